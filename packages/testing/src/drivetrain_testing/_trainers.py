"""The conformance kit for trainers, as tests that a plugin inherits.

A plugin author writes a class with two attributes and one method, and pytest collects the tests::

    from drivetrain_testing import TrainerConformance

    class TestMyTrainer(TrainerConformance):
        trainer = MyTrainer
        name = "my"  # the name of the entry point

        def arguments(self):
            return {"train_loop_per_worker": train, "train_loop_config": {"lr": 0.1}}
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from drivetrain import (
    Callback,
    ConfigurationError,
    DataParallelTrainer,
    DrivetrainError,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    restore,
)
from drivetrain.plugin import Report, Run, load_plugin
from drivetrain.plugin.callbacks import CommittedCheckpoint
from drivetrain.plugin.files import RUN_FILE
from drivetrain.plugin.trainers import dumps
from drivetrain_testing._checks import forget_test_name
from drivetrain_testing._conformance import check_overrides

__all__ = ["TrainerConformance"]

_NOT_STORED = ("datasets", "dataset_config", "resume_from_checkpoint")
_UNKNOWN = "no_such_argument"


class TrainerConformance:
    """Tests of a trainer. Derive a class from it, set :attr:`trainer` and :attr:`name`, and define :meth:`arguments`.

    Attributes:
        trainer: the class of the trainer.
        name: the name of its entry point in ``drivetrain.trainers``; None if it is not registered. The tests that need
            the entry point are then skipped.
        num_workers: the number of local workers of each run.
        forwards_keywords: True if the constructor accepts unknown keyword arguments, for example because it passes
            them on to the framework.
    """

    trainer: ClassVar[type[DataParallelTrainer]]
    name: ClassVar[str | None] = None
    num_workers: ClassVar[int] = 1
    forwards_keywords: ClassVar[bool] = False
    _interrupted: ClassVar[list[Path]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        trainer = getattr(cls, "trainer", None)
        if not isinstance(trainer, type) or not issubclass(trainer, DataParallelTrainer):
            raise TypeError(f"{cls.__name__}: expected an attribute `trainer` with a DataParallelTrainer class")
        check_overrides(cls, TrainerConformance)
        cls._interrupted = []

    def arguments(self) -> dict[str, Any]:
        """Return the constructor's arguments for a small training that reports at least once, by name.

        The kit adds ``scaling_config``, and the name and the storage path of ``run_config``.
        """
        raise NotImplementedError(f"{type(self).__name__}: expected a method arguments()")

    @pytest.fixture
    def interrupted(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The directory of a run that failed after its first report or checkpoint. All tests of the class share it."""
        if not self._interrupted:
            directory = tmp_path_factory.mktemp("interrupted")
            trainer = self._create(directory, callback=_FailsOnce(directory / "failed"))
            with pytest.raises(TrainingFailedError) as failed:
                trainer.fit()
            assert (directory / "failed").exists(), f"expected the training to report, got: {failed.value}"
            self._interrupted.append(directory / "run")
        return self._interrupted[0]

    def _create(
        self,
        directory: Path,
        *args: Any,
        kind: type[DataParallelTrainer] | None = None,
        callback: Callback | None = None,
        **changes: Any,
    ) -> DataParallelTrainer:
        """Create the trainer with the arguments of the subclass, to which the kit adds some."""
        forget_test_name()
        arguments = {**self.arguments(), **changes}
        run_config = arguments.get("run_config", RunConfig(verbose=0))
        if isinstance(run_config, RunConfig):
            callbacks = [*run_config.callbacks, *([] if callback is None else [callback])]
            arguments["run_config"] = replace(run_config, name="run", storage_path=directory, callbacks=callbacks)
        runtime = "local" if self.num_workers else "inprocess"
        arguments.setdefault("scaling_config", ScalingConfig(num_workers=self.num_workers, runtime=runtime))
        if args:
            del arguments[self._first_parameter()]
        return (kind or self.trainer)(*args, **arguments)

    def _restore(self, path: Path, kind: type[DataParallelTrainer] | None = None) -> DataParallelTrainer:
        not_stored = {name: value for name, value in self.arguments().items() if name in _NOT_STORED}
        return (kind or self.trainer).restore(path, **not_stored)

    def _first_parameter(self) -> str:
        return next(iter(inspect.signature(self.trainer).parameters))

    def _renamed(self) -> type[DataParallelTrainer]:
        """Return a subclass whose first parameter has another name."""

        class Renamed(self.trainer):  # type: ignore[name-defined, misc]
            def __init__(self, my_loop: Any = None, **arguments: Any) -> None:
                super().__init__(my_loop, **arguments)

        return Renamed

    def test_subclass_with_another_first_parameter_trains(self, tmp_path: Path) -> None:
        kind, first = self._renamed(), self._first_parameter()
        arguments = self.arguments()
        args = [arguments[first]] if first in arguments else []
        result = self._create(tmp_path, *args, kind=kind).fit()
        assert result.metrics, "expected the training to report at least once"
        facts = json.loads((tmp_path / "run" / RUN_FILE).read_text())
        assert facts["trainer"] == kind.__name__
        restored = self._restore(tmp_path / "run", kind)
        assert type(restored) is kind, f"{kind.__name__}.restore(): expected that class, got {restored!r}"

    def test_restore_returns_a_trainer_of_the_class(self, interrupted: Path) -> None:
        restored = self._restore(interrupted)
        assert type(restored) is self.trainer, f"restore(): expected {self.trainer.__name__}, got {restored!r}"

    def test_restored_trainer_has_the_same_settings(self, interrupted: Path, tmp_path: Path) -> None:
        original, restored = _settings(self._create(tmp_path)), _settings(self._restore(interrupted))
        for name, value in original.items():
            assert restored[name] == value, f"restore(): expected {name} {value}, got {restored[name]}"

    def test_restored_trainer_continues_the_run(self, interrupted: Path) -> None:
        result = self._restore(interrupted).fit()
        assert Path(result.path) == interrupted, f"expected the run to continue in {interrupted}, got {result.path}"
        assert result.metrics, "expected reports of the resumed run"

    def test_can_restore_a_directory_with_a_run(self, interrupted: Path, tmp_path: Path) -> None:
        assert self.trainer.can_restore(interrupted) is True, "can_restore(): expected True for the directory of a run"
        assert self.trainer.can_restore(tmp_path) is False, "can_restore(): expected False for an empty directory"

    def test_entry_point_refers_to_the_class(self) -> None:
        found = load_plugin("trainer", self._registered_name())
        assert found is self.trainer, f"drivetrain.trainers: expected {self.name} = {self.trainer}, got {found}"

    def test_drivetrain_restore_finds_the_class(self, interrupted: Path) -> None:
        self._registered_name()
        not_stored = {name: value for name, value in self.arguments().items() if name in _NOT_STORED}
        restored = restore(interrupted, **not_stored)
        assert type(restored) is self.trainer, f"drivetrain.restore(): expected {self.trainer}, got {restored!r}"

    def test_first_argument_can_be_passed_by_position(self, tmp_path: Path) -> None:
        arguments, first = self.arguments(), self._first_parameter()
        if first not in arguments:
            pytest.skip(f"arguments() does not contain {first!r}")
        by_position = _settings(self._create(tmp_path, arguments[first]))
        assert by_position == _settings(self._create(tmp_path)), f"{first}: expected the same trainer by position"

    def test_vary_returns_a_copy_with_changes(self, tmp_path: Path) -> None:
        trainer = self._create(tmp_path)
        before = _settings(trainer)
        try:
            copy, varied = trainer.vary({}), trainer.vary({"scaling_config": {"num_workers": self.num_workers + 1}})
        except DrivetrainError as error:
            pytest.fail(f"vary(): expected a copy with changed arguments, got {error}")
        assert type(varied) is self.trainer, f"vary(): expected a {self.trainer.__name__}, got {varied!r}"
        assert _settings(copy) == before, "vary({}): expected the same arguments"
        workers = varied.given["scaling_config"].num_workers
        assert workers == self.num_workers + 1, f"vary(): expected num_workers={self.num_workers + 1}, got {workers}"
        assert {**_settings(varied), "scaling_config": None} == {**before, "scaling_config": None}
        assert _settings(trainer) == before, "vary(): expected the trainer itself to stay as it was"

    def test_unknown_argument_is_refused(self, tmp_path: Path) -> None:
        if self.forwards_keywords:
            pytest.skip(f"{type(self).__name__} declares forwards_keywords")
        message = self._refusal(tmp_path, **{_UNKNOWN: 1})
        assert _UNKNOWN in message, f"expected an error that names the unknown argument, got: {message}"

    def test_argument_of_a_wrong_type_is_refused(self, tmp_path: Path) -> None:
        parameters = inspect.signature(self.trainer.__init__).parameters.values()
        configurations = {each.name for each in parameters if re.search(r"Config\b", str(each.annotation))}
        for name in sorted({"scaling_config", "run_config", *configurations}):
            message = self._refusal(tmp_path, **{name: 3.5})
            assert name in message, f"{name}=3.5: expected an error that names the argument, got: {message}"

    def test_trainer_can_be_pickled(self, tmp_path: Path) -> None:
        trainer = self._create(tmp_path)
        try:
            copy = pickle.loads(dumps(trainer))
        except Exception as error:
            pytest.fail(f"expected a trainer that can be pickled, got {type(error).__name__}: {error}")
        assert _settings(copy) == _settings(trainer), "expected the unpickled trainer to have the same arguments"

    def _refusal(self, directory: Path, **arguments: Any) -> str:
        """Return the message of the error that the constructor raises."""
        try:
            self._create(directory, **arguments)
        except (TypeError, ConfigurationError) as error:
            return str(error)
        pytest.fail(f"{self.trainer.__name__}({arguments}): expected a TypeError or ConfigurationError, got none")

    def _registered_name(self) -> str:
        if self.name is None:
            pytest.skip(f"{type(self).__name__} declares no name of an entry point")
        return self.name


class _FailsOnce(Callback):
    """Fails a run at its first checkpoint, or at its first report if that has no checkpoint.

    Args:
        marker: a file that this callback creates. If it exists, the callback does nothing.
    """

    def __init__(self, marker: Path) -> None:
        self._marker = os.fspath(marker)

    def on_report(self, run: Run, report: Report) -> None:
        if report.checkpoint is None:
            self._fail()

    def on_checkpoint(self, run: Run, checkpoint: CommittedCheckpoint) -> None:
        self._fail()

    def _fail(self) -> None:
        if not os.path.exists(self._marker):
            Path(self._marker).touch()
            raise InterruptedError("this callback interrupts the run in this test")


def _settings(trainer: DataParallelTrainer) -> dict[str, str]:
    """Return the settings that a copy of a trainer must have too, as text without memory addresses."""
    values = {name: value for name, value in trainer.given.items() if name != "run_config"}
    values.setdefault("scaling_config", ScalingConfig())
    return {name: re.sub(r"0x[0-9a-f]+", "0x...", repr(value)) for name, value in values.items()}
