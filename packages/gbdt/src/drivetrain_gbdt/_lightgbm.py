"""The code that imports LightGBM: the callback, and training on tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightgbm
import numpy as np
import pyarrow as pa

from drivetrain import Checkpoint, ConfigurationError, get_checkpoint, get_dataset_shard
from drivetrain_gbdt._reporting import ModelReports, evaluations, model_file

__all__ = ["RayTrainReportCallback", "train_on_tables"]

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


def train_on_tables(config: dict[str, Any], network: Mapping[str, Any]) -> None:
    """Train on this worker's parts of the datasets.

    Args:
        config: the config of the train function, as returned by ``TableForm.build_configs()``.
        network: the parameters that connect the workers.
    """
    params = {**network, **config["params"]}
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
    sets: dict[str, lightgbm.Dataset] = {}
    features: list[str] | None = None
    for name in config["names"]:
        options = dict(config["options"].get(name, {}))
        columns = {key: options.pop(key) for key in config["columns"] if key in options}
        table = _read(name, get_dataset_shard(name))
        features = features or config["table"].features(name, table.schema)
        config["table"].features(name, table.schema, features)
        fields = {key: table.column(column).to_numpy() for key, column in columns.items()}
        if "group" in fields:
            fields["group"] = _sizes(fields["group"])
        sets[name] = lightgbm.Dataset(
            _matrix(table, features),
            label=table.column(config["table"].label).to_numpy(),
            reference=next(iter(sets.values()), None),
            feature_name=features,
            **fields,
            **options,
        )
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
            f"LightGBM: expected at least one row of dataset {name!r} on each worker, got none. Use fewer workers"
        )
    return table


def _matrix(table: pa.Table, features: Sequence[str]) -> Any:
    """Return the features in a format that LightGBM accepts: an array, or a data frame if some are categorical."""
    kinds = [table.schema.field(name).type for name in features]
    if any(pa.types.is_dictionary(kind) for kind in kinds):
        return table.select(list(features)).to_pandas()
    single = all(pa.types.is_float32(kind) or pa.types.is_float16(kind) for kind in kinds)
    matrix = np.empty((table.num_rows, len(features)), dtype=np.float32 if single else np.float64)
    for number, name in enumerate(features):
        matrix[:, number] = table.column(name).to_numpy()
    return matrix


def _sizes(groups: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the number of rows of each group; the rows of a group are contiguous."""
    bounds = np.flatnonzero(groups[1:] != groups[:-1]) + 1
    return np.diff(np.concatenate([[0], bounds, [len(groups)]]))
