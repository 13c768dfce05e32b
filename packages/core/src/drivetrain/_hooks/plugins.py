"""Plugins: list the entry points without importing them, load one by name, and explain errors.

A missing plugin and a broken one cause different errors. If no distribution provides the name, the error names the
package to install, if that is known. If loading the plugin fails, the error names its distribution and includes the
exception. A plugin is loaded only if it is selected by name, except for dataset providers and runtimes, which are asked
whether they accept a dataset or are selected by the environment.
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
    "install_commands",
    "installed_plugins",
    "is_configured",
    "list_plugins",
    "load_plugin",
    "load_single_plugin",
    "missing_runtimes",
]

API_VERSION = 1
"""The version of the interface for plugins. It increases with every change that breaks existing plugins."""

KINDS = {
    "backend": "drivetrain.backends",
    "trainer": "drivetrain.trainers",
    "prepare": "drivetrain.prepare",
    "strategy": "drivetrain.strategies",
    "callback": "drivetrain.callbacks",
    "dataset": "drivetrain.datasets",
    "runtime": "drivetrain.runtimes",
    "policy": "drivetrain.policies",
    "trainable": "drivetrain.trainables",
    "command": "drivetrain.commands",
}

_RUNTIME_EXTRAS = ("ray",)
"""The extras of the core that install a runtime with the same name."""

_OUR_EXTRA = re.compile(r"""(drivetrain-[\w-]+).*extra == ['"]([\w.-]+)['"]""")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugin:
    """An entry point of an installed distribution.

    Attributes:
        kind: a key of :data:`KINDS`.
        name: the name by which users select the plugin.
        target: the location of the plugin's object, in the form ``module:attribute``.
        distribution: the name of the distribution that provides the plugin.
        version: the version of the distribution.
    """

    kind: str
    name: str
    target: str
    distribution: str
    version: str

    def load(self) -> Any:
        """Import and return the object that :attr:`target` refers to.

        Raises:
            PluginBrokenError: the import failed, or the module has no such attribute.
        """
        from importlib.metadata import EntryPoint

        try:
            return EntryPoint(self.name, self.target, KINDS[self.kind]).load()
        except (Exception, SystemExit) as error:  # importing another package may raise anything
            raise PluginBrokenError(
                f"[DT-602] the {self.kind} {self.name!r} of {self.distribution} {self.version} cannot be loaded from "
                f"{self.target}: {type(error).__name__}: {error}"
            ) from error


def list_plugins(kind: str) -> list[Plugin]:
    """Return the installed plugins of a kind, sorted by name, without importing them."""
    from importlib.metadata import entry_points  # at the top, it would take a third of the time of `import drivetrain`

    plugins = {
        Plugin(
            kind=kind,
            name=point.name,
            target=point.value,
            distribution=point.dist.name if point.dist else "unknown",
            version=point.dist.version if point.dist else "",
        )
        for point in entry_points(group=KINDS[kind])
    }
    return sorted(plugins, key=lambda plugin: (plugin.name, plugin.distribution))


def installed_plugins(kind: str) -> tuple[Plugin, ...]:
    """Return the same as :func:`list_plugins`, cached for each value of ``sys.path``."""
    return _installed_plugins(kind, tuple(sys.path))


@functools.lru_cache(maxsize=16)
def _installed_plugins(kind: str, module_path: tuple[str, ...]) -> tuple[Plugin, ...]:
    return tuple(list_plugins(kind))


def load_plugin(kind: str, name: str) -> Any:
    """Import the plugin of the given kind and name, and return its object.

    Raises:
        PluginNotFoundError: no distribution provides it. The message lists the installed plugins and, if known, the
            package to install.
        PluginError: several distributions provide it.
        PluginBrokenError: importing it failed.
    """
    candidates = [plugin for plugin in installed_plugins(kind) if plugin.name == name]
    if not candidates:  # the plugin may have been installed after the cached lookup
        installed = list_plugins(kind)
        candidates = [plugin for plugin in installed if plugin.name == name]
        if not candidates:
            raise PluginNotFoundError(_explain_missing(kind, name, installed))
    if len(candidates) > 1:
        providers = " and ".join(f"{plugin.distribution} {plugin.version}" for plugin in candidates)
        raise PluginError(
            f"[DT-603] {kind} {name!r}: expected one distribution that provides it, got {providers}. Uninstall "
            "one of them"
        )
    return candidates[0].load()


def load_single_plugin(kind: str, *, hint: str) -> Any:
    """Import the only installed plugin of a kind, and return its object.

    Args:
        kind: a key of :data:`KINDS`.
        hint: the end of the error message if no plugin is installed.

    Raises:
        PluginNotFoundError: no plugin is installed.
        PluginError: several plugins are installed.
        PluginBrokenError: importing it failed.
    """
    installed = list_plugins(kind)
    if not installed:
        raise PluginNotFoundError(f"[DT-601] no {kind} is installed. {hint}")
    if len(installed) > 1:
        names = ", ".join(f"{plugin.name!r} of {plugin.distribution}" for plugin in installed)
        raise PluginError(f"[DT-603] expected one installed {kind}, got {names}. Select one by its name")
    return installed[0].load()


def _explain_missing(kind: str, name: str, installed: Sequence[Plugin]) -> str:
    names = ", ".join(repr(plugin.name) for plugin in installed) or "none"
    message = f"[DT-601] no {kind} {name!r} is installed. Installed: {names}"
    if (extra := _extra_of(name)) is not None:
        message += f'. Run: pip install "drivetrain[{extra}]"'
    return message


def _extra_of(name: str) -> str | None:
    """Return the extra that installs a plugin, or None. The extra ``x`` installs the plugins ``x`` and ``x_...``."""
    return next((extra for extra in _extra_distributions() if name == extra or name.startswith(f"{extra}_")), None)


def _extra_distributions() -> dict[str, str]:
    """Return a mapping from each extra of the core to the ``drivetrain-...`` distribution that the extra installs."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        required = requires("drivetrain") or []
    except PackageNotFoundError:  # running from a source tree that is not installed
        return {}
    matches = [match for line in required if (match := _OUR_EXTRA.match(line))]
    return {match[2]: match[1] for match in matches if match[2] != "all"}


def install_commands(*names: str) -> list[str]:
    """Return a ``pip`` command for each named extra of the core whose distribution is not installed."""
    from importlib.metadata import distributions

    extras = _extra_distributions()
    installed = {distribution.name for distribution in distributions()}
    missing = [name for name in dict.fromkeys(names) if name in extras and extras[name] not in installed]
    return [f'pip install "drivetrain[{name}]"' for name in missing]


def missing_runtimes() -> dict[str, str]:
    """Return the runtimes that the environment configures although their package is not installed.

    Returns:
        A mapping from the name of a runtime to the environment variable that contains its address.
    """
    installed = {plugin.name for plugin in installed_plugins("runtime")}
    missing = [name for name in _RUNTIME_EXTRAS if name not in installed and is_configured(name)]
    return {name: _address_variable(name) for name in missing}


def is_configured(runtime: str) -> bool:
    """Return True if the environment configures a runtime: the runtime ``x`` has the variable ``X_ADDRESS``."""
    return bool(os.environ.get(_address_variable(runtime)))


def _address_variable(runtime: str) -> str:
    return f"{runtime.upper()}_ADDRESS"
