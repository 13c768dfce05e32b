"""The conformance kit for plugins of ``drivetrain.prepare``, as tests that a plugin inherits.

A plugin author writes a class with two attributes and one method, and pytest collects the tests::

    from drivetrain_testing import PrepareConformance

    class TestMyFramework(PrepareConformance):
        name = "my_framework"  # its entry point in drivetrain.prepare
        backend = MyConfig()

        @staticmethod
        def make_objects():
            return [my_framework.Model()]

A test that cannot pass for a plugin must be overridden with ``@pytest.mark.xfail(reason=...)``. Overriding a test
without a reason is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig, TrainingFailedError, prepare
from drivetrain.plugin import BackendConfig, load_plugin
from drivetrain.plugin.backends import run_python
from drivetrain.plugin.checks import one_line
from drivetrain_testing._checks import check_equal, forget_test_name
from drivetrain_testing._conformance import check_overrides

__all__ = ["PrepareConformance"]

_IMPORTS = """
import sys
from drivetrain.plugin import load_plugin
sys.path[:0] = sys.argv[2:]
assert load_plugin("prepare", sys.argv[1])(object()) is NotImplemented
print(sys.argv[1] in sys.modules)
"""


class PrepareConformance:
    """Tests of a function that prepares the objects of a framework. Derive a class from it, and set :attr:`name`.

    Attributes:
        name: the name of its entry point in ``drivetrain.prepare``: the root module of the framework.
        backend: the configuration of the backend with which the objects are used.
    """

    name: ClassVar[str]
    backend: ClassVar[BackendConfig] = BackendConfig()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not getattr(cls, "name", ""):
            raise TypeError(f"{cls.__name__}: expected an attribute `name` with the name of the entry point")
        if cls.make_objects is PrepareConformance.make_objects:
            raise TypeError(f"{cls.__name__}: expected a static method make_objects(), got none")
        check_overrides(cls, PrepareConformance)

    @staticmethod
    def make_objects() -> Sequence[Any]:
        """Return one object of each kind that the function prepares. Called in a train function, on every worker."""
        raise NotImplementedError

    def test_returns_not_implemented_for_other_objects(self) -> None:
        function = load_plugin("prepare", self.name)
        for value in (object(), None, 3, "text", [1, 2], {"loss": 0.5}, print):
            try:
                prepared = function(value)
            except Exception as error:  # of the plugin
                pytest.fail(
                    f"{value!r}: expected NotImplemented, so that other plugins are tried, got {one_line(error)}"
                )
            assert prepared is NotImplemented, f"{value!r}: expected NotImplemented, got {prepared!r}"

    def test_returns_not_implemented_without_importing_the_framework(self) -> None:
        printed = run_python(_IMPORTS, self.name, *sys.path)
        assert printed != "True", (
            f"expected NotImplemented without an import of {self.name}, got an import. Look it up: "
            f"sys.modules.get({self.name!r})"
        )
        check_equal("the output of the process", printed, "False")

    def test_prepares_its_own_objects_once(self, tmp_path: Path) -> None:
        forget_test_name()
        trainer = DataParallelTrainer(
            _prepare_twice,
            train_loop_config={"name": self.name, "make_objects": type(self).make_objects},
            backend_config=self.backend,
            scaling_config=ScalingConfig(num_workers=2, runtime="local"),
            run_config=RunConfig(storage_path=tmp_path, verbose=0, worker_output="none", start_timeout_s=120),
        )
        try:
            trainer.fit()
        except TrainingFailedError as error:
            raise error.__cause__ or error from None


def _prepare_twice(config: dict[str, Any]) -> None:
    name, function = config["name"], load_plugin("prepare", config["name"])
    prepared = [_prepare_one(name, function, value) for value in config["make_objects"]()]
    for value in prepared:
        again = function(value)
        assert again is value, (
            f"{_describe(value)}: expected that preparing it again returns the same object, got {_describe(again)}"
        )
    found = prepare(*prepared, prepared[0])
    assert all(one is other for one, other in zip(found, [*prepared, prepared[0]], strict=True)), (
        f"drivetrain.prepare(): expected the prepared objects, got {', '.join(map(_describe, found))}"
    )


def _prepare_one(name: str, function: Callable[[Any], Any], value: Any) -> Any:
    roots = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    assert name in roots, (
        f"{_describe(value)}: expected a class of the root module {name!r}, the name of the entry point, got one of "
        f"{', '.join(sorted(roots - {'builtins'}))}. Register the function under that name"
    )
    prepared = function(value)
    assert prepared is not NotImplemented, f"{_describe(value)}: expected a prepared object, got NotImplemented"
    assert prepared is not None, f"{_describe(value)}: expected a prepared object, got None. Return the object"
    return prepared


def _describe(value: object) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}"
