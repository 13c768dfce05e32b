"""What needs XGBoost: the callback, and training on tables."""

from __future__ import annotations

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
from drivetrain_gbdt._data import Columns
from drivetrain_gbdt._reporting import ModelReports, evaluations, model_file

__all__ = ["RayTrainReportCallback", "train_on_tables"]

History = dict[str, dict[str, list[float]]]
"""By dataset and metric, the values of all rounds."""

_ROWS = 65_536  # of a batch that is read from a Ray dataset
_QUANTILE = ("hist", "gpu_hist", "auto")


class RayTrainReportCallback(xgboost.callback.TrainingCallback):
    """Reports each round's metrics, and the model every so often: pass it to ``xgboost.train(callbacks=[...])``.

    When the run is about to be ended (see :func:`drivetrain.get_preemption_info`), it saves the model and stops.

    Args:
        metrics: names of metrics to report, such as ``"valid-logloss"``; None for all; a mapping
            ``{reported name: metric}`` to give them others.
        filename: of the model in its checkpoint; the ending says the format, ``.ubj`` or ``.json``.
        frequency: rounds from one checkpoint to the next; 0 for none but the last.
        checkpoint_at_end: have one after the last round.
        results_postprocessing_fn: makes what is reported of a dict of metrics.

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

    def after_iteration(self, model: Any, epoch: int, evals_log: Mapping[str, Mapping[str, Sequence[Any]]]) -> bool:
        """Reports the round."""
        values: dict[str, float] = {}
        for dataset, metrics in evals_log.items():
            for metric, history in metrics.items():
                latest = history[-1]  # a pair of mean and deviation where folds are compared
                values[f"{dataset}-{metric}"] = float(latest[0] if isinstance(latest, tuple) else latest)
        return self._reports.after_round(values, model.num_boosted_rounds(), model.save_model)

    def after_training(self, model: Any) -> Any:
        """Reports the model, if its last round came without."""
        self._reports.at_end(model.save_model)
        return model

    @classmethod
    def get_model(cls, checkpoint: Checkpoint, filename: str = CHECKPOINT_NAME) -> xgboost.Booster:
        """The model of a checkpoint that this callback has reported.

        Raises:
            ConfigurationError: the checkpoint has no file of that name.
        """
        with checkpoint.as_directory() as directory:
            return xgboost.Booster(model_file=str(model_file(checkpoint, filename, directory)))


class _TableReports(RayTrainReportCallback):
    """Has checkpoints hold the metrics of all rounds, the ones before a resume included."""

    def __init__(self, past: History, **options: Any) -> None:
        super().__init__(**options)
        self._past = past
        self._saved: tuple[int, str | None] | None = None

    def after_iteration(self, model: Any, epoch: int, evals_log: Mapping[str, Mapping[str, Sequence[Any]]]) -> bool:
        """Reports the round."""
        self._reports.history = {
            dataset: {
                metric: [*self._past.get(dataset, {}).get(metric, ()), *map(float, values)]
                for metric, values in metrics.items()
            }
            for dataset, metrics in evals_log.items()
        }
        stops = super().after_iteration(model, epoch, evals_log)
        self._saved = _state(model)
        return stops

    def after_training(self, model: Any) -> Any:
        """Leaves the end to :class:`_AtEnd`, as others may change the model after this."""
        return model

    def at_end(self, model: Any) -> None:
        """Reports the model, if its last round came without, or if it was changed after it."""
        self._reports.at_end(model.save_model, again=_state(model) != self._saved)


class _AtEnd(xgboost.callback.TrainingCallback):
    """The last of the callbacks."""

    def __init__(self, report: _TableReports) -> None:
        super().__init__()
        self._report = report

    def after_training(self, model: Any) -> Any:
        """Reports the model as all others leave it."""
        self._report.at_end(model)
        return model


def _state(model: Any) -> tuple[int, str | None]:
    """What early stopping changes of a model."""
    return model.num_boosted_rounds(), model.attr("best_iteration")


class _Batches(xgboost.DataIter):
    """Feeds a shard to a DMatrix piece by piece, as often as it is asked to."""

    def __init__(
        self,
        name: str,
        table: Columns,
        fields: Mapping[str, str],
        features: Sequence[str] | None,
        cache: Path | None = None,
    ) -> None:
        self._name = name
        self._shard = get_dataset_shard(name)
        self._table = table
        self._fields = fields
        self._expected = features
        self.features: Sequence[str] = ()
        self.dictionaries: dict[str, int] = {}
        self._tables: Iterator[pa.Table] = iter(())
        super().__init__(cache_prefix=None if cache is None else str(cache / name))

    def reset(self) -> None:
        """Begins again."""
        self._tables = _tables(self._shard)
        if "qid" in self._fields:
            self._tables = _whole_groups(self._tables, self._fields["qid"])

    def next(self, input_data: Callable[..., None]) -> bool:
        """Hands over the next piece; False when there is none left."""
        table = next(self._tables, None)
        if table is None:
            return False
        if not self.features:
            found = self._table.features(self._name, table.schema, self._expected)
            self.features = self._expected or found
        for name in self.features:
            self._note_categories(name, table.column(name))
        fields = {key: table.column(column).to_numpy() for key, column in self._fields.items()}
        if "qid" in fields and "weight" in fields:  # of which XGBoost wants one for each group
            fields["weight"] = fields["weight"][_starts(fields["qid"])]
        label = table.column(self._table.label).to_numpy()
        input_data(data=table.select(self.features), label=label, **fields)
        return True

    def _note_categories(self, name: str, column: pa.ChunkedArray) -> None:
        """Has the numbers that stand for categories mean the same in each piece."""
        if not pa.types.is_dictionary(column.type):
            return
        for chunk in column.chunks:
            found = zlib.crc32("\0".join(map(str, chunk.dictionary.to_pylist())).encode())
            if self.dictionaries.setdefault(name, found) != found:
                raise _other_categories(name)


def _other_categories(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"column {name!r}: expected the same categories, in the same order, in every part of a dataset, got others: "
        "give the dataset as one data frame, or encode the column as numbers"
    )


def _tables(shard: Any) -> Iterator[pa.Table]:
    """A shard's rows; of an empty one a table without rows, as XGBoost wants to know its columns."""
    if hasattr(shard, "iter_tables"):
        seen = False
        for table in shard.iter_tables():
            seen = True
            yield table
        if not seen:
            yield shard.schema().empty_table()
        return
    yield from shard.iter_batches(batch_size=_ROWS, batch_format="pyarrow")


