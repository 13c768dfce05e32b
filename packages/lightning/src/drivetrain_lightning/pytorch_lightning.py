"""The classes of :mod:`drivetrain_lightning.lightning`, but for ``pytorch_lightning``."""

from __future__ import annotations

from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from pytorch_lightning.callbacks import Callback, Checkpoint
from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

from drivetrain_lightning._prepare import prepare_trainer
from drivetrain_lightning._report import EpochEnd, ReportCallback
from drivetrain_lightning._worker import WorkerDeepSpeedStrategy, WorkerEnvironment, WorkerFSDPStrategy, WorkerStrategy

__all__ = [
    "RayDDPStrategy",
    "RayDeepSpeedStrategy",
    "RayFSDPStrategy",
    "RayLightningEnvironment",
    "RayTrainReportCallback",
    "prepare_trainer",
]


class RayDDPStrategy(WorkerStrategy, DDPStrategy):
    """See :class:`drivetrain_lightning.RayDDPStrategy`."""


class RayFSDPStrategy(WorkerFSDPStrategy, FSDPStrategy):
    """See :class:`drivetrain_lightning.RayFSDPStrategy`."""


class RayDeepSpeedStrategy(WorkerDeepSpeedStrategy, DeepSpeedStrategy):
    """See :class:`drivetrain_lightning.RayDeepSpeedStrategy`."""


class RayLightningEnvironment(WorkerEnvironment, ClusterEnvironment):
    """See :class:`drivetrain_lightning.RayLightningEnvironment`."""


class _EpochEnd(EpochEnd, Checkpoint):
    pass


class RayTrainReportCallback(ReportCallback, Callback):
    """See :class:`drivetrain_lightning.RayTrainReportCallback`."""

    _epoch_end = _EpochEnd
