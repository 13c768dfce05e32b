"""The conformance kit for ``drivetrain.prepare``: a small framework passes; broken functions are rejected by name."""

import importlib
from typing import Any

import pytest

from drivetrain_testing import PrepareConformance
from tests.core.conftest import Install
from tests.kits.rejecting import rejection

FRAMEWORK = """
class Model:
    prepared = False


class Wrapped(Model):
    prepared = True
"""

GOOD = """
import sys


def prepare(value):
    framework = sys.modules.get("{framework}")
    if framework is None or not isinstance(value, framework.Model):
        return NotImplemented
    return value if value.prepared else framework.Wrapped()
"""

TESTS = [name for name in vars(PrepareConformance) if name.startswith("test_")]
OTHERS = "test_returns_not_implemented_for_other_objects"
ONCE = "test_prepares_its_own_objects_once"
BROKEN = {
    "raises for other objects": (
        OTHERS,
        "def prepare(value):\n    raise TypeError(f'expected a Model, got {value!r}')",
        "expected NotImplemented, so that other plugins are tried, got TypeError: expected a Model",
    ),
    "returns None for other objects": (OTHERS, "def prepare(value): ...", "expected NotImplemented, got None"),
    "returns other objects unchanged": (
        OTHERS,
        "def prepare(value):\n    return value",
        "expected NotImplemented, got <",
    ),
    "imports the framework": (
        "test_returns_not_implemented_without_importing_the_framework",
        "def prepare(value):\n    import {framework}\n    return NotImplemented",
        "got an import. Look it up: sys.modules.get(",
    ),
    "wraps again": (
        ONCE,
        GOOD.replace("value if value.prepared else framework.Wrapped()", "framework.Wrapped()"),
        "expected that preparing it again returns the same object, got a ",
    ),
    "rejects its own objects": (
        ONCE,
        "def prepare(value):\n    return NotImplemented",
        "expected a prepared object, got",
    ),
    "changes the object, and returns None": (
        ONCE,
        GOOD.replace("return value if value.prepared else framework.Wrapped()", "value.prepared = True"),
        "expected a prepared object, got None. Return the object",
    ),
}


@pytest.fixture
def framework(install: Install, request: pytest.FixtureRequest) -> str:
    """A framework of its own for each test, installed with its plugin; the parameter is the plugin's code."""
    source, number = request.param
    name = f"prepared_{number}"
    code = source.replace("{framework}", name)
    site = install(f"{name}-plugin", f"{name}_plugin", code, {"drivetrain.prepare": {name: f"{name}_plugin:prepare"}})
    (site / f"{name}.py").write_text(FRAMEWORK)
    return name


def make_model(name: str) -> list[Any]:
    return [importlib.import_module(name).Model()]


@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize("framework", [(GOOD, "good")], indirect=True)
def test_small_framework_passes(request: pytest.FixtureRequest, framework: str, test: str) -> None:
    kit = type("TestGood", (PrepareConformance,), {"name": framework, "make_objects": made_by(framework)})
    arguments = {"tmp_path": request.getfixturevalue("tmp_path")} if test == ONCE else {}
    getattr(kit(), test)(**arguments)


@pytest.mark.parametrize(
    ("framework", "test", "message"),
    [((source, index), test, message) for index, (test, source, message) in enumerate(BROKEN.values())],
    ids=BROKEN,
    indirect=["framework"],
)
def test_broken_function_is_rejected(request: pytest.FixtureRequest, framework: str, test: str, message: str) -> None:
    found = rejection(request, PrepareConformance, test, name=framework, make_objects=made_by(framework))
    assert message in found


@pytest.mark.parametrize("framework", [(GOOD, "misnamed")], indirect=True)
def test_plugin_under_a_wrong_name_is_rejected(request: pytest.FixtureRequest, framework: str) -> None:
    found = rejection(request, PrepareConformance, ONCE, name=framework, make_objects=staticmethod(make_fraction))
    assert (
        f"expected a class of the root module {framework!r}, the name of the entry point, got one of fractions" in found
    )


def test_class_without_a_name_is_refused() -> None:
    with pytest.raises(TypeError, match="expected an attribute `name`"):
        type("TestNothing", (PrepareConformance,), {})


def make_fraction() -> list[Any]:
    return [importlib.import_module("fractions").Fraction(1, 2)]


def made_by(framework: str) -> Any:
    def make_objects() -> list[Any]:
        return make_model(framework)

    return staticmethod(make_objects)
