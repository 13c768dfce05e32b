"""Training on tables: the base of both trainers, which checks the arguments before the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from drivetrain import (
    CheckpointConfig,
    ConfigurationError,
    DataConfig,
    DataParallelTrainer,
    RunConfig,
    ScalingConfig,
)
from drivetrain_gbdt._data import TRAIN, Columns, TableData

if TYPE_CHECKING:
    from drivetrain.plugin.trainers import TrainFunction

__all__ = ["TableArguments", "TableForm", "TableTrainer", "has_several_workers"]


class TableArguments(NamedTuple):
    """The arguments of a trainer for training on tables.

    Attributes:
        label_column: the column to predict.
        params: the library's parameters.
        rounds: the number of rounds.
        options: for each dataset, arguments of the library's class for data.
        arguments: further arguments of the library's function.
    """

    label_column: str | None
    params: Mapping[str, Any] | None
    rounds: int
    options: Mapping[str, Mapping[str, Any]] | None
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class TableForm:
    """The properties of a library's trainer that matter for training on tables.

    Attributes:
        trainer: the name of the trainer.
        function: the library's function that trains.
        options_argument: the name of the trainer's argument with options for each dataset.
        column_options: the names of the options whose values are names of columns.
        group_option: the name of the option that selects the column of groups; rows of the same group stay on one
            worker.
        default_split: the names of the datasets that are split by default, or ``"all"``.
        refused_arguments: arguments of the library's function that tables replace, and their replacements.
        refused_options: options of a dataset that tables replace, and their replacements.
        ranking: the beginnings of the names of objectives that rank the rows of a group.
        categorical: the name of the option that allows categorical features; None if they are always allowed.
    """

    trainer: str
    function: str
    options_argument: str
    column_options: Sequence[str]
    group_option: str
    default_split: str | Sequence[str]
    refused_arguments: Mapping[str, str]
    refused_options: Mapping[str, str]
    ranking: tuple[str, ...]
    categorical: str | None = None

    def build_configs(
        self,
        table: TableArguments,
        *,
        datasets: Mapping[str, Any] | None,
        dataset_config: DataConfig | None,
        scaling_config: ScalingConfig | None,
        run_config: RunConfig | None,
        **others: Any,
    ) -> dict[str, Any]:
        """Return the config of the train function, and the other arguments of a trainer that must be replaced.

        Raises:
            ConfigurationError: an argument is missing, or the arguments contradict each other.
        """
        if others.get("train_loop_config") is not None:
            raise ConfigurationError(
                f"[DT-730] {self.trainer}(train_loop_config=...): expected none without a train_loop_per_worker, which "
                "would receive it. Pass the settings of the training as params={...}"
            )
        label, parameters = _check_arguments(self.trainer, table, datasets, scaling_config)
        assert datasets is not None
        dataset_options = {name: dict(given) for name, given in (table.options or {}).items()}
        if unknown := sorted(set(dataset_options) - set(datasets)):
            raise ConfigurationError(
                f"[DT-730] {self.trainer}({self.options_argument}=...): expected names of datasets "
                f"({', '.join(map(repr, datasets))}), got {', '.join(map(repr, unknown))}"
            )
        self._check_options(dataset_options, table.arguments)
        self._check_ranking(parameters, dataset_options, datasets)
        run_config, frequency, at_end = _checkpoint_rules(run_config)
        columns = Columns(
            label=label,
            others={
                name: [given[key] for key in self.column_options if key in given]
                for name, given in dataset_options.items()
            },
            any_category=self.categorical is None,
            categorical=(
                self.categorical is None or any(given.get(self.categorical) for given in dataset_options.values())
            ),
        )
        config = {
            "table": columns,
            "params": parameters,
            "rounds": table.rounds,
            "options": dataset_options,
            "columns": tuple(self.column_options),
            "names": [TRAIN, *(name for name in datasets if name != TRAIN)],
            "arguments": dict(table.arguments),
            "frequency": frequency,
            "at_end": at_end,
        }
        data = self._data(columns, parameters, dataset_options, dataset_config)
        return {"train_loop_config": config, "dataset_config": data, "run_config": run_config}

    def _check_options(self, options: Mapping[str, Mapping[str, Any]], arguments: Mapping[str, Any]) -> None:
        for name in self.refused_arguments:
            if name in arguments:
                raise ConfigurationError(
                    f"[DT-730] {self.trainer}({name}=...): expected none, because the workers train on tables. "
                    f"{self.refused_arguments[name]}"
                )
        for dataset, given in options.items():
            where = f"[DT-730] {self.trainer}({self.options_argument}={{{dataset!r}: {{"
            for option, value in given.items():
                if option in self.refused_options:
                    raise ConfigurationError(
                        f"{where}{option!r}: ...}}}}): expected none, because the data comes from the columns of the "
                        f"dataset. {self.refused_options[option]}"
                    )
                if option in self.column_options and not isinstance(value, str):
                    raise ConfigurationError(
                        f"{where}{option!r}: ...}}}}): expected the name of a column, got {value!r:.200}. Add the "
                        "values to the dataset as a column, and pass its name"
                    )

    def _check_ranking(
        self, params: Mapping[str, Any], options: Mapping[str, Mapping[str, Any]], datasets: Mapping[str, Any]
    ) -> None:
        objective = params.get("objective")
        if not isinstance(objective, str) or not objective.startswith(self.ranking):
            return
        for name in datasets:
            if self.group_option not in options.get(name, {}):
                raise ConfigurationError(
                    f"[DT-730] {self.trainer}(params={{'objective': {objective!r}}}): expected a column that says "
                    f"which rows of dataset {name!r} are ranked together, got none. Pass "
                    f"{self.options_argument}={{{name!r}: {{{self.group_option!r}: '<column>'}}}}"
                )

    def reject(self, table: TableArguments) -> None:
        """Raise an error if arguments for training on tables were passed in addition to a train function."""
        named = {"label_column": table.label_column, "params": table.params, self.options_argument: table.options}
        given = [name for name, value in {**named, **table.arguments}.items() if value is not None]
        if given:
            raise ConfigurationError(
                f"[DT-730] {self.trainer}(train_loop_per_worker=...): expected no label_column, params or arguments of "
                f"{self.function}, got {', '.join(given)}. Call {self.function} with them in the train function"
            )

    def _data(
        self,
        columns: Columns,
        params: Mapping[str, Any],
        options: Mapping[str, Mapping[str, Any]],
        dataset_config: DataConfig | None,
    ) -> DataConfig:
        if dataset_config is not None and type(dataset_config) is not DataConfig:
            return dataset_config
        rules = dataset_config or DataConfig(self.default_split)
        objective = params.get("objective")
        return TableData(
            columns=columns,
            objective=objective if isinstance(objective, str) else None,
            classes=params.get("num_class"),
            groups={
                **rules.keep_together,
                **{name: option[self.group_option] for name, option in options.items() if self.group_option in option},
            },
            datasets_to_split=rules.datasets_to_split,
            execution_options=rules.execution_options,
        )


class TableTrainer(DataParallelTrainer):
    """The base class of both trainers. It trains on tables, unless it is created with a train function.

    Args:
        train_loop_per_worker: the train function; None to train on tables.
        table: the arguments for training on tables.
        train_on_tables: the train function for tables.
        **arguments: see :class:`drivetrain.DataParallelTrainer`.
    """

    _form: ClassVar[TableForm]

    def __init__(
        self,
        train_loop_per_worker: TrainFunction[Any] | None,
        *,
        table: TableArguments,
        train_on_tables: TrainFunction[Any],
        **arguments: Any,
    ) -> None:
        if train_loop_per_worker is None:
            arguments |= self._form.build_configs(table, **arguments)
        else:
            self._form.reject(table)
        super().__init__(train_loop_per_worker or train_on_tables, **arguments)


def has_several_workers(scaling: ScalingConfig | None) -> bool:
    """Return True if a run can have more than one worker."""
    workers = getattr(scaling, "num_workers", 1)
    return max(workers) > 1 if isinstance(workers, tuple) else workers > 1


def _check_arguments(
    trainer: str, table: TableArguments, datasets: Mapping[str, Any] | None, scaling: ScalingConfig | None
) -> tuple[str, dict[str, Any]]:
    """Return the label column and the parameters after checking them."""
    label_column, params = table.label_column, table.params
    if not isinstance(label_column, str) or not isinstance(params, Mapping) or not datasets or TRAIN not in datasets:
        raise ConfigurationError(
            f"[DT-730] {trainer}: expected either a train_loop_per_worker, or params={{...}}, label_column='...' and "
            f"datasets={{'train': ...}}, got label_column={label_column!r}, params={params!r}, "
            f"datasets {sorted(datasets or ())}"
        )
    objective = params.get("objective")
    if isinstance(objective, str) and objective.startswith("multi") and not params.get("num_class"):
        raise ConfigurationError(
            f"[DT-730] {trainer}(params=...): expected num_class for objective {objective!r}, got none. "
            "Add num_class, the number of classes"
        )
    device = str(params.get("device", params.get("device_type", "cpu")))
    if device.startswith(("cuda", "gpu")) and not getattr(scaling, "use_gpu", False):
        raise ConfigurationError(
            f"[DT-730] {trainer}(params={{'device': {device!r}}}): expected GPUs, got ScalingConfig(use_gpu=False). "
            "Set use_gpu=True, or use device='cpu'"
        )
    return label_column, dict(params)


def _checkpoint_rules(run_config: RunConfig | None) -> tuple[RunConfig, int, bool]:
    """Extract the checkpoint settings that apply only to trainers with their own training loop.

    Returns:
        The run's configuration without these settings; the number of rounds between checkpoints; and True if a
        checkpoint is saved after the last round.

    Raises:
        ConfigurationError: the configuration has the wrong type.
    """
    given: object = run_config
    if given is not None and not isinstance(given, RunConfig):
        raise ConfigurationError(f"[DT-103] run_config: expected a RunConfig, got {given!r}")
    run_config = run_config or RunConfig()
    rules: CheckpointConfig = run_config.checkpoint_config
    plain = replace(rules, checkpoint_frequency=0, checkpoint_at_end=None)
    at_end = rules.checkpoint_at_end
    return replace(run_config, checkpoint_config=plain), rules.checkpoint_frequency, at_end is None or at_end
