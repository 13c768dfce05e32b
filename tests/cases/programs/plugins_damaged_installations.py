"""Damaged and hostile distributions disturb neither a run that does not use them nor a built-in command.

One distribution has no METADATA, the entry points of another cannot be decoded, plugins raise a `BaseException` when
they are imported or called, and a distribution takes the name of a built-in command. `drivetrain doctor` names them.
"""

# arguments: local; inprocess

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa

import drivetrain
from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig

KINDS = ("backends", "callbacks", "commands", "datasets", "policies", "prepare", "runtimes", "strategies", "trainers")
SOURCES = {
    "hostile_import": "raise BaseException('hostile')\n",
    "hostile_exit": "raise SystemExit(7)\n",
    "hostile_call": "class Hostile:\n    def __init__(self, *given):\n        raise BaseException('hostile')\n",
    "hostile_name": "def add(commands):\n    raise BaseException('this is not the built-in command')\n",
}


def install(directory: Path, name: str, entry_points: bytes, metadata: str | None) -> None:
    """Install a distribution."""
    info = directory / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_bytes(entry_points)
    if metadata is not None:
        (info / "METADATA").write_text(metadata)


def entry_points(module: str) -> bytes:
    """Return the entry points of a distribution that provides its module as a plugin of each kind."""
    groups = [f"[drivetrain.{kind}]\n{module} = {module}:Hostile\n" for kind in KINDS]
    return "\n".join(groups).encode()


def install_all(directory: Path) -> None:
    """Install all distributions."""
    for module, source in SOURCES.items():
        (directory / f"{module}.py").write_text(source)
        metadata = f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n"
        points = b"[drivetrain.commands]\nruns = hostile_name:add\n" if "name" in module else entry_points(module)
        install(directory, module, points, metadata)
    install(directory, "without_metadata", b"[drivetrain.runtimes]\nwithout = hostile_import:Hostile\n", None)
    install(directory, "without_utf8", b"[drivetrain.runtimes]\nx = \xff\xfe\n", "Name: x\nVersion: 1.0\n")
    install(directory, "without_value", b"[drivetrain.runtimes]\nx\n", "Name: y\nVersion: 1.0\n")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain", *arguments], capture_output=True, text=True, timeout=200, check=False
    )
    print(arguments, done.returncode, done.stdout[-3000:], done.stderr[-3000:], sep="\n")
    return done


def train() -> int:
    """Read the dataset."""
    return sum(len(batch["x"]) for batch in drivetrain.get_dataset_shard("train").iter_batches(batch_size=2))


def main() -> None:
    """Install the distributions, train, and run commands."""
    with tempfile.TemporaryDirectory() as directory:
        install_all(Path(directory))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (directory, os.environ.get("PYTHONPATH"))))
        sys.path.insert(0, directory)
        scaling = ScalingConfig(num_workers=0) if sys.argv[1] == "inprocess" else ScalingConfig(num_workers=1)
        result = DataParallelTrainer(
            train,
            datasets={"train": pa.table({"x": [1, 2, 3]})},
            scaling_config=scaling,
            run_config=RunConfig(storage_path=directory, verbose=0),
        ).fit()
        overview, runs, doctor = run("--help"), run("runs", "list", directory), run("doctor")
    assert result.return_value == 3
    assert overview.returncode == 0
    assert "hostile_import" in overview.stdout
    assert runs.returncode == 0
    assert "finished" in runs.stdout
    for expected in ("METADATA is missing", "hostile_name", "hostile_import", "UnicodeDecodeError"):
        assert expected in doctor.stdout, expected


if __name__ == "__main__":
    main()
