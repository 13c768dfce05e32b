"""The shape of the package: what importing it costs, and who may import whom."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import drivetrain
from drivetrain import errors

PACKAGE = Path(drivetrain.__file__).parent
PACKAGES = Path(__file__).parents[2] / "packages"
HEAVY = {"torch", "ray", "numpy", "pandas", "pyarrow", "fsspec", "rich", "tensorflow", "pytest", "optuna"}
MAX_MODULES = 300

# From the ground up: a module imports only from lines above its own.
LAYERS = """
    _version console context control crashpoints errors interactive interrupts loggers loggers.standing
    loggers.usage pickling runtime runtime.stacks views views.figures views.terminal
    backend callback data.batches events failure loggers.panel plugins policy runtime.output storage.filesystem
    storage.node storage.transfer tune.space
    data.position interactive.callbacks loggers.csvfile loggers.jsonfile loggers.timeline preemption reports
    runtime.base runtime.wire storage.remote
    interactive.warm notebook storage
    checkpoint config storage.lock storage.mirror
    checkpoints loggers.tracker runtime.resources tune.merge
    attempt loggers.aim loggers.comet loggers.mlflow loggers.progress loggers.wandb testing.crash uploads
    views.records
    loggers.chosen session views.curves
    data.shard interactive.dicts interactive.ranks views.page workspace
    cli.output data.sources loggers.tensorboard result rundir runtime.worker views.server
    cli.checkpoints cli.doctor cli.gc cli.tail controller data.config handle runtime.forkserver
    runtime.inprocess runtime.ray.worker runtime.remote tune.results
    cli.runs data interactive.iterator runtime.local runtime.ray.actors runtime.ray.cluster tune.search
    runtime.ray
    tune.raytune
    trainer
    cli.run interactive.trainer testing.conformance tune.runner
    . cli testing tune.tuner
    testing.crashjob tune
