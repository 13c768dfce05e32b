"""The conformance kit for plugins of ``drivetrain.frameworks``, as tests that a plugin inherits.

A plugin author writes a class with one attribute and up to three methods, and pytest collects the tests::

    from drivetrain_testing import FrameworkConformance

    class TestMyFramework(FrameworkConformance):
        name = "my_framework"  # its entry point in drivetrain.frameworks

        @staticmethod
        def draw():
            return my_framework.random_number()

        @staticmethod
        def draw_restored():  # if random_state() does not contain the generator of draw()
            return my_framework.Generator.default().number()

        @staticmethod
        def make_objects_of_process():
            return [my_framework.Group()]

A test that cannot pass for a plugin must be overridden with ``@pytest.mark.xfail(reason=...)``. Overriding a test
without a reason is an error.
"""

from __future__ import annotations

import importlib
import itertools
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from drivetrain import ConfigurationError, DataParallelTrainer, RunConfig, ScalingConfig, TrainingFailedError
from drivetrain.plugin import Framework, load_plugin
from drivetrain.plugin.arrays import from_json, to_json
from drivetrain.plugin.checks import one_line
from drivetrain.plugin.state import STATE_ERRORS
from drivetrain_testing._checks import check_equal, forget_test_name
from drivetrain_testing._conformance import check_overrides

__all__ = ["FrameworkConformance"]


class FrameworkConformance:
    """Tests of the plugin of a framework. Derive a class from it, and set :attr:`name`.

    Attributes:
        name: the name of its entry point in ``drivetrain.frameworks``: the root module of the framework.
    """

    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not getattr(cls, "name", ""):
            raise TypeError(f"{cls.__name__}: expected an attribute `name` with the name of the entry point")
        check_overrides(cls, FrameworkConformance)

    @staticmethod
    def draw() -> Any:
        """Return numbers of the framework's global random generator. Without this method, the framework has none."""
        return secrets.token_hex()

    @classmethod
    def draw_restored(cls) -> Any:
        """Return numbers of the generators whose state ``random_state()`` returns. By default, :meth:`draw` does."""
        return cls.draw()

    @staticmethod
    def make_objects_of_process() -> Sequence[Any]:
        """Return an object of each class whose objects belong to the process that creates them."""
        return ()

    def test_forked_workers_draw_different_numbers(self, tmp_path: Path) -> None:
        forget_test_name()
        trainer = DataParallelTrainer(
            _draw,
            train_loop_config={"draw": type(self).draw, "directory": str(tmp_path)},
            scaling_config=ScalingConfig(num_workers=2, runtime="local"),
            run_config=RunConfig(
                storage_path=tmp_path, preload=[self.name], verbose=0, worker_output="none", start_timeout_s=120
            ),
        )
        try:
            trainer.fit()
        except TrainingFailedError as error:
            raise error.__cause__ or error from None
        first, second = (Path(tmp_path, f"drawn_{rank}").read_text() for rank in range(2))
        assert first != second, f"expected other random numbers on every rank, got {first} on both. Seed in reseed()"

    def test_restored_random_state_gives_the_same_numbers(self) -> None:
        framework, state = self._framework_and_state()
        check_equal("random_state(), called twice", _as_text(framework.random_state()), _as_text(state))
        expected = [type(self).draw_restored() for _ in range(3)]
        framework.set_random_state(from_json(json.loads(_as_text(state))))  # as another framework's state stores it
        check_equal("the numbers after set_random_state()", [type(self).draw_restored() for _ in range(3)], expected)
        framework.set_random_state(state)
        check_equal("the numbers after set_random_state()", [type(self).draw_restored() for _ in range(3)], expected)

    def test_damaged_random_state_is_refused(self) -> None:
        framework, state = self._framework_and_state()
        damaged: list[Any] = ["text", {"text": []}, print]
        for name, value in itertools.product(state, damaged):
            outcome = "no error"
            try:
                framework.set_random_state({**state, name: value})
            except STATE_ERRORS:
                continue
            except Exception as error:  # of the plugin
                outcome = one_line(error)
            finally:
                framework.set_random_state(state)
            pytest.fail(f"set_random_state() with {name}={value!r}: expected a ValueError, got {outcome}")

    def _framework_and_state(self) -> tuple[Framework, Mapping[str, Any]]:
        importlib.import_module(self.name)
        framework: Framework = load_plugin("framework", self.name)()
        type(self).draw_restored()  # some frameworks create their generator with the first number
        state = framework.random_state()
        if not state:
            pytest.skip("random_state() returns nothing")
        return framework, state

    def test_objects_of_one_process_are_refused(self, tmp_path: Path) -> None:
        forget_test_name()
        importlib.import_module(self.name)
        for value in type(self).make_objects_of_process():
            trainer = DataParallelTrainer(
                _use,
                train_loop_config={"value": value},
                scaling_config=ScalingConfig(num_workers=2, runtime="local"),
                run_config=RunConfig(storage_path=tmp_path, verbose=0, worker_output="none"),
            )
            with pytest.raises(ConfigurationError) as raised:
                trainer.fit()
            check_equal(f"the code of the error for {value!r}", raised.value.code, "DT-130")

    def test_accepts_other_objects(self) -> None:
        framework: Framework = load_plugin("framework", self.name)()
        for value in (object(), None, 3, "text", [1, 2], {"loss": 0.5}, print):
            try:
                belongs = framework.belongs_to_process(value)
            except Exception as error:  # of the plugin
                pytest.fail(f"belongs_to_process({value!r}): expected False, got {one_line(error)}")
            check_equal(f"belongs_to_process({value!r})", belongs, False)


def _as_text(state: Mapping[str, Any]) -> str:
    return json.dumps(to_json(state, "random_state()"))


def _draw(config: dict[str, Any]) -> None:
    from drivetrain import get_context

    draw: Callable[[], Any] = config["draw"]
    Path(config["directory"], f"drawn_{get_context().get_world_rank()}").write_text(repr(draw()))


def _use(config: dict[str, Any]) -> None:
    """Do nothing: the run is refused before it starts."""
