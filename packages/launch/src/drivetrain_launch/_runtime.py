"""The runtime ``command``."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from drivetrain import ConfigurationError
from drivetrain.plugin import Runtime
from drivetrain.plugin.backends import Finding
from drivetrain.plugin.runtimes import GroupSpec
from drivetrain_launch._address import own_address
from drivetrain_launch._shares import divide
from drivetrain_launch._template import Template, check_hosts

if TYPE_CHECKING:
    from drivetrain import ScalingConfig
    from drivetrain.plugin import WorkerInfo
    from drivetrain_launch._group import CommandGroup
    from drivetrain_launch._launch import Launch, LaunchSpec

__all__ = ["CommandRuntime"]

_COMMAND = "DRIVETRAIN_COMMAND"
_HOSTS = "DRIVETRAIN_HOSTS"
_TOKEN_DIRECTORY = "DRIVETRAIN_TOKEN_DIRECTORY"
_RESOURCES = {"CPU", "GPU"}

_launches: WeakKeyDictionary[contextlib.ExitStack, Launch] = WeakKeyDictionary()
"""The launch of each run, by the stack of the run's resources. Runtimes can be pickled, so they do not contain it."""


@dataclass(frozen=True)
class CommandRuntime(Runtime):
    """Starts workers with a command, such as ``srun``, ``mpirun`` or ``ssh``.

    The template is a command line with fields. It is split like a shell does it, but not executed by a shell.

    ============ =======================================================================================
    field        value
    ============ =======================================================================================
    ``{worker}`` the command that starts one worker; required
    ``{n}``      the number of workers; the command must then start all of them
    ``{host}``   a host of ``hosts``; the command is then started once per worker, on the hosts in turn
    ============ =======================================================================================

    Without ``{n}`` and ``{host}``, the command is started once per worker. A word that consists of ``{worker}`` alone
    becomes several words; in a longer word, such as a command for a remote shell, ``{worker}`` is quoted for a shell.
    Literal braces are written as ``{{`` and ``}}``.

    The command must run until its workers exit. A worker needs the same Python interpreter at the same path as this
    process, drivetrain, and a connection to this machine.

    Args:
        template: the template; None to read it from the environment variable ``DRIVETRAIN_COMMAND``.
        hosts: the hosts for ``{host}``; None to read them from ``DRIVETRAIN_HOSTS``, separated by commas.
        host: the IP address of this machine to which the workers connect; None for the address on the network of the
            hosts or, without hosts, of the default route.
        token_directory: a directory that all nodes share and only trusted users can write to, for a command that does
            not pass its environment to the workers, such as ``ssh``. The secret that a worker needs to connect is then
            passed in a temporary file that only its owner can read, instead of in the environment. None to read the
            directory from ``DRIVETRAIN_TOKEN_DIRECTORY``, or to use the environment if this is not set.

    Raises:
        ConfigurationError: an argument or an environment variable is invalid.

    Example:
        >>> from drivetrain_launch import CommandRuntime
        >>> from drivetrain import ScalingConfig
        >>> runtime = CommandRuntime("srun -n {n} {worker}")
        >>> ScalingConfig(num_workers=8, runtime=runtime).max_workers
        8
    """

    name = "command"

    template: str | None = None
    hosts: Sequence[str] | None = field(default=None, kw_only=True)
    host: str | None = field(default=None, kw_only=True)
    token_directory: str | os.PathLike[str] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        text = self.template if self.template is not None else os.environ.get(_COMMAND)
        if text is None:
            raise ConfigurationError(
                f"[DT-113] CommandRuntime: expected a template, got none. Set the environment variable {_COMMAND}, for "
                "example to 'srun -n {n} {worker}', or set ScalingConfig(runtime=CommandRuntime(...))"
            )
        template = Template.parse(text)
        hosts = self.hosts
        if hosts is None and "host" in template.fields:
            hosts = [name for part in os.environ.get(_HOSTS, "").split(",") if (name := part.strip())]
        directory = self.token_directory or os.environ.get(_TOKEN_DIRECTORY) or None
        object.__setattr__(self, "template", text)
        object.__setattr__(self, "hosts", check_hosts(hosts or (), template))
        object.__setattr__(self, "token_directory", None if directory is None else Path(directory))

    @classmethod
    def diagnose(cls, address: str | None) -> Iterable[Finding]:
        """Check the template in the environment, if there is one, and whether its program is installed."""
        if _COMMAND not in os.environ:
            return
        try:
            runtime = cls()
            program = runtime._require_program()
            listening = own_address(runtime.hosts or ())
        except ConfigurationError as error:
            advice = f"correct {_COMMAND}, or install the program on this machine"
            yield Finding("command", "problem", str(error), advice)
        else:
            found = f"{_COMMAND}={runtime.template!r} uses {program}; workers connect to {listening}"
            yield Finding("command", "ok", found)

    def validate(self, scaling: ScalingConfig) -> None:
        """Check that the program is installed, and that the configuration is one that a command can implement."""
        if scaling.min_workers != scaling.max_workers:
            raise _unsupported(
                "num_workers", "one number, because a command cannot find free resources", scaling, "Pass one number"
            )
        if scaling.max_workers == 0:
            raise _unsupported("num_workers", "at least 1", scaling, "Pass 1 or more")
        if scaling.spare_workers:
            raise _unsupported("spare_workers", "0", scaling)
        for name in ("trainer_resources", "accelerator_type"):
            if getattr(scaling, name):
                raise _unsupported(name, "None, because the command selects resources", scaling)
        if scaling.placement_strategy != "PACK":
            raise _unsupported("placement_strategy", "'PACK', because the command selects nodes", scaling)
        if set(scaling.resources_per_worker or ()) - _RESOURCES:
            raise _unsupported("resources_per_worker", "only CPU and GPU, as the command selects others", scaling)
        divide(scaling, {}, may_be_confined=False)
        self._require_program()

    def room(self, scaling: ScalingConfig, running: Sequence[WorkerInfo], avoided: frozenset[str]) -> int:
        """Return the requested number of workers, because a command cannot find free resources."""
        return scaling.max_workers

    @contextlib.contextmanager
    def launch(self, spec: GroupSpec) -> Iterator[CommandGroup]:
        """Start the command, or use the processes that it has started for the previous group of the run."""
        # Every run loads this module to detect its runtime, and most use another one.
        from drivetrain_launch._group import CommandGroup

        deadline = time.monotonic() + spec.start_timeout_s
        launch = self._launch(spec)
        try:
            with contextlib.ExitStack() as acquired:
                group = CommandGroup(spec, deadline, launch)
                acquired.callback(group.close_connections)
                acquired.callback(group.end)
                group.start()
                yield group
        finally:
            if not launch.is_usable:
                launch.close()

    def _launch(self, spec: GroupSpec) -> Launch:
        """Return the launch of the previous group, unless it cannot be used any more; otherwise a new one."""
        from drivetrain_launch._launch import Launch

        wanted = self._launch_spec(spec.num_workers, spec.ports)
        launch = _launches.get(spec.run_resources)
        if launch is not None:
            if launch.is_usable:
                launch.handle()  # since the end of the previous group, nothing has read its descriptors
            avoids = any(each.visible.node_id in spec.avoided for each in launch.supervisors.values())
            if launch.spec == wanted and launch.is_usable and not avoids:
                return launch
            launch.close()
        launch = _launches[spec.run_resources] = Launch(wanted, spec.output.console)
        spec.run_resources.callback(launch.close)
        return launch

    def _launch_spec(self, num_workers: int, ports: range | None) -> LaunchSpec:
        from drivetrain_launch._launch import LaunchSpec

        assert self.template is not None
        hosts = tuple(self.hosts or ())
        return LaunchSpec(
            template=Template.parse(self.template),
            hosts=hosts,
            num_workers=num_workers,
            address=self.host or own_address(hosts[:num_workers]),
            ports=ports,
            token_directory=None if self.token_directory is None else Path(self.token_directory),
        )

    def _require_program(self) -> str:
        """Return the path of the program.

        Raises:
            ConfigurationError: it is not installed, or it may pass the path of the interpreter to a shell.
        """
        assert self.template is not None
        template = Template.parse(self.template)
        if template.program == "{worker}":
            return "the workers' own interpreter"
        (program, *_) = template.fill(num_workers=1, worker=[sys.executable], host="".join((self.hosts or ("",))[:1]))
        path = shutil.which(program)
        if path is None:
            raise ConfigurationError(
                f"[DT-113] CommandRuntime: expected an installed program, got {program!r}, which is not on PATH. "
                "Install it, or correct the template"
            )
        return path


def _unsupported(name: str, expected: str, scaling: ScalingConfig, advice: str = "Remove it") -> ConfigurationError:
    return ConfigurationError(
        f"[DT-114] ScalingConfig({name}=...): expected {expected} with the command runtime, got "
        f"{getattr(scaling, name)!r}. {advice}, or use another runtime"
    )
