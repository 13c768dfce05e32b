"""The structure of the packages: import cost, import direction, public names, and sizes."""

import ast
import functools
import importlib
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import drivetrain
from drivetrain import errors
from drivetrain._base import elsewhere
from tests.lines import count_lines

PACKAGE = Path(drivetrain.__file__).parent
PACKAGES = Path(__file__).parents[2] / "packages"
SOURCES = {str(file.relative_to(PACKAGES)): file for file in sorted(PACKAGES.glob("*/src/**/*.py"))}
HEAVY = {"torch", "ray", "numpy", "pandas", "pyarrow", "fsspec", "rich", "tensorflow", "jax", "pytest", "optuna"}
MAX_MODULES = 90

# From the bottom up: a module imports only from its own folder and from rows above its row in this list.
ROWS = """
    errors _version
    _base
    config
    _storage
    _hooks
    _plugins
    _wire
    _worker
    _runtimes
    loggers
    runs
    _driver
    __main__
"""
ROW_OF = {name: row for row, line in enumerate(ROWS.strip().split("\n")) for name in line.split()}
FACADES = ("__init__", "plugin")  # they only re-export; no module of the core imports them

# For each package, the other packages that it imports, apart from the core. Each is a requirement or an extra of it,
# or named in an error that says how to install it.
IMPORTED_PACKAGES = {
    "gbdt": {"data"},
    "hf": {"torch"},
    "lightning": {"torch"},
    "ray": {"torch"},
    "testing": {"console", "interactive"},
    "torch": {"testing"},
    "track": {"testing"},
}

ADAPTER = "ray/src/drivetrain_ray/_drains.py"
"""The only file that uses a private name of a dependency: Ray has no public one."""

MAX_LINES_OF_FILE = 500
MAX_LINES_OF_FUNCTION = 60
MAX_ATTRIBUTES = 12
MAX_METHODS = 35

# Units above a limit, with their sizes. No entry may be added or grow.
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}
CLASSES_WITH_MANY_ATTRIBUTES: dict[str, int] = {
    "LocalGroup": 16,
    "RayGroup": 15,
    "CommandGroup": 13,
    "MLflowLoggerCallback": 13,
    "WandbLoggerCallback": 13,
}
CLASSES_WITH_MANY_METHODS: dict[str, int] = {
    "LocalGroup": 51,
    "RayGroup": 52,
    "CommandGroup": 51,
    "RemoteGroup": 41,
}

PUBLIC_NAMES = set(
    """
    BackendError Callback CallbackError Checkpoint CheckpointConfig CheckpointError CheckpointUploadMode
    ConfigurationError DataConfig DataParallelTrainer DrivetrainError FailureConfig FailureKind PluginBrokenError
    PluginError PluginNotFoundError PreemptionInfo RemoteError ResourceError Result RunCancelledError RunConfig
    RunExistsError RunHandle RunInUseError ScalingConfig SerializationError SessionError StorageError SyncConfig
    TrainContext TrainingFailedError WaitTimeoutError WorkerDiedError __version__ get_checkpoint get_context
    get_dataset_shard get_preemption_info heartbeat prepare report restore resume_later shared_checkpoint
    """.split()  # noqa: SIM905 - a list of forty quoted names is harder to read
)
MAX_NAMES_OF_PLUGIN_MODULE = 15


