"""LightGBM on several workers: the backend that prepares its network, the trainer, and the reporting callback.

The train function calls ``lightgbm.train`` or a scikit-learn estimator as usual, on the rows of its worker, with the
parameters that :func:`get_network_params` returns; LightGBM builds the same trees on all workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drivetrain import (
    Backend,
    BackendConfig,
    Checkpoint,
    ConfigurationError,
    DataConfig,
    DataParallelTrainer,
    RunConfig,
    ScalingConfig,
    SessionError,
    TrainContext,
    WorkerGroup,
)
from drivetrain.plugin import ProcessValue, reserve_port, worker_threads
from drivetrain_gbdt._data import TRAIN
from drivetrain_gbdt._tables import Loop, TableForm

if TYPE_CHECKING:
    import lightgbm

    from drivetrain_gbdt._lightgbm import RayTrainReportCallback

__all__ = ["LightGBMConfig", "LightGBMTrainer", "RayTrainReportCallback", "get_network_params"]

_TABLES = TableForm(
    trainer="LightGBMTrainer",
    options_argument="dataset_params",
    column_options=("weight", "group", "init_score"),
    group_option="group",
    default_split=(TRAIN,),
)

_port = ProcessValue[int]("drivetrain_gbdt.port")
_network = ProcessValue[dict[str, Any]]("drivetrain_gbdt.network")


def get_network_params() -> dict[str, Any]:
    """Return the parameters with which ``lightgbm.train`` and LightGBM's estimators connect all workers.

    Returns:
        Parameters to add to your own: the number of threads and, with several workers, those of the network.

    Raises:
        SessionError: called outside the train function of a :class:`LightGBMTrainer`.

    Example:
        >>> from drivetrain import RunConfig
        >>> trainer = LightGBMTrainer(lambda: sorted(get_network_params()), run_config=RunConfig(verbose=0))
        >>> trainer.fit().return_value
        ['num_threads']
    """
    network = _network.value
    if network is None:
        raise SessionError("get_network_params() must be called in the train function of a LightGBMTrainer")
    return dict(network)


@dataclass(frozen=True, kw_only=True)
class LightGBMConfig(BackendConfig):
    """Configuration of LightGBM's network.

    Attributes:
        tree_learner: LightGBM's parallel algorithm: ``"data"``, ``"voting"`` or ``"feature"``.
        timeout_s: timeout in seconds for connecting to the other workers.

    Raises:
        ConfigurationError: a value is out of range.
    """

    tree_learner: str = "data"
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if self.tree_learner not in ("data", "voting", "feature"):
            raise ConfigurationError(
                f"LightGBMConfig(tree_learner=...): expected 'data', 'voting' or 'feature', got {self.tree_learner!r}"
            )
        if type(self.timeout_s) not in (int, float) or self.timeout_s < 1:
            raise ConfigurationError(
                f"LightGBMConfig(timeout_s=...): expected a number of seconds >= 1, got {self.timeout_s!r}"
            )

    def create(self) -> Backend:
        """Return the backend with this configuration."""
        return LightGBMBackend(self.tree_learner, self.timeout_s)


@dataclass(frozen=True)
class LightGBMBackend(Backend):
    """The backend that :class:`LightGBMConfig` creates.

    Attributes:
        tree_learner: see :class:`LightGBMConfig`.
        timeout_s: see :class:`LightGBMConfig`.
    """

    tree_learner: str
    timeout_s: float

    name = "lightgbm"
    preload = ("lightgbm",)
    warmup = ("pyarrow.dataset", "pyarrow.parquet", "drivetrain_gbdt._lightgbm")

    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        """Reserve a port on the machine of each worker, if there are several workers."""
        if len(group.workers) == 1:
            return [{}]
        ports = group.run(_reserve_port)
        machines = ",".join(f"{worker.ip}:{port}" for worker, port in zip(group.workers, ports, strict=True))
        return [{"machines": machines, "local_listen_port": str(port)} for port in ports]

    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        """Provide the return value of :func:`get_network_params`. LightGBM connects when the training starts."""
        network: dict[str, Any] = {"num_threads": worker_threads() or 0}
        if rendezvous:
            network |= {
                "tree_learner": self.tree_learner,
                "machines": rendezvous["machines"],
                "local_listen_port": int(rendezvous["local_listen_port"]),
                "num_machines": context.get_world_size(),
                "time_out": max(1, round(self.timeout_s / 60)),  # in minutes
                "pre_partition": True,
            }
        _network.value = network
        try:
            yield
        finally:
            _network.value = None


def _reserve_port() -> int:
    """Return the port of this process, on which LightGBM will listen. All sessions of a process use the same port."""
    port = _port.value = _port.value or reserve_port()
    return port


class LightGBMTrainer(DataParallelTrainer, config=LightGBMConfig):
    """Runs LightGBM on every worker. The workers are connected and train one model.

    Pass a train function. Without one, the trainer trains on tables: each worker trains on its part of the dataset
    ``"train"``, and evaluates the model on all rows of the other datasets, because LightGBM does not combine the
    metrics of the workers.

    Args:
        train_loop_per_worker: the train function, which takes no argument or the config; None to train on tables.
        train_loop_config: the config to pass to the train function.
        lightgbm_config: the configuration of the network.
        scaling_config: the number of workers and their resources.
        run_config: where results are stored, which callbacks run, and when the run stops. On tables, its
            ``CheckpointConfig`` may set ``checkpoint_frequency``, in rounds, and ``checkpoint_at_end``.
        datasets: see :class:`drivetrain.DataParallelTrainer`; on tables, one must be called ``"train"``.
        dataset_config: which datasets are split, and how; on tables, only ``"train"`` is split by default.
        metadata: the value that ``get_context().get_metadata()`` and every checkpoint's ``get_metadata()`` return.
        resume_from_checkpoint: the checkpoint that ``get_checkpoint()`` returns at the start of a new run; on tables,
            training continues from the model in this checkpoint.
        label_column: on tables: the column to predict.
        params: on tables: LightGBM's parameters.
        num_boost_round: on tables: the total number of rounds, including the rounds of a model from a checkpoint.
        dataset_params: on tables: arguments of ``lightgbm.Dataset`` for each dataset, as a mapping from the dataset's
            name. The values of ``weight``, ``group`` and ``init_score`` are names of columns. Rows with the same value
            in the ``group`` column are ranked together, and stay on one worker.
        **train_kwargs: on tables: further arguments of ``lightgbm.train``.

    Raises:
        ConfigurationError: an argument is of the wrong type, or the arguments contradict each other.

    Example:
        >>> from drivetrain import RunConfig, ScalingConfig
        >>> from sklearn.datasets import load_breast_cancer
        >>> trainer = LightGBMTrainer(
        ...     params={"objective": "binary", "metric": "binary_error", "verbosity": -1},
        ...     label_column="target",
        ...     num_boost_round=5,
        ...     datasets={"train": load_breast_cancer(as_frame=True).frame},
        ...     scaling_config=ScalingConfig(num_workers=2),
        ...     run_config=RunConfig(verbose=0, worker_output="none"),
        ... )
        >>> LightGBMTrainer.get_model(trainer.fit().checkpoint).num_trees()
        5
    """

    def __init__(
        self,
        train_loop_per_worker: Loop | None = None,
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        lightgbm_config: LightGBMConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
        label_column: str | None = None,
        params: Mapping[str, Any] | None = None,
        num_boost_round: int = 100,
        dataset_params: Mapping[str, Mapping[str, Any]] | None = None,
        **train_kwargs: Any,
    ) -> None:
        if train_loop_per_worker is None:
            train_loop_per_worker = _train_on_tables
            train_loop_config, dataset_config, run_config = _TABLES.build_configs(
                label_column=label_column,
                params=params,
                rounds=num_boost_round,
                options=dataset_params,
                arguments=train_kwargs,
                datasets=datasets,
                dataset_config=dataset_config,
                scaling=scaling_config,
                run_config=run_config,
            )
        else:
            given = {"label_column": label_column, "params": params, "dataset_params": dataset_params, **train_kwargs}
            _TABLES.reject("lightgbm.train", given)
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            lightgbm_config=lightgbm_config,
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
        )

    @staticmethod
    def get_model(checkpoint: Checkpoint) -> lightgbm.Booster:
        """Return the model in a checkpoint from training on tables; see ``RayTrainReportCallback.get_model``."""
        from drivetrain_gbdt._lightgbm import RayTrainReportCallback

        return RayTrainReportCallback.get_model(checkpoint)


def _train_on_tables(config: dict[str, Any]) -> None:
    """Train on tables. This is the train function of a trainer that was created without one."""
    from drivetrain_gbdt._lightgbm import train_on_tables

    train_on_tables(config, get_network_params())


def __getattr__(name: str) -> Any:  # the callback needs LightGBM, which is imported lazily
    if name == "RayTrainReportCallback":
        from drivetrain_gbdt._lightgbm import RayTrainReportCallback

        return RayTrainReportCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
