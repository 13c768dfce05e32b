"""Horovod for drivetrain: its rendezvous, and its environment variables on every worker, so that ``hvd.init()`` works.

Importing this package imports neither Horovod nor a framework. A worker imports them when it first needs them.
"""

from drivetrain_horovod._config import HorovodConfig
from drivetrain_horovod._trainer import HorovodTrainer

__all__ = ["HorovodConfig", "HorovodTrainer"]
