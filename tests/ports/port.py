"""A port: a program, the edits that let it run on two CPUs, and the edits for drivetrain."""

from __future__ import annotations

import difflib
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
PYTHON = ()


@dataclass(frozen=True)
class Edit:
    """Replaces a text that occurs once in a file."""

    old: str
    new: str
    file: str = ""

    def apply(self, text: str) -> str:
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"expected {self.old!r} once in the program, got it {count} times. Use another commit")
        return text.replace(self.old, self.new)


@dataclass(frozen=True, kw_only=True)
class Port:
    """A public program and its port.

    ``prepare`` is applied to the original, too: it makes the program small, lets it run without a GPU and without
    downloads, and calls the probe. ``changes`` are what drivetrain requires. ``resume_changes`` are applied in addition
    for the comparison of a killed run with an undisturbed one.
    """

    name: str
    repository: str
    script: str
    prepare: Sequence[Edit]
    changes: Sequence[Edit]
    kill: str
    launcher: Sequence[str] = TORCHRUN
    arguments: Sequence[str] = ()
    workers: int = 2
    """The number of workers of the port that is compared with the original. 0: the program calls ``fit()`` itself."""
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for ``drivetrain run`` that the own launcher sets."""
    resume_workers: int | None = None
    resume_changes: Sequence[Edit] = ()
    data: Callable[[Path], None] | None = None
    data_files: Sequence[str] = ()
    """Patterns of other files of the repository that the program reads."""

    @property
    def folder(self) -> str:
        return str(Path(self.script).parent)

    def write(self, checkout: Path, target: Path, edits: Sequence[Edit]) -> None:
        """Write the modules next to the program to a directory, and apply the edits."""
        target.mkdir(parents=True)
        patterns = [str(Path(self.folder, "*.py")), *self.data_files]
        for name in git(checkout, "ls-tree", "-r", "--name-only", "HEAD").splitlines():
            if any(fnmatch(name, pattern) for pattern in patterns):
                file = target / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(git_bytes(checkout, "show", f"HEAD:{name}"))
        for edit in edits:
            file = target / self.folder / (edit.file or Path(self.script).name)
            file.write_text(edit.apply(file.read_text()))
        home = target / self.folder
        (home / "probe.py").write_text(Path(__file__).with_name("probe.py").read_text())
        if self.data is not None:
            self.data(home)


def git(checkout: Path, *arguments: str, check: bool = True) -> str:
    return git_bytes(checkout, *arguments, check=check).decode().strip()


def git_bytes(checkout: Path, *arguments: str, check: bool = True) -> bytes:
    return subprocess.run(["git", "-C", str(checkout), *arguments], check=check, capture_output=True).stdout


def changed_lines(before: Path, after: Path) -> tuple[int, int]:
    """The numbers of lines that were added and removed between two directories."""
    added = removed = 0
    for file in sorted(after.rglob("*.py")):
        old = before / file.relative_to(after)
        lines = old.read_text().splitlines() if old.exists() else []
        for line in difflib.unified_diff(lines, file.read_text().splitlines(), n=0):
            added += line.startswith("+") and not line.startswith("+++")
            removed += line.startswith("-") and not line.startswith("---")
    return added, removed
