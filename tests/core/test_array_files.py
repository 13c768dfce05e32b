"""The files of named arrays of a training state, also from an untrusted source."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drivetrain._worker.arrayfiles import Bounds, read_arrays, write_arrays

WHOLE = np.arange(8.0).reshape(4, 2)
DESCRIBED: dict[str, Any] = {"weight": {"dtype": "float64", "shape": [4, 2]}}


def write(directory: Path, *rows: tuple[int, int]) -> None:
    """Write some rows of the array as its parts."""
    parts: list[tuple[str, Bounds | None, Any]] = [
        ("weight", ((start, stop), (0, 2)), WHOLE[start:stop]) for start, stop in rows
    ]
    write_arrays(str(directory / "state.npz"), parts)


def read(directory: Path) -> Any:
    with read_arrays(str(directory), ["state.npz"], DESCRIBED) as arrays:
        return arrays["weight"].read()


def test_parts_are_put_together_in_any_order(tmp_path: Path) -> None:
    write(tmp_path, (3, 4), (0, 3))
    np.testing.assert_array_equal(read(tmp_path), WHOLE)


@pytest.mark.parametrize("rows", [[(0, 3)], [(0, 2), (1, 3)], [(0, 4), (2, 3)]], ids=["gap", "hidden gap", "twice"])
def test_gaps_and_parts_that_are_there_twice_are_refused(tmp_path: Path, rows: list[tuple[int, int]]) -> None:
    write(tmp_path, *rows)
    with pytest.raises(ValueError, match="weight is incomplete, or has parts twice"):
        read(tmp_path)


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "state.npz", weight=np.array([Path("code")], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        read(tmp_path)


def test_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.npz").write_bytes(b"damaged")
    with pytest.raises(zipfile.BadZipFile):
        read(tmp_path)
