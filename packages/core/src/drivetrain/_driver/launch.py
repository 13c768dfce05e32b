"""Prepares the start of a run: selects the runtime, checks the storage and pickles the train function."""

from __future__ import annotations

import inspect
import os
import resource
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

from drivetrain._base.pickling import dumps
from drivetrain._base.script import pack
from drivetrain._driver.captured import UsedObject, parts_of, used_objects
from drivetrain._plugins.frameworks import belongs_to_process, load_frameworks
from drivetrain._plugins.known import CORE
from drivetrain._plugins.loading import check_plugin, installed_plugins, is_configured, load_plugin, missing_runtimes
from drivetrain._runtimes.base import Runtime
from drivetrain._runtimes.inprocess import InProcessRuntime
from drivetrain._runtimes.local import LocalRuntime
from drivetrain._worker.script import running_script
from drivetrain.config import RunConfig, ScalingConfig
from drivetrain.errors import (
    ConfigurationError,
    PluginError,
    PluginNotFoundError,
    ResourceError,
    SerializationError,
)

__all__ = [
    "pickle_function",
    "refuse_in_script_of_workers",
    "refuse_in_spawned_script",
    "refuse_objects_of_process",
    "require_linux",
    "require_process_state",
    "require_shared",
    "resolve_runtime",
]


_FILES_OF_RUN = 24
_FILES_PER_WORKER = 5  # connection, stacks, exit, output and log


