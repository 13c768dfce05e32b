"""The runtime whose workers are started by a command, such as ``srun``, ``mpirun`` or ``ssh``.

The command starts one *supervisor* for each worker: ``python -m drivetrain._runtimes.command``. A supervisor connects
to the driver, forks the worker process when the driver asks for it, and reports how the process has ended. When the
connection to the driver closes, the supervisor kills the worker and everything that the worker has started.

Modules, from the bottom up: ``template`` (the command line), ``shares`` (GPUs and CPUs of the workers), ``supervisor``
(the process on the worker's node), ``token`` (how it gets the driver's token), ``launcher`` (a running command),
``commands`` (all of a run), ``launch`` (the commands and the connections to supervisors), ``group`` and ``runtime``.
"""
