"""The conformance kit of frameworks finds plugins that do not restore the states of their generators."""

import random
from collections.abc import Mapping
from typing import Any

import pytest

from drivetrain.plugin import Framework
from drivetrain_testing import FrameworkConformance

GENERATOR = random.Random(0)


class Sound(Framework):
    def random_state(self) -> Mapping[str, Any]:
        version, numbers, gauss = GENERATOR.getstate()
        return {"version": version, "numbers": list(numbers), "gauss": gauss}

    def set_random_state(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state["gauss"], (float, type(None))):
            raise TypeError("expected a number")
        GENERATOR.setstate((state["version"], tuple(state["numbers"]), state["gauss"]))


class Forgets(Sound):
    def set_random_state(self, state: Mapping[str, Any]) -> None:
        pass


class Draws(Sound):
    def random_state(self) -> Mapping[str, Any]:
        GENERATOR.random()
        return super().random_state()


class Crashes(Sound):
    def set_random_state(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state["version"], int):
            raise EOFError("the state is damaged")
        super().set_random_state(state)


class Kit(FrameworkConformance):
    name = "random"
    plugin: type[Framework] = Sound

    @staticmethod
    def draw() -> Any:
        return GENERATOR.random()

    def _framework_and_state(self) -> tuple[Framework, Mapping[str, Any]]:
        framework = self.plugin()
        return framework, framework.random_state()


def make_kit(plugin: type[Framework]) -> Kit:
    kit = Kit()
    kit.plugin = plugin
    return kit


def test_sound_plugin_passes() -> None:
    kit = make_kit(Sound)
    kit.test_restored_random_state_gives_the_same_numbers()
    kit.test_damaged_random_state_is_refused()


@pytest.mark.parametrize(
    ("plugin", "message"), [(Forgets, "the numbers after set_random_state"), (Draws, "called twice")]
)
def test_plugin_that_does_not_restore_the_state_is_found(plugin: type[Framework], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        make_kit(plugin).test_restored_random_state_gives_the_same_numbers()


@pytest.mark.parametrize(
    ("plugin", "message"), [(Forgets, "got no error"), (Crashes, "got EOFError: the state is damaged")]
)
def test_plugin_that_does_not_refuse_a_damaged_state_is_found(plugin: type[Framework], message: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=message):
        make_kit(plugin).test_damaged_random_state_is_refused()