def refuse_in_spawned_script() -> None:
    """Raise an error if a process that multiprocessing has spawned calls ``fit()`` while it imports the script."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__mp_main__":
            raise ConfigurationError(
                f"[DT-120] fit(): expected the process that started the script, got process {os.getpid()}, which "
                "multiprocessing has spawned and which imports the script again. Put the code that calls fit() under "
                'if __name__ == "__main__":, or use the start method "fork"'
            )
        frame = frame.f_back


def refuse_in_script_of_workers() -> None:
    """Raise an error if a script that ``drivetrain run`` runs on every worker calls ``fit()``."""
    if (script := running_script()) is not None:
        raise ConfigurationError(
            f"[DT-131] fit(): expected a process that is not a worker, got a worker that runs the script {script}. Run "
            f"the script once, without options about workers: drivetrain run {script}. Its trainer starts the workers"
        )


def require_shared(config: RunConfig) -> None:
    """Raise an error if other processes cannot access the storage."""
    path = config.storage_path if config.resume in ("never", "auto", "must") else config.resume
    protocol = getattr(config.storage_filesystem, "protocol", None)
    if str(path).startswith("memory://") or "memory" in (protocol if isinstance(protocol, tuple) else (protocol,)):
        raise ConfigurationError(
            f"[DT-404] storage_path: expected a storage that the workers can access, got {path}, which is in the "
            "memory of this process. Use another storage, or ScalingConfig(num_workers=0)"
        )


def require_linux() -> None:
    """Raise an error on a system on which no run can start."""
    if sys.platform != "linux":
        raise ConfigurationError(
            f"[DT-115] fit(): expected Linux, got {sys.platform}. Run the script on a Linux machine, in a container "
            "or, on Windows, in WSL 2"
        )


def require_process_state(workers: int) -> None:
    """Check that this process has a working directory, and may open the files that a run needs.

    Args:
        workers: the maximum number of workers.

    Raises:
        ConfigurationError: the working directory was deleted.
        ResourceError: the limit on open files is too low, and this process may not raise it.
    """
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigurationError(
            "[DT-112] fit(): expected a working directory, which the workers inherit, but the one of this process was "
            "deleted. Change to a directory that exists"
        ) from error
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + _FILES_OF_RUN + _FILES_PER_WORKER * workers
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ResourceError(
            f"[DT-308] {workers} workers: expected a limit of at least {needed:,} open files, got {hard:,}. Raise it "
            f"with `ulimit -n {needed}`, or as an administrator with `ulimit -Hn`, or use fewer workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def resolve_runtime(scaling: ScalingConfig, *, required: str | None = None) -> Runtime:
    """Return the configured runtime, or else the runtime that the datasets or the environment require.

    Args:
        scaling: the scaling configuration. Its ``runtime`` is a runtime, the name of a runtime, or None.
        required: the name of the runtime that a dataset requires; None if no dataset requires one.
    """
    if scaling.runtime is not None and not isinstance(scaling.runtime, str):
        return cast("Runtime", scaling.runtime)
    if scaling.runtime is None and scaling.max_workers == 0:
        return InProcessRuntime()
    name = scaling.runtime or required or _detect_runtime()
    if name is None:
        _refuse_missing_runtime()
        return LocalRuntime()
    try:
        runtime: Runtime = load_plugin("runtime", name)()
    except PluginNotFoundError as error:
        if scaling.runtime is None:
            raise
        raise ConfigurationError(str(error)) from error
    return runtime


def _detect_runtime() -> str | None:
    """Return the name of the first plugin runtime that the environment selects; None if there is none."""
    for plugin in installed_plugins("runtime"):
        if plugin.distribution == CORE:  # the built-in runtimes are chosen by the number of workers
            continue
        try:
            if check_plugin(plugin).detect():
                return plugin.name
        except PluginError as error:
            warnings.warn(str(error), stacklevel=2)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # raised by a plugin that this run may not need
            problem = f"detect() raised {type(error).__name__}: {error}"
            warnings.warn(f"runtime {plugin.name!r} of {plugin.distribution}: {problem}", stacklevel=2)
        else:
            continue
        if is_configured(plugin.name):  # do not use another runtime; the error is raised when this plugin is loaded
            return plugin.name
    return None


def _refuse_missing_runtime() -> None:
    """Raise an error, rather than run locally, if the environment selects a runtime that is not installed."""
    missing = missing_runtimes()
    if missing:
        name, variable = next(iter(missing.items()))
        raise PluginNotFoundError(
            f"[DT-307] the environment variable {variable} selects the runtime {name!r}, which is not installed. "
            f'Run: pip install "drivetrain[{name}]", or select another runtime: ScalingConfig(runtime="local")'
        )


def refuse_objects_of_process(function: Callable[..., Any], config: Any) -> None:
    """Check that a train function and its config use no object that was created for the processes of this driver.

    Raises:
        ConfigurationError: they use one. The message names it.
    """
    load_frameworks()
    for name, value in used_objects(function, config):
        for part in parts_of(value):
            if belongs_to_process(part):
                raise _refusal(name, part)


def pickle_function(function: Callable[..., Any], config: Any, reduce: Callable[[Any], Any]) -> bytes:
    """Pickle the train function and its config; on failure, name the object that cannot be pickled."""
    try:
        return pack((function, config if config is not None else {}), _refusing_objects_of_process(reduce))
    except _BelongsToProcessError as error:
        raise _refusal("the train function", error.value) from None
    except Exception as error:  # a user's object may raise any exception
        used = next((each for each in used_objects(function, config) if not _can_be_pickled(each, reduce)), None)
        culprit = f"{used.name} (a {type(used.value).__name__})" if used is not None else "the train function"
        raise SerializationError(
            f"[DT-201] train_loop_per_worker: expected a function and config that can be pickled, but {culprit} "
            f"cannot be pickled ({type(error).__name__}: {error}). Create it inside the train function instead"
        ) from error


def _can_be_pickled(used: UsedObject, reduce: Callable[[Any], Any]) -> bool:
    try:
        dumps(used.value, reduce)
    except Exception:  # a user's object may raise any exception
        return False
    return True


class _BelongsToProcessError(Exception):
    """An object to be pickled belongs to this process."""

    def __init__(self, value: object) -> None:
        super().__init__("it was created for the process of the driver")
        self.value = value


def _refusing_objects_of_process(reduce: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if belongs_to_process(value):
            raise _BelongsToProcessError(value)
        return reduce(value)

    return check


def _refusal(name: str, value: object) -> ConfigurationError:
    kind = type(value)
    return ConfigurationError(
        f"[DT-130] {name}: expected an object that does not depend on the number of processes, got an object of the "
        f"class {kind.__qualname__} of {kind.__module__.partition('.')[0]}, which was created before fit(): with it, "
        "each worker would train alone. Create it in the train function"
    )
