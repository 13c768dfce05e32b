"""The code that imports XGBoost: the callback, and training on tables."""

from __future__ import annotations

import json
import random
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xgboost
from xgboost import collective

from drivetrain import Checkpoint, ConfigurationError, get_checkpoint, get_dataset_shard
from drivetrain_gbdt._convert import is_text, numbers, plain_numbers, starts, to_frame
from drivetrain_gbdt._data import Columns, no_rows
from drivetrain_gbdt._reporting import ModelReports, Rounds, evaluations, model_file

__all__ = ["RayTrainReportCallback", "train_on_tables"]

History = dict[str, dict[str, list[float]]]
"""For each dataset and each of its metrics, by name: the values of all rounds."""

_BATCH_ROWS = 65_536  # the size of the batches that are read from a Ray dataset
_HISTOGRAM_METHODS = ("hist", "gpu_hist", "auto")
_TWO_NAMES = (
    ("eta", "learning_rate"),
    ("gamma", "min_split_loss"),
    ("alpha", "reg_alpha"),
    ("lambda", "reg_lambda"),
)
_FRACTIONS = ("subsample", "colsample_bytree", "colsample_bylevel", "colsample_bynode")


class RayTrainReportCallback(xgboost.callback.TrainingCallback):
    """Reports each round's metrics, and saves the model at intervals: pass it to ``xgboost.train(callbacks=[...])``.

    On a preemption (see :func:`drivetrain.get_preemption_info`), it saves the model and stops the training.

    Args:
        metrics: the names of the metrics to report, such as ``"valid-logloss"``; None for all; a mapping
            ``{reported name: metric}`` to rename them.
        filename: the file name of the model in its checkpoint; the suffix selects the format, ``.ubj`` or ``.json``.
        frequency: the number of rounds between checkpoints; 0 to save none before the last round.
        checkpoint_at_end: save a checkpoint after the last round.
        results_postprocessing_fn: turns the dict of metrics into the metrics to report.

    Raises:
        ConfigurationError: an argument is out of range; or, after the first round, a metric is unknown.
    """

    CHECKPOINT_NAME = "model.ubj"

    def __init__(
        self,
        metrics: str | Sequence[str] | Mapping[str, str] | None = None,
        filename: str = CHECKPOINT_NAME,
        frequency: int = 0,
        checkpoint_at_end: bool = True,
        results_postprocessing_fn: Callable[[dict[str, float]], Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__()
        self._reports = ModelReports(metrics, filename, frequency, checkpoint_at_end, results_postprocessing_fn)
        self._unreported: dict[str, float] | None = None  # the metrics of a round

    def before_training(self, model: Any) -> Any:
        """Determine how many rounds the run has completed."""
        self._reports.start(model.num_boosted_rounds())
        return model

    def before_iteration(self, model: Any, epoch: int, evals_log: object) -> bool:
        """Report the previous round, which was not the last one. Return True to stop because of a preemption."""
        return self._report_round(model, last=False)

    def after_iteration(self, model: Any, epoch: int, evals_log: Mapping[str, Mapping[str, Sequence[Any]]]) -> bool:
        """Note the metrics of the round, and return False.

        XGBoost does not tell whether this is the last round. Therefore the round is reported when the next one starts,
        or when the training ends.
        """
        values: dict[str, float] = {}
        for dataset, metrics in evals_log.items():
            for metric, history in metrics.items():
                latest = history[-1]  # in cross-validation, a pair of mean and standard deviation
                values[f"{dataset}-{metric}"] = float(latest[0] if isinstance(latest, tuple) else latest)
        self._unreported = values
        return False

    def after_training(self, model: Any) -> Any:
        """Report the last round, with the model."""
        self._report_round(model, last=True)
        return model

    def _report_round(self, model: Any, *, last: bool) -> bool:
        """Report a round. Return True if the training has to stop because of a preemption."""
        if self._unreported is not None:
            values, self._unreported = self._unreported, None
            return self._reports.after_round(values, model.save_model, last=last)
        if last:  # the model was complete already
            self._reports.at_end(model.save_model)
        return False

    @classmethod
    def get_model(cls, checkpoint: Checkpoint, filename: str = CHECKPOINT_NAME) -> xgboost.Booster:
        """Return the model in a checkpoint that this callback has reported.

        Raises:
            ConfigurationError: the checkpoint has no file of that name.
        """
        with checkpoint.as_directory() as directory:
            return xgboost.Booster(model_file=str(model_file(checkpoint, filename, directory)))

    @classmethod
    def get_rounds(cls, checkpoint: Checkpoint, filename: str = CHECKPOINT_NAME) -> int:
        """Return how many rounds the run had trained when it reported a checkpoint.

        The rounds of the model with which the run began (``xgb_model``) are not included.

        Raises:
            ConfigurationError: the checkpoint has no file of that name.
        """
        return Rounds.read(checkpoint, cls.get_model(checkpoint, filename).num_boosted_rounds()).completed


class _TableReports(RayTrainReportCallback):
    """The callback for training on tables: each checkpoint also contains the metrics of all rounds.

    Args:
        earlier_metrics: the metrics of the rounds before a resume.
        updates: True if the rounds update existing trees.
        **options: see :class:`RayTrainReportCallback`.

    Attributes:
        history: the metrics of all rounds.
    """

    def __init__(self, earlier_metrics: History, updates: bool, **options: Any) -> None:
        super().__init__(**options)
        self._updates = updates
        self._earlier_metrics = earlier_metrics
        self.history = earlier_metrics

    def before_training(self, model: Any) -> Any:
        """Determine how many rounds the run has completed."""
        super().before_training(model)
        if self._updates:
            self._reports.rounds = Rounds(0, model.num_boosted_rounds(), updates=True)
        return model

    def before_segment(self) -> None:
        """Keep the metrics of all rounds until now, because XGBoost starts new lists."""
        self._earlier_metrics = self.history

    def after_iteration(self, model: Any, epoch: int, evals_log: Mapping[str, Mapping[str, Sequence[Any]]]) -> bool:
        """Note the metrics of all rounds, and return False."""
        self.history = self._reports.history = {
            dataset: {
                metric: [*self._earlier_metrics.get(dataset, {}).get(metric, ()), *map(float, values)]
                for metric, values in metrics.items()
            }
            for dataset, metrics in evals_log.items()
        }
        return super().after_iteration(model, epoch, evals_log)


class _Callbacks(xgboost.callback.TrainingCallback):
    """Calls the report and the user's callbacks as in one training, although a training may consist of several.

    Args:
        report: reports the rounds. It comes first: a callback that stops the training prevents the calls after it.
        callbacks: the callbacks of the user.
        completed: the number of rounds that the run has completed before.

    Attributes:
        completed: the number of rounds that the run has completed, which is the number of the next round.
        stopped: True if a callback has stopped the training.
    """

    def __init__(self, report: _TableReports, callbacks: Sequence[Any], completed: int) -> None:
        super().__init__()
        self._report = report
        self._callbacks = callbacks
        self._first = self.completed = completed
        self.stopped = False

    def before_training(self, model: Any) -> Any:
        """Begin the training, or continue with its next segment."""
        self._report.before_segment()
        if self.completed == self._first:
            for callback in (self._report, *self._callbacks):
                model = callback.before_training(model)
        if self.completed:
            for callback in self._callbacks:
                if isinstance(callback, xgboost.callback.LearningRateScheduler):  # it sets the rate of the next round
                    history: Any = self._report.history
                    callback.after_iteration(model, self.completed - 1, history)
        return model

    def before_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        """Call the callbacks with the number of the round in the run."""
        history = self._report.history
        self.stopped = self._report.before_iteration(model, epoch, evals_log) or any(
            callback.before_iteration(model, self._number(callback), history) for callback in self._callbacks
        )
        return self.stopped

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        """Call the callbacks with the number of the round in the run, and the metrics of all rounds."""
        self._report.after_iteration(model, epoch, evals_log)
        history = self._report.history
        self.stopped = any(
            callback.after_iteration(model, self._number(callback), history) for callback in self._callbacks
        )
        self.completed += 1
        return self.stopped

    def finish(self, model: Any) -> None:
        """End the training. The report comes last, because the other callbacks may change the model."""
        for callback in self._callbacks:
            model = callback.after_training(model)
        self._report.after_training(model)

    def _number(self, callback: object) -> int:
        # Early stopping adds the number of rounds that the model had before this attempt.
        return self.completed - self._first * isinstance(callback, xgboost.callback.EarlyStopping)


class _Batches(xgboost.DataIter):
    """Feeds a shard to a DMatrix in batches. XGBoost may iterate over the shard several times.

    Args:
        name: the name of the dataset.
        table: the roles of the columns.
        fields: a mapping from arguments of ``xgboost.DMatrix``, such as ``"weight"``, to names of columns.
        features: the features of the training dataset; None for the training dataset itself.
        cache: the directory in which XGBoost stores the batches; None to keep them in memory.
        feature_weights: for each feature, the weight of its selection; None for equal weights.

    Attributes:
        features: the features, once the first batch was passed to XGBoost.
        shared: arguments of a ``DMatrix`` that are the same for all batches.
        category_checksums: a mapping from each categorical column to a checksum of its categories.
    """

    def __init__(
        self,
        name: str,
        table: Columns,
        fields: Mapping[str, str],
        features: Sequence[str] | None,
        cache: Path | None = None,
        feature_weights: Any = None,
    ) -> None:
        self._name = name
        self._shard: Any = get_dataset_shard(name)
        self._table = table
        self._fields = fields
        self._expected = features
        self.shared = {} if feature_weights is None else {"feature_weights": np.asarray(feature_weights)}
        self.features: Sequence[str] = ()
        self.category_checksums: dict[str, int] = {}
        self._groups = 0  # the number of groups in the previous batches
        self._tables: Iterator[pa.Table] = iter(())
        super().__init__(cache_prefix=None if cache is None else str(cache / name))

    def reset(self) -> None:
        """Restart the iteration."""
        self._groups = 0
        self._tables = _tables(self._shard)
        if "qid" in self._fields:
            self._tables = _whole_groups(self._tables, self._fields["qid"])

    def next(self, input_data: Callable[..., None]) -> bool:
        """Pass the next batch to XGBoost; return False at the end of the shard."""
        batch = self.read()
        if batch is None:
            return False
        input_data(**{**batch, **self.shared, "data": _features(batch["data"])})
        return True

    def read(self) -> dict[str, Any] | None:
        """Return the arguments of a ``DMatrix`` for the next batch, whose data is a table; None after the last one."""
        table = next(self._tables, None)
        if table is None:
            return None
        if not self.features:
            features = self._table.features(self._name, table.schema, self._expected)
            self.features = self._expected or features
        for name in self.features:
            self._check_categories(name, table.column(name))
        fields = {key: numbers(table.column(column)) for key, column in self._fields.items() if key != "qid"}
        if "qid" in self._fields:
            first_rows = starts(table.column(self._fields["qid"]))
            fields["qid"] = self._number_groups(first_rows, table.num_rows)
            if "weight" in fields:  # XGBoost expects one weight per group
                fields["weight"] = fields["weight"][first_rows]
        return {"data": table.select(self.features), "label": numbers(table.column(self._table.label)), **fields}

    def _number_groups(self, first_rows: np.ndarray[Any, Any], rows: int) -> np.ndarray[Any, Any]:
        """Return the number of each row's group. XGBoost requires ids that increase, which those of users need not."""
        lengths = np.diff(np.concatenate([first_rows, [rows]]))
        numbers_of_groups = np.arange(self._groups, self._groups + len(first_rows), dtype=np.uint32)
        self._groups += len(first_rows)
        return np.repeat(numbers_of_groups, lengths)

    def _check_categories(self, name: str, column: pa.ChunkedArray) -> None:
        """Check that each code stands for the same category in all batches."""
        if not pa.types.is_dictionary(column.type):
            return
        for chunk in column.chunks:
            checksum = zlib.crc32("\0".join(map(str, chunk.dictionary.to_pylist())).encode())
            if self.category_checksums.setdefault(name, checksum) != checksum:
                raise _different_categories(name)


def _different_categories(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"[DT-732] column {name!r}: expected the same categories, in the same order, in every part of a dataset, got "
        "different ones. Pass the dataset as one data frame, or encode the column as numbers"
    )


def _tables(shard: Any) -> Iterator[pa.Table]:
    """Yield the tables of a shard. For an empty shard, yield a table without rows, which shows XGBoost the columns."""
    if hasattr(shard, "iter_tables"):
        is_empty = True
        for table in shard.iter_tables():
            is_empty = False
            yield table
        if is_empty:
            yield shard.schema().empty_table()
        return
    yield from shard.iter_batches(batch_size=_BATCH_ROWS, batch_format="pyarrow")


def _features(table: pa.Table) -> Any:
    """Return features in a format that XGBoost accepts. Of an Arrow table, it accepts only categories that are text."""
    table = plain_numbers(table)
    kinds = [field.type.value_type for field in table.schema if pa.types.is_dictionary(field.type)]
    return table if all(map(is_text, kinds)) else to_frame(table)


def _whole_groups(tables: Iterator[pa.Table], column: str) -> Iterator[pa.Table]:
    """Yield the same rows in tables that contain only whole groups."""
    pending: pa.Table | None = None
    for table in tables:
        rows = table if pending is None else pa.concat_tables([pending, table])
        first_rows = starts(rows.column(column))
        last = int(first_rows[-1]) if len(first_rows) else 0
        if last:
            yield rows.slice(0, last)
        pending = rows.slice(last)
    if pending is not None:
        yield pending


def train_on_tables(config: dict[str, Any]) -> None:
    """Train on this worker's parts of the datasets.

    Args:
        config: the config of the train function, as returned by ``TableForm.build_configs()``.
    """
    params, total = dict(config["params"]), config["rounds"]
    arguments = dict(config["arguments"])
    callbacks = _callbacks(arguments)
    model = arguments.pop("xgb_model", None)
    params = {**_inherited(model, params), **params}
    updates = params.get("process_type") == "update"
    past: History = {}
    completed = 0
    checkpoint = get_checkpoint()
    if checkpoint is not None:
        saved = RayTrainReportCallback.get_model(checkpoint)
        rounds = Rounds.read(checkpoint, saved.num_boosted_rounds())
        if updates and rounds.updates:
            return
        if updates:
            model = model or saved
        else:
            model, past, completed = saved, evaluations(checkpoint) or {}, rounds.completed
            if _replay(callbacks, model, past) or completed >= total or rounds.is_shortened(model.num_boosted_rounds()):
                return
    with tempfile.TemporaryDirectory() as cache:
        matrices = _matrices(config, params, Path(cache))
        report = _TableReports(past, updates, frequency=config["frequency"], checkpoint_at_end=config["at_end"])
        calls = _Callbacks(report, callbacks, completed)
        while True:
            end = _end_of_segment(params, calls.completed, total, config["frequency"])
            model = xgboost.train(
                _seeded(params, calls.completed),
                matrices[config["names"][0]],
                num_boost_round=end - calls.completed,
                evals=[(matrix, name) for name, matrix in matrices.items()],
                callbacks=[calls],
                xgb_model=bytearray(model.save_raw("ubj")) if isinstance(model, xgboost.Booster) else model,
                verbose_eval=False,
                **arguments,
            )
            if calls.stopped or calls.completed >= total:
                break
        calls.finish(model)
        matrices.clear()  # closes the files of the matrices in the cache


def _inherited(model: object, params: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters that a training takes over from its first model, as it does if the model is a Booster.

    A checkpoint does not contain them, so they are passed in each attempt.
    """
    if not isinstance(model, xgboost.Booster):
        return {}
    booster = json.loads(model.save_config())["learner"]["gradient_booster"]
    values = booster.get("gbtree", booster).get("tree_train_param", {})
    replaced = {name for names in _TWO_NAMES for name in names if set(names) & set(params)}
    second_names = {names[1] for names in _TWO_NAMES}
    return {name: value for name, value in values.items() if value and name not in replaced | second_names}


def _callbacks(arguments: dict[str, Any]) -> list[Any]:
    """Remove the arguments of ``xgboost.train`` that stand for callbacks, and return all callbacks."""
    callbacks = list(arguments.pop("callbacks", None) or ())
    if verbose := arguments.pop("verbose_eval", False):
        callbacks.append(xgboost.callback.EvaluationMonitor(period=int(verbose)))
    if (patience := arguments.pop("early_stopping_rounds", None)) is not None:
        callbacks.append(xgboost.callback.EarlyStopping(rounds=patience, maximize=arguments.pop("maximize", None)))
    return callbacks


def _is_random(params: Mapping[str, Any]) -> bool:
    """Return True if the parameters make the trees depend on random numbers."""
    return (
        any(float(params.get(name, 1)) < 1 for name in _FRACTIONS)
        or params.get("booster") == "dart"
        or params.get("feature_selector") in ("random", "shuffle")
        or params.get("lambdarank_pair_method") == "mean"
    )


def _seeded(params: Mapping[str, Any], completed: int) -> Mapping[str, Any]:
    """Return the parameters for a segment of the training, which must not repeat the random numbers of the first."""
    if not completed or not _is_random(params):
        return params
    seed = params.get("seed", params.get("random_state", 0))
    others = {name: value for name, value in params.items() if name != "random_state"}
    return {**others, "seed": random.Random(f"{seed} {completed}").randrange(2**31)}


def _end_of_segment(params: Mapping[str, Any], completed: int, total: int, frequency: int) -> int:
    """Return the round at which the next random numbers get another seed.

    XGBoost cannot save the state of its random numbers. Therefore they get another seed after each checkpoint,
    with or without a failure, so both give the same trees.
    """
    if not frequency or not _is_random(params):
        return total
    return min(total, (completed // frequency + 1) * frequency)


def _replay(callbacks: Sequence[object], model: xgboost.Booster, past: History) -> bool:
    """Replay the metrics of earlier rounds to the early stopping callbacks; return True if one stops the training."""
    stopped = False
    rounds = max((len(values) for metrics in past.values() for values in metrics.values()), default=0)
    for callback in callbacks:
        if isinstance(callback, xgboost.callback.EarlyStopping):
            callback.before_training(model)
            for completed in range(1, rounds + 1):
                log: Any = {
                    dataset: {metric: values[:completed] for metric, values in metrics.items()}
                    for dataset, metrics in past.items()
                }
                stopped = callback.after_iteration(model, completed - 1 - rounds, log) or stopped
    return stopped


def _matrices(config: Mapping[str, Any], params: Mapping[str, Any], cache: Path) -> dict[str, xgboost.DMatrix]:
    """Return the worker's part of each dataset as a DMatrix of the type that the parameters require."""
    quantile = (
        params.get("tree_method", "auto") in _HISTOGRAM_METHODS
        and params.get("booster", "gbtree") != "gblinear"
        and params.get("process_type") != "update"
    )
    matrices: dict[str, xgboost.DMatrix] = {}
    features: Sequence[str] | None = None
    for name in config["names"]:
        options = {"enable_categorical": config["table"].categorical, **config["options"].get(name, {})}
        fields = {key: options.pop(key) for key in config["columns"] if key in options}
        external = options.pop("external_memory", False)
        weights = options.pop("feature_weights", None)
        batches = _Batches(name, config["table"], fields, features, cache if external else None, weights)
        if quantile:
            kind = xgboost.ExtMemQuantileDMatrix if external else xgboost.QuantileDMatrix
            options.setdefault("max_bin", int(params.get("max_bin", 256)))
            matrices[name] = kind(batches, ref=next(iter(matrices.values()), None), **options)
        elif external:
            raise ConfigurationError(
                f"[DT-730] dmatrix_params={{{name!r}: {{'external_memory': True}}}}: expected a histogram tree_method, "
                f"got {params.get('tree_method')!r} (booster {params.get('booster', 'gbtree')!r}). "
                "Use tree_method='hist'"
            )
        else:
            matrices[name] = _whole(batches, options)
        rows = np.array([matrices[name].num_row()], dtype=np.int64)
        if not (collective.allreduce(rows, collective.Op.SUM) if collective.is_distributed() else rows)[0]:
            raise no_rows(name)
        _check_categories(batches.category_checksums)
        features = batches.features
    return matrices


def _whole(batches: _Batches, options: Mapping[str, Any]) -> xgboost.DMatrix:
    """Return a matrix with all raw values in memory, as the exact and linear training methods require."""
    batches.reset()
    parts = list(iter(batches.read, None))
    joined: dict[str, Any] = {key: np.concatenate([part[key] for part in parts]) for key in parts[0] if key != "data"}
    table = pa.concat_tables([part["data"] for part in parts])
    return xgboost.DMatrix(_features(table), **joined, **batches.shared, **options)


def _check_categories(checksums: Mapping[str, int]) -> None:
    """Check that each code stands for the same category on all workers."""
    if not collective.is_distributed():
        return
    for name, checksum in checksums.items():
        pair = np.array([checksum, -checksum], dtype=np.int64)
        maximum = collective.allreduce(pair, collective.Op.MAX)
        if maximum[0] != -maximum[1]:
            raise _different_categories(name)
