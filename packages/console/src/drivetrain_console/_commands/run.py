"""``drivetrain run``: runs a train function (from a module or a file), a script or a module on every worker."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import cloudpickle

from drivetrain import ConfigurationError, TrainingFailedError
from drivetrain.plugin import load_plugin
from drivetrain.plugin.sessions import Script, ScriptBackend, behind_exit, package_of
from drivetrain_console._commands.output import BAD, OK, Commands, add_command, emit, find_run, write
from drivetrain_console._commands.warm import add_keep_warm

if TYPE_CHECKING:
    from drivetrain import Result

__all__ = ["add_resume", "add_run", "load_target"]

_MODULE_OF_FILE = "__drivetrain_file__"
_ABOUT_WORKERS = ("num_workers", "runtime", "use_gpu", "backend", "trainer")
"""The options with which a script runs on workers. Without one of them, it runs once, as the driver."""
_ONLY_FOR_WORKERS = (
    *("resources", "config", "name", "storage_path", "resume", "max_failures", "hang_timeout", "num_to_keep"),
    *("output_of", "report", "quiet", "json"),
)

_EXAMPLES = """\
  drivetrain run train.py:train_func --num-workers 4 --backend torch --config lr=0.01 --config epochs=3
  drivetrain run my_package.training:train_func --runtime ray --use-gpu --num-workers 2:8 --max-failures 3
  drivetrain run train.py --num-workers 2 -- --epochs 3     run the script on every worker, as under torchrun
  drivetrain run -m my_package.train --num-workers 2     run a module on every worker, as python -m does
  drivetrain run train.py -- --epochs 3     run the script once; it calls fit() itself
