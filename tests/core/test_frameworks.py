"""Random generators are seeded for each process, with the plugins of the imported frameworks, or without a plugin."""

import random
import sys
from types import ModuleType

import numpy as np
import pytest

from drivetrain._plugins import frameworks
from drivetrain._plugins.frameworks import belongs_to_process, load_frameworks, reseed
from tests.core.conftest import Install

PLUGIN = """
import drivetrain.plugin

class Noise(drivetrain.plugin.Framework):
    seeds = 0

    def reseed(self):
        Noise.seeds += 1
        {fault}

    def belongs_to_process(self, value):
        return value.size == 1
"""


@pytest.fixture(autouse=True)
def _forget_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "_known", {})


def imported(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_generators_of_python_and_numpy_are_seeded() -> None:
    random.seed(1)
    np.random.seed(1)
    before = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    reseed()
    assert random.random() != before[0]
    assert np.random.rand() != before[1]


def test_plugin_of_an_imported_framework_seeds_it_and_knows_its_objects(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = PLUGIN.format(fault="")
    install("noise-plugin", "noise_plugin", source, {"drivetrain.frameworks": {"noise": "noise_plugin:Noise"}})
    load_frameworks()
    assert "noise_plugin" not in sys.modules

    group = type("Group", (), {"__module__": "noise.groups", "size": 1})
    imported(monkeypatch, "noise")
    load_frameworks()
    reseed()
    assert sys.modules["noise_plugin"].Noise.seeds == 1
    assert belongs_to_process(group())
    assert belongs_to_process(type("OwnGroup", (group,), {})())
    assert not belongs_to_process(type("Large", (group,), {"size": 2})())
    assert not belongs_to_process(object())


def test_framework_without_a_plugin_is_seeded_by_its_submodule(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[str] = []
    imported(monkeypatch, "first.random", seed=lambda: seeded.append("first"))
    imported(monkeypatch, "second.random", seed=lambda value: seeded.append("second"))
    imported(monkeypatch, "third.random")
    imported(monkeypatch, "fourth.random.seeds", seed=lambda: seeded.append("fourth"))
    reseed()
    assert seeded == ["first"]


def test_failing_plugin_causes_a_warning(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    source = PLUGIN.format(fault="raise RuntimeError('no generator')")
    install("loud-plugin", "loud_plugin", source, {"drivetrain.frameworks": {"loud": "loud_plugin:Noise"}})
    imported(monkeypatch, "loud")
    load_frameworks()
    with pytest.warns(UserWarning, match="loud: its random generators cannot be seeded: RuntimeError: no generator"):
        reseed()


def test_broken_plugin_causes_one_warning(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("bad-plugin", "bad_plugin", "1 / 0", {"drivetrain.frameworks": {"bad": "bad_plugin:Bad"}})
    imported(monkeypatch, "bad")
    with pytest.warns(UserWarning, match="the framework 'bad' of bad-plugin 1.2 cannot be loaded"):
        load_frameworks()
    load_frameworks()
    reseed()
