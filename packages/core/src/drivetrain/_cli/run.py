"""``drivetrain run``: runs a function of a module or a file, or a whole script, on every worker."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from drivetrain._cli.output import BAD, OK, Commands, add_command, emit, write
from drivetrain.errors import ConfigurationError, TrainingFailedError

__all__ = ["Script", "add_run", "load_target"]

_MODULE_OF_FILE = "__drivetrain_file__"
_EXAMPLES = """\
  drivetrain run train.py:train_func --num-workers 4 --backend torch --config lr=0.01 --config epochs=3
  drivetrain run my_package.training:train_func --runtime ray --use-gpu --num-workers 2:8 --max-failures 3
  drivetrain run train.py --num-workers 2 --backend torch -- --epochs 3     the script itself, on every worker
"""


def add_run(commands: Commands) -> None:
    """Adds ``run``."""
    parser = add_command(
        commands, "run", _run, "run a train function, or a whole script, on a number of workers", _EXAMPLES
    )
    parser.add_argument(
        "target",
        help="script.py:function or module:function for a train function; script.py for the script itself, which "
        'every worker runs as "__main__"',
    )
    parser.usage = "drivetrain run TARGET [OPTION ...] [-- ARGUMENT ...]"  # what is after -- is cut off before
    parser.set_defaults(script_arguments=[])
    scaling = parser.add_argument_group("workers")
    scaling.add_argument("--num-workers", default="1", metavar="N", help="how many; MIN:MAX for an elastic run (1)")
    scaling.add_argument("--runtime", help="local, ray, inprocess, or another that is installed")
    scaling.add_argument("--use-gpu", action="store_true", help="a GPU for each worker")
    scaling.add_argument(
        "--resources", action="append", default=[], metavar="NAME=AMOUNT", help="of a worker, such as CPU=4; repeatable"
    )
    scaling.add_argument("--backend", help="the framework to set up, such as torch; see drivetrain plugins")
    what = parser.add_argument_group("the run")
    what.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for the train function; values are JSON, or else text; or the path of a JSON file; repeatable",
    )
    what.add_argument("--name", help="the run's name (made from the time)")
    what.add_argument("--storage-path", metavar="PATH", help="where runs are kept: a path or URI")
    what.add_argument("--resume", default="never", metavar="MODE", help="never, auto, must, or a run's path (never)")
    what.add_argument(
        "--max-failures", type=int, default=0, metavar="N", help="how often to start again (0); -1: always"
    )
    what.add_argument("--hang-timeout", type=float, metavar="SECONDS", help="without a report count as hung")
    what.add_argument("--num-to-keep", type=int, metavar="N", help="how many checkpoints to keep (all)")
    what.add_argument("--output-of", choices=("rank0", "all", "none"), default="rank0", help="whose to show (rank0)")
    what.add_argument(
        "--report", type=Path, metavar="FILE", help="write the run's page there at the end, however it ends"
    )
    what.add_argument("-q", "--quiet", action="store_true", help="no progress line")


def _run(arguments: argparse.Namespace) -> int:
    from drivetrain._driver.trainer import DataParallelTrainer
    from drivetrain.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

    function = load_target(arguments.target, arguments.script_arguments)
    config = _parse_config(arguments.config)
    if isinstance(function, Script) and config:
        raise ConfigurationError(
            f"--config is for a train function, and {arguments.target} is a script: pass its arguments after --"
        )
    trainer = DataParallelTrainer(
        function,
        train_loop_config=config or None,
        backend_config=arguments.backend,
        scaling_config=ScalingConfig(
            num_workers=_parse_number_of_workers(arguments.num_workers),
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
            # With --json, the standard output is the result's alone.
            worker_output="none" if arguments.json else arguments.output_of,
        ),
    )
    result = trainer.fit(raise_on_failure=False)
    if arguments.report is not None:
        from drivetrain._views.page import write_report

        write_report(result.storage, arguments.report)
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
        if result.error.__cause__ is not None:
            traceback.print_exception(result.error.__cause__)
        write(f"drivetrain: {result.error}", error=True)
    return OK if result.error is None else BAD


class Script:
    """A train function that runs a script on its worker as ``python script.py`` would.

    The script's source travels with it, so that it need not be on the worker's machine; what it imports has to be.

    Args:
        path: the script.
        arguments: its ``sys.argv[1:]``.
    """

    def __init__(self, path: Path, arguments: Sequence[str]) -> None:
        self.path = str(path.absolute())
        self.arguments = list(arguments)
        self.source = path.read_text(encoding="utf-8")
        self.__qualname__ = path.name

    def __call__(self) -> None:
        """Runs it in a module that is ``__main__`` meanwhile."""
        module = ModuleType("__main__")
        module.__file__ = self.path
        # So that a traceback shows the lines also where the file is not.
        linecache.cache[self.path] = (len(self.source), None, self.source.splitlines(keepends=True), self.path)
        before = sys.modules["__main__"], sys.argv, list(sys.path)
        sys.modules["__main__"], sys.argv = module, [self.path, *self.arguments]
        sys.path.insert(0, os.path.dirname(self.path))
        try:
            exec(compile(self.source, self.path, "exec"), vars(module))
        finally:
            sys.modules["__main__"], sys.argv, sys.path[:] = before


def load_target(target: str, arguments: Sequence[str] = ()) -> Callable[..., Any]:
    """The function that a target names.

    Args:
        target: ``module:function``, ``script.py:function``, or ``script.py``.
        arguments: of the script, in the last case.

    Raises:
        ConfigurationError: there is none.
    """
    place, colon, name = target.rpartition(":")
    if not colon:
        place, name = target, ""
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise ConfigurationError(f"run: expected a script that exists, found none at {place}")
    if is_file and not name:
        return Script(Path(place), arguments)
    if not name:
        raise ConfigurationError(f"run: expected script.py, script.py:function or module:function, got {target!r}")
    if arguments:
        raise ConfigurationError(
            f"arguments after -- are for a script, and {target} is a function: pass --config key=value"
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
            f"run: expected a function {name!r} in {place}, found none; there are: {', '.join(known) or 'none'}"
        )
    return function  # type: ignore[no-any-return]


def _import_file(path: Path) -> ModuleType:
    """Imports a file whose functions are sent to the workers as they are, as those of ``__main__`` would be."""
    sys.path.insert(0, str(path.absolute().parent))
    spec = importlib.util.spec_from_file_location(_MODULE_OF_FILE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE_OF_FILE] = module  # which dataclasses and pickles look for
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


def _import_module(name: str) -> ModuleType:
    """Imports a module as ``python -m`` would: from the working directory too."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name and not name.startswith(f"{error.name}."):
            raise  # something that it imports
        raise ConfigurationError(
            f"run: expected a module that can be imported, found no {name!r} in the working directory or among what is "
            "installed"
        ) from None


def _parse_number_of_workers(text: str) -> int | tuple[int, int]:
    numbers = text.split(":")
    if len(numbers) > 2 or not all(number.isdecimal() for number in numbers):
        raise ConfigurationError(f"--num-workers: expected a number, or MIN:MAX, got {text!r}")
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
            raise ConfigurationError(f"--config: expected KEY=VALUE, or a JSON file, got {text!r}: {error}") from None
        if not isinstance(read, dict):
            raise ConfigurationError(
                f"--config {text}: expected a JSON object in the file, got a {type(read).__name__}"
            )
        config |= read
    return config
