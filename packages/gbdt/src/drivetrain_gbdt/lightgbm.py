"""LightGBM on several workers: the backend that prepares its network, the trainer, and the reporting callback.

The train function calls ``lightgbm.train`` or a scikit-learn estimator as usual, on the rows of its worker, with the
parameters that :func:`get_network_params` returns; LightGBM builds the same trees on all workers.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from drivetrain import (
    Checkpoint,
    ConfigurationError,
    DataConfig,
    RunConfig,
    ScalingConfig,
    SessionError,
    TrainContext,
)
from drivetrain.plugin import Backend, BackendConfig
from drivetrain.plugin.backends import ProcessValue, WorkerGroup, reserve_port, worker_threads
from drivetrain.plugin.trainers import checked_config
from drivetrain_gbdt._data import TRAIN
from drivetrain_gbdt._network import Peers, network, peers
from drivetrain_gbdt._parameters import find, pop_network, pop_rounds
from drivetrain_gbdt._tables import TableArguments, TableForm, TableTrainer, has_several_workers

if TYPE_CHECKING:
    import lightgbm

    from drivetrain.plugin.trainers import ConfigT, TrainFunction
    from drivetrain_gbdt._lightgbm import RayTrainReportCallback

__all__ = ["LightGBMConfig", "LightGBMTrainer", "RayTrainReportCallback", "get_network_params", "shared_bins"]

_TABLES = TableForm(
    trainer="LightGBMTrainer",
    function="lightgbm.train",
    options_argument="dataset_params",
    column_options=("weight", "group", "init_score"),
    group_option="group",
    default_split=(TRAIN,),
    refused_arguments={
        "train_set": "Pass datasets={'train': ...}",
        "valid_sets": "Pass the data as further datasets; each is evaluated",
        "valid_names": "The names of the datasets are used",
        "evals_result": "Read Result.metrics_dataframe, which has the metrics of all rounds",
        "early_stopping_rounds": "Pass params={'early_stopping_round': ...}",
        "feature_name": "Rename the columns",
        "categorical_feature": "Pass dataset_params={'train': {'categorical_feature': [...]}}",
    },
    refused_options={
        "data": "Pass datasets={...}",
        "label": "Pass label_column='...'",
        "reference": "The dataset 'train' is used",
        "feature_name": "Rename the columns",
    },
    ranking=("lambdarank", "rank_xendcg", "xendcg", "xe_ndcg", "xe_ndcg_mart", "xendcg_mart"),
)

_port = ProcessValue[int]("drivetrain_gbdt.port")


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
    params = network.value
    if params is None:
        raise SessionError("[DT-801] get_network_params() must be called in the train function of a LightGBMTrainer")
    return dict(params)


def shared_bins(features: Any, params: Mapping[str, Any] | None = None, **options: Any) -> lightgbm.Dataset | None:
    """Return a dataset whose bins come from the rows of all workers: pass it as ``lightgbm.Dataset(reference=...)``.

    LightGBM divides each feature into bins. With several workers, it computes the bins of a feature from the rows of
    one worker, so the model is bad if the rows are in the order of a feature. Training on tables avoids this itself.
    Every worker must call this function, before ``lightgbm.train``.

    Args:
        features: the features of this worker's rows, as a data frame, a pyarrow table or a 2D array.
        params: the parameters of ``lightgbm.train`` that concern datasets, such as ``max_bin``.
        **options: further arguments of ``lightgbm.Dataset``, such as ``categorical_feature``.

    Returns:
        The dataset, which contains a sample of the rows; None with one worker, whose bins are right anyway.

    Raises:
        SessionError: called outside the train function of a :class:`LightGBMTrainer`; or a worker cannot be reached.
    """
    connected = get_network_params()
    if peers.value is None:
        return None
    from drivetrain_gbdt._lightgbm import bins_of, to_table

    dataset: lightgbm.Dataset = bins_of(peers.value, to_table(features), {**(params or {}), **connected}, options)
    return dataset


@dataclass(frozen=True, kw_only=True)
class LightGBMConfig(BackendConfig):
    """Configuration of LightGBM's network.

    Attributes:
        tree_learner: LightGBM's parallel algorithm: ``"data"`` or ``"voting"``.
        timeout_s: timeout in seconds for connecting to the other workers.

    Raises:
        ConfigurationError: a value is out of range.
    """

    tree_learner: Literal["data", "voting"] = "data"
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if self.tree_learner not in ("data", "voting"):  # LightGBM's Python package does not support "feature"
            raise ConfigurationError(
                f"[DT-101] LightGBMConfig(tree_learner=...): expected 'data' or 'voting', got {self.tree_learner!r}"
            )
        if type(self.timeout_s) not in (int, float) or self.timeout_s < 1:
            raise ConfigurationError(
                f"[DT-101] LightGBMConfig(timeout_s=...): expected a number of seconds >= 1, got {self.timeout_s!r}"
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
        key = secrets.token_hex(32)
        return [{"machines": machines, "local_listen_port": str(port), "key": key} for port in ports]

    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        """Provide the return value of :func:`get_network_params`. LightGBM connects when the training starts."""
        params: dict[str, Any] = {"num_threads": worker_threads() or 0}
        if rendezvous:
            host, _, port = rendezvous["machines"].partition(",")[0].rpartition(":")
            key = bytes.fromhex(rendezvous["key"])
            peers.value = Peers(
                context.get_world_rank(), context.get_world_size(), (host, int(port)), key, self.timeout_s
            )
            params |= {
                "tree_learner": self.tree_learner,
                "machines": rendezvous["machines"],
                "local_listen_port": int(rendezvous["local_listen_port"]),
                "num_machines": context.get_world_size(),
                "time_out": max(1, round(self.timeout_s / 60)),  # in minutes
                "pre_partition": True,
            }
        network.value = params
        try:
            yield
        finally:
            network.value = peers.value = None


def _reserve_port() -> int:
    """Return the port of this process, on which LightGBM will listen. All sessions of a process use the same port."""
    port = _port.value = _port.value or reserve_port()
    return port


class LightGBMTrainer(TableTrainer):
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
        num_boost_round: on tables: the total number of rounds, including those of the run from whose checkpoint the
            training continues, but not those of an ``init_model``.
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

    _form = _TABLES

    def __init__(
        self,
        train_loop_per_worker: TrainFunction[ConfigT] | None = None,
        *,
        train_loop_config: ConfigT | None = None,
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
            params, num_boost_round, lightgbm_config = _own_parameters(
                params, num_boost_round, lightgbm_config, has_several_workers(scaling_config)
            )
        super().__init__(
            train_loop_per_worker,
            table=TableArguments(label_column, params, num_boost_round, dataset_params, train_kwargs),
            train_on_tables=_train_on_tables,
            train_loop_config=train_loop_config,
            backend_config=checked_config(lightgbm_config, LightGBMConfig, "LightGBMTrainer(lightgbm_config=...)"),
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


def _own_parameters(
    params: Mapping[str, Any] | None, rounds: int, config: LightGBMConfig | None, several: bool
) -> tuple[Mapping[str, Any] | None, int, LightGBMConfig | None]:
    """Separate the parameters that the trainer sets itself from the user's.

    Returns:
        The other parameters; the number of rounds; and the configuration of the network.

    Raises:
        ConfigurationError: LightGBM does not support a parameter with several workers.
    """
    if not isinstance(params, Mapping):
        return params, rounds, config
    if several and find(params, "linear_tree"):
        raise ConfigurationError(
            "[DT-730] LightGBMTrainer(params={'linear_tree': ...}): expected one worker, because LightGBM fits linear "
            "trees on one machine only, got several. Use ScalingConfig(num_workers=1), or linear_tree=False"
        )
    own = dict(params)
    rounds = pop_rounds(own, rounds)
    learner = pop_network(own, several, config.tree_learner if isinstance(config, LightGBMConfig) else None)
    return own, rounds, config if config is not None or learner is None else LightGBMConfig(tree_learner=learner)


def _train_on_tables(config: dict[str, Any]) -> None:
    """Train on tables. This is the train function of a trainer that was created without one."""
    from drivetrain_gbdt._lightgbm import train_on_tables

    train_on_tables(config, get_network_params(), peers.value)


def __getattr__(name: str) -> Any:  # the callback needs LightGBM, which is imported lazily
    if name == "RayTrainReportCallback":
        from drivetrain_gbdt._lightgbm import RayTrainReportCallback

        return RayTrainReportCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