"""


def add_run(commands: Commands) -> None:
    """Add ``run``."""
    parser = add_command(commands, "run", _run, "run a train function or a script on a group of workers", _EXAMPLES)
    parser.allow_abbrev = False  # or else --output of a script, without the -- before it, would mean --output-of
    parser.add_argument(
        "target",
        help="a train function as script.py:function or module:function; or script.py, which every worker runs as "
        "under torchrun, or which runs once, as the driver, if there is no option about workers",
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="the target is the name of a module to run, as with python -m"
    )
    parser.usage = "drivetrain run TARGET [OPTION ...] [-- ARGUMENT ...]"  # main() removes the arguments after --
    parser.set_defaults(script_arguments=[])
    _add_worker_options(parser)
    add_keep_warm(parser)
    run = parser.add_argument_group("run")
    run.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="config of the train function; values are JSON or text; or a JSON file; repeatable",
    )
    run.add_argument("--name", help="the name of the run (default: from the current time)")
    run.add_argument("--storage-path", metavar="PATH", help="the storage path of runs: a path or URI")
    run.add_argument(
        "--resume", default="never", metavar="MODE", help="never, auto, must, or the path of a run (default: never)"
    )
    run.add_argument(
        "--max-failures", type=int, default=0, metavar="N", help="the number of retries (default: 0); -1: no limit"
    )
    run.add_argument(
        "--hang-timeout",
        type=lambda text: text if text == "auto" else float(text),
        metavar="SECONDS",
        help="treat a run without progress of a rank for this time as hung; auto to learn the time. A script must call "
        "drivetrain.report() or drivetrain.heartbeat() in each step",
    )
    run.add_argument("--num-to-keep", type=int, metavar="N", help="the number of checkpoints to keep (default: all)")
    run.add_argument(
        "--output-of",
        choices=("rank0", "all", "none"),
        default="rank0",
        help="the ranks whose output to show (default: rank0)",
    )
    run.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write an HTML report to this file when the run ends, even if it fails",
    )
    run.add_argument("-q", "--quiet", action="store_true", help="do not show progress")
    parser.set_defaults(defaults={name: parser.get_default(name) for name in _ONLY_FOR_WORKERS})
    parser.set_defaults(options=[f"--{name.replace('_', '-')}" for name in (*_ABOUT_WORKERS, *_ONLY_FOR_WORKERS)])


def _add_worker_options(parser: argparse.ArgumentParser) -> None:
    scaling = parser.add_argument_group("workers")
    scaling.add_argument(
        "--num-workers", metavar="N", help="the number of workers; MIN:MAX for an elastic run (default: 1)"
    )
    scaling.add_argument("--runtime", help="local, ray, inprocess, or another installed runtime")
    scaling.add_argument("--use-gpu", action="store_true", help="assign a GPU to each worker")
    scaling.add_argument(
        "--resources",
        action="append",
        default=[],
        metavar="NAME=AMOUNT",
        help="the resources of each worker, such as CPU=4; repeatable",
    )
    scaling.add_argument("--backend", help="the framework to set up, such as torch (list: drivetrain plugins)")
    scaling.add_argument("--trainer", help="the trainer to use, such as xgboost (list: drivetrain plugins)")


def _run(arguments: argparse.Namespace) -> int:
    from drivetrain import CheckpointConfig, DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig

    function = load_target(arguments.target, arguments.script_arguments, is_module=arguments.module)
    config = _parse_config(arguments.config)
    if isinstance(function, Script) and config:
        raise ConfigurationError(
            f"--config: expected a train function as the target, got the script {arguments.target}. "
            "Pass its arguments after --"
        )
    if isinstance(function, Script) and not any(getattr(arguments, name) for name in _ABOUT_WORKERS):
        return _run_as_driver(arguments)
    kind: Callable[..., DataParallelTrainer] = DataParallelTrainer
    backend: dict[str, Any] = {"backend_config": arguments.backend}
    if isinstance(function, Script) and arguments.backend is None:
        backend = {"backend_config": ScriptBackend(arguments.max_failures)}
    if arguments.trainer is not None:
        if arguments.backend is not None:
            raise ConfigurationError("--trainer and --backend: expected one of them, because a trainer has a backend")
        kind, backend = load_plugin("trainer", arguments.trainer), {}
    trainer = kind(
        function,
        train_loop_config=config or None,
        **backend,
        scaling_config=ScalingConfig(
            num_workers=_parse_number_of_workers(arguments.num_workers or "1"),
            runtime=arguments.runtime,
            use_gpu=arguments.use_gpu,
            resources_per_worker=_parse_resources(arguments.resources) or None,
        ),
        run_config=RunConfig(
            name=arguments.name,
            storage_path=arguments.storage_path,
            resume=arguments.resume,
            failure_config=FailureConfig(max_failures=arguments.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=arguments.num_to_keep),
            hang_timeout_s=arguments.hang_timeout,
            verbose=0 if arguments.quiet or arguments.json else 1,
            # With --json, standard output contains only the result.
            worker_output="none" if arguments.json else arguments.output_of,
        ),
    )
    result = trainer.fit(raise_on_failure=False)
    if arguments.report is not None:
        from drivetrain_console._views.page import write_page

        write_page(result.storage, arguments.report)
    status = _emit_result(arguments, result)
    return _exit_code_of_script(result) or status if isinstance(function, Script) else status


def add_resume(commands: Commands) -> None:
    """Add ``resume``."""
    parser = add_command(
        commands,
        "resume",
        _resume,
        "continue a run from its latest checkpoint; executes code that is stored with the run",
        "  drivetrain runs resume my_run\n  drivetrain runs resume s3://bucket/runs/my_run",
    )
    parser.add_argument("run", help="the run's directory or URI, or its name in the default storage path")


def _resume(arguments: argparse.Namespace) -> int:
    from drivetrain import restore

    storage = find_run(arguments.run)
    if not storage.is_local and "://" not in arguments.run:
        raise ConfigurationError(f"resume: expected the URI of a run on remote storage, got {arguments.run!r}")
    trainer = restore(storage.root if storage.is_local else arguments.run)
    return _emit_result(arguments, trainer.fit(raise_on_failure=False))


def _emit_result(arguments: argparse.Namespace, result: Result) -> int:
    """Print the result of a run, and return the exit code."""
    checkpoint = result.checkpoint
    data = {
        "path": result.path,
        "status": "finished" if result.error is None else "failed",
        "metrics": result.metrics or None,
        "checkpoint": checkpoint.path if checkpoint else None,
        "error": str(result.error) if result.error else None,
        "kind": result.error.kind.value if isinstance(result.error, TrainingFailedError) else None,
    }
    emit(arguments, data, lambda: f"the run is in {result.path}")
    if result.error is not None and not arguments.json:
        cause = result.error.__cause__
        if cause is not None and behind_exit(cause) is not cause:
            traceback.print_exception(behind_exit(cause))
        elif cause is not None and not isinstance(cause, SystemExit):
            traceback.print_exception(cause)
        write(f"drivetrain: {result.error}", error=True)
    return OK if result.error is None else BAD


def _exit_code_of_script(result: Result) -> int | None:
    """Return the exit code with which a script has failed, as ``python script.py`` returns it; None if it has none."""
    cause = result.error.__cause__ if result.error is not None else None
    code = cause.code if isinstance(cause, SystemExit) else None
    return code if isinstance(code, int) and 0 < code < 256 else None


def _run_as_driver(arguments: argparse.Namespace) -> int:
    """Make this process run the script like ``python script.py`` once the command has ended. Return the exit code.

    Raises:
        ConfigurationError: there are options that apply only to workers.
    """
    given = [name for name, default in arguments.defaults.items() if getattr(arguments, name) != default]
    if given:
        raise ConfigurationError(
            f"--{given[0].replace('_', '-')}: expected a script that runs on workers, got {arguments.target}, which "
            "runs once, as the driver, without an option about workers. Add --num-workers N, or remove the option"
        )
    if arguments.module:
        os.execv(sys.executable, [sys.executable, "-m", arguments.target, *arguments.script_arguments])
    from drivetrain.plugin.drivers import run_script

    arguments.finally_run = partial(
        run_script, arguments.target, arguments.script_arguments, arguments.keep_warm or 0.0
    )
    return OK


def load_target(target: str, arguments: Sequence[str] = (), *, is_module: bool = False) -> Callable[..., Any]:
    """Return the train function that a target names; a :class:`Script` if the target is a script or a module.

    Args:
        target: ``module:function``, ``script.py:function``, or ``script.py``.
        arguments: the arguments of the script.
        is_module: True if the target is the name of a module to run as a script.

    Raises:
        ConfigurationError: the target does not exist, or there are arguments and the target is not a script.
    """
    if is_module:
        return _module_as_script(target, arguments)
    place, colon, name = target.rpartition(":")
    if not colon:
        place, name = target, ""
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise ConfigurationError(f"run: expected a script that exists, got the missing file {place}")
    if is_file and not name:
        return Script(Path(place), arguments)
    if not name:
        raise ConfigurationError(
            f"run: expected script.py, script.py:function, module:function or -m module, got {target!r}"
        )
    if arguments:
        raise ConfigurationError(
            f"arguments after --: expected a script as the target, got the function {target}. Use --config NAME=VALUE"
        )
    module = _import_file(Path(place)) if is_file else _import_module(place)
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        known = [
            name for name, value in vars(module).items() if callable(value) and value.__module__ == module.__name__
        ]
        raise ConfigurationError(
            f"run: expected a function in {place}, got {name!r}. Known functions: {', '.join(known) or 'none'}"
        )
    return function  # type: ignore[no-any-return]


def _import_file(path: Path) -> ModuleType:
    """Import a file as a module whose functions are pickled by value, like functions of ``__main__``."""
    package, root = package_of(path)
    sys.path.insert(0, str(path.absolute().parent))
    if root not in ("", *sys.path):
        sys.path.append(root)
    name = f"{package}.{_MODULE_OF_FILE}".removeprefix(".")  # relative imports require the name of the package
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up the module in sys.modules
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


def _module_as_script(name: str, arguments: Sequence[str]) -> Script:
    """Return the script that ``python -m`` runs for a module or a package. The package is not imported.

    Raises:
        ConfigurationError: the module does not exist, or it has no source file.
    """
    _search_working_directory()
    spec = _find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = _find_spec(name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ConfigurationError(
            f"run -m: expected the name of a module with a source file, installed or in the working directory, got "
            f"{name!r}"
        )
    return Script(Path(spec.origin), arguments, name)


def _find_spec(name: str) -> ModuleSpec | None:
    """Find a module without importing the packages that contain it, because only workers need them."""
    locations: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    full_name = ""
    for part in name.split("."):
        full_name = f"{full_name}.{part}".removeprefix(".")
        found = (finder.find_spec(full_name, locations) for finder in sys.meta_path)
        spec = next((each for each in found if each is not None), None)
        if spec is None:
            return None
        locations = spec.submodule_search_locations or ()
    return spec


def _import_module(name: str) -> ModuleType:
    """Import a module. Like ``python -m``, search the working directory too."""
    _search_working_directory()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name and not name.startswith(f"{error.name}."):
            raise  # the module exists, but a module that it imports is missing
        raise ConfigurationError(
            f"run: expected an installed module or a module in the working directory, got {name!r}"
        ) from None


def _search_working_directory() -> None:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _parse_number_of_workers(text: str) -> int | tuple[int, int]:
    numbers = text.split(":")
    if len(numbers) > 2 or not all(number.isdecimal() for number in numbers):
        raise ConfigurationError(f"--num-workers: expected a number or MIN:MAX, got {text!r}")
    return int(text) if len(numbers) == 1 else (int(numbers[0]), int(numbers[1]))


def _parse_resources(given: Sequence[str]) -> dict[str, float]:
    resources = {}
    for text in given:
        name, _, amount = text.partition("=")
        try:
            resources[name] = float(amount)
        except ValueError:
            raise ConfigurationError(f"--resources: expected NAME=AMOUNT, such as CPU=4, got {text!r}") from None
    return resources


def _parse_config(given: Sequence[str]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if equals:
            try:
                config[key] = json.loads(value)
            except ValueError:
                config[key] = value
            continue
        try:
            read = json.loads(Path(text).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"--config: expected NAME=VALUE or a JSON file, got {text!r}: {error}") from None
        if not isinstance(read, dict):
            raise ConfigurationError(
                f"--config {text}: expected a JSON object in the file, got a {type(read).__name__}"
            )
        config |= read
    return config
