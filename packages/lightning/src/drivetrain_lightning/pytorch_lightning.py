"""The classes of :mod:`drivetrain_lightning.lightning`, but for ``pytorch_lightning``."""

from __future__ import annotations

from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from pytorch_lightning.callbacks import Callback, Checkpoint
from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

from drivetrain_lightning._alone import RefusesTrainingAlone, is_in_group
from drivetrain_lightning._checkpoints import Checkpoints
from drivetrain_lightning._prepare import prepare_trainer
from drivetrain_lightning._report import ReportCallback
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


class _Checkpoints(Checkpoints, Checkpoint):
    pass


class _RefusesTrainingAlone(RefusesTrainingAlone, Callback):
    pass


def make_callbacks() -> list[Callback]:
    """Return the callbacks that Lightning adds to each ``Trainer``: in a group of workers, one that checks it."""
    return [_RefusesTrainingAlone()] if is_in_group() else []


class RayTrainReportCallback(ReportCallback, Callback):
    """See :class:`drivetrain_lightning.RayTrainReportCallback`."""

    _checkpoints = _Checkpoints
