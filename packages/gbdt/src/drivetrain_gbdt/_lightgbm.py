"""What needs LightGBM: the callback, and training on tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightgbm
import numpy as np
import pyarrow as pa

from drivetrain import Checkpoint, ConfigurationError, get_checkpoint, get_dataset_shard
from drivetrain_gbdt._reporting import ModelReports, evaluations, model_file

__all__ = ["RayTrainReportCallback", "train_on_tables"]

_AFTER_EVALUATION = 25  # LightGBM's own: 10 logs, 20 records, 30 stops early
_STOPPING = 30
_ROWS = 65_536  # of a batch that is read from a Ray dataset
_PATIENCE = ("early_stopping_round", "early_stopping_rounds", "early_stopping", "n_iter_no_change")
_STOPS_EARLY = type(lightgbm.early_stopping(1))

History = list[list[tuple[Any, ...]]]
"""By round, LightGBM's results: dataset, metric, value, whether higher is better."""


class RayTrainReportCallback:
    """Reports each round's metrics, and the model every so often: pass it to ``lightgbm.train(callbacks=[...])``.

    When the run is about to be ended (see :func:`drivetrain.get_preemption_info`), it saves the model and stops.

    Args:
        metrics: names of metrics to report, such as ``"valid-binary_logloss"``; None for all; a mapping
            ``{reported name: metric}`` to give them others.
        filename: of the model in its checkpoint, in LightGBM's text format.
        frequency: rounds from one checkpoint to the next; 0 for none but the last.
        checkpoint_at_end: have one after the last round. Where another callback stops training early, that round is
            not known as the last: use a ``frequency`` then.
        results_postprocessing_fn: makes what is reported of a dict of metrics.

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
        self.order = _AFTER_EVALUATION  # which LightGBM reads of the object alone
        self._rounds = 0
        self._reports = ModelReports(metrics, filename, frequency, checkpoint_at_end, results_postprocessing_fn)

    def __call__(self, env: lightgbm.callback.CallbackEnv) -> None:
        """Reports the round."""
        model: Any = env.model
        results = list(env.evaluation_result_list or ())
        values = {f"{result[0]}-{result[1]}": float(result[2]) for result in results}
        last = env.iteration + 1 == env.end_iteration
        self._rounds = model.current_iteration()
        if self._reports.after_round(values, self._rounds, model.save_model, last=last):
            raise lightgbm.callback.EarlyStopException(env.iteration, results)

    def at_end(self, model: lightgbm.Booster) -> None:
        """Reports the model, if its last round came without, or if rounds after the best are to be left out."""
        self._reports.at_end(model.save_model, again=0 < model.best_iteration < self._rounds)

    @classmethod
    def get_model(cls, checkpoint: Checkpoint, filename: str = CHECKPOINT_NAME) -> lightgbm.Booster:
        """The model of a checkpoint that this callback has reported.

        Raises:
            ConfigurationError: the checkpoint has no file of that name.
        """
        with checkpoint.as_directory() as directory:
            return lightgbm.Booster(model_file=str(model_file(checkpoint, filename, directory)))


class _TableReports(RayTrainReportCallback):
    """Has checkpoints hold the metrics of all rounds, the ones before a resume included."""

    def __init__(self, past: History, **options: Any) -> None:
        super().__init__(**options)
        self._history = list(past)

    def __call__(self, env: lightgbm.callback.CallbackEnv) -> None:
        """Reports the round."""
        self._history.append([tuple(result) for result in env.evaluation_result_list or ()])
        self._reports.history = self._history
        super().__call__(env)


class _EarlyStopping:
    """LightGBM's own, which begins with the rounds before a resume."""

    before_iteration = False

    def __init__(self, callback: Callable[[lightgbm.callback.CallbackEnv], None], past: History) -> None:
        self.order = _STOPPING
        self._callback = callback
        self._past = past

    def __call__(self, env: lightgbm.callback.CallbackEnv) -> None:
        """Counts the round."""
        results: Any = env.evaluation_result_list
        if env.iteration == env.begin_iteration:
            for iteration, past in enumerate(self._past):
                self._count(
                    env, iteration, [_as_result(then, like=now) for now, then in zip(results, past, strict=False)]
                )
        self._count(env, env.iteration, results)

    def _count(self, env: lightgbm.callback.CallbackEnv, iteration: int, results: Any) -> None:
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
    """A result of LightGBM's present version, which may be a plain tuple."""
    return tuple(values) if type(like) is tuple else type(like)(*values)


def train_on_tables(config: dict[str, Any], network: Mapping[str, Any]) -> None:
    """Trains on this worker's part of the tables.

    Args:
        config: what the trainer was given.
        network: the parameters that connect the workers.
    """
    params = {**network, **config["params"]}
    past: History = []
    rounds, model = config["rounds"], None
    checkpoint = get_checkpoint()
    if checkpoint is not None:
        model, past = RayTrainReportCallback.get_model(checkpoint), evaluations(checkpoint) or []
        rounds -= model.current_iteration()
        if rounds <= 0 or len(past) > model.current_iteration():  # the rounds after the best were left out at the end
            return
    sets: dict[str, lightgbm.Dataset] = {}
    features: list[str] | None = None
    for name in config["names"]:
        options = dict(config["options"].get(name, {}))
        given = {key: options.pop(key) for key in config["columns"] if key in options}
        table = _read(name, get_dataset_shard(name))
        features = features or config["table"].features(name, table.schema)
        config["table"].features(name, table.schema, features)
        fields = {key: table.column(column).to_numpy() for key, column in given.items()}
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
        _EarlyStopping(callback, past) if isinstance(callback, _STOPS_EARLY) else callback
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
    """Takes early stopping out of the parameters, and makes the callback that LightGBM would make of it."""
    patience = [params.pop(name) for name in _PATIENCE if name in params]
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
        table = pa.concat_tables(shard.iter_batches(batch_size=_ROWS, batch_format="pyarrow"))
    if not table.num_rows:
        raise ConfigurationError(
            f"LightGBM: expected at least one row of dataset {name!r} on each worker, found none: use fewer workers"
        )
    return table


def _matrix(table: pa.Table, features: Sequence[str]) -> Any:
    """The features as LightGBM takes them: one array, or a data frame where there are categories."""
    kinds = [table.schema.field(name).type for name in features]
    if any(pa.types.is_dictionary(kind) for kind in kinds):
        return table.select(list(features)).to_pandas()
    single = all(pa.types.is_float32(kind) or pa.types.is_float16(kind) for kind in kinds)
    matrix = np.empty((table.num_rows, len(features)), dtype=np.float32 if single else np.float64)
    for number, name in enumerate(features):
        matrix[:, number] = table.column(name).to_numpy()
    return matrix


def _sizes(groups: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The number of rows of each group, whose rows are next to each other."""
    bounds = np.flatnonzero(groups[1:] != groups[:-1]) + 1
    return np.diff(np.concatenate([[0], bounds, [len(groups)]]))
