"""Uses the plugins of the frameworks that this process has imported. Others are not loaded."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from drivetrain._base.failure import one_line
from drivetrain._hooks.context import TrainContext
from drivetrain._hooks.framework import Framework
from drivetrain._plugins.loading import installed_plugins, load_plugin
from drivetrain.errors import ConfigurationError, PluginError

__all__ = [
    "STATE_ERRORS",
    "belongs_to_process",
    "installed_frameworks",
    "keep_random_states",
    "launcher_variables",
    "limit_threads",
    "load_frameworks",
    "random_states",
    "reseed",
    "restore_random_states",
]

STATE_ERRORS = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, OverflowError)
"""The errors by which a generator refuses a state."""

_PYTHON, _NUMPY = "python", "numpy"
_NUMPY_RANDOM = "numpy.random"

_known: dict[str, Framework | None] = {}
"""The frameworks whose plugins are loaded, by their root module; None for a plugin that cannot be loaded."""


def load_frameworks() -> list[str]:
    """Load the plugins of the frameworks that this process has imported. A plugin that cannot be loaded is ignored.

    Returns:
        The modules that a training with these frameworks imports soon after its start.
    """
    found = [_load(name) for name in installed_frameworks() if name in sys.modules]
    return [module for framework in found if framework is not None for module in framework.warmup]


def installed_frameworks() -> list[str]:
    """Return the root modules of the frameworks for which a plugin is installed."""
    return list(dict.fromkeys(plugin.name for plugin in installed_plugins("framework")))


def _load(name: str) -> Framework | None:
    if name not in _known:
        try:
            _known[name] = load_plugin("framework", name)()
        except PluginError as error:
            _known[name] = None
            warnings.warn(str(error), stacklevel=3)
    return _known[name]


def launcher_variables(context: TrainContext, max_failures: int) -> dict[str, str]:
    """Return the variables that the launchers of all frameworks set for a script, whether imported or not."""
    variables: dict[str, str] = {}
    for name in installed_frameworks():
        if (framework := _load(name)) is not None:
            variables.update(framework.launcher_variables(context, max_failures))
    return variables


def belongs_to_process(value: object) -> bool:
    """Return True if an object is bound to the processes among which it was created. Uses the loaded plugins."""
    roots = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    frameworks = (_known.get(root) for root in roots)
    return any(framework.belongs_to_process(value) for framework in frameworks if framework is not None)


def limit_threads(threads: int) -> None:
    """Limit the number of threads that the frameworks start for an operation. Uses the loaded plugins."""
    for framework in _known.values():
        if framework is not None:
            framework.limit_threads(threads)


def reseed() -> None:
    """Seed the global random generators of all imported modules from the operating system, as in a new process.

    Uses the loaded plugins. For a framework without a plugin, this calls the function ``seed()`` of its submodule
    ``random``, if there is one that requires no argument.
    """
    for root, seed in dict(_seed_functions()).items():
        try:
            seed()
        except Exception as error:  # of another package
            warnings.warn(f"{root}: its random generators cannot be seeded: {one_line(error)}", stacklevel=2)


def _seed_functions() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the root module and the function of each framework. A later function replaces an earlier one."""
    for name in list(sys.modules):
        root, _, rest = name.partition(".")
        seed = getattr(sys.modules.get(name), "seed", None) if rest == "random" else None
        if callable(seed) and _requires_no_argument(seed):
            yield root, seed
    for root, framework in _known.items():
        if framework is not None:
            yield root, framework.reseed
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        yield "numpy", numpy_random.seed
    yield "random", random.seed


def _requires_no_argument(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):  # it requires an argument, or it is written in C and has no signature
        return False
    return True


def random_states() -> dict[str, Any]:
    """Return the states of the global random generators of this process.

    Returns:
        The states by name: ``"python"``, ``"numpy"`` if it is imported, and the root module of each imported framework
        whose plugin implements :meth:`~drivetrain.plugin.Framework.random_state`. The values are numbers, strings and
        containers of them, or tensors of the framework.
    """
    load_frameworks()
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {_PYTHON: [version, list(numbers), gauss]}
    if (numpy_random := sys.modules.get(_NUMPY_RANDOM)) is not None:
        name, key, *rest = numpy_random.get_state()
        states[_NUMPY] = [name, key.tolist(), *rest]
    for root, framework in _known.items():
        if framework is not None and root in sys.modules and (state := dict(framework.random_state())):
            states[root] = state
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Restore the states of the global random generators of this process.

    Args:
        states: a return value of :func:`random_states`. The states of a framework that is not installed are ignored.

    Raises:
        ConfigurationError: the states were not created by :func:`random_states`. Some may have been restored.
    """
    load_frameworks()
    for name, state in states.items():
        try:
            if name == _PYTHON:
                version, numbers, gauss = state
                random.setstate((version, tuple(numbers), gauss))
            elif name == _NUMPY:
                # A later import would seed it from the operating system.
                importlib.import_module(_NUMPY_RANDOM).set_state(tuple(state))
            elif (framework := _known.get(name)) is not None:
                framework.set_random_state(state)
        except STATE_ERRORS as error:
            raise ConfigurationError(
                f"[DT-762] the states of random number generators: expected those that were saved, got an invalid "
                f"state of {name!r}: {one_line(error)}. Pass the saved value unchanged, or use another checkpoint"
            ) from error


@contextlib.contextmanager
def keep_random_states() -> Iterator[None]:
    """Restore the states of the global random generators at the end of a ``with`` block.

    Use it in a loader whose iterator continues inside an epoch: the undisturbed run has already drawn the random
    numbers that a new iterator draws.
    """
    states = random_states()
    try:
        yield
    finally:
        restore_random_states(states)
