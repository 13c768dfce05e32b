"""Functions with which the modules of this package make mistakes, and collect their messages."""

import contextlib
import io
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drivetrain
from drivetrain._plugins.loading import KINDS, check_plugin, list_plugins

IMPORTS = """
import contextlib, sys
from dataclasses import dataclass
import drivetrain
from drivetrain.plugin import Backend, BackendConfig
from drivetrain import Callback, DataParallelTrainer
from drivetrain.plugin import DatasetProvider, Runtime
"""

mistakes: dict[str, Callable[[], object]] = {}


def mistake(title: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Return a decorator for the function that makes a mistake.

    Args:
        title: the first cell of its row in the table of the page.
    """

    def register(function: Callable[[], object]) -> Callable[[], object]:
        assert title not in mistakes
        mistakes[title] = function
        return function

    return register


def install(kind: str, source: str, name: str = "faulty", *, group: str | None = None, requires: str = "") -> None:
    """Install the distribution ``faulty-plugin`` with one module, whose ``plugin`` is the target of an entry point.

    Args:
        kind: the kind of the plugin.
        source: the source of the module.
        name: the name of the entry point.
        group: the group of the entry point; None for the group of the kind.
        requires: the required versions of drivetrain, such as ``>=1``.
    """
    site = Path(tempfile.mkdtemp(dir=Path.cwd()))
    (site / "faulty_plugin.py").write_text(IMPORTS + textwrap.dedent(source))
    info = site / "faulty_plugin-1.2.dist-info"
    info.mkdir()
    required = f"Requires-Dist: drivetrain{requires}\n"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: faulty-plugin\nVersion: 1.2\n{required}")
    (info / "entry_points.txt").write_text(f"[{group or KINDS[kind]}]\n{name} = faulty_plugin:plugin\n")
    sys.path.insert(0, str(site))


def load(kind: str, source: str, name: str = "faulty") -> None:
    """Install a plugin, and check it like ``drivetrain plugins``."""
    install(kind, source, name)
    check_plugin(next(plugin for plugin in list_plugins(kind) if plugin.distribution == "faulty-plugin"))


def train(function: Callable[[], object] = lambda: drivetrain.report({"loss": 1}), **arguments: Any) -> None:
    """Train quietly. Keyword arguments for RunConfig and ScalingConfig are passed to them, the others to the trainer.

    The function runs in this process unless a number of workers is given.
    """
    scaling = {name: arguments.pop(name) for name in ("num_workers", "runtime") if name in arguments}
    run = {
        name: arguments.pop(name)
        for name in ("callbacks", "failure_config", "start_timeout_s", "storage_path", "storage_filesystem")
        if name in arguments
    }
    drivetrain.DataParallelTrainer(
        function,
        scaling_config=drivetrain.ScalingConfig(**{"num_workers": 0, **scaling}),
        run_config=drivetrain.RunConfig(**{"storage_path": str(Path.cwd() / "runs"), "verbose": 0, **run}),
        **arguments,
    ).fit()


def messages_of(function: Callable[[], object]) -> list[str]:
    """Call a function, and return everything that it shows: warnings, output and the exception."""
    output = io.StringIO()
    shown = []
    with (
        warnings.catch_warnings(record=True) as caught,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        warnings.simplefilter("always")
        try:
            function()
        except (Exception, SystemExit) as error:
            shown.append(str(error))
    return [*shown, *(str(warning.message) for warning in caught), output.getvalue()]
