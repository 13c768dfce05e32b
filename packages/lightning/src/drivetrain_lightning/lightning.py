"""The classes for ``lightning.pytorch``."""

from __future__ import annotations

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

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
    """Lightning's ``DDPStrategy`` on drivetrain's workers, with its arguments.

    Raises:
        ConfigurationError: when it is set up: see :func:`prepare_trainer`.
    """


class RayFSDPStrategy(WorkerFSDPStrategy, FSDPStrategy):
    """Lightning's ``FSDPStrategy`` on drivetrain's workers, with its arguments.

    On workers without GPUs it wants ``state_dict_type="sharded"``.

    Raises:
        ConfigurationError: when it is set up: see :func:`prepare_trainer`; or it is to save full checkpoints without
            GPUs.
    """


class RayDeepSpeedStrategy(WorkerDeepSpeedStrategy, DeepSpeedStrategy):
    """Lightning's ``DeepSpeedStrategy`` on drivetrain's workers, with its arguments.

    Raises:
        ConfigurationError: when it is set up: see :func:`prepare_trainer`.
    """


class RayLightningEnvironment(WorkerEnvironment, ClusterEnvironment):
    """Tells a ``Trainer`` the ranks and the number of workers: pass it as one of its ``plugins``."""


class _EpochEnd(EpochEnd, Checkpoint):
    pass


class RayTrainReportCallback(ReportCallback, Callback):
    """Reports the metrics that were logged, with a checkpoint, and saves before a preemption.

    A report has what is in ``trainer.callback_metrics``, ``epoch`` (from 0) and ``step`` (the number of optimizer
    steps). The checkpoint is what ``trainer.save_checkpoint`` writes, under the name ``CHECKPOINT_NAME``: a file, or a
    directory where the strategy shards, to which every rank adds its part. ``trainer.fit(ckpt_path=...)`` goes on from
    it.

    After each optimizer step the callback asks :func:`drivetrain.get_preemption_info`. When there is something to tell,
    all ranks save and report at the same step, and ``trainer.fit`` returns, without a validation.

    Args:
        every: ``"epoch"`` reports at the end of each training epoch, after a validation in it; ``"validation"`` after
            each validation; a number after so many optimizer steps. To go on from a checkpoint within an epoch,
            Lightning needs a data loader with ``state_dict`` and ``load_state_dict``.
        metrics: the names of those to report; None for all.
        checkpoint_upload_mode: ``"sync"`` or ``"async"``, see :func:`drivetrain.report`.

    Raises:
        ConfigurationError: an argument is out of range; or, at a report, a metric was never logged; or, with several
            workers, the trainer is not fit for them: see :func:`prepare_trainer`.
    """

    _epoch_end = _EpochEnd
