"""``drivetrain new-plugin``: generates a distribution with a working plugin, its tests and their configuration for CI.

The files are in ``templates``: those in ``common`` belong to every distribution, and those in the folder of a kind to
plugins of this kind. In their paths, ``package`` stands for the import package, and ``module`` for the name of the
plugin in Python. In their texts, ``$``-placeholders stand for these and other names.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, NamedTuple

from packaging.version import Version

from drivetrain import ConfigurationError, __version__
from drivetrain.plugin.checks import closest
from drivetrain.plugin.installed import CORE, KINDS, OWN, list_plugins
from drivetrain_console import OK, Commands, add_command, emit

if TYPE_CHECKING:
    from importlib.abc import Traversable

__all__ = ["SCAFFOLDS", "Scaffold", "add_new_plugin"]

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_TEMPLATE_SUFFIX = ".txt"
"""The suffix of files with placeholders. Tools that check Python, TOML or YAML skip them."""


class Scaffold(NamedTuple):
    """The plugin that is generated for a kind.

    Attributes:
        summary: a description of the plugin in one sentence.
        entry_points: the object of each entry point, by its group's kind.
        entry_name: the name of the entry points.
        packages: further distributions of drivetrain that the plugin requires.
    """

    summary: str
    entry_points: Mapping[str, str]
    entry_name: str = "$name"
    packages: tuple[str, ...] = ()


SCAFFOLDS = {
    "backend": Scaffold(
        "Connects the workers of a run, so that they can sum numbers.",
        {"backend": "${Thing}Config", "trainer": "${Thing}Trainer"},
    ),
    "trainer": Scaffold("Minimizes a function on all workers.", {"trainer": "${Thing}Trainer"}),
    "prepare": Scaffold(
        "Lets each worker read its part of text files.", {"prepare": "prepare"}, entry_name="fileinput"
    ),
    "framework": Scaffold(
        "Gives each worker its own random numbers.", {"framework": "${Thing}Framework"}, entry_name="$package"
    ),
    "strategy": Scaffold(
        "Trains a PyTorch model by averaging its gradients.",
        {"strategy": "${Thing}Strategy"},
        packages=("drivetrain-torch",),
    ),
    "callback": Scaffold("Writes the events of a run to a file.", {"callback": "${Thing}Callback"}),
    "tracker": Scaffold(
        "Logs the metrics of runs to an SQLite database.",
        {"callback": "${Thing}Tracker"},
        packages=("drivetrain-track",),
    ),
    "dataset": Scaffold("Splits the rows of CSV files among the workers.", {"dataset": "${Thing}Datasets"}),
    "runtime": Scaffold("Starts each worker as a separate process.", {"runtime": "${Thing}Runtime"}),
    "policy": Scaffold("Retries after growing delays.", {"policy": "${Thing}Policy"}),
    "trainable": Scaffold("Turns a trainer into a function of its arguments.", {"trainable": "make_trainable"}),
    "command": Scaffold(
        "Counts the runs in a directory.", {"command": "add_${module}"}, packages=("drivetrain-console",)
    ),
    "view": Scaffold("Shows the latest metrics of a run as a table.", {"view": "show"}),
}


def add_new_plugin(commands: Commands) -> None:
    parser = add_command(
        commands,
        "new-plugin",
        _new_plugin,
        "generate a Python distribution with a working plugin and its tests",
        "  drivetrain new-plugin callback webhook\n"
        '  drivetrain new-plugin backend my-thing --directory ~/code --author "Jane Doe"',
    )
    parser.add_argument(
        "kind", type=_kind, choices=tuple(SCAFFOLDS), help="the kind of the plugin: %(choices)s", metavar="KIND"
    )
    parser.add_argument("name", metavar="NAME", help="the name of the plugin, such as my-thing")
    parser.add_argument(
        "--directory",
        metavar="DIRECTORY",
        default=".",
        help="the directory in which to create the folder drivetrain-NAME; by default the working directory",
    )
    parser.add_argument("--author", metavar="AUTHOR", help="the author's name in the metadata of the distribution")


def _kind(given: str) -> str:
    if given not in SCAFFOLDS:
        meant = closest(given, SCAFFOLDS, similarity=0.5)
        hint = f". Did you mean {meant!r}?" if meant else ""
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(SCAFFOLDS)}, got {given!r}{hint}")
    return given


def _new_plugin(arguments: argparse.Namespace) -> int:
    kind, name = arguments.kind, arguments.name
    scaffold = SCAFFOLDS[kind]
    _check_name(name)
    _check_unused(scaffold, name)
    names = _placeholders(kind, name, arguments.author)
    files = dict(_render(resources.files("drivetrain_testing") / "templates", kind, names))
    target = Path(arguments.directory).expanduser() / names["distribution"]
    _write(target, files)
    data = {
        "kind": kind,
        "name": name,
        "distribution": names["distribution"],
        "package": names["package"],
        "path": str(target),
        "files": sorted(files),
    }
    emit(arguments, data, lambda: _next_steps(kind, target, names["package"]))
    return OK


def _next_steps(kind: str, target: Path, package: str) -> str:
    return (
        f"created {target}, a {kind} plugin that works. Install and test it:\n"
        f"  cd {shlex.quote(str(target))}\n"
        "  pip install -e '.[test]'\n"
        "  pytest\n"
        f"Then change the code in src/{package} step by step, and run pytest after each change."
    )


def _check_name(name: str) -> None:
    if _NAME.fullmatch(name) and not name.startswith("drivetrain"):
        return
    corrected = re.sub(r"[^a-z0-9]+", "-", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()).strip("-")
    corrected = re.sub(r"^(drivetrain-?)+", "", corrected)
    hint = f". Did you mean {corrected!r}?" if _NAME.fullmatch(corrected) else ""
    raise ConfigurationError(
        "[DT-609] NAME: expected lower-case letters and digits, in words separated by hyphens, without 'drivetrain', "
        f"such as my-thing, got {name!r}{hint}"
    )


def _check_unused(scaffold: Scaffold, name: str) -> None:
    """Check that no installed plugin or distribution has this name."""
    if "backend" in scaffold.entry_points and name == "none":
        raise ConfigurationError(
            "[DT-610] NAME: expected a name that is not in use, got 'none': the backend 'none' stands for training "
            "without a framework. Choose another name"
        )
    for kind in scaffold.entry_points:
        for plugin in list_plugins(kind):
            if plugin.name == name:
                built_in = plugin.distribution == CORE
                remedy = "" if built_in else f", or uninstall {plugin.distribution}"
                raise ConfigurationError(
                    f"[DT-610] NAME: expected a name that is not in use, got {name!r}: {plugin.distribution} "
                    f"{plugin.version} provides the {kind} {name!r}. Choose another name{remedy}"
                )
    distribution = f"drivetrain-{name}"
    if distribution in OWN or _is_installed(distribution):
        raise ConfigurationError(
            f"[DT-610] NAME: expected a name that is not in use, got {name!r}: there is a distribution {distribution}. "
            "Choose another name"
        )


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def _placeholders(kind: str, name: str, author: str | None) -> dict[str, str]:
    """Return the values of the placeholders in the templates."""
    scaffold = SCAFFOLDS[kind]
    thing = "".join(word.capitalize() for word in name.split("-"))
    module = name.replace("-", "_")
    names = {
        "kind": kind,
        "name": name,
        "distribution": f"drivetrain-{name}",
        "package": f"drivetrain_{module}",
        "module": module,
        "MODULE": module.upper(),
        "Thing": thing,
        "thing": thing.lower(),
        "summary": scaffold.summary,
        "version": __version__,
        "requires": _compatible_versions(),
    }
    own = [CORE, *scaffold.packages]
    names["dependencies"] = "".join(f'    "{each}{names["requires"]}",\n' for each in own)
    names["authors"] = f"authors = [{{ name = {_toml_string(author)} }}]\n" if author else ""
    entry_name = Template(scaffold.entry_name).substitute(names)
    names["entry_points"] = "\n".join(
        f'[project.entry-points."{KINDS[kind]}"]\n{entry_name} = "{names["package"]}:{target}"\n'
        for kind, target in scaffold.entry_points.items()
    )
    names["entry_points"] = Template(names["entry_points"]).substitute(names)
    return names


def _compatible_versions() -> str:
    """Return the versions of drivetrain that a plugin for this version can expect to work with."""
    major, minor = Version(__version__).release[:2]
    return f">={__version__},<{major}.{minor + 1}"


def _toml_string(text: str) -> str:
    if not text.isprintable():
        raise ConfigurationError(f"[DT-609] --author: expected printable characters, got {text!r}")
    return json.dumps(text, ensure_ascii=False)


def _render(templates: Traversable, kind: str, names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the relative path and the content of each file of a distribution."""
    usage = templates / kind / f"usage.md{_TEMPLATE_SUFFIX}"
    names = {**names, "usage": Template(usage.read_text(encoding="utf-8")).substitute(names).strip()}
    for folder in (templates / "common", templates / kind):
        for path, file in _walk(folder):
            if file.name == usage.name:
                continue
            text = file.read_text(encoding="utf-8")
            target = path.replace("package", names["package"]).replace("module", names["module"])
            if path.endswith(_TEMPLATE_SUFFIX):
                target, text = target.removesuffix(_TEMPLATE_SUFFIX), Template(text).substitute(names)
            yield target, text


def _walk(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        else:
            yield f"{prefix}{entry.name}", entry


def _write(target: Path, files: Mapping[str, str]) -> None:
    """Write the files into a new directory. If that fails, nothing remains of it."""
    try:
        target.mkdir()
    except FileExistsError as error:
        raise ConfigurationError(
            f"[DT-611] new-plugin: expected a new path, got {target}, which exists. Choose another name or --directory"
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"[DT-611] new-plugin: cannot create {target}: {error.strerror}. Choose another --directory"
        ) from error
    try:
        for path, text in files.items():
            file = target / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise ConfigurationError(
            f"[DT-611] new-plugin: cannot write to {target}: {error.strerror}. Choose another --directory"
        ) from error
