"""The code that imports LightGBM: the callback, and training on tables."""

from __future__ import annotations

import random
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
from drivetrain_gbdt._parameters import find, pop
from drivetrain_gbdt._reporting import ModelReports, Rounds, evaluations, model_file

__all__ = ["RayTrainReportCallback", "bins_of", "to_table", "train_on_tables"]

_REPORT_ORDER = 25  # order of LightGBM's own callbacks: log 10, record 20, stop early 30
_BATCH_ROWS = 65_536  # the size of the batches that are read from a Ray dataset
_STATEFUL = (type(lightgbm.early_stopping(1)), type(lightgbm.record_evaluation({})))
_SCHEDULE = type(lightgbm.reset_parameter())
_SEEDS_ORDER = 5  # before the schedules of the user
_FRACTIONS = ("bagging_fraction", "pos_bagging_fraction", "neg_bagging_fraction")

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
            self._reports.start(env.begin_iteration)
        model: Any = env.model
        results = list(env.evaluation_result_list or ())
        values = {f"{result[0]}-{result[1]}": float(result[2]) for result in results}
        last = env.iteration + 1 == env.end_iteration
        self._rounds = model.current_iteration()
        if self._reports.after_round(values, model.save_model, last=last):
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

    @classmethod
    def get_rounds(cls, checkpoint: Checkpoint, filename: str = CHECKPOINT_NAME) -> int:
        """Return how many rounds the run had trained when it reported a checkpoint.

        The rounds of the model with which the run began (``init_model``) are not included.

        Raises:
            ConfigurationError: the checkpoint has no file of that name.
        """
        return Rounds.read(checkpoint, cls.get_model(checkpoint, filename).current_iteration()).completed


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


class _Replayed:
    """Wraps a callback that remembers the results of all rounds, and first passes the rounds before a resume to it.

    Args:
        callback: LightGBM's callback.
        past: the results of the rounds before a resume.
    """

    before_iteration = False

    def __init__(self, callback: Any, past: History) -> None:
        self.order = callback.order
        self._callback = callback
        self._past = past

    def __call__(self, env: lightgbm.callback.CallbackEnv) -> None:
        """Pass the round to LightGBM's callback. In the first round, pass the rounds before a resume first."""
        results: Any = env.evaluation_result_list
        first = env.begin_iteration - len(self._past)
        if env.iteration == env.begin_iteration:
            for number, past in enumerate(self._past):
                replayed = [_as_result(old, like=new) for new, old in zip(results, past, strict=False)]
                self._callback(_changed(env, iteration=first + number, begin=first, results=replayed))
        self._callback(_changed(env, iteration=env.iteration, begin=first, results=results))


class _Schedule:
    """Wraps LightGBM's callback that sets parameters by the number of the round, which it counts from the first one.

    Args:
        callback: LightGBM's callback.
        completed: the number of rounds before a resume.
    """

    before_iteration = True

    def __init__(self, callback: Any, completed: int) -> None:
        self.order = callback.order
        self._callback = callback
        self._completed = completed

    def __call__(self, env: lightgbm.callback.CallbackEnv) -> None:
        """Pass the round to LightGBM's callback."""
        first = env.begin_iteration - self._completed
        self._callback(_changed(env, iteration=env.iteration, begin=first, results=env.evaluation_result_list))


class _RoundSeeds:
    """Gives each round seeds that depend only on its number, so that a resumed run draws the same random numbers.

    LightGBM cannot save the state of its random numbers.

    Args:
        params: LightGBM's parameters.
    """

    before_iteration = True

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.order = _SEEDS_ORDER
        self._params = params
        self._period = int(find(params, "bagging_freq", 0))
        self._bagging = self._period > 0 and any(float(find(params, name, 1)) < 1 for name in _FRACTIONS)
        fractions = (float(find(params, name, 1)) for name in ("feature_fraction", "feature_fraction_bynode"))
        used = {
            "feature_fraction_seed": any(fraction < 1 for fraction in fractions),
            "extra_seed": bool(find(params, "extra_trees")),
            "drop_seed": find(params, "boosting") == "dart",
        }
        self._names = [name for name, is_used in used.items() if is_used]

    @property
    def needed(self) -> bool:
        """True if the training draws random numbers."""
        return self._bagging or bool(self._names)

    def __call__(self, env: lightgbm.callback.CallbackEnv) -> None:
        """Set the seeds of the next round."""
        model: Any = env.model
        seeds = {name: self._seed(name, env.iteration) for name in self._names}
        if self._bagging:
            # LightGBM uses a new seed only if another parameter of the bagging changes. It then draws new rows, so the
            # seed stays the same while the rows are to stay the same.
            model.reset_parameter({"bagging_freq": self._period + 1})
            seeds["bagging_freq"] = self._period
            seeds["bagging_seed"] = self._seed("bagging_seed", env.iteration // self._period)
        model.reset_parameter(seeds)

    def _seed(self, name: str, number: int) -> int:
        given = find(self._params, name, find(self._params, "seed", 0))
        return random.Random(f"{given} {name} {number}").randrange(2**30)


def _changed(env: Any, *, iteration: int, begin: int, results: Any) -> lightgbm.callback.CallbackEnv:
    return lightgbm.callback.CallbackEnv(
        model=env.model,
        params=env.params,
        iteration=iteration,
        begin_iteration=begin,
        end_iteration=env.end_iteration,
        evaluation_result_list=results,
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
    params, total = dict(config["params"]), config["rounds"]
    threads = pop(params, "num_threads", 0)
    params |= {**network, "num_threads": threads if threads > 0 else network["num_threads"]}
    arguments = dict(config["arguments"])
    model = arguments.pop("init_model", None)
    past: History = []
    completed = 0
    checkpoint = get_checkpoint()
    if checkpoint is not None:
        saved = RayTrainReportCallback.get_model(checkpoint)
        rounds = Rounds.read(checkpoint, saved.current_iteration())
        if rounds.completed >= total or rounds.is_shortened(saved.current_iteration()):
            return
        if find(params, "boosting") not in ("rf", "random_forest"):  # LightGBM cannot add trees to a random forest
            model, past, completed = saved, evaluations(checkpoint) or [], rounds.completed
    sets = _datasets(config, params, peers)
    report = _TableReports(past, frequency=config["frequency"], checkpoint_at_end=config["at_end"])
    callbacks = _callbacks(arguments.pop("callbacks", None) or (), params, past, completed)
    if config["frequency"] and (seeds := _RoundSeeds(params)).needed:
        callbacks.append(seeds)
    booster = lightgbm.train(
        params,
        sets[TRAIN],
        num_boost_round=total - completed,
        valid_sets=list(sets.values()),
        valid_names=list(sets),
        callbacks=[*callbacks, report],
        init_model=model,
        **arguments,
    )
    report.at_end(booster)


def _callbacks(given: Sequence[Any], params: dict[str, Any], past: History, completed: int) -> list[Any]:
    """Return the callbacks of the user, wrapped where they depend on earlier rounds."""
    callbacks: list[Any] = []
    for callback in (*given, *_early_stopping(params)):
        if isinstance(callback, _STATEFUL):
            callbacks.append(_Replayed(callback, past))
        elif isinstance(callback, _SCHEDULE):
            callbacks.append(_Schedule(callback, completed))
        else:
            callbacks.append(callback)
    return callbacks


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
    patience = pop(params, "early_stopping_round")
    if not patience or patience < 0:
        return []
    return [
        lightgbm.early_stopping(
            patience,
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
