"""The code that imports LightGBM: the callback, and training on tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightgbm
import numpy as np
import pyarrow as pa

from drivetrain import Checkpoint, ConfigurationError, get_checkpoint, get_dataset_shard
from drivetrain_gbdt._bins import sample_of_all_workers
from drivetrain_gbdt._convert import has_categories, numbers, plain_numbers, sizes, to_frame
from drivetrain_gbdt._data import TRAIN
from drivetrain_gbdt._network import Peers, check_connected
from drivetrain_gbdt._parameters import pop
from drivetrain_gbdt._reporting import ModelReports, evaluations, model_file

__all__ = ["RayTrainReportCallback", "bins_of", "to_table", "train_on_tables"]

_REPORT_ORDER = 25  # order of LightGBM's own callbacks: log 10, record 20, stop early 30
_EARLY_STOPPING_ORDER = 30
_BATCH_ROWS = 65_536  # the size of the batches that are read from a Ray dataset
_PATIENCE_PARAMS = ("early_stopping_round", "early_stopping_rounds", "early_stopping", "n_iter_no_change")
_EARLY_STOPPING_TYPE = type(lightgbm.early_stopping(1))

History = list[list[tuple[Any, ...]]]
"""For each round, LightGBM's results as tuples: dataset, metric, value, and True if a higher value is better."""


class RayTrainReportCallback:
    """Reports each round's metrics, and saves the model at intervals: pass it to ``lightgbm.train(callbacks=[...])``.

    On a preemption (see :func:`drivetrain.get_preemption_info`), it saves the model and stops the training.

    Args:
        metrics: the names of the metrics to report, such as ``"valid-binary_logloss"``; None for all; a mapping
            ``{reported name: metric}`` to rename them.
        filename: the file name of the model in its checkpoint; it has LightGBM's text format.
        frequency: the number of rounds between checkpoints; 0 to save none before the last round.
        checkpoint_at_end: save a checkpoint after the last round. If another callback stops the training early, this
            callback does not notice that the round was the last one; set a ``frequency`` in this case.
        results_postprocessing_fn: turns the dict of metrics into the metrics to report.

    Raises:
        ConfigurationError: an argument is out of range; or, after the first round, a metric is unknown.
    """

    CHECKPOINT_NAME = "model.txt"
    before_iteration = False

    def __init__(
        self,
        metrics: str | Sequence[str] | Mapping[str, str] | None = None,
        filename: str = CHECKPOINT_NAME,
        frequency: int = 0,
        checkpoint_at_end: bool = True,
        results_postprocessing_fn: Callable[[dict[str, float]], Mapping[str, Any]] | None = None,
    ) -> None:
        self.order = _REPORT_ORDER  # on the instance, because LightGBM does not read it from the class
        self._rounds = 0
        self._reports = ModelReports(metrics, filename, frequency, checkpoint_at_end, results_postprocessing_fn)

    def __call__(self, env: lightgbm.callback.CallbackEnv) -> None:
        """Report the round."""
        if env.iteration == env.begin_iteration:
            check_connected(env.params)
        model: Any = env.model
        results = list(env.evaluation_result_list or ())
        values = {f"{result[0]}-{result[1]}": float(result[2]) for result in results}
        last = env.iteration + 1 == env.end_iteration
        self._rounds = model.current_iteration()
        if self._reports.after_round(values, self._rounds, model.save_model, last=last):
            raise lightgbm.callback.EarlyStopException(env.iteration, results)

    def at_end(self, model: lightgbm.Booster) -> None:
        """Report the model if the last report did not contain it, or contained rounds after the best one."""
        self._reports.at_end(model.save_model, again=0 < model.best_iteration < self._rounds)

    @classmethod
    def get_model(cls, checkpoint: Checkpoint, filename: str = CHECKPOINT_NAME) -> lightgbm.Booster:
        """Return the model in a checkpoint that this callback has reported.

        Raises:
            ConfigurationError: the checkpoint has no file of that name.
        """
        with checkpoint.as_directory() as directory:
            return lightgbm.Booster(model_file=str(model_file(checkpoint, filename, directory)))


