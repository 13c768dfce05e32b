"""Horovod for drivetrain: sets up the rendezvous and environment variables that ``hvd.init()`` needs on every worker.

Importing this package imports neither Horovod nor a framework. Each worker imports them on first use.
"""

from drivetrain_horovod._config import HorovodConfig
from drivetrain_horovod._trainer import HorovodTrainer

__all__ = ["HorovodConfig", "HorovodTrainer"]

__version__ = "0.1.0"
