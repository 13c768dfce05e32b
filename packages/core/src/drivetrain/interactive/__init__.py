"""The interactive trainer: one group of workers for several runs, for example in a notebook.

It is a front end of :class:`~drivetrain.DataParallelTrainer`: every run is a run of a ``DataParallelTrainer``, with the
same storage, callbacks and recovery.
"""