class _Imports(ast.NodeVisitor):
    """Collects the private names and the imports of a module, including those in functions and for type checkers."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []
        self.executed: list[tuple[str, str]] = []
        self.private: list[str] = []
        self._only_types = False

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            before, self._only_types = self._only_types, True
            for statement in node.body:
                self.visit(statement)
            self._only_types = before
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self._add([(alias.name, "") for alias in node.names])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._add([(node.module or "", alias.name) for alias in node.names])

    def visit_Call(self, node: ast.Call) -> None:
        """Add the modules that are imported by a name in a string."""
        names = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        if names and ast.unparse(node.func) in ("importlib.import_module", "import_module"):
            self._add([(names[0], "")])
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.attr.startswith("_") and not node.attr.startswith("__"):
            self.private.append(f"{node.value.id}.{node.attr}")
        self.generic_visit(node)

    def _add(self, imports: list[tuple[str, str]]) -> None:
        self.found += imports
        if not self._only_types:
            self.executed += imports


@functools.cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def _read(file: Path) -> _Imports:
    imports = _Imports()
    imports.visit(_parse(file))
    return imports


def _name_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {_name_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def _own_imports(name: str) -> set[str]:
    """Return the modules of the core that a core module imports."""
    imported = set()
    for module, attribute in _read(MODULES[name]).found:
        if module == "drivetrain" or module.startswith("drivetrain."):
            path = module.removeprefix("drivetrain").lstrip(".")
            inner = f"{path}.{attribute}".lstrip(".")
            imported.add(inner if inner in MODULES else path or "__init__")
    return imported - {name}


def _upward_imports() -> Iterator[tuple[str, str]]:
    for name in MODULES:
        folder = name.partition(".")[0]
        for imported in () if folder in FACADES else _own_imports(name):
            other = imported.partition(".")[0]
            if other != folder and (other in FACADES or ROW_OF[other] >= ROW_OF[folder]):
                yield name, imported


def test_importing_drivetrain_loads_no_framework_and_few_modules() -> None:
    code = "import drivetrain, sys; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout.split()

    assert not HEAVY & {name.partition(".")[0] for name in loaded}
    assert len(loaded) <= MAX_MODULES, f"{len(loaded)} modules: {loaded}"


def test_importing_drivetrain_starts_no_thread_and_no_process_and_leaves_signals_alone() -> None:
    code = (
        "import signal; before = [signal.getsignal(n) for n in signal.valid_signals()]\n"
        "import drivetrain, os, threading\n"
        "assert [signal.getsignal(n) for n in signal.valid_signals()] == before\n"
        "assert threading.active_count() == 1 and len(os.listdir('/proc/self/task')) == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_pinned_and_exist() -> None:
    assert set(drivetrain.__all__) == PUBLIC_NAMES
    for name in drivetrain.__all__:
        assert hasattr(drivetrain, name)


@pytest.mark.parametrize("facade", FACADES)
def test_facade_exports_the_same_names_at_run_time_and_to_type_checkers(facade: str) -> None:
    module = importlib.import_module(f"drivetrain.{facade}".removesuffix(".__init__"))
    shown = {
        name: source
        for source, name in _read(MODULES[facade]).found
        if name not in ("TYPE_CHECKING", "lazy_names", "__version__")
    }
    sources = {name: source for source, names in module._SOURCES.items() for name in names.split()}
    assert sources == shown
    assert set(module.__all__) == {*shown, *(["__version__"] if facade == "__init__" else [])}
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in dir(module)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = module.no_such_name


def test_public_modules_are_attributes_of_the_package() -> None:
    code = "import drivetrain; drivetrain.errors.StorageError, drivetrain.plugin.Runtime, drivetrain.loggers"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_exception_is_public_and_documented_in_the_tree() -> None:
    classes = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert classes == set(errors.__all__) <= set(drivetrain.__all__)
    for name in classes - {"FailureKind"}:
        assert name in (errors.__doc__ or "")


def test_every_folder_has_a_row() -> None:
    assert {name.partition(".")[0] for name in MODULES} == {*ROW_OF, *(name for name in FACADES if name in MODULES)}


def test_no_module_imports_from_a_row_below_its_own() -> None:
    assert not list(_upward_imports()), "imports against the order of ROWS"


def _imports_of_house(file: Path, house: Collection[str]) -> set[str]:
    """Return the modules of all packages that a module imports, including those that only type checkers see."""
    found = {(module, f"{module}.{name}") for module, name in _read(file).found}
    return {inner if inner in house else module for module, inner in found if module in house}


def test_no_cycle_between_modules_of_all_packages() -> None:
    house = {
        ".".join(Path(name).with_suffix("").parts[2:]).removesuffix(".__init__"): file for name, file in SOURCES.items()
    }
    graph = {name: _imports_of_house(file, house) - {name} for name, file in house.items()}
    assert sum(map(len, graph.values())) > len(graph), "few imports were found"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(reversed(error.args[1]))}")


@pytest.mark.parametrize("name", MODULES)
def test_only_adapters_import_optional_dependencies_and_none_imports_ray(name: str) -> None:
    tops = {module.partition(".")[0] for module, _ in _read(MODULES[name]).executed}
    allowed = {
        "_storage.remote": {"pyarrow"},
        "_storage.parquetparts": {"pyarrow"},
        "loggers.parquetfile": {"pyarrow"},
        "_driver.result": {"pandas"},
        "_worker.arrayfiles": {"numpy"},
        "_worker.jsonvalues": {"numpy"},
    }
    assert not tops & HEAVY - allowed.get(name, set()) - {"fsspec"}


@pytest.mark.parametrize("file", SOURCES.values(), ids=SOURCES)
def test_module_uses_no_private_names_of_its_dependencies(file: Path) -> None:
    imports = _read(file)
    modules = {module.partition(".")[0] for module, _ in imports.executed} - {"drivetrain", "__future__"}
    modules = {module for module in modules if not module.startswith("drivetrain_")}
    allowed = {"os._exit", "sys._getframe", "sys._xoptions"}  # documented in spite of their underscores
    assert not [use for use in imports.private if use.partition(".")[0] in modules and use not in allowed]
    if str(file.relative_to(PACKAGES)) == ADAPTER:
        return
    for module, imported in imports.executed:
        if not module.startswith(("drivetrain", "__future__")):
            assert not any(part.startswith("_") for part in [*module.split("."), imported] if part)


PLUGIN_FILES = sorted(PACKAGES.glob("*/src/drivetrain_*/**/*.py"))


@pytest.mark.parametrize("file", PLUGIN_FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_plugin_touches_only_public_names_of_the_core(file: Path) -> None:
    for module, name in _read(file).found:
        if module.partition(".")[0] == "drivetrain":
            assert not any(part.startswith("_") for part in module.split(".")), f"{file} imports {module}"
            facade = importlib.import_module(module)
            assert not name or name in facade.__all__, f"{file}: {name} of {module} is not public"


def test_packages_import_only_those_that_are_listed() -> None:
    found: dict[str, set[str]] = {}
    for file in PLUGIN_FILES:
        own = file.relative_to(PACKAGES).parts[0]
        for module, _ in _read(file).found:
            other = module.partition(".")[0].removeprefix("drivetrain_")
            if module.startswith("drivetrain_") and other != own:
                assert "._" not in module, f"{file} imports {module}"
                found.setdefault(own, set()).add(other)
    assert found == IMPORTED_PACKAGES
    for file in MODULES.values():
        assert not [module for module, _ in _read(file).found if module.startswith("drivetrain_")], file


def test_packages_do_not_import_each_other() -> None:
    try:
        TopologicalSorter(IMPORTED_PACKAGES).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(reversed(error.args[1]))}")


def test_modules_of_drivetrain_plugin_are_small_and_have_different_names() -> None:
    modules = [importlib.import_module(f"drivetrain.{name}") for name in MODULES if name.startswith("plugin")]
    seen: dict[str, str] = {}
    for module in modules:
        assert 0 < len(module.__all__) <= MAX_NAMES_OF_PLUGIN_MODULE, module.__name__
        for name in module.__all__:
            assert seen.setdefault(name, module.__name__) == module.__name__, name


def _length(node: ast.AST) -> int:
    return (getattr(node, "end_lineno", 0) or 0) - getattr(node, "lineno", 0) + 1


def _function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return _length(node) - (0 if ast.get_docstring(node) is None else _length(node.body[0]))


def _attributes(node: ast.ClassDef) -> set[str]:
    """Return the names that methods assign to `self`, and the fields declared in the body."""
    fields = [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]
    names = {ast.unparse(field.target) for field in fields if "ClassVar" not in ast.unparse(field.annotation)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and ast.unparse(inner.value) == "self":
            names.add(inner.attr)
    return names


def test_files_are_short() -> None:
    lines = {name: count_lines(file.read_text()) for name, file in SOURCES.items()}
    assert {name: count for name, count in lines.items() if count > MAX_LINES_OF_FILE} == LONG_FILES


def test_jax_plugin_shows_that_a_plugin_is_thin() -> None:
    lines = {file.stem: count_lines(file.read_text()) for file in PACKAGES.glob("jax/src/drivetrain_jax/*.py")}
    state = sum(lines.pop(name) for name in ("_state", "_statefiles", "_placement"))
    assert 0 < sum(lines.values()) <= 250
    assert state <= 250


def test_functions_are_short() -> None:
    found = {}
    for name, file in SOURCES.items():
        for node in ast.walk(_parse(file)):
            is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            if is_function and (count := _function_lines(node)) > MAX_LINES_OF_FUNCTION:
                found[f"{name} {node.name}"] = count
    assert found == LONG_FUNCTIONS


def _methods(node: ast.ClassDef) -> set[str]:
    """Return the names of the methods, except for special methods."""
    return {each.name for each in node.body if isinstance(each, ast.FunctionDef) and not each.name.startswith("__")}


def _classes() -> dict[str, ast.ClassDef]:
    """Return the classes by name; one of them if several have the same name."""
    exempt = (PACKAGE / "config.py", PACKAGE / "_driver" / "job.py")  # a configuration has a field per option
    trees = [_parse(file) for file in SOURCES.values() if file not in exempt]
    return {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _with_base_classes(
    count: Callable[[ast.ClassDef], set[str]], name: str, classes: dict[str, ast.ClassDef]
) -> set[str]:
    """Return what a class and its base classes in the packages have."""
    names = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in classes[name].bases]
    inherited = [_with_base_classes(count, base, classes) for base in names if base in classes and base != name]
    return count(classes[name]).union(*inherited)


@pytest.mark.parametrize(
    ("count", "limit", "exceptions"),
    [(_attributes, MAX_ATTRIBUTES, CLASSES_WITH_MANY_ATTRIBUTES), (_methods, MAX_METHODS, CLASSES_WITH_MANY_METHODS)],
    ids=["attributes", "methods"],
)
def test_classes_are_small_with_their_base_classes(
    count: Callable[[ast.ClassDef], set[str]], limit: int, exceptions: dict[str, int]
) -> None:
    classes = _classes()
    sizes = {name: len(_with_base_classes(count, name, classes)) for name in classes}
    assert {name: size for name, size in sizes.items() if size > limit} == exceptions


def test_unknown_name_of_another_package_is_named_with_its_import() -> None:
    with pytest.raises(AttributeError, match=r"'torch'\. Write: from drivetrain_torch import prepare_model"):
        drivetrain.torch.prepare_model  # type: ignore[attr-defined]  # noqa: B018
    for place, names in elsewhere.PLACES.items():
        package, _, module = place.partition(".")
        file = PACKAGES / package / "src" / f"drivetrain_{package}" / f"{module or '__init__'}.py"
        missing = [name for name in names.split() if f'"{name}"' not in file.read_text()]
        assert not missing, f"{place} does not export {missing}"


def test_name_of_another_package_is_refused_with_its_import() -> None:
    with pytest.raises(
        ImportError, match=r"'Trainer' from 'drivetrain'\. Write: from drivetrain_interactive import Tra"
    ):
        from drivetrain import Trainer  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(ImportError, match=r"Write: from drivetrain_track import TrackerCallback"):
        from drivetrain.loggers import TrackerCallback  # type: ignore[attr-defined]  # noqa: F401
    assert not hasattr(drivetrain, "world_rank")  # which pickle looks up in all modules
