"""Detects optimizers whose parameters a strategy has replaced, so that their steps would train nothing.

This module imports torch, so other modules import it only inside functions.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from drivetrain import ConfigurationError

__all__ = ["refuse_optimizers_of"]

_replaced: dict[int, tuple[weakref.ref[torch.nn.Parameter], str]] = {}
"""The parameters that no longer belong to a model, by their id, with the strategy that replaced them."""

_checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""The optimizers that have made a step since the last replacement."""


def refuse_optimizers_of(parameters: Iterable[torch.nn.Parameter], strategy: str) -> None:
    """Make the first step of every optimizer of these parameters an error.

    PyTorch has no list of the optimizers that exist. Each optimizer is therefore checked at its first step.

    Args:
        parameters: parameters that a strategy has removed from a model.
        strategy: the name of the strategy, for the message.
    """
    for parameter in parameters:
        key = id(parameter)
        forget = functools.partial(_forget, key)
        _replaced[key] = (weakref.ref(parameter, forget), strategy)
    _checked.clear()
    _register_check()


def _forget(key: int, _: weakref.ref[torch.nn.Parameter]) -> None:
    _replaced.pop(key, None)


@functools.cache
def _register_check() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if optimizer in _checked or not _replaced:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # A parameter with a gradient is still trained, as a part of another model.
            if id(parameter) in _replaced and parameter.grad is None:
                strategy = _replaced[id(parameter)][1]
                raise ConfigurationError(
                    f"[DT-721] {type(optimizer).__name__}: expected the parameters of the model that prepare_model "
                    f"returned, got parameters that the strategy {strategy} has replaced, so this optimizer would "
                    "train nothing. Call prepare_model first, and create the optimizer from the model that it returns"
                )
    _checked.add(optimizer)
