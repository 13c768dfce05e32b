"""``python -m drivetrain_horovod.build``: compiles Horovod for this environment's PyTorch, and installs it.

Horovod 0.28.1, its last release, asks for C++14, which PyTorch's headers no longer compile with, and pip would build it
where no framework is. So this unpacks the release, has it ask for C++17, and compiles it against the PyTorch that is
installed here. That takes some minutes of CPU time. The wheel is kept in the user's cache directory, by the
versions of Horovod, PyTorch and Python, and tried before it is installed.

Horovod's own variables hold: ``HOROVOD_GPU_OPERATIONS=NCCL`` builds for GPUs, ``HOROVOD_WITH_MPI=1`` with MPI. Wheels
of different variables are kept apart.
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

__all__ = ["main"]

VERSION = "0.28.1"
_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
_BUILD_TOOLS = ("setuptools==84.0.0", "wheel", "packaging", "cloudpickle", "cffi", "psutil", "pyyaml")
_PROGRAMS = {"cmake": "CMake of at least 3.13", "make": "make", "g++": "a C++17 compiler"}
_PATCHED = ("CMakeLists.txt", "horovod/torch/CMakeLists.txt")
_TRIAL = "import horovod.torch as hvd; hvd.init(); assert hvd.size() == 1 and hvd.gloo_built(); hvd.shutdown()"
_TRIAL_S = 300


def main(arguments: Sequence[str] | None = None) -> None:
    """Builds Horovod unless the cache has it, and installs it.

    Args:
        arguments: of the command line; None for this process's.

    Raises:
        SystemExit: something that it needs is missing, or a step failed; the message says which.
    """
    parser = argparse.ArgumentParser(
        prog="python -m drivetrain_horovod.build",
        description="Compiles Horovod for this environment's PyTorch, unless that was done before, and installs it.",
    )
    parser.add_argument("--cache", type=Path, default=_cache(), help="where wheels are kept (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        sys.exit("expected PyTorch in this environment, to compile against, found none: run pip install torch")
    environment = _environment()
    folder = options.cache / _key(torch, environment)
    kept = next(folder.glob("*.whl"), None)
    if kept is None or not _install(kept):
        print(f"compiling Horovod {VERSION} for PyTorch {torch}, which takes some minutes", flush=True)
        kept = _build(folder, environment)
        if not _install(kept):
            kept.unlink()
            sys.exit(f"Horovod {VERSION} was built, and cannot be used with PyTorch {torch}: see above")
    print(f"installed {kept}")


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "drivetrain" / "horovod"


def _environment() -> dict[str, str]:
    """The variables of the build; what the user has set goes before."""
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
    """What a wheel was built for, as the name of a folder."""
    chosen = sorted(item for item in environment.items() if item[0].startswith("HOROVOD_"))
    options = hashlib.sha256(repr(chosen).encode()).hexdigest()[:8]
    return f"horovod-{VERSION}-torch-{torch}-{sys.implementation.cache_tag}-{sysconfig.get_platform()}-{options}"


def _build(folder: Path, environment: Mapping[str, str]) -> Path:
    if missing := [f"{name} ({what})" for name, what in _PROGRAMS.items() if shutil.which(name) is None]:
        sys.exit(f"expected {', '.join(missing)} on the PATH, found none; on Debian: apt install build-essential cmake")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="horovod-build-") as name:
        scratch = Path(name)
        tools = scratch / "tools"  # beside the environment, which stays as it is
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
        for patched in _PATCHED:
            text = (source / patched).read_text()
            (source / patched).write_text(text.replace("set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"))
        built = scratch / "wheel"
        # Not pip's cache, which knows only the version of Horovod.
        wheel = ["wheel", "--no-cache-dir", "--no-deps", "--no-build-isolation", "-w", str(built), str(source)]
        _run([*pip, *wheel], settings)
        (found,) = built.glob("*.whl")
        arriving = folder / f".{found.name}.{os.getpid()}"
        shutil.copyfile(found, arriving)
        return arriving.replace(folder / found.name)  # at once, as others may look


def _install(wheel: Path) -> bool:
    """Installs a wheel, and tells whether Horovod starts; what goes wrong then is shown."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    # The version does not tell what a wheel was built for, so it may have to replace itself.
    _run([*pip, "--force-reinstall", "--no-deps", str(wheel)])
    _run([*pip, str(wheel)])  # what it depends on
    alone = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    trial = [sys.executable, "-W", "ignore", "-c", _TRIAL]
    return subprocess.run(trial, env=alone, check=False, timeout=_TRIAL_S).returncode == 0


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    if subprocess.run(command, env=environment, check=False).returncode:
        sys.exit(f"failed, see above: {' '.join(command)}")


if __name__ == "__main__":
    main()