class _TableReports(RayTrainReportCallback):
    """The callback for training on tables: each checkpoint also contains the metrics of all rounds.

    Args:
        earlier_metrics: the metrics of the rounds before a resume.
        **options: see :class:`RayTrainReportCallback`.
    """

    def __init__(self, earlier_metrics: History, **options: Any) -> None:
        super().__init__(**options)
        self._history = list(earlier_metrics)

    def __call__(self, env: lightgbm.callback.CallbackEnv) -> None:
        """Report the round."""
        self._history.append([tuple(result) for result in env.evaluation_result_list or ()])
        self._reports.history = self._history
        super().__call__(env)


class _EarlyStopping:
    """Wraps LightGBM's early stopping callback, and first passes the rounds before a resume to it.

    Args:
        callback: LightGBM's callback.
        past: the results of the rounds before a resume.
    """

    before_iteration = False

    def __init__(self, callback: Callable[[lightgbm.callback.CallbackEnv], None], past: History) -> None:
        self.order = _EARLY_STOPPING_ORDER
        self._callback = callback
        self._past = past

    def __call__(self, env: lightgbm.callback.CallbackEnv) -> None:
        """Pass the round to LightGBM's callback. In the first round, pass the rounds before a resume first."""
        results: Any = env.evaluation_result_list
        if env.iteration == env.begin_iteration:
            for iteration, past in enumerate(self._past):
                self._call(env, iteration, [_as_result(old, like=new) for new, old in zip(results, past, strict=False)])
        self._call(env, env.iteration, results)

    def _call(self, env: lightgbm.callback.CallbackEnv, iteration: int, results: Any) -> None:
        self._callback(
            lightgbm.callback.CallbackEnv(
                model=env.model,
                params=env.params,
                iteration=iteration,
                begin_iteration=0 if self._past else env.begin_iteration,
                end_iteration=env.end_iteration,
                evaluation_result_list=results,
            )
        )


def _as_result(values: Sequence[Any], *, like: Any) -> Any:
    """Convert an evaluation result to the type of another one, which depends on the version of LightGBM."""
    return tuple(values) if type(like) is tuple else type(like)(*values)


