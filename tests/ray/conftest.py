"""The pipes through which tests and trials synchronise."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import Pipe, open_pipe


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    with open_pipe(tmp_path / "pipe") as pipe:
        yield pipe


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Pipe]:
    with open_pipe(tmp_path / "gate") as pipe:
        yield pipe
