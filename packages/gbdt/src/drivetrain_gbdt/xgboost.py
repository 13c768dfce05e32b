"""XGBoost on several workers: the backend that connects the workers, the trainer, and the reporting callback.

The train function calls ``xgboost.train`` or a scikit-learn estimator as usual, on the rows of its worker; XGBoost
builds the same trees on all workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drivetrain import (
    Checkpoint,
    ConfigurationError,
    DataConfig,
    RunConfig,
    ScalingConfig,
    TrainContext,
)
from drivetrain.plugin import Backend, BackendConfig
from drivetrain.plugin.backends import ProcessValue, WorkerGroup, port_to_bind, worker_threads
from drivetrain.plugin.trainers import checked_config
from drivetrain_gbdt._tables import TableArguments, TableForm, TableTrainer, has_several_workers

if TYPE_CHECKING:
    import xgboost

    from drivetrain.plugin.trainers import ConfigT, TrainFunction
    from drivetrain_gbdt._xgboost import RayTrainReportCallback

__all__ = ["RayTrainReportCallback", "XGBoostConfig", "XGBoostTrainer"]

_TABLES = TableForm(
    trainer="XGBoostTrainer",
    function="xgboost.train",
    options_argument="dmatrix_params",
    column_options=("weight", "qid", "base_margin", "label_lower_bound", "label_upper_bound"),
    group_option="qid",
    default_split="all",
    refused_arguments={
        "dtrain": "Pass datasets={'train': ...}",
        "evals": "Pass the data as further datasets; each is evaluated",
        "evals_result": "Read Result.metrics_dataframe, which has the metrics of all rounds",
    },
    refused_options={
        "data": "Pass datasets={...}",
        "label": "Pass label_column='...'",
        "group": "Pass 'qid', the name of a column",
        "feature_names": "Rename the columns",
        "feature_types": "Use the column types: integers, floats, booleans, or pandas' dtype 'category'",
    },
    ranking=("rank:",),
    categorical="enable_categorical",
)

_tracker = ProcessValue[Any]("drivetrain_gbdt.tracker")
"""The tracker that this process runs; None on every rank except 0."""


@dataclass(frozen=True, kw_only=True)
class XGBoostConfig(BackendConfig):
    """Configuration of XGBoost's collective, which is the group of connected workers.

    Attributes:
        timeout_s: timeout in seconds for joining the collective, and for each collective operation.

    Raises:
        ConfigurationError: the timeout is shorter than one second.
    """

    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if type(self.timeout_s) not in (int, float) or self.timeout_s < 1:
            raise ConfigurationError(
                f"[DT-101] XGBoostConfig(timeout_s=...): expected a number of seconds >= 1, got {self.timeout_s!r}"
            )

    def create(self) -> Backend:
        """Return the backend with this configuration."""
        return XGBoostBackend(self.timeout_s)


@dataclass(frozen=True)
class XGBoostBackend(Backend):
    """The backend that :class:`XGBoostConfig` creates.

    Attributes:
        timeout_s: see :class:`XGBoostConfig`.
    """

    timeout_s: float

    name = "xgboost"
    preload = ("xgboost",)
    warmup = ("pyarrow.dataset", "pyarrow.parquet", "drivetrain_gbdt._xgboost")

    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        """Start XGBoost's tracker on rank 0, if there are several workers. The tracker chooses a free port."""
        size = len(group.workers)
        if size == 1:
            return [{}]
        (arguments,) = group.run(_serve_tracker, group.workers[0].ip, size, int(self.timeout_s), ranks=[0])
        # The tracker assigns ranks in the sort order of the task ids.
        return [{**arguments, "dmlc_task_id": f"[{rank:08d}]"} for rank in range(size)]

    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        """Join the collective, and leave it when the train function has returned.

        After an exception, the worker does not leave the collective, because leaving waits for the other workers. The
        other workers notice the failure when this process exits.
        """
        import xgboost
        from xgboost import collective

        with xgboost.config_context(nthread=worker_threads() or 0):
            if not rendezvous:
                yield
                return
            arguments: dict[str, Any] = dict(rendezvous)
            arguments["dmlc_tracker_port"] = int(arguments["dmlc_tracker_port"])
            collective.init(dmlc_timeout=int(self.timeout_s), **arguments)
            yield
            collective.finalize()


def _serve_tracker(address: str, size: int, timeout_s: int) -> dict[str, str]:
    from xgboost.tracker import RabitTracker

    _tracker.value = tracker = RabitTracker(
        n_workers=size, host_ip=address, port=port_to_bind(), sortby="task", timeout=timeout_s
    )
    tracker.start()
    return {name: str(value) for name, value in tracker.worker_args().items()}


