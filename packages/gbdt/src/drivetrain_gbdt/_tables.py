"""The table form of both trainers: datasets by name, a label column, and what is known to be wrong before a start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drivetrain import CheckpointConfig, ConfigurationError, DataConfig, RunConfig, ScalingConfig
from drivetrain_gbdt._data import TRAIN, Columns, TableData

__all__ = ["Loop", "TableForm"]


@dataclass(frozen=True, kw_only=True)
class TableForm:
    """What a library's trainer does with tables.

    Attributes:
        trainer: its name.
        options: its argument for what each dataset is made with.
        columns: of those options, the names of columns.
        group: the one of them of which equal values stay together.
        split: the datasets that are split unless the user says otherwise.
        categorical: the option without which columns of categories are no features; None if they always are.
    """

    trainer: str
    options: str
    columns: Sequence[str]
    group: str
    split: str | Sequence[str]
    categorical: str | None = None

    def arrange(
        self,
        *,
        label_column: object,
        params: Mapping[str, Any] | None,
        rounds: int,
        options: Mapping[str, Mapping[str, Any]] | None,
        arguments: Mapping[str, Any],
        datasets: Mapping[str, Any] | None,
        dataset_config: DataConfig | None,
        scaling: ScalingConfig | None,
        run_config: RunConfig | None,
    ) -> tuple[dict[str, Any], DataConfig, RunConfig]:
        """The config of the train function, how the datasets are split, and the run's configuration.

        Raises:
            ConfigurationError: the arguments do not fit together.
        """
        label, parameters = _check_arguments(
            self.trainer, label_column=label_column, params=params, datasets=datasets, scaling=scaling
        )
        assert datasets is not None
        of_dataset = {name: dict(given) for name, given in (options or {}).items()}
        if unknown := sorted(set(of_dataset) - set(datasets)):
            raise ConfigurationError(
                f"{self.trainer}({self.options}=...): expected names of datasets ({', '.join(map(repr, datasets))}), "
                f"got {', '.join(map(repr, unknown))}"
            )
        run_config, frequency, at_end = _checkpoint_rules(run_config)
        columns = Columns(
            label=label,
            others={name: [of[key] for key in self.columns if key in of] for name, of in of_dataset.items()},
            categorical=self.categorical is None or any(of.get(self.categorical) for of in of_dataset.values()),
        )
        config = {
            "table": columns,
            "params": parameters,
            "rounds": rounds,
            "options": of_dataset,
            "columns": tuple(self.columns),
            "names": [TRAIN, *(name for name in datasets if name != TRAIN)],
            "arguments": dict(arguments),
            "frequency": frequency,
            "at_end": at_end,
        }
        return config, self._data(columns, parameters, of_dataset, dataset_config), run_config

    def refuse(self, function: str, *given: object) -> None:
        """Refuses the arguments of the table form beside a train function."""
        if any(value for value in given):
            raise ConfigurationError(
                f"{self.trainer} with a train_loop_per_worker: expected no label_column, params or arguments of "
                f"{function}: the function calls it itself"
            )

    def _data(
        self,
        columns: Columns,
        params: Mapping[str, Any],
        options: Mapping[str, Mapping[str, Any]],
        given: DataConfig | None,
    ) -> DataConfig:
        if given is not None and type(given) is not DataConfig:
            return given
        objective = params.get("objective")
        return TableData(
            columns=columns,
            objective=objective if isinstance(objective, str) else None,
            classes=params.get("num_class"),
            groups={
                **({} if given is None else given.keep_together),
                **{name: of[self.group] for name, of in options.items() if self.group in of},
            },
            datasets_to_split=self.split if given is None else given.datasets_to_split,
            execution_options=None if given is None else given.execution_options,
        )


def _check_arguments(
    trainer: str,
    *,
    label_column: object,
    params: Mapping[str, Any] | None,
    datasets: Mapping[str, Any] | None,
    scaling: ScalingConfig | None,
) -> tuple[str, dict[str, Any]]:
    """The label column and the parameters, if they can be."""
    if not isinstance(label_column, str) or not isinstance(params, Mapping) or not datasets or TRAIN not in datasets:
        raise ConfigurationError(
            f"{trainer}: expected a train_loop_per_worker; or params={{...}}, label_column='...' and "
            f"datasets={{'train': ...}}, got label_column={label_column!r}, params={params!r}, "
            f"datasets {sorted(datasets or ())}"
        )
    objective = params.get("objective")
    if isinstance(objective, str) and objective.startswith("multi") and not params.get("num_class"):
        raise ConfigurationError(f"{trainer}(params=...) with objective {objective!r}: expected num_class, found none")
    device = str(params.get("device", params.get("device_type", "cpu")))
    if device.startswith(("cuda", "gpu")) and not (scaling is not None and scaling.use_gpu):
        raise ConfigurationError(
            f"{trainer}(params={{'device': {device!r}}}): expected GPUs, got ScalingConfig(use_gpu=False): "
            "add use_gpu=True, or use device='cpu'"
        )
    return label_column, dict(params)


def _checkpoint_rules(run_config: RunConfig | None) -> tuple[RunConfig, int, bool]:
    """Takes the rules that only a trainer with its own loop knows out of a run's configuration.

    Returns:
        The rest; after how many rounds a checkpoint is made; and whether after the last one.
    """
    run_config = run_config or RunConfig()
    rules: CheckpointConfig = run_config.checkpoint_config
    plain = replace(rules, checkpoint_frequency=0, checkpoint_at_end=None)
    at_end = rules.checkpoint_at_end
    return replace(run_config, checkpoint_config=plain), rules.checkpoint_frequency, at_end is None or at_end


Loop = Callable[[], Any] | Callable[[dict[str, Any]], Any]
