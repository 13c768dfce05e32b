"""Entry points: list without importing, load by name, validate, explain.

*Missing* is not *broken*: a name that nobody provides says what to install; a name whose package does not load says
which distribution it is and shows the error. A name selects; nothing activates itself.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.errors import PluginBrokenError, PluginError, PluginNotFoundError

__all__ = [
    "API_VERSION",
    "KINDS",
    "Plugin",
    "has_address",
    "install_commands",
    "installed_plugins",
    "list_plugins",
    "load_only_plugin",
    "load_plugin",
    "missing_runtimes",
]

API_VERSION = 1
"""Increases when a change breaks plugins."""

KINDS = {
    "backend": "drivetrain.backends",
    "callback": "drivetrain.callbacks",
    "dataset": "drivetrain.datasets",
    "runtime": "drivetrain.runtimes",
    "trainable": "drivetrain.trainables",
}

_RUNTIME_EXTRAS = ("ray",)
"""The extras of the core that install a runtime with the same name."""

_OUR_EXTRA = re.compile(r"""(drivetrain-[\w-]+).*extra == ['"]([\w.-]+)['"]""")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugin:
    """An entry point that some installed distribution declares.

    Attributes:
        kind: a key of :data:`KINDS`.
        name: what selects it.
        target: the object it names, as ``module:attribute``.
        distribution: who provides it.
        version: that distribution's version.
    """

    kind: str
    name: str
    target: str
    distribution: str
    version: str

    def load(self) -> Any:
        """Imports the object.

        Raises:
            PluginBrokenError: the import failed, or found no such object.
        """
        from importlib.metadata import EntryPoint

        try:
            return EntryPoint(self.name, self.target, KINDS[self.kind]).load()
        except (Exception, SystemExit) as error:  # whatever importing somebody's package may raise
            raise PluginBrokenError(
                f"the {self.kind} {self.name!r} of {self.distribution} {self.version} cannot be loaded from "
                f"{self.target}: {type(error).__name__}: {error}"
            ) from error


def list_plugins(kind: str) -> list[Plugin]:
    """The installed plugins of a kind, by name, without importing any of them."""
    from importlib.metadata import entry_points  # a third of the time of `import drivetrain`, were it at the top

    found = {
        Plugin(
            kind=kind,
            name=point.name,
            target=point.value,
            distribution=point.dist.name if point.dist else "unknown",
            version=point.dist.version if point.dist else "",
        )
        for point in entry_points(group=KINDS[kind])
    }
    return sorted(found, key=lambda plugin: (plugin.name, plugin.distribution))


def installed_plugins(kind: str) -> tuple[Plugin, ...]:
    """Like :func:`list_plugins`, looked up once for each module path of this process."""
    return _installed_plugins(kind, tuple(sys.path))


@functools.lru_cache(maxsize=16)
def _installed_plugins(kind: str, module_path: tuple[str, ...]) -> tuple[Plugin, ...]:
    return tuple(list_plugins(kind))


def load_plugin(kind: str, name: str) -> Any:
    """Imports the plugin of that kind and name.

    Raises:
        PluginNotFoundError: nobody provides it; the message lists who is there, and what to install if it is known.
        PluginError: two distributions provide it.
        PluginBrokenError: importing it failed.
    """
    candidates = [plugin for plugin in installed_plugins(kind) if plugin.name == name]
    if not candidates:  # it may have been installed since they were looked up
        installed = list_plugins(kind)
        candidates = [plugin for plugin in installed if plugin.name == name]
        if not candidates:
            raise PluginNotFoundError(_explain_missing(kind, name, installed))
    if len(candidates) > 1:
        claimants = " and ".join(f"{plugin.distribution} {plugin.version}" for plugin in candidates)
        raise PluginError(f"the {kind} {name!r} is claimed by {claimants}: uninstall one of them")
    return candidates[0].load()


def load_only_plugin(kind: str, *, hint: str) -> Any:
    """Imports the plugin of a kind of which usually one is installed.

    Args:
        kind: a key of :data:`KINDS`.
        hint: the end of the error message if no plugin is installed.

    Raises:
        PluginNotFoundError: no plugin is installed.
        PluginError: several are installed.
        PluginBrokenError: importing it failed.
    """
    installed = list_plugins(kind)
    if not installed:
        raise PluginNotFoundError(f"no {kind} is installed. {hint}")
    if len(installed) > 1:
        names = ", ".join(f"{plugin.name!r} of {plugin.distribution}" for plugin in installed)
        raise PluginError(f"expected one installed {kind}, got {names}. Select one by its name")
    return installed[0].load()


def _explain_missing(kind: str, name: str, installed: Sequence[Plugin]) -> str:
    known = ", ".join(repr(plugin.name) for plugin in installed) or "none"
    message = f"no {kind} {name!r} is installed; installed are: {known}"
    if (extra := _extra_of(name)) is not None:
        message += f'. Run: pip install "drivetrain[{extra}]"'
    return message


def _extra_of(name: str) -> str | None:
    """The extra of the core that installs a plugin of that name: it has the name, or is how it begins."""
    return next((extra for extra in _our_extras() if name == extra or name.startswith(f"{extra}_")), None)


def _our_extras() -> dict[str, str]:
    """The distribution that each extra of the core installs, if it is one of ours."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        required = requires("drivetrain") or []
    except PackageNotFoundError:  # a source tree that is not installed
        return {}
    found = [match for line in required if (match := _OUR_EXTRA.match(line))]
    return {match[2]: match[1] for match in found if match[2] != "all"}


def install_commands(*names: str) -> list[str]:
    """For the extras of the core with these names whose distribution is not installed: how to install them."""
    from importlib.metadata import distributions

    extras = _our_extras()
    there = {distribution.name for distribution in distributions()}
    missing = [name for name in dict.fromkeys(names) if name in extras and extras[name] not in there]
    return [f'pip install "drivetrain[{name}]"' for name in missing]


def missing_runtimes() -> dict[str, str]:
    """The runtimes that the environment has an address for, although their package is not installed.

    Returns:
        The variable of each runtime, by the name of the runtime.
    """
    installed = {plugin.name for plugin in installed_plugins("runtime")}
    missing = [name for name in _RUNTIME_EXTRAS if name not in installed and has_address(name)]
    return {name: _address_variable(name) for name in missing}


def has_address(runtime: str) -> bool:
    """Whether the environment configures a runtime: the runtime ``x`` has the variable ``X_ADDRESS``."""
    return bool(os.environ.get(_address_variable(runtime)))


def _address_variable(runtime: str) -> str:
    return f"{runtime.upper()}_ADDRESS"