"""
LAYER_OF = {name: layer for layer, line in enumerate(LAYERS.split("\n")) for name in line.split()}
MODULES = {
    str(file.relative_to(PACKAGE).with_suffix("")).replace("/", ".").removesuffix("__init__").rstrip(".") or ".": file
    for file in sorted(PACKAGE.rglob("*.py"))
}

PUBLIC_NAMES = set(
    """
    Backend BackendConfig Callback CallbackError Checkpoint CheckpointConfig CheckpointError CheckpointUploadMode
    CommittedCheckpoint ConfigurationError DataParallelTrainer DrivetrainError Failure FailureConfig FailureKind
    FailurePolicy PluginBrokenError PluginError PluginNotFoundError PreemptionInfo RemoteError Report ResourceError
    Result Run RunConfig RunCancelledError RunExistsError RunHandle RunInUseError ScalingConfig SerializationError
    SessionError StorageError SyncConfig TrainContext TrainingFailedError WaitTimeoutError WorkerDiedError
    WorkerGroup WorkerInfo __version__ DataConfig DatasetShard get_checkpoint get_context get_dataset_shard
    get_preemption_info report CheckpointStrategy Trainer TrainingCallback TrainingIterator
    load_checkpoint local_rank save_checkpoint world_rank world_size
    """.split()  # noqa: SIM905 - a list of forty quoted names is harder to read
)


class _Imports(ast.NodeVisitor):
    """Collects what a module imports when it runs, inside functions too; what only type checkers see is left out."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []
        self.private: list[str] = []

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [(alias.name, "") for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.found += [(node.module or "", alias.name) for alias in node.names]

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.attr.startswith("_") and not node.attr.startswith("__"):
            self.private.append(f"{node.value.id}.{node.attr}")
        self.generic_visit(node)


def _read(file: Path) -> _Imports:
    imports = _Imports()
    imports.visit(ast.parse(file.read_text()))
    return imports


def _rooms_imported_by(file: Path) -> set[str]:
    rooms = set()
    for module, name in _read(file).found:
        if module == "drivetrain" or module.startswith("drivetrain."):
            room = module.removeprefix("drivetrain").lstrip(".") or "."
            inner = name if room == "." else f"{room}.{name}"
            rooms.add(inner if inner in MODULES else room)
    return rooms


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


def test_public_names_are_pinned_and_there() -> None:
    assert set(drivetrain.__all__) == PUBLIC_NAMES
    for name in drivetrain.__all__:
        assert hasattr(drivetrain, name)


def test_every_exception_is_public_and_drawn_in_the_tree() -> None:
    classes = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert classes == set(errors.__all__) <= set(drivetrain.__all__)
    for name in classes - {"FailureKind"}:
        assert name in (errors.__doc__ or "")


@pytest.mark.parametrize("name", MODULES)
def test_module_imports_only_from_the_layers_below_it(name: str) -> None:
    assert name in LAYER_OF, f"put {name} into LAYERS, as low as its imports allow"
    for imported in _rooms_imported_by(MODULES[name]):
        assert LAYER_OF[imported] < LAYER_OF[name], f"{name} imports {imported}, which is not below it"


def test_layers_name_only_modules_that_exist() -> None:
    assert set(LAYER_OF) == set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_only_its_own_room_knows_ray_and_none_knows_a_framework(name: str) -> None:
    tops = {module.partition(".")[0] for module, _ in _read(MODULES[name]).found}
    allowed = {
        "runtime.ray": {"ray"},
        "runtime.ray.actors": {"ray"},
        "runtime.ray.cluster": {"ray"},
        "runtime.ray.worker": {"ray"},
        "storage.remote": {"pyarrow"},
        "data.batches": {"numpy", "pyarrow", "tensorflow", "torch"},
        "data.config": {"ray"},
        "data.position": {"numpy", "pyarrow"},
        "data.shard": {"pyarrow", "tensorflow", "torch"},
        "data.sources": {"numpy", "pyarrow"},
        "testing.conformance": {"pytest"},
        "loggers.panel": {"rich"},
        "loggers.tensorboard": {"numpy"},
        "tune.raytune": {"ray"},
        "tune.results": {"pandas"},
        "tune.search": {"optuna"},
        "tune.space": {"optuna", "ray"},
        "result": {"pandas"},
    }
    assert not tops & HEAVY - allowed.get(name, set()) - {"fsspec"}


@pytest.mark.parametrize("name", MODULES)
def test_module_uses_no_private_names_of_its_dependencies(name: str) -> None:
    imports = _read(MODULES[name])
    modules = {module.partition(".")[0] for module, _ in imports.found} - {"drivetrain", "__future__"}
    allowed = {"os._exit"}  # documented, its underscore notwithstanding
    assert not [use for use in imports.private if use.partition(".")[0] in modules and use not in allowed]
    for module, imported in imports.found:
        if not module.startswith(("drivetrain", "__future__")):
            assert not any(part.startswith("_") for part in [*module.split("."), imported] if part)


@pytest.mark.parametrize("file", sorted(PACKAGES.glob("*/src/drivetrain_*/**/*.py")), ids=lambda file: file.stem)
def test_plugin_touches_only_public_names_of_the_core(file: Path) -> None:
    for module, name in _read(file).found:
        if module == "drivetrain":
            assert name in drivetrain.__all__, f"{file}: {name} is not public"
        else:
            assert not module.startswith("drivetrain.") or module == "drivetrain.testing", f"{file} imports {module}"


def _lines_of_code(file: Path) -> int:
    """The lines that are not blank, comments or docstrings."""
    source = file.read_text()
    strings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(source.splitlines(), 1)
    return sum(number not in strings and text.strip()[:1] not in ("", "#") for number, text in lines)


def test_engine_stays_small_and_no_module_wants_to_be_two() -> None:
    lines = {name: _lines_of_code(file) for name, file in MODULES.items()}
    engine = [
        count
        for name, count in lines.items()
        if not name.startswith(("loggers", "data", "tune", "cli", "testing", "interactive", "views"))
    ]
    assert sum(engine) <= 7_650
    assert max(engine) <= 500, max(lines, key=lines.__getitem__)
