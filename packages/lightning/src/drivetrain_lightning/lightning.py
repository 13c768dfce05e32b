"""The strategies, the environment and the callback for ``lightning.pytorch``."""

from __future__ import annotations

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

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
    """Lightning's ``DDPStrategy`` on drivetrain's workers, with the same arguments.

    Raises:
        ConfigurationError: During setup, for the reasons listed in :func:`prepare_trainer`.
    """


class RayFSDPStrategy(WorkerFSDPStrategy, FSDPStrategy):
    """Lightning's ``FSDPStrategy`` on drivetrain's workers, with the same arguments.

    On workers without GPUs it requires ``state_dict_type="sharded"``.

    Raises:
        ConfigurationError: During setup, for the reasons listed in :func:`prepare_trainer`, or if ``state_dict_type``
            is ``"full"`` on workers without GPUs.
    """


class RayDeepSpeedStrategy(WorkerDeepSpeedStrategy, DeepSpeedStrategy):
    """Lightning's ``DeepSpeedStrategy`` on drivetrain's workers, with the same arguments.

    Raises:
        ConfigurationError: During setup, for the reasons listed in :func:`prepare_trainer`.
    """


class RayLightningEnvironment(WorkerEnvironment, ClusterEnvironment):
    """A cluster environment with drivetrain's ranks and number of workers. Pass it as ``Trainer(plugins=[...])``."""


class _Checkpoints(Checkpoints, Checkpoint):
    pass


class _RefusesTrainingAlone(RefusesTrainingAlone, Callback):
    pass


def make_callbacks() -> list[Callback]:
    """Return the callbacks that Lightning adds to each ``Trainer``: in a group of workers, one that checks it."""
    return [_RefusesTrainingAlone()] if is_in_group() else []


class RayTrainReportCallback(ReportCallback, Callback):
    """Reports the logged metrics with a checkpoint at regular intervals, and also before a preemption.

    A report contains ``epoch`` (from 0), ``step`` (the number of optimizer steps), and the metrics in
    ``trainer.callback_metrics``. In the checkpoint, ``trainer.save_checkpoint`` writes a file with the name
    ``CHECKPOINT_NAME``. If the strategy shards the model, this is a directory to which every rank adds its part. Pass
    the path of the file or directory to ``trainer.fit(ckpt_path=...)`` to resume.

    After each optimizer step, the callback calls :func:`drivetrain.get_preemption_info`. If a preemption is pending,
    all ranks save and report at the same step, and ``trainer.fit`` returns without running validation, except at the
    last step of an epoch. The run is resumed after the train function has returned
    (:func:`drivetrain.resume_later`).

    Args:
        every: ``"epoch"`` reports at the end of each training epoch, after the validation within it. ``"validation"``
            reports after each validation. A number ``n`` reports after every ``n`` optimizer steps, at the last step
            of an epoch after its validation. From a checkpoint that was saved within an epoch, training continues with
            the next batch if the loader is a ``DataLoader`` with a length, and the strategy is one of this package.
        metrics: the names of the metrics to report, or None for all.
        checkpoint_upload_mode: ``"sync"`` or ``"async"``, see :func:`drivetrain.report`.

    Raises:
        ConfigurationError: an argument is out of range. During training, if a metric in ``metrics`` was not logged
            before a report, or if there are several workers and the trainer is not configured for them; see
            :func:`prepare_trainer`.
    """

    _checkpoints = _Checkpoints
