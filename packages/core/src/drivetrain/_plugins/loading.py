"""Plugins: list the entry points without importing them, load and check one by name, and explain errors.

A missing plugin and a broken one cause different errors. If no distribution provides the name, the error names the
package to install, if that is known. If the plugin cannot be loaded, or is not what its group requires, the error names
its distribution and the problem. A plugin is loaded only if it is selected by name, except for dataset providers and
runtimes, which are asked whether they accept a dataset or are selected by the environment.

An installed distribution whose metadata cannot be read is skipped, because most runs do not need it. ``drivetrain
doctor`` reports it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from drivetrain._base.closest import closest
from drivetrain._base.failure import one_line, text_of, type_name
from drivetrain._plugins.known import CORE, EXTRAS, OWN, PROVIDERS
from drivetrain._plugins.requirements import find_problem
from drivetrain._version import __version__
from drivetrain.errors import DrivetrainError, PluginBrokenError, PluginError, PluginNotFoundError

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

__all__ = [
    "API_VERSION",
    "KINDS",
    "Plugin",
    "UnknownGroup",
    "check_plugin",
    "check_plugins",
    "create_object",
    "create_plugin",
    "errors_of",
    "find_damaged_distributions",
    "find_unknown_groups",
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
    "framework": "drivetrain.frameworks",
    "strategy": "drivetrain.strategies",
    "callback": "drivetrain.callbacks",
    "dataset": "drivetrain.datasets",
    "runtime": "drivetrain.runtimes",
    "policy": "drivetrain.policies",
    "trainable": "drivetrain.trainables",
    "command": "drivetrain.commands",
    "view": "drivetrain.views",
}

_RUNTIME_EXTRAS = ("ray",)
"""The extras that install a runtime with the same name."""


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

        with errors_of(self, f"cannot be loaded from {self.target}"):
            return EntryPoint(self.name, self.target, KINDS[self.kind]).load()

    def required_version(self) -> str:
        """Return the versions of drivetrain that the distribution requires, such as ``">=0.1,<0.2"``; empty for any."""
        from importlib.metadata import PackageNotFoundError, requires

        from packaging.requirements import InvalidRequirement, Requirement

        try:
            lines = requires(self.distribution) or ()
        except PackageNotFoundError:
            return ""
        for line in lines:
            try:
                requirement = Requirement(line)
            except InvalidRequirement:  # of another package
                continue
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if _normalized(requirement.name) in (CORE, "drivetrain") and applies:
                return str(requirement.specifier)
        return ""


@contextlib.contextmanager
def errors_of(plugin: Plugin, problem: str) -> Iterator[None]:
    """Convert exceptions of a plugin's code, also those that are not ``Exception``, to errors that name the plugin.

    Args:
        plugin: the plugin.
        problem: what failed, for the message.

    Raises:
        PluginBrokenError: the code raised an exception other than those of drivetrain and ``KeyboardInterrupt``.
    """
    try:
        yield
    except (DrivetrainError, KeyboardInterrupt):
        raise
    except BaseException as error:  # another package may raise anything
        raise PluginBrokenError(
            f"[DT-602] the {plugin.kind} {plugin.name!r} of {plugin.distribution} {plugin.version} {problem}: "
            f"{type_name(error)}: {text_of(error)}"
        ) from error


def check_plugin(plugin: Plugin) -> Any:
    """Load a plugin, check that it is what its group requires, and return its object.

    Raises:
        PluginBrokenError: the import failed, or the object cannot be used. The message names the problem.
        PluginError: the distribution requires another version of drivetrain.
    """
    _require_version(plugin)
    loaded = plugin.load()
    with errors_of(plugin, f"cannot be checked, {plugin.target}"):
        problem = find_problem(loaded, plugin.kind, plugin.name)
    if problem is not None:
        raise PluginBrokenError(
            f"[DT-602] the {plugin.kind} {plugin.name!r} of {plugin.distribution} {plugin.version}, {plugin.target}: "
            f"{problem}"
        )
    return loaded


def _require_version(plugin: Plugin) -> None:
    if plugin.distribution.startswith("drivetrain-") and plugin.version == __version__:  # saves time at the start
        return
    from packaging.specifiers import SpecifierSet

    required = plugin.required_version()
    if not SpecifierSet(required).contains(__version__, prereleases=True):
        raise PluginError(
            f"[DT-608] the {plugin.kind} {plugin.name!r}: {plugin.distribution} {plugin.version} requires "
            f"drivetrain{required}, but {__version__} is installed. Install versions that fit together: "
            f"pip install --upgrade drivetrain {plugin.distribution}"
        )


class UnknownGroup(NamedTuple):
    """An entry-point group that drivetrain ignores, although its name suggests that it is one of ours.

    Attributes:
        distribution: the name of the distribution that registers entry points in it.
        name: the name of the group.
        plugins: the names of the entry points.
        advice: the closest correct name, or the list of groups, as a sentence.
    """

    distribution: str
    name: str
    plugins: tuple[str, ...]
    advice: str


def find_unknown_groups() -> list[UnknownGroup]:
    """Return the groups that begin with ``drivetrain.`` or look like misspelled versions of ours."""
    found = set()
    for distribution, points in _readable_distributions():
        for group in {point.group for point in points} - set(KINDS.values()):
            normalized = group.lower().replace("-", ".").replace("_", ".").replace(":", ".")
            meant = closest(normalized, KINDS.values(), similarity=0.85)
            if meant or group.startswith("drivetrain."):
                advice = f"Did you mean {meant!r}?" if meant else f"Groups: {', '.join(KINDS.values())}"
                names = tuple(sorted(point.name for point in points if point.group == group))
                owner, _ = _owner(distribution) or ("a damaged distribution", "")
                found.add(UnknownGroup(owner, group, names, advice))
    return sorted(found)


def find_damaged_distributions() -> list[str]:
    """Return a description of each installed distribution that is skipped because its metadata cannot be read."""
    from importlib.metadata import distributions

    damaged = []
    for distribution in distributions():
        try:
            points: Sequence[EntryPoint] = list(distribution.entry_points)
        except Exception as error:  # any file may have been damaged in any way
            points, problem = [], one_line(error)
        else:
            problem = "" if _owner(distribution) is not None else "METADATA is missing or damaged"
        if problem:
            ours = [f"{kind} {point.name}" for kind in KINDS for point in points if point.group == KINDS[kind]]
            skipped = f"; skipped: {', '.join(ours)}" if ours else ""
            name = (_owner(distribution) or ("a distribution",))[0]
            damaged.append(f"{name} in {distribution.locate_file('')}: {problem}{skipped}")
    return damaged


def _readable_distributions() -> Iterator[tuple[Distribution, Sequence[EntryPoint]]]:
    """Yield the installed distributions with their entry points. Skip those whose entry points cannot be read."""
    from importlib.metadata import distributions

    for distribution in distributions():
        with contextlib.suppress(Exception):  # any file may have been damaged in any way
            yield distribution, list(distribution.entry_points)


def _owner(distribution: Distribution | None) -> tuple[str, str] | None:
    """Return the name and the version of a distribution; None if its metadata cannot be read."""
    if distribution is None:
        return "unknown", ""
    try:
        owner: tuple[object, object] = distribution.name, distribution.version  # None without METADATA in Python 3.12
    except Exception:  # any file may have been damaged in any way
        return None
    return (str(owner[0]), str(owner[1])) if None not in owner else None


def _entry_points() -> Sequence[EntryPoint]:
    """Return the entry points of all kinds. Reading those of one kind takes the same time."""
    from importlib.metadata import entry_points  # at the top, it would take a third of the time of `import drivetrain`

    groups = set(KINDS.values())
    try:
        found = entry_points()
        return [point for group in groups for point in found.select(group=group)]
    except Exception:  # one distribution is damaged
        return [point for _, points in _readable_distributions() for point in points if point.group in groups]


def list_plugins(kind: str) -> list[Plugin]:
    """Return the installed plugins of a kind, sorted by name, without importing them."""
    return _plugins_of(kind, _entry_points())


def _plugins_of(kind: str, points: Iterable[EntryPoint]) -> list[Plugin]:
    plugins = {
        Plugin(kind=kind, name=point.name, target=point.value, distribution=owner[0], version=owner[1])
        for point in points
        if point.group == KINDS[kind] and (owner := _owner(point.dist)) is not None
    }
    return sorted(plugins, key=lambda plugin: (plugin.name, plugin.distribution))


def installed_plugins(kind: str) -> tuple[Plugin, ...]:
    """Return the same as :func:`list_plugins`, cached for each value of ``sys.path``."""
    return _installed_plugins(kind, tuple(sys.path))


@functools.lru_cache(maxsize=16)
def _installed_plugins(kind: str, module_path: tuple[str, ...]) -> tuple[Plugin, ...]:
    return tuple(_plugins_of(kind, _installed_entry_points(module_path)))


@functools.lru_cache(maxsize=16)
def _installed_entry_points(module_path: tuple[str, ...]) -> Sequence[EntryPoint]:
    return _entry_points()


def load_plugin(kind: str, name: str) -> Any:
    """Import the plugin of the given kind and name, and return its object.

    Raises:
        PluginNotFoundError: no distribution provides it. The message lists the installed plugins and, if known, the
            package to install.
        PluginError: several distributions provide it, or its distribution requires another version of drivetrain. A
            command of drivetrain itself is used nevertheless, so that no package can disable it.
        PluginBrokenError: importing it failed, or it is not what its group requires.
    """
    candidates = [plugin for plugin in installed_plugins(kind) if plugin.name == name]
    if not candidates:  # the plugin may have been installed after the cached lookup
        installed = list_plugins(kind)
        candidates = [plugin for plugin in installed if plugin.name == name]
        if not candidates:
            raise PluginNotFoundError(_explain_missing(kind, name, installed))
    return _check_unique(candidates)


def check_plugins() -> Iterator[tuple[Plugin, PluginError | None]]:
    """Yield each installed plugin with the error that selecting it by its name raises; None if it can be used."""
    for kind in KINDS:
        installed = list_plugins(kind)
        for plugin in installed:
            try:
                candidates = [each for each in installed if each.name == plugin.name]
                if plugin != (used := _select(candidates)):
                    raise PluginError(
                        f"[DT-603] {kind} {plugin.name!r}: {used.distribution} provides it, so the one of "
                        f"{plugin.distribution} {plugin.version} is not used. Uninstall {plugin.distribution}"
                    )
                check_plugin(used)
            except PluginError as error:
                yield plugin, error
            else:
                yield plugin, None


def _check_unique(candidates: Sequence[Plugin]) -> Any:
    """Check and return the plugin of a kind and name. If several distributions provide it, raise an error."""
    return check_plugin(_select(candidates))


def _select(candidates: Sequence[Plugin]) -> Plugin:
    """Return the only candidate, or the command of drivetrain itself. Otherwise, raise an error."""
    first = candidates[0]
    own = [plugin for plugin in candidates if plugin.kind == "command" and plugin.distribution in OWN]
    if own:
        return own[0]
    if len(candidates) > 1:
        providers = " and ".join(f"{plugin.distribution} {plugin.version}" for plugin in candidates)
        raise PluginError(
            f"[DT-603] {first.kind} {first.name!r}: expected one distribution that provides it, got {providers}. "
            "Uninstall one of them"
        )
    return first


def create_plugin(kind: str, name: str, options: Mapping[str, Any]) -> Any:
    """Load the plugin of the given kind and name, and create an object of its class with options.

    Returns:
        The object. If the plugin is a function, the function itself.

    Raises:
        PluginError: see :func:`load_plugin`.
        PluginBrokenError: the class does not accept the options, or creating the object failed.
    """
    loaded = load_plugin(kind, name)
    if isinstance(loaded, type):
        hint = f"Pass its options, as in ({name!r}, {{...}}), or an object"
        return create_object(loaded, f"{kind} {name!r}", hint, options)
    if options:
        raise PluginBrokenError(
            f"[DT-602] {kind} {name!r}: expected no options, because it is a function, got {', '.join(options)}"
        )
    return loaded


def create_object(plugin: type, where: str, hint: str, options: Mapping[str, Any]) -> Any:
    """Create an object of a plugin's class.

    Args:
        plugin: the class.
        where: what selects the plugin, for the error message.
        hint: what to do instead, for the error message.
        options: keyword arguments.

    Raises:
        PluginBrokenError: the class does not accept the options, or creating the object failed.
    """
    try:
        return plugin(**options)
    except DrivetrainError:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the class is not ours
        arguments = f"with the options {', '.join(options)}" if options else "without arguments"
        raise PluginBrokenError(
            f"[DT-602] {where}: creating it {arguments} raised {one_line(error)}. {hint}: {plugin.__qualname__}(...)"
        ) from error


def load_single_plugin(kind: str, *, hint: str) -> Any:
    """Import the only installed plugin of a kind, and return its object.

    Args:
        kind: a key of :data:`KINDS`.
        hint: the end of the error message if no plugin is installed.

    Raises:
        PluginNotFoundError: no plugin is installed.
        PluginError: several plugins are installed, or it requires another version of drivetrain.
        PluginBrokenError: importing it failed, or it is not what its group requires.
    """
    installed = list_plugins(kind)
    if not installed:
        raise PluginNotFoundError(f"[DT-601] no {kind} is installed. {hint}")
    if len(installed) > 1:
        names = ", ".join(f"{plugin.name!r} of {plugin.distribution}" for plugin in installed)
        raise PluginError(f"[DT-603] expected one installed {kind}, got {names}. Select one by its name")
    return check_plugin(installed[0])


def _explain_missing(kind: str, name: str, installed: Sequence[Plugin]) -> str:
    names = ", ".join(repr(plugin.name) for plugin in installed) or "none"
    message = f"[DT-601] no {kind} {name!r} is installed. Installed: {names}"
    if (requirement := _find_provider(kind, name)) is not None:
        return f"{message}. Run: pip install {requirement}"
    if meant := closest(name, [plugin.name for plugin in installed]):
        message += f". Did you mean {meant!r}?"
    for group in find_unknown_groups():
        if name in group.plugins:
            message += (
                f"{'' if message.endswith('?') else '.'} {group.distribution} registers {name!r} in the unknown group "
                f"{group.name!r}, which is ignored. {group.advice}"
            )
    return message


def _find_provider(kind: str, name: str) -> str | None:
    """Return what installs a plugin, as an argument of pip, or None. The extra ``x`` installs ``x`` and ``x_...``."""
    extras = (f"drivetrain[{extra}]" for extra in EXTRAS if name == extra or name.startswith(f"{extra}_"))
    requirement = PROVIDERS.get((kind, name)) or next(extras, None)
    return f'"{requirement}"' if requirement and "[" in requirement else requirement


def install_commands(*names: str) -> list[str]:
    """Return a ``pip`` command for each named extra whose distribution is not installed."""
    from importlib.metadata import distributions

    installed = {owner[0] for distribution in distributions() if (owner := _owner(distribution)) is not None}
    missing = [name for name in dict.fromkeys(names) if name in EXTRAS and EXTRAS[name] not in installed]
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


def _normalized(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
