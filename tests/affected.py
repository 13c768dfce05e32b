"""Selects the tests that a change can affect, by following imports. It imports and executes none of the files.

Usage, from the repository root::

    python -m tests.affected                      # compared with main: one pytest argument per line
    python -m tests.affected --base HEAD~3        # compared with another revision
    python -m tests.affected --changed FILE ...   # as if these files had changed
    python -m tests.affected --why TEST           # the references that lead from a test to a changed file

Every Python file is parsed into *units*: one per top-level name, and one for the statements that run on import. A unit
refers to units and files. A test is selected if a chain of references leads from it to any unit of a changed file.
References are followed by name, because ``import drivetrain`` re-exports nearly everything: a test that uses
``drivetrain.Checkpoint`` depends on the module that defines it, not on all that the facade names. These are references:

- names and attributes of imported modules, function-level imports included; a name of a lazy facade refers to the
  submodules that bind it
- fixtures, by the names of parameters, through the ``conftest.py`` files
- strings: module names, names of entry points, paths of files and folders, and Python code (scripts that tests run)
- path expressions such as ``ROOT / "docs"`` and ``Path(drivetrain.__file__).parent``
- the Python blocks of a documentation page, and the example plugins whose ``pyproject.toml`` the page includes

A module that is imported while none of its names is used is not followed further than its own file. If it no longer
imports, every selected test fails. Docstrings, annotations and ``TYPE_CHECKING`` blocks are not followed at all.
"""

import argparse
import ast
import fnmatch
import gc
import posixpath
import re
import subprocess
import sys
import textwrap
import warnings
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.toml import tomllib

ROOT = Path(__file__).parents[1]
PAGE_TESTS = "tests/docs/test_pages.py"
PAGE_TEST = "test_blocks_of_a_page_run_and_print_the_shown_output"

# These cannot be analysed: any test may depend on them.
_EVERYTHING = ("pyproject.toml", "packages/*/pyproject.toml", "noxfile.py", "tests/conftest.py")
# Files that no test reads unless it refers to them.
_INERT = ("*.md", "LICENSE", "*/LICENSE", ".gitignore", "benchmarks/*", "docs/*")
# Outside of these folders, a path is recognised only in full, from the repository root.
_FOLDERS_OF_DATA = ("examples/", "docs/", ".ci/")