class XGBoostTrainer(TableTrainer):
    """Runs XGBoost on every worker. The workers form one collective and train one model.

    Pass a train function. Without one, the trainer trains on tables: each worker trains on its part of the dataset
    ``"train"``, and the model is evaluated on all datasets.

    Args:
        train_loop_per_worker: the train function, which takes no argument or the config; None to train on tables.
        train_loop_config: the config to pass to the train function.
        xgboost_config: the configuration of the collective.
        scaling_config: the number of workers and their resources.
        run_config: where results are stored, which callbacks run, and when the run stops. On tables, its
            ``CheckpointConfig`` may set ``checkpoint_frequency``, in rounds, and ``checkpoint_at_end``.
        datasets: see :class:`drivetrain.DataParallelTrainer`; on tables, one must be called ``"train"``.
        dataset_config: which datasets are split, and how.
        metadata: the value that ``get_context().get_metadata()`` and every checkpoint's ``get_metadata()`` return.
        resume_from_checkpoint: the checkpoint that ``get_checkpoint()`` returns at the start of a new run; on tables,
            training continues from the model in this checkpoint.
        label_column: on tables: the column to predict.
        params: on tables: XGBoost's parameters.
        num_boost_round: on tables: the total number of rounds, including those of the run from whose checkpoint the
            training continues, but not those of an ``xgb_model``.
        dmatrix_params: on tables: arguments of ``xgboost.DMatrix`` for each dataset, as a mapping from the dataset's
            name. The values of ``weight``, ``qid``, ``base_margin``, ``label_lower_bound`` and ``label_upper_bound``
            are names of columns. Rows with the same ``qid`` stay on one worker. With ``"external_memory": True``, each
            worker stores its part of the dataset on its disk, in the temporary directory, and reads it again in each
            round.
        **train_kwargs: on tables: further arguments of ``xgboost.train``.

    Raises:
        ConfigurationError: an argument is of the wrong type, or the arguments contradict each other.

    Example:
        >>> from drivetrain import RunConfig, ScalingConfig
        >>> from sklearn.datasets import load_breast_cancer
        >>> trainer = XGBoostTrainer(
        ...     params={"objective": "binary:logistic", "eval_metric": "error"},
        ...     label_column="target",
        ...     num_boost_round=5,
        ...     datasets={"train": load_breast_cancer(as_frame=True).frame},
        ...     scaling_config=ScalingConfig(num_workers=2),
        ...     run_config=RunConfig(verbose=0, worker_output="none"),
        ... )
        >>> result = trainer.fit()
        >>> result.metrics["train-error"] < 0.05
        True
        >>> XGBoostTrainer.get_model(result.checkpoint).num_boosted_rounds()
        5
    """

    _form = _TABLES

    def __init__(
        self,
        train_loop_per_worker: TrainFunction[ConfigT] | None = None,
        *,
        train_loop_config: ConfigT | None = None,
        xgboost_config: XGBoostConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
        label_column: str | None = None,
        params: Mapping[str, Any] | None = None,
        num_boost_round: int = 10,
        dmatrix_params: Mapping[str, Mapping[str, Any]] | None = None,
        **train_kwargs: Any,
    ) -> None:
        if train_loop_per_worker is None:
            _check_workers(params, scaling_config)
        super().__init__(
            train_loop_per_worker,
            table=TableArguments(label_column, params, num_boost_round, dmatrix_params, train_kwargs),
            train_on_tables=_train_on_tables,
            train_loop_config=train_loop_config,
            backend_config=checked_config(xgboost_config, XGBoostConfig, "XGBoostTrainer(xgboost_config=...)"),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
        )

    @staticmethod
    def get_model(checkpoint: Checkpoint) -> xgboost.Booster:
        """Return the model in a checkpoint from training on tables; see ``RayTrainReportCallback.get_model``."""
        from drivetrain_gbdt._xgboost import RayTrainReportCallback

        return RayTrainReportCallback.get_model(checkpoint)


def _check_workers(params: Mapping[str, Any] | None, scaling: ScalingConfig | None) -> None:
    """Raise an error if XGBoost does not support the parameters with several workers."""
    updates = isinstance(params, Mapping) and params.get("process_type") == "update"
    if updates and has_several_workers(scaling):
        raise ConfigurationError(
            "[DT-730] XGBoostTrainer(params={'process_type': 'update'}): expected one worker, because XGBoost updates "
            "trees correctly only with all rows, got several. Use ScalingConfig(num_workers=1)"
        )


def _train_on_tables(config: dict[str, Any]) -> None:
    """Train on tables. This is the train function of a trainer that was created without one."""
    from drivetrain_gbdt._xgboost import train_on_tables

    train_on_tables(config)


def __getattr__(name: str) -> Any:  # lazy, because the base class of the callback is XGBoost's
    if name == "RayTrainReportCallback":
        from drivetrain_gbdt._xgboost import RayTrainReportCallback

        return RayTrainReportCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
