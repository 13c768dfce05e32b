"""Saves the position of a loader when an ``Accelerator`` saves its state.

This module imports torch and accelerate, so other modules import it only inside functions.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from drivetrain.plugin.state import random_states
from drivetrain_hf._states import read_state, write_state

if TYPE_CHECKING:
    from drivetrain_hf._loading import ResumableLoader

__all__ = ["save_with"]

_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""The number of loaders that each ``Accelerator`` saves."""


def save_with(accelerator: Any, loader: ResumableLoader) -> None:
    """Make an ``Accelerator`` save and load the position of a loader.

    Accelerate calls the hooks on every rank: when it saves, after the models were collected, and when it loads, before
    it restores the random states.
    """
    number = _counts[accelerator] = _counts.get(accelerator, -1) + 1
    name = f"drivetrain_loader_{number}"

    def save(models: Any, weights: Any, directory: str) -> None:
        write_state(directory, name, {"loader": loader.state_dict(), "random": random_states()})

    def load(models: Any, directory: str) -> None:
        saved, is_own = read_state(directory, name, ("loader", "random"))
        if saved is not None:
            loader.load_state_dict(saved["loader"], saved["random"] if is_own else {})

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