def bins_of(peers: Peers, features: pa.Table, params: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Return a dataset whose bins come from the rows of all workers.

    Args:
        peers: the workers.
        features: the features of this worker's rows.
        params: LightGBM's parameters.
        options: arguments of ``lightgbm.Dataset``.
    """
    sample = sample_of_all_workers(peers, features, params)
    # LightGBM drops features that are too rare to split, but it judges by the number of rows of this dataset.
    filtered = {} if sample.complete else {"feature_pre_filter": False}
    return lightgbm.Dataset(
        _matrix(sample.features),
        label=np.zeros(sample.features.num_rows),
        feature_name=sample.features.column_names,
        **{**options, "params": {**params, **filtered, **(options.get("params") or {})}},
    ).construct()


def to_table(features: Any) -> pa.Table:
    """Convert a data frame, a table or a 2D array to a table."""
    if isinstance(features, pa.Table):
        return features
    if isinstance(features, np.ndarray):
        return pa.table({f"Column_{number}": column for number, column in enumerate(features.T)})
    return pa.Table.from_pandas(features, preserve_index=False)


def train_on_tables(config: dict[str, Any], network: Mapping[str, Any], peers: Peers | None) -> None:
    """Train on this worker's parts of the datasets.

    Args:
        config: the config of the train function, as returned by ``TableForm.build_configs()``.
        network: the parameters that connect the workers.
        peers: the workers; None if there is only one.
    """
    params = dict(config["params"])
    threads = pop(params, "num_threads", 0)
    params |= {**network, "num_threads": threads if threads > 0 else network["num_threads"]}
    past: History = []
    rounds, model = config["rounds"], None
    checkpoint = get_checkpoint()
    if checkpoint is not None:
        model, past = RayTrainReportCallback.get_model(checkpoint), evaluations(checkpoint) or []
        rounds -= model.current_iteration()
        # If more rounds were evaluated than the model has, the training was completed with early stopping, and the
        # rounds after the best one were removed.
        if rounds <= 0 or len(past) > model.current_iteration():
            return
    sets = _datasets(config, params, peers)
    arguments = dict(config["arguments"])
    callbacks = [
        _EarlyStopping(callback, past) if isinstance(callback, _EARLY_STOPPING_TYPE) else callback
        for callback in (*(arguments.pop("callbacks", None) or ()), *_early_stopping(params))
    ]
    report = _TableReports(past, frequency=config["frequency"], checkpoint_at_end=config["at_end"])
    booster = lightgbm.train(
        params,
        next(iter(sets.values())),
        num_boost_round=rounds,
        valid_sets=list(sets.values()),
        valid_names=list(sets),
        callbacks=[*callbacks, report],
        init_model=model if model is not None else arguments.pop("init_model", None),
        **arguments,
    )
    report.at_end(booster)


def _datasets(config: Mapping[str, Any], params: dict[str, Any], peers: Peers | None) -> dict[str, lightgbm.Dataset]:
    """Return this worker's part of each dataset, with bins from the rows of all workers."""
    sets: dict[str, lightgbm.Dataset] = {}
    features: list[str] | None = None
    reference: lightgbm.Dataset | None = None
    for name in config["names"]:
        options = dict(config["options"].get(name, {}))
        columns = {key: options.pop(key) for key in config["columns"] if key in options}
        table = _read(name, get_dataset_shard(name))
        features = features or config["table"].features(name, table.schema)
        config["table"].features(name, table.schema, features)
        group = columns.pop("group", None)
        fields: dict[str, Any] = {key: numbers(table.column(column)) for key, column in columns.items()}
        if group is not None:
            fields["group"] = sizes(table.column(group))
        rows = table.select(features)
        if name == TRAIN and peers is not None:
            reference = bins_of(peers, rows, params, options)
        sets[name] = lightgbm.Dataset(
            _matrix(rows),
            label=numbers(table.column(config["table"].label)),
            reference=reference if name == TRAIN else sets[TRAIN],
            feature_name=features,
            **fields,
            **options,
        )
    return sets


def _early_stopping(params: dict[str, Any]) -> list[Any]:
    """Remove early stopping from the parameters; return a list with the callback that LightGBM would create for it."""
    patience = [params.pop(name) for name in _PATIENCE_PARAMS if name in params]
    if not patience or not patience[0] or patience[0] < 0:
        return []
    return [
        lightgbm.early_stopping(
            patience[0],
            first_metric_only=params.get("first_metric_only", False),
            min_delta=params.get("early_stopping_min_delta", 0.0),
        )
    ]


def _read(name: str, shard: Any) -> pa.Table:
    if hasattr(shard, "to_table"):
        table = shard.to_table()
    else:
        table = pa.concat_tables(shard.iter_batches(batch_size=_BATCH_ROWS, batch_format="pyarrow"))
    if not table.num_rows:
        raise ConfigurationError(
            f"[DT-732] LightGBM: expected at least one row of dataset {name!r} on each worker, got none. "
            "Use fewer workers"
        )
    return table


def _matrix(features: pa.Table) -> Any:
    """Return features in a format that LightGBM accepts: an array, or a data frame if some are categorical."""
    if has_categories(features.schema):
        return to_frame(plain_numbers(features))
    kinds = [field.type for field in features.schema]
    single = all(pa.types.is_float32(kind) or pa.types.is_float16(kind) for kind in kinds)
    matrix = np.empty((features.num_rows, len(kinds)), dtype=np.float32 if single else np.float64)
    for number, column in enumerate(features.columns):
        matrix[:, number] = numbers(column)
    return matrix
