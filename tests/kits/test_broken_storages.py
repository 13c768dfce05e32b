"""Broken filesystems, each of which the conformance kit rejects with a message that names the mistake."""

from pathlib import Path
from typing import Any

import pytest

from drivetrain_testing import StorageConformance
from tests.kits import filesystems
from tests.kits.rejecting import rejection

METHODS = "test_has_the_required_methods"
BROKEN = [
    (filesystems.NoRm, METHODS, "rm(path, recursive=True): expected that it deletes a directory tree, got NotImplem"),
    (filesystems.NoRanges, METHODS, "cat_file(path, start=2, end=5): expected that it returns a range of bytes, got a"),
    (filesystems.NoFind, METHODS, 'find(path, detail=True): expected that it returns the "size" of all files below'),
    (filesystems.RemovesOneFileOnly, METHODS, "rm(path, recursive=True): expected that it deletes a directory tree"),
    (
        filesystems.RaisesOSError,
        "test_missing_file_is_reported_as_such",
        "expected FileNotFoundError, got OSError: 404",
    ),
    (filesystems.PutIsNotVisible, METHODS, "exists(path): expected that it finds a file, got another result"),
    (filesystems.StaleListing, "test_files_of_other_processes_are_visible_at_once", "Implement invalidate_cache()"),
    (
        filesystems.Truncates,
        "test_large_file_is_stored_and_read_in_parts",
        "that was written in parts: expected {'large.bin': 20971521}",
    ),
    (filesystems.ReplacesInTwoSteps, "test_file_is_replaced_atomically", "Make mv() rename the file in one step"),
    (
        filesystems.LeavesDrafts,
        "test_file_that_is_replaced_has_its_new_content",
        "got ([], ['manifest.json', 'manifest.json.copy'])",
    ),
    (filesystems.LosesSpaces, "test_names_and_empty_files_are_kept", "with%20space.txt"),
    (
        filesystems.CannotBePickled,
        "test_files_of_other_processes_are_visible_at_once",
        "expected a filesystem that can",
    ),
]


@pytest.mark.parametrize(("broken", "test", "message"), BROKEN)
def test_broken_filesystem_is_rejected(
    request: pytest.FixtureRequest, broken: type[Any], test: str, message: str
) -> None:
    def make_filesystem(directory: Path) -> tuple[Any, str]:
        return broken(skip_instance_cache=True), str(directory)

    assert message in rejection(request, StorageConformance, test, make_filesystem=make_filesystem)


def test_class_without_a_filesystem_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a method make_filesystem\(directory\), got none"):
        type("TestNothing", (StorageConformance,), {})
