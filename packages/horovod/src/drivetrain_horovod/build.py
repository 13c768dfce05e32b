"""``python -m drivetrain_horovod.build``: compiles Horovod for this environment's PyTorch, and installs it.

Horovod 0.28.1, the last release, requests C++14, with which PyTorch's headers no longer compile. An operation that one
rank starts while another rank shuts Horovod down may never end. In addition, pip would build Horovod in an isolated
environment without a framework. This module therefore unpacks the release, patches its source (see
:mod:`drivetrain_horovod._patches`), and compiles it against the installed PyTorch. This takes some minutes of CPU time.
The wheel is stored in the user's cache directory, in a folder for these patches and for these versions of Horovod,
PyTorch and Python. The wheel is tested after it is installed.

Horovod's own environment variables for builds apply. For example, ``HOROVOD_GPU_OPERATIONS=NCCL`` adds support for
GPUs, and ``HOROVOD_WITH_MPI=1`` adds support for MPI. Wheels that were built with different variables are stored
separately.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from drivetrain_horovod._patches import PATCHES, apply_patches

__all__ = ["main"]

VERSION = "0.28.1"
_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
_BUILD_TOOLS = ("setuptools==84.0.0", "wheel", "packaging", "cloudpickle", "cffi", "psutil", "pyyaml")
_PROGRAMS = {"cmake": "CMake 3.13 or newer", "make": "make", "g++": "a C++17 compiler"}
_TRIAL = "import horovod.torch as hvd; hvd.init(); assert hvd.size() == 1 and hvd.gloo_built(); hvd.shutdown()"
_TRIAL_S = 300


def main(arguments: Sequence[str] | None = None) -> None:
    """Install Horovod. Build it first, unless the cache contains a wheel that works.

    Args:
        arguments: the command-line arguments, or None for those of this process.

    Raises:
        SystemExit: If a requirement is missing or a step failed. The message says which requirement or step.
    """
    parser = argparse.ArgumentParser(
        prog="python -m drivetrain_horovod.build",
        description="Compile Horovod for this environment's PyTorch, unless the cache contains it, and install it.",
    )
    parser.add_argument("--cache", type=Path, default=_cache(), help="the directory for wheels (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        sys.exit("drivetrain_horovod.build requires PyTorch, which is not installed. Run: pip install torch")
    environment = _environment()
    folder = options.cache / _key(torch, environment)
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None or not _install(wheel):
        print(f"compiling Horovod {VERSION} for PyTorch {torch}, which takes some minutes", flush=True)
        wheel = _build(folder, environment)
        if not _install(wheel):
            wheel.unlink()
            sys.exit(f"Horovod {VERSION} was built but does not work with PyTorch {torch}, see the output above")
    print(f"installed {wheel}")


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "drivetrain" / "horovod"


def _environment() -> dict[str, str]:
    """Return the environment variables for the build. Values set by the user take precedence."""
    defaults = {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "MAKEFLAGS": f"-j{os.cpu_count() or 1}",
    }
    if "HOROVOD_WITH_MPI" not in os.environ:
        defaults["HOROVOD_WITHOUT_MPI"] = "1"
    if platform.machine() == "x86_64":
        defaults["HOROVOD_BUILD_ARCH_FLAGS"] = "-mavx -mfma -mf16c"
    if sys.platform == "linux":
        defaults["LDFLAGS"] = "-Wl,--strip-debug"
    return {**defaults, **os.environ}


def _key(torch: str, environment: Mapping[str, str]) -> str:
    """Return the name of the cache folder for wheels with this PyTorch version, these variables and these patches."""
    chosen = sorted(item for item in environment.items() if item[0].startswith("HOROVOD_"))
    options = hashlib.sha256(repr((chosen, PATCHES)).encode()).hexdigest()[:8]
    return f"horovod-{VERSION}-torch-{torch}-{sys.implementation.cache_tag}-{sysconfig.get_platform()}-{options}"


def _build(folder: Path, environment: Mapping[str, str]) -> Path:
    if missing := [f"{name} ({label})" for name, label in _PROGRAMS.items() if shutil.which(name) is None]:
        sys.exit(f"PATH: expected {', '.join(missing)}, got none. On Debian, run: apt install build-essential cmake")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="horovod-build-") as name:
        scratch = Path(name)
        tools = scratch / "tools"  # a separate directory, so that the installed packages do not change
        pip = [sys.executable, "-m", "pip"]
        _run([*pip, "install", "--quiet", "--target", str(tools), *_BUILD_TOOLS])
        path = os.pathsep.join([str(tools), *filter(None, [environment.get("PYTHONPATH")])])
        settings = {**environment, "PYTHONPATH": path}
        requirement = scratch / "requirement.txt"
        requirement.write_text(f"horovod=={VERSION} --hash=sha256:{_SHA256}\n")
        download = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes"]
        _run([*pip, "download", "--quiet", *download, "-d", str(scratch), "-r", str(requirement)], settings)
        with tarfile.open(scratch / f"horovod-{VERSION}.tar.gz") as archive:
            archive.extractall(scratch, filter="data")
        source = scratch / f"horovod-{VERSION}"
        apply_patches(source)
        built = scratch / "wheel"
        # Do not use pip's cache: it distinguishes wheels by the version of Horovod, but not by the build's variables.
        wheel = ["wheel", "--no-cache-dir", "--no-deps", "--no-build-isolation", "-w", str(built), str(source)]
        _run([*pip, *wheel], settings)
        (result,) = built.glob("*.whl")
        draft = folder / f".{result.name}.{os.getpid()}"
        shutil.copyfile(result, draft)
        return draft.replace(folder / result.name)  # atomically, because other processes may read the folder


def _install(wheel: Path) -> bool:
    """Install a wheel, and return True if Horovod starts. Errors are printed."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    # The same version of Horovod may be installed from another build. --force-reinstall replaces it anyway.
    _run([*pip, "--force-reinstall", "--no-deps", str(wheel)])
    _run([*pip, str(wheel)])  # installs the dependencies
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    trial = [sys.executable, "-W", "ignore", "-c", _TRIAL]
    return subprocess.run(trial, env=environment, check=False, timeout=_TRIAL_S).returncode == 0


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    if subprocess.run(command, env=environment, check=False).returncode:
        sys.exit(f"command failed, see its output above: {' '.join(command)}")


if __name__ == "__main__":
    main()
