"""``drivetrain.prepare``: the plugin is found by the classes of an object, the most specific one first."""

from collections.abc import Callable
from pathlib import Path

import pytest

import drivetrain
from drivetrain import ConfigurationError, PluginBrokenError
from tests.core.conftest import Install

PLUGIN = """
class Base:
    pass


class Special(Base):
    pass


def prepare(value):
    {body}
"""


Add = Callable[..., None]


@pytest.fixture
def add(install: Install) -> Add:
    """Install a module with two classes and the function that prepares them."""

    def run(name: str, body: str, *, imports: str = "", target: str = "prepare") -> None:
        source = imports + PLUGIN.format(body=body)
        install(f"{name}-dist", name, source, {"drivetrain.prepare": {name: f"{name}:{target}"}})

    return run


def test_plugin_of_the_root_module_prepares_the_object(add: Add) -> None:
    add("prep_one", "return ('one', value)")
    import prep_one  # type: ignore[import-not-found]

    value = prep_one.Base()
    assert drivetrain.prepare(value) == ("one", value)
    assert drivetrain.prepare(value, value) == (("one", value), ("one", value))


def test_subclass_of_a_user_is_prepared_by_the_plugin_of_its_base_class(add: Add) -> None:
    add("prep_two", "return 'prepared'")
    import prep_two  # type: ignore[import-not-found]

    class Mine(prep_two.Base):  # type: ignore[misc]
        pass

    assert drivetrain.prepare(Mine()) == "prepared"


def test_next_plugin_is_asked_if_the_first_does_not_know_the_class(add: Add) -> None:
    add("prep_base", "return 'by the base'")
    add("prep_derived", "return NotImplemented", imports="import prep_base\n")
    import prep_base  # type: ignore[import-not-found]
    import prep_derived

    class Mixed(prep_derived.Base, prep_base.Base):  # type: ignore[misc]
        pass

    assert drivetrain.prepare(Mixed()) == "by the base"
    with pytest.raises(ConfigurationError, match=r"got prep_derived.Base"):
        drivetrain.prepare(prep_derived.Base())


def test_unknown_class_is_refused_with_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain._plugins.preparing.installed_plugins", lambda kind: ())
    monkeypatch.setattr("drivetrain._plugins.preparing.install_commands", install_commands_of)
    with pytest.raises(ConfigurationError, match=r"got pathlib.*Run: pip install .drivetrain.pathlib.") as refused:
        drivetrain.prepare(Path())
    assert str(refused.value).startswith("[DT-809] prepare()")


def install_commands_of(*names: str) -> list[str]:
    return [f'pip install "drivetrain[{name}]"' for name in names if name == "pathlib"]


def test_broken_plugin_is_named(add: Add) -> None:
    add("prep_broken", "pass", target="prepar")
    import prep_broken  # type: ignore[import-not-found]

    with pytest.raises(PluginBrokenError, match="prepare 'prep_broken' of prep_broken-dist"):
        drivetrain.prepare(prep_broken.Base())