_MODULE_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*)?")
_PATH = re.compile(r"[\w.*-]+(/[\w.*-]+)*")
_IMPORT_IN_TEXT = re.compile(r"\b(?:from|import)\s+((?:drivetrain|tests)[\w.]*)(?:\s+import\s+\(?([\w, ]+))?")
_CODE_BLOCK = re.compile(
    r"(?P<skipped><!-- not executed: .*?-->\s*)?^```(?P<kind>python|console)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_INSTALLED = re.compile(r"^```{literalinclude} (\.\./code/plugins/\w+)/pyproject\.toml$", re.MULTILINE)

# The nodes of a module in addition to its names: the statements that run on import, those for a script, the names that
# it exports, all of its submodules, and everything that it executes as a script or as a file of tests.
_BODY, _SCRIPT, _EXPORTS, _TREE, _RUN = "", "if __name__", "*", "**", "run"


@dataclass
class Unit:
    """The references of one top-level name of a module, or of its body.

    Attributes:
        names: references to names: dotted paths, from this module's names or from the root of all modules.
        strings: references by module name in a string.
        submodules: patterns of module names that are imported dynamically.
        fixtures: names of parameters that pytest resolves.
        paths: files and folders, from the repository root, with wildcards; their Python files are executed.
        read: the same, but only read: a method of the path is called.
        alias: the dotted path that an import binds to the name.
        is_fixture: True for a fixture.
        automatic: True if pytest uses it without a reference: a hook or an ``autouse`` fixture.
    """

    names: set[tuple[str, ...]] = field(default_factory=set)
    strings: set[str] = field(default_factory=set)
    submodules: set[str] = field(default_factory=set)
    fixtures: set[str] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    alias: tuple[str, ...] | None = None
    is_fixture: bool = False
    automatic: bool = False


@dataclass
class Module:
    """A parsed file.

    Attributes:
        name: its dotted name; ``src`` folders are not part of it.
        path: from the repository root.
        units: by name.
        stars: modules whose names are imported with ``*``.
        path_expressions: top-level names that may stand for a path.
    """

    name: str
    path: str
    units: dict[str, Unit] = field(default_factory=lambda: defaultdict(Unit))
    stars: list[str] = field(default_factory=list)
    path_expressions: dict[str, ast.expr] = field(default_factory=dict)

    @property
    def is_package(self) -> bool:
        return self.path.endswith("/__init__.py")

    @property
    def is_test(self) -> bool:
        return self.path.startswith("tests/")


class _Scanner(ast.NodeVisitor):
    """Collects the references of one unit, or of a script in a string."""

    def __init__(self, graph: "Graph", module: Module, unit: Unit, *, script: bool = False) -> None:
        self.graph, self.module, self.unit = graph, module, unit
        self.script = script
        self.imported: dict[str, tuple[str, ...]] = {}

    def scan(self, *nodes: ast.AST) -> None:
        for node in nodes:
            self.visit(node)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for name, target in _bindings(node):
            self.imported[name] = target
            self.graph.note_import(self.module, self.unit, node, target)
            found = self.graph.find_module(target, self.module)
            if isinstance(node, ast.ImportFrom) and found is not None and found[1]:
                self.unit.names.add(("", *target))

    visit_ImportFrom = visit_Import

    def _refer(self, name: str, *attributes: str) -> None:
        if name in self.imported:
            self.unit.names.add(("", *self.imported[name], *attributes))
        elif not self.script and name in self.module.units:
            self.unit.names.add((name, *attributes))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.Call | ast.BinOp) and not self.script:
            path = self.graph.path_of(node, self.module)
            if path is not None:
                self.unit.paths.add(path)
                return
        super().visit(node)

    def visit_If(self, node: ast.If) -> None:
        if not _is_type_checking(node.test):
            self.visit(node.test)
            for statement in node.body:
                self.visit(statement)
        for statement in node.orelse:
            self.visit(statement)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not (isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)):
            self.visit(node.value)  # others are docstrings

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]:
            self.visit(part)
        if self.module.is_test and (node.name.startswith("test") or _is_fixture(node)):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            self.unit.fixtures.update(argument.arg for argument in arguments)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if not (isinstance(node.func, ast.Attribute) and node.func.attr in ("is_relative_to", "relative_to")):
            self.generic_visit(node)  # these only compare paths

    def visit_Name(self, node: ast.Name) -> None:
        self._refer(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        attributes: list[str] = []
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            attributes.insert(0, inner.attr)
            inner = inner.value
        path = None if self.script else self.graph.path_of(inner, self.module)
        if path is not None:
            self.unit.read.add(path)
        elif isinstance(inner, ast.Name):
            self._refer(inner.id, *attributes)
        else:
            self.visit(inner)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._read_string(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        own_package = _is_own_name(node.values[0]) if node.values else False
        parts = [part.value if isinstance(part, ast.Constant) else "*" for part in node.values]
        if own_package:
            parts[0] = self.module.name
        pattern = "".join(map(str, parts))
        if re.fullmatch(r"(\w+\.)+\*", pattern):
            self.unit.submodules.add(pattern)
        elif "import " in pattern:
            self._read_string(pattern.replace("*", "_"))
        elif "/" in pattern.partition("*")[0] and "**" not in pattern:
            self._read_path(pattern)
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.visit(part.value)

    def _read_string(self, text: str) -> None:
        if len(text) < 100 and "\n" not in text:
            if _MODULE_NAME.fullmatch(text):
                self.unit.strings.add(text)
                self.unit.fixtures.update([text] if self.module.is_test else [])  # getfixturevalue, usefixtures
            if "*" not in text and ("/" in text or "." in text):
                self._read_path(text)
        if "import " in text:
            self._read_code(text)

    def _read_path(self, text: str) -> None:
        # A package names its own files relative to itself, see path_of.
        if not self.module.path.startswith("packages/") and _PATH.fullmatch(text):
            self.unit.paths.add(text)

    def _read_code(self, text: str) -> None:
        try:
            tree = _parse(textwrap.dedent(text))
        except SyntaxError:  # a part of a script, or prose
            for module, names in _IMPORT_IN_TEXT.findall(text):
                used = names.replace(" ", "").split(",") if names else re.findall(rf"\b{module}\.(\w+)", text)
                self.unit.names.update(("", *module.split("."), name) for name in used if name)
        else:
            _Scanner(self.graph, self.module, self.unit, script=True).scan(tree)


class Graph:
    """The references between the files of a repository."""

    def __init__(self, root: Path, files: Iterable[str], changed: Iterable[str] = ()) -> None:
        """Parse the files.

        Args:
            root: the repository.
            files: all its files, as paths from its root.
            changed: the files that changed; deleted files are kept, as files without content.
        """
        self.root = root
        self.changed = set(changed)
        self.files = sorted({*files, *self.changed})
        self.modules: dict[str, Module] = {}
        self.by_path: dict[str, Module] = {}
        self.pages: dict[str, Module] = {}
        self.entry_points: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self._commands: set[str] = set()
        self._siblings: dict[tuple[str, str], str] = {}
        self._scripts: dict[str, str] = {}
        self._below: dict[str, list[str]] = defaultdict(list)
        self.edges: dict[str, set[str]] = defaultdict(set)
        self._read()
        self._connect()

    # Reading

    def _text(self, path: str) -> str:
        file = self.root / path
        return file.read_text(encoding="utf-8") if file.is_file() else ""

    def _read(self) -> None:
        trees: list[tuple[Module, ast.Module]] = []
        for path in self.files:
            self._index(path)
            if path.endswith(".py") and path != "noxfile.py":
                module = Module(_module_name(path), path)
                self.modules[module.name] = self.by_path[path] = module
                folder, file = posixpath.split(path)
                self._siblings[folder, file.removesuffix(".py")] = module.name
                if path.startswith("docs/"):
                    self._scripts[file.removesuffix(".py")] = module.name
                trees.append((module, _parse(self._text(path), path)))
            elif path == "README.md" or (path.startswith("docs/") and path.endswith(".md")):
                code = page_code(self._text(path))
                if code:
                    self.pages[path] = page = Module(path, path)
                    trees.append((page, _parse(code)))
            elif fnmatch.fnmatch(path, "packages/*/pyproject.toml"):
                self._read_entry_points(path)
        for module, tree in trees:
            _declare(module, tree.body)
        for module, tree in trees:
            self._scan(module, tree.body)

    def _index(self, path: str) -> None:
        """Index a file under its path, its folders and, if tests may abbreviate these, the ends of them."""
        parts = path.split("/")
        for end in range(1, len(parts) + 1):
            self._below["/".join(parts[:end])].append(path)
            if path.startswith(_FOLDERS_OF_DATA):
                for start in range(1, end):
                    if end - start > 1 or "." in parts[start]:
                        self._below["/".join(parts[start:end])].append(path)

    def _read_entry_points(self, path: str) -> None:
        project = tomllib.loads(self._text(path)).get("project", {})
        own = {path.partition("/src/")[2].partition("/")[0] for path in self.files}
        groups = project.get("entry-points", {})
        # Nothing here looks up the entry points of other programs by their names.
        looked_up = [points for group, points in groups.items() if group.partition(".")[0] in own]
        for points in [*looked_up, project.get("scripts", {})]:
            for name, target in points.items():
                self.entry_points[name].append((posixpath.dirname(path), target))
        self._commands |= set(project.get("scripts", {}))

    def _scan(self, module: Module, statements: Sequence[ast.stmt], unit_name: str = _BODY) -> None:
        for node in statements:
            if isinstance(node, ast.If) and _is_type_checking(node.test):
                self._scan(module, node.orelse, unit_name)
            elif isinstance(node, ast.If) and "__name__" in ast.dump(node.test):
                self._scanner(module, _SCRIPT).scan(*node.body)
            elif isinstance(node, ast.If | ast.Try | ast.With):
                heads = [node.test] if isinstance(node, ast.If) else getattr(node, "items", [])
                self._scanner(module, unit_name).scan(*heads)
                for block in _blocks(node):
                    self._scan(module, block, unit_name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for _, target in _bindings(node):
                    self.note_import(module, module.units[unit_name], node, target)
            else:
                for name in _bound_names(node) or [unit_name]:
                    if name in module.path_expressions and self.path_of(ast.Name(name), module) is not None:
                        continue  # a path, which counts where it is used
                    self._scanner(module, name).scan(node)

    def _scanner(self, module: Module, unit: str) -> _Scanner:
        return _Scanner(self, module, module.units[unit])

    def note_import(
        self, module: Module, unit: Unit, node: ast.Import | ast.ImportFrom, target: tuple[str, ...]
    ) -> None:
        """Record the references of an import statement, whether or not its names are used."""
        if target[0] in self.entry_points and target[0] not in self.modules:
            # A program that imports Ray may get the runtime `ray` without naming it.
            unit.strings.add(target[0])
        if isinstance(node, ast.Import) and (found := self.find_module(target, module)) is not None:
            unit.names.add(("", *found[0].name.split("."), "__name__"))

    def path_of(self, node: ast.AST, module: Module) -> str | None:
        """Return the path from the repository root that an expression stands for; None if it is no such path."""
        if isinstance(node, ast.Name):
            if node.id == "__file__":
                return module.path
            if node.id in module.path_expressions:
                value = module.path_expressions.pop(node.id)  # it may refer to itself: `path = path.parent`
                try:
                    return self.path_of(value, module)
                finally:
                    module.path_expressions[node.id] = value
            unit = module.units.get(node.id)
            if unit is not None and unit.alias is not None and len(unit.alias) > 1:
                found = self.find_module(unit.alias, module)
                if found is not None and len(found[1]) == 1 and found[1][0] in found[0].path_expressions:
                    return self.path_of(ast.Name(found[1][0]), found[0])
        elif isinstance(node, ast.Attribute):
            if node.attr == "parent":
                return _parent(self.path_of(node.value, module))
            if node.attr in ("__file__", "__path__") and isinstance(node.value, ast.Name):
                alias = module.units[node.value.id].alias if node.value.id in module.units else None
                found = self.find_module(alias, module) if alias else None
                if found is not None and not found[1]:
                    return found[0].path if node.attr == "__file__" else posixpath.dirname(found[0].path)
        elif isinstance(node, ast.Subscript):
            if isinstance(node.value, ast.Attribute) and node.value.attr == "parents":
                path = self.path_of(node.value.value, module)
                if path is not None and isinstance(node.slice, ast.Constant):
                    for _ in range(int(node.slice.value) + 1):
                        path = _parent(path)
                    return path
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == "Path" and len(node.args) == 1:
                return self.path_of(node.args[0], module)
            if isinstance(node.func, ast.Attribute) and node.func.attr in ("resolve", "absolute") and not node.args:
                return self.path_of(node.func.value, module)
            if isinstance(node.func, ast.Attribute) and node.func.attr == "with_name":
                return _join(_parent(self.path_of(node.func.value, module)), node.args[0])
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            return _join(self.path_of(node.left, module), node.right)
        return None

    # Resolving

    def find_module(self, target: Sequence[str], seen_from: Module) -> tuple[Module, tuple[str, ...]] | None:
        """Return the module that a dotted path leads to, and the rest of the path."""
        for length in range(len(target), 0, -1):
            name = ".".join(target[:length])
            if length == 1 and name not in self.modules:
                folder = posixpath.dirname(seen_from.path)
                name = self._siblings.get((folder, name)) or self._scripts.get(name, name)
            if name in self.modules:
                return self.modules[name], tuple(target[length:])
        return None

    def _resolve(self, module: Module, names: Sequence[str]) -> Iterator[str]:
        """Yield the nodes referred to by the use of a module's name, or of an attribute of it."""
        if not names:
            yield f"{module.name}:{_TREE}"
            return
        first, *rest = names
        submodule = self.modules.get(f"{module.name}.{first}")
        if first == "*":
            yield f"{module.name}:{_EXPORTS}"
        elif first in module.units:
            alias = module.units[first].alias
            if alias is None or not rest:
                yield f"{module.name}:{first}"
            else:
                yield f"{module.name}:{_BODY}"
                yield from self._resolve_path((*alias, *rest), module)
        elif submodule is not None and module.is_package:
            yield f"{module.name}:{_BODY}"
            yield from self._resolve(submodule, rest)
        elif first in ("__name__", "__doc__", "__all__"):
            yield f"{module.name}:{_BODY}"
        else:
            yield from self._resolve_unbound(module, names)

    def _resolve_unbound(self, module: Module, names: Sequence[str]) -> Iterator[str]:
        """Resolve a name that a module gets from ``import *`` or makes on request."""
        providers = [self.modules[star] for star in module.stars if star in self.modules]
        if "__getattr__" in module.units:
            yield f"{module.name}:{_BODY}"
            prefix = f"{module.name}."
            providers += [other for name, other in self.modules.items() if name.startswith(prefix)]
        providers = [provider for provider in providers if names[0] in provider.units]
        for provider in providers:
            yield from self._resolve(provider, names)
        if not providers:
            yield f"{module.name}:{_TREE}"

    def _resolve_path(self, target: Sequence[str], seen_from: Module) -> Iterator[str]:
        found = self.find_module(target, seen_from)
        if found is not None:
            yield from self._resolve(*found)

    def _resolve_string(self, module: Module, text: str) -> Iterator[str]:
        """Yield the references of a string that names a module, ``module:attribute`` or an entry point."""
        name, _, attribute = text.partition(":")
        for package, target in self.entry_points.get(text, []):
            of_same_package = module.path.startswith(f"{package}/") and text not in self._commands
            if not module.path.startswith("packages/") or of_same_package:
                yield from self._resolve_string(module, target)
        is_word = text in self.entry_points or text == "tests"  # it usually does not mean the module
        if name in self.modules and not is_word:
            yield from self._resolve(self.modules[name], [attribute] if attribute else [])
        elif "." in name and (found := self.find_module(name.split("."), module)) is not None:
            owner, rest = found
            if rest[0] in owner.units:
                yield from self._resolve(owner, rest)

    def _resolve_fixture(self, module: Module, name: str) -> Iterator[str]:
        for place in [module, *self._conftests(module.path)]:
            unit = place.units.get(name)
            if unit is not None and (unit.is_fixture or (place is not module and len(unit.alias or ()) > 1)):
                yield f"{place.name}:{name}"
                return

    def _conftests(self, path: str) -> list[Module]:
        """Return the ``conftest.py`` files that apply to a test file, the nearest first."""
        folders = []
        while path:
            path = posixpath.dirname(path)
            folders.append(posixpath.join(path, "conftest.py"))
        return [self.by_path[file] for file in folders if file in self.by_path]

    def _resolve_files(self, path: str, strings: set[str]) -> list[str]:
        """Return the files that a path of a unit stands for; a folder stands for all of its files."""
        if "*" not in path:
            return self._below.get(path, [])
        # The placeholder of an f-string: if the module names some of the matches, the unit refers to these.
        pattern = re.compile(fnmatch.translate(path).replace(".*", "(.*)", 1))
        matches = {file: match[1] for file in self.files if (match := pattern.match(file))}
        return [file for file, name in matches.items() if name in strings] or list(matches)

    # Connecting

    def _connect(self) -> None:
        for module in [*self.by_path.values(), *self.pages.values()]:
            self._connect_module(module)
        source_files = [file for file in self.files if "/src/" in file and not file.endswith(".py")]
        named = {node for found in self.edges.values() for node in found}
        for file in source_files:
            if f"file {file}" not in named:  # it may be read by any module of its package
                folder = posixpath.dirname(file)
                while folder and f"{folder}/__init__.py" not in self.by_path:
                    folder = posixpath.dirname(folder)
                if folder:
                    self.edges[f"{self.by_path[f'{folder}/__init__.py'].name}:{_BODY}"].add(f"file {file}")
        self.tests = dict(self._find_tests())
        for test, nodes in self.tests.items():
            self.edges[f"test {test}"].update(nodes)

    def _connect_module(self, module: Module) -> None:
        whole, tree, run, body = (f"{module.name}:{unit}" for unit in (_EXPORTS, _TREE, _RUN, _BODY))
        self.edges[whole].update((body, f"{module.name}:{_SCRIPT}"))
        self.edges[tree].add(whole)
        self.edges[run].update((body, f"{module.name}:{_SCRIPT}"))
        parts = module.name.split(".")
        for length in range(1, len(parts)):
            if ".".join(parts[:length]) in self.modules:
                self.edges[body].add(f"{'.'.join(parts[:length])}:{_BODY}")
        if module.is_package:
            prefix = f"{module.name}."
            self.edges[tree].update(f"{name}:{_TREE}" for name in self.modules if name.startswith(prefix))
        strings = {text for unit in module.units.values() for text in unit.strings}
        for name, unit in list(module.units.items()):
            node = f"{module.name}:{name}"
            found = self.edges[node]
            found.add(body)
            if unit.alias is None:
                self.edges[whole].add(node)
                self.edges[run].add(node)
            else:
                found.update(self._resolve_path(unit.alias, module))
                target = self.find_module(unit.alias, module)
                if target is not None and target[1]:  # a name that it exports, not a module that it uses
                    self.edges[whole].add(node)
            for first, *rest in unit.names:
                found.update(self._resolve(module, [first, *rest]) if first else self._resolve_path(rest, module))
            for text in unit.strings:
                found.update(self._resolve_string(module, text))
            for text in unit.fixtures:
                found.update(self._resolve_fixture(module, text))
            for path in unit.paths | unit.read:
                for file in self._resolve_files(path, strings):
                    found.add(f"file {file}")
                    if file in self.by_path and path in unit.paths:
                        found.add(f"{self.by_path[file].name}:{_RUN}")
            # A name of a lazy facade is looked up in its submodules, see _resolve_unbound.
            imports_more = self.edges[whole] if name == "__getattr__" else found
            for pattern in unit.submodules:
                matching = [other for other in self.modules if fnmatch.fnmatch(other, pattern)]
                named = [other for other in matching if other.rpartition(".")[2] in strings]
                imports_more.update(f"{other}:{_TREE}" for other in named or matching)
            found.discard(node)

    def _find_tests(self) -> Iterator[tuple[str, set[str]]]:
        """Yield every test, as an argument for pytest or a script in ``tests/isolation``, with its first references."""
        for path, module in self.by_path.items():
            folder, file = posixpath.split(path)
            if not module.is_test or not file.startswith(("test_", "check_")):
                continue
            shared = {f"{conftest.name}:{_BODY}" for conftest in self._conftests(path)}
            for conftest in self._conftests(path):
                shared |= {f"{conftest.name}:{name}" for name, unit in conftest.units.items() if unit.automatic}
            if path == PAGE_TESTS and PAGE_TEST in module.units:
                yield from self._find_page_tests(module, shared)
            elif file.startswith("test_") or folder == "tests/isolation":
                yield path, {f"{module.name}:{_RUN}", *shared}

    def _find_page_tests(self, module: Module, shared: set[str]) -> Iterator[tuple[str, set[str]]]:
        """Yield one test for each page that has code to execute, and the other tests of the same file."""
        page_test = f"{module.name}:{PAGE_TEST}"
        # The list of all pages determines the tests, but is not a dependency of each test.
        lists = {f"{module.name}:{name}" for name, unit in module.units.items() if unit.alias is not None}
        common = {f"{module.name}:{_BODY}", *shared}
        for node in self.edges.pop(page_test) - lists:
            common.add(node)
        for path, page in self.pages.items():
            yield f"{module.path}::{PAGE_TEST}[{path}]", {f"{page.name}:{_RUN}", f"file {path}", *common}
        for name in module.units:
            if name.startswith("test_") and name != PAGE_TEST:
                yield f"{module.path}::{name}", {f"{module.name}:{name}", *common}

    # Selecting

    def select(self) -> dict[str, list[str]]:
        """Return the tests that a changed file can affect, each with the references that lead from it to that file."""
        for path in sorted(self.changed):
            if any(fnmatch.fnmatch(path, pattern) for pattern in _EVERYTHING):
                return {test: [f"test {test}", f"file {path}"] for test in self.tests}
        backwards: dict[str, list[str]] = defaultdict(list)
        nodes: set[str] = set()
        for source, targets in self.edges.items():
            nodes.add(source)
            nodes |= targets
            for target in targets:
                backwards[target].append(source)
        towards: dict[str, str] = {}
        waiting: deque[str] = deque()
        prefixes = {module.name: path for path, module in {**self.by_path, **self.pages}.items()}
        known = set()
        for node in sorted(nodes):
            name = node.removeprefix("file ") if node.startswith("file ") else node.rpartition(":")[0]
            path = prefixes.get(name, name)
            known.add(path)
            if path in self.changed and not node.startswith("test "):
                towards[node] = ""
                waiting.append(node)
        for path in sorted(self.changed - known):
            if not any(fnmatch.fnmatch(path, pattern) for pattern in _INERT):
                return {test: [f"test {test}", f"file {path}"] for test in self.tests}
        while waiting:
            node = waiting.popleft()
            for source in backwards[node]:
                if source not in towards:
                    towards[source] = node
                    waiting.append(source)
        return {test: _chain(f"test {test}", towards) for test in self.tests if f"test {test}" in towards}


def _chain(node: str, towards: dict[str, str]) -> list[str]:
    chain = [node]
    while towards[chain[-1]]:
        chain.append(towards[chain[-1]])
    return chain


def page_code(text: str) -> str:
    """Return the code that a page executes, and the paths of the example plugins that are installed for it."""
    blocks = [match for match in _CODE_BLOCK.finditer(text) if not match["skipped"]]
    code = [match["code"] if match["kind"] == "python" else f"_ = {match['code']!r}" for match in blocks]
    plugins = [f"_ = {f'docs/{found[3:]}'!r}" for found in _INSTALLED.findall(text)]
    return "\n".join([*code, *plugins] if code else [])


def _parse(text: str, path: str = "<string>") -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # escape sequences in text that only looks like code
        return ast.parse(text, path)


def _module_name(path: str) -> str:
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts[parts.index("src") + 1 :] if "src" in parts else parts)


def _bindings(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the names that an import statement binds, each with the dotted path that it refers to."""
    for alias in node.names:
        path = alias.name.split(".")
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, (*(node.module or "").split("."), alias.name)
        elif alias.asname:
            yield alias.asname, tuple(path)
        else:
            yield path[0], (path[0],)


def _declare(module: Module, statements: Sequence[ast.stmt]) -> None:
    """Declare the top-level names of a module, before any of them is resolved."""
    module.units[_BODY] = module.units[_BODY]
    for node in statements:
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            _declare(module, node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for block in _blocks(node):
                _declare(module, block)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for name, target in _bindings(node):
                if name == "*":
                    module.stars.append(".".join(target[:-1]))
                else:
                    module.units[name].alias = target
        else:
            for name in _bound_names(node):
                unit = module.units[name]
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    decorators = "".join(map(ast.dump, node.decorator_list))
                    unit.is_fixture = "'fixture'" in decorators
                    unit.automatic = name.startswith("pytest_") or "autouse" in decorators
                elif isinstance(node, ast.Assign):
                    module.path_expressions[name] = node.value


def _bound_names(node: ast.stmt) -> list[str]:
    """Return the names that a top-level statement defines; none if it may also have a side effect."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return []
    names = [inner for target in targets if target is not None for inner in _flatten(target)]
    return [inner.id for inner in names if isinstance(inner, ast.Name)] if names else []


def _flatten(target: ast.expr) -> list[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        return [inner for element in target.elts for inner in _flatten(element)]
    return [target]


def _blocks(node: ast.If | ast.Try | ast.With) -> list[Sequence[ast.stmt]]:
    handlers = [handler.body for handler in getattr(node, "handlers", [])]
    return [node.body, *handlers, getattr(node, "orelse", []), getattr(node, "finalbody", [])]


def _is_type_checking(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in (getattr(test, "id", ""), getattr(test, "attr", ""))


def _is_fixture(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("'fixture'" in ast.dump(decorator) for decorator in node.decorator_list)


def _is_own_name(node: ast.expr) -> bool:
    return isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name) and node.value.id == "__name__"


def _parent(path: str | None) -> str | None:
    return None if path is None else posixpath.dirname(path)


def _join(path: str | None, node: ast.expr) -> str | None:
    if path is None:
        return None
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return posixpath.join(path, node.value)
    return path


def _git(root: Path, *arguments: str) -> list[str]:
    command = ["git", "-C", str(root), *arguments]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [entry for entry in output.split("\0") if entry]


def list_files(root: Path) -> list[str]:
    """Return the files of a repository that are tracked, or new and not ignored."""
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return [file for file in listed if (root / file).is_file()]


def changed_files(root: Path, base: str) -> set[str]:
    """Return the files that differ from a revision, including deleted and untracked ones."""
    differing = _git(root, "diff", "-z", "--name-only", "--no-renames", base, "--")
    return {*differing, *_git(root, "ls-files", "-z", "--others", "--exclude-standard")}


def default_base(root: Path) -> str:
    """Return the commit at which this branch left main; HEAD on main itself or if there is no main."""
    for main in ("main", "origin/main"):
        found = subprocess.run(
            ["git", "-C", str(root), "merge-base", "HEAD", main], capture_output=True, text=True, check=False
        )
        if found.returncode == 0:
            return found.stdout.strip()
    return "HEAD"


def as_arguments(tests: Iterable[str], graph: Graph) -> list[str]:
    """Return the tests as arguments for pytest; all tests of a file become that file."""
    selected = set(tests)
    for path in {test.partition("::")[0] for test in selected}:
        of_file = {test for test in graph.tests if test.partition("::")[0] == path}
        if of_file <= selected:
            selected = selected - of_file | {path}
    return sorted(selected)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.affected", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", metavar="REV", help="the revision to compare with (where this branch left main)")
    parser.add_argument("--changed", nargs="+", metavar="FILE", help="assume that these files have changed instead")
    parser.add_argument("--why", metavar="TEST", help="show the references from this test to a changed file")
    options = parser.parse_args()

    gc.disable()  # syntax trees are many objects and few cycles: this halves the time
    changed = set(options.changed or changed_files(ROOT, options.base or default_base(ROOT)))
    graph = Graph(ROOT, list_files(ROOT), changed)
    selected = graph.select()
    if options.why is None:
        print("\n".join(as_arguments(selected, graph)))
        return
    chains = [chain for test, chain in selected.items() if test.startswith(options.why)]
    if not chains:
        sys.exit(f"{options.why}: not selected by the change of {', '.join(sorted(changed)) or 'no file'}")
    print("\n  -> ".join(step for step in chains[0]))


if __name__ == "__main__":
    main()
