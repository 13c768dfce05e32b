"""The interactive trainer: one group of workers for run after run, as one wants it in a notebook.

It is a front end of :class:`~drivetrain.DataParallelTrainer`: every run is one of its, with the same storage, callbacks
and recovery.
"""