def _starts(groups: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The first row of each group, whose rows are next to each other."""
    changes = np.flatnonzero(groups[1:] != groups[:-1]) + 1
    return np.concatenate([[0], changes]) if len(groups) else changes


def _whole_groups(tables: Iterator[pa.Table], column: str) -> Iterator[pa.Table]:
    """The same rows in tables that end where a group does."""
    held: pa.Table | None = None
    for table in tables:
        rows = table if held is None else pa.concat_tables([held, table])
        starts = _starts(rows.column(column).to_numpy())
        last = int(starts[-1]) if len(starts) else 0
        if last:
            yield rows.slice(0, last)
        held = rows.slice(last)
    if held is not None:
        yield held


def train_on_tables(config: dict[str, Any]) -> None:
    """Trains on this worker's part of the tables.

    Args:
        config: what the trainer was given.
    """
    params, rounds = dict(config["params"]), config["rounds"]
    arguments = dict(config["arguments"])
    callbacks = list(arguments.pop("callbacks", None) or ())
    if (patience := arguments.pop("early_stopping_rounds", None)) is not None:
        callbacks.append(xgboost.callback.EarlyStopping(rounds=patience, maximize=arguments.get("maximize")))
    past: History = {}
    model = None
    checkpoint = get_checkpoint()
    if checkpoint is not None:
        model, past = RayTrainReportCallback.get_model(checkpoint), evaluations(checkpoint) or {}
        rounds -= model.num_boosted_rounds()
        known = max((len(values) for metrics in past.values() for values in metrics.values()), default=0)
        if _replay(callbacks, model, past) or rounds <= 0 or known > model.num_boosted_rounds():
            return  # of more rounds than the model has those after the best were left out at the end
    with tempfile.TemporaryDirectory() as cache:
        matrices = _matrices(config, params, Path(cache))
        report = _TableReports(past, frequency=config["frequency"], checkpoint_at_end=config["at_end"])
        xgboost.train(
            params,
            matrices[config["names"][0]],
            num_boost_round=rounds,
            evals=[(matrix, name) for name, matrix in matrices.items()],
            callbacks=[report, *callbacks, _AtEnd(report)],  # XGBoost asks none of those after one that stops
            xgb_model=model if model is not None else arguments.pop("xgb_model", None),
            verbose_eval=arguments.pop("verbose_eval", False),
            **arguments,
        )
        matrices.clear()  # they keep files in the cache open


def _replay(callbacks: Sequence[object], model: xgboost.Booster, past: History) -> bool:
    """Has what stops early see the rounds before a resume; True if it would have stopped there."""
    rounds, stopped = model.num_boosted_rounds(), False
    for callback in callbacks:
        if isinstance(callback, xgboost.callback.EarlyStopping):
            callback.before_training(model)
            for done in range(1, rounds + 1 if past else 1):
                log: Any = {
                    dataset: {metric: values[:done] for metric, values in metrics.items()}
                    for dataset, metrics in past.items()
                }
                stopped = callback.after_iteration(model, done - 1 - rounds, log) or stopped
    return stopped


def _matrices(config: Mapping[str, Any], params: Mapping[str, Any], cache: Path) -> dict[str, xgboost.DMatrix]:
    """The worker's part of each dataset as XGBoost wants it."""
    quantile = params.get("tree_method", "auto") in _QUANTILE and params.get("booster", "gbtree") != "gblinear"
    matrices: dict[str, xgboost.DMatrix] = {}
    features: Sequence[str] | None = None
    for name in config["names"]:
        options = {"enable_categorical": config["table"].categorical, **config["options"].get(name, {})}
        fields = {key: options.pop(key) for key in config["columns"] if key in options}
        external = options.pop("external_memory", False)
        pieces = _Batches(name, config["table"], fields, features, cache if external else None)
        if quantile:
            kind = xgboost.ExtMemQuantileDMatrix if external else xgboost.QuantileDMatrix
            options.setdefault("max_bin", params.get("max_bin", 256))
            matrices[name] = kind(pieces, ref=next(iter(matrices.values()), None), **options)
        elif external:
            raise ConfigurationError(
                f"dmatrix_params={{{name!r}: {{'external_memory': True}}}}: expected a tree_method of histograms, got "
                f"{params.get('tree_method')!r} (booster {params.get('booster', 'gbtree')!r}): use tree_method='hist'"
            )
        else:
            matrices[name] = _whole(pieces, options)
        _check_categories(pieces.dictionaries)
        features = pieces.features
    return matrices


def _whole(pieces: _Batches, options: Mapping[str, Any]) -> xgboost.DMatrix:
    """A matrix of raw values, which exact and linear methods want; it holds them all."""
    parts: list[dict[str, Any]] = []
    pieces.reset()
    while pieces.next(lambda **part: parts.append(part)):
        pass
    joined: dict[str, Any] = {key: np.concatenate([part[key] for part in parts]) for key in parts[0] if key != "data"}
    joined["data"] = pa.concat_tables([part["data"] for part in parts])
    return xgboost.DMatrix(**joined, **options)


def _check_categories(found: Mapping[str, int]) -> None:
    """Has the numbers that stand for categories mean the same on each worker."""
    if not collective.is_distributed():
        return
    for name, value in found.items():
        pair = np.array([value, -value], dtype=np.int64)
        greatest = collective.allreduce(pair, collective.Op.MAX)
        if greatest[0] != -greatest[1]:
            raise _other_categories(name)
