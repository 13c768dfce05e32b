"""The directories of a node in the temporary directory, where other users can write."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain import StorageError
from drivetrain._storage.node import share_directory, sweep
from tests.support import PROCESS_LIMIT_S

OTHER_USER = 65534
KINDS = ("downloads", "uploads", "runs")

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory like /tmp, which all users can write to, and no umask."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o1777)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        before = os.umask(0)
        yield Path(directory)
        os.umask(before)


@pytest.fixture
def top(temporary: Path) -> Path:
    """The directory of this user, which does not exist yet."""
    return temporary / f"drivetrain-{os.getuid()}-private"


def as_other_user(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs Python code as another user."""
    command = [sys.executable, "-c", f"import os, sys; os.setgid({OTHER_USER}); os.setuid({OTHER_USER}); {code}"]
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=PROCESS_LIMIT_S
    )


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("kind", KINDS)
def test_directories_are_private_for_any_umask(kind: str, top: Path) -> None:
    with share_directory(kind, "key", fill=lambda path: Path(path, "weights").touch()) as directory:
        assert [mode_of(path) for path in (top, top / kind, Path(directory))] == [0o700] * 3
        assert [mode_of(path) for path in (top / kind).glob("key.*")] == [0o600] * 2


def test_directory_of_an_older_release_that_the_group_can_write_to_is_not_used(temporary: Path, top: Path) -> None:
    old = temporary / f"drivetrain-{os.getuid()}"
    (old / "downloads" / "model").mkdir(parents=True, mode=0o775)
    old.chmod(0o775)

    with share_directory("downloads", "model", fill=lambda path: Path(path, "weights").touch()) as directory:
        assert Path(directory) == top / "downloads" / "model"
        assert os.listdir(directory) == ["weights"]
    assert os.listdir(old / "downloads" / "model") == []


@needs_root
@pytest.mark.parametrize("umask", [0, 0o077])
def test_another_user_can_neither_read_nor_replace_a_download(umask: int, top: Path) -> None:
    os.umask(umask)
    with share_directory("downloads", "model", fill=lambda path: Path(path, "w").write_text("mine") and None) as path:
        weights = Path(path, "w")
        replaced = as_other_user("open(sys.argv[1], 'w').write('theirs')", weights)
        moved = as_other_user("os.rename(sys.argv[1], sys.argv[1] + '.old')", path)
        listed = as_other_user("os.listdir(sys.argv[1])", top)

        for attempt in (replaced, moved, listed):
            assert "PermissionError" in attempt.stderr
        assert weights.read_text() == "mine"


@pytest.mark.parametrize("level", ["top", "kind"])
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_directory_that_others_can_write_to_is_refused(level: str, mode: int, top: Path) -> None:
    (top / "downloads").mkdir(parents=True, mode=0o700)
    top.chmod(0o700)
    open_one = top if level == "top" else top / "downloads"
    open_one.chmod(mode)

    refused = pytest.raises(StorageError, match=rf"{open_one}: expected .* no other user can write .* set TMPDIR")
    with refused, share_directory("downloads", "model"):
        pass
    with pytest.raises(StorageError, match="no other user can write"):
        sweep("downloads")


@needs_root
@pytest.mark.parametrize("level", ["top", "kind"])
def test_directory_of_another_user_is_refused(level: str, top: Path) -> None:
    (top / "downloads").mkdir(parents=True, mode=0o700)
    top.chmod(0o700)
    foreign = top if level == "top" else top / "downloads"
    os.chown(foreign, OTHER_USER, OTHER_USER)

    refused = pytest.raises(StorageError, match=rf"{foreign}: expected .* of user {OTHER_USER}")
    with refused, share_directory("downloads", "model"):
        pass


@pytest.mark.parametrize("mode", [0o777, 0o703])
def test_temporary_directory_that_others_can_write_to_without_the_sticky_bit_causes_one_warning(
    mode: int, temporary: Path
) -> None:
    temporary.chmod(mode)
    private = temporary / f"tmp-{os.getuid()}"
    expected = rf"{temporary}: expected .* sticky bit, got drwx.* mkdir -m 700 {private} && export TMPDIR={private}$"
    with pytest.warns(UserWarning, match=expected), share_directory("downloads", "model") as directory:
        assert mode_of(Path(directory)) == 0o700
    with share_directory("downloads", "model"):  # a second warning would be an error
        pass


@needs_root
@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1777])
def test_temporary_directory_of_another_user_is_refused(mode: int, temporary: Path) -> None:
    os.chown(temporary, OTHER_USER, OTHER_USER)
    temporary.chmod(mode)
    expected = rf"{temporary}: expected a temporary directory of user 0 .* got one of user {OTHER_USER}\. Set TMPDIR"
    with pytest.raises(StorageError, match=expected) as refused, share_directory("downloads", "model"):
        pass
    assert refused.value.code == "DT-415"
    assert os.listdir(temporary) == []


@needs_root
def test_group_of_a_temporary_directory_is_trusted_if_it_is_the_primary_one(temporary: Path) -> None:
    temporary.chmod(0o770)
    with share_directory("downloads", "model"):
        pass
    os.chown(temporary, -1, OTHER_USER)
    temporary.chmod(0o770)
    with pytest.warns(UserWarning, match="sticky bit"), share_directory("downloads", "model"):
        pass


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o1777, 0o1770])
def test_temporary_directory_that_is_private_or_sticky_is_used(mode: int, temporary: Path) -> None:
    temporary.chmod(mode)
    with share_directory("downloads", "model") as directory:
        assert Path(directory).is_dir()


@pytest.mark.parametrize("kind", ["link", "file"])
def test_link_or_file_in_the_place_of_the_directory_is_refused(kind: str, top: Path, temporary: Path) -> None:
    (temporary / "elsewhere").mkdir(mode=0o700)
    if kind == "link":
        top.symlink_to("elsewhere")
    else:
        top.touch(mode=0o600)

    with pytest.raises(StorageError, match="expected a directory"), share_directory("downloads", "model"):
        pass
    assert os.listdir(temporary / "elsewhere") == []
