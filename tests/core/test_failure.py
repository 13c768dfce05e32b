import builtins
import errno
import importlib
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest

from drivetrain import CheckpointError, FailureKind, RemoteError, StorageError
from drivetrain._base.failure import capture_failure, classify, describe_exit, one_line, rebuild_exception

since_python_311 = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="expects notes or groups: Python 3.11 or newer"
)


class TwoWordsError(Exception):
    def __init__(self, first: str, *, second: str) -> None:
        super().__init__(f"{first} and {second}")
        self.second = second


class NeverPicklesError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def fail(error: BaseException) -> None:
    raise error


def raised(error: BaseException) -> BaseException:
    """The exception with a traceback, as an ``except`` clause sees it."""
    try:
        fail(error)
    except BaseException as caught:
        return caught
    raise AssertionError


def functions(error: BaseException | None) -> list[str]:
    assert error is not None
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_exception_comes_back_with_its_type_arguments_and_frames() -> None:
    original = raised(OSError(13, "Permission denied", "file.txt"))

    error = rebuild_exception(capture_failure(original))

    assert type(error) is PermissionError
    assert (error.errno, error.filename) == (13, "file.txt")
    assert functions(error) == ["raised", "fail"]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    assert (frame.filename, frame.line) == (__file__, "raise error")


@since_python_311
def test_exception_comes_back_with_its_notes() -> None:
    original = OSError(13, "Permission denied")
    original.add_note("while saving")
    assert rebuild_exception(capture_failure(raised(original))).__notes__ == ["while saving"]


def test_exception_that_cannot_be_rebuilt_from_its_arguments_comes_back() -> None:
    error = rebuild_exception(capture_failure(raised(TwoWordsError("bread", second="butter"))))

    assert isinstance(error, TwoWordsError)
    assert (str(error), error.second) == ("bread and butter", "butter")


def test_exception_of_a_class_made_in_a_function_comes_back() -> None:
    class LocalError(ValueError):
        pass

    error = rebuild_exception(capture_failure(raised(LocalError("here"))))

    assert isinstance(error, LocalError)


def test_unpicklable_exception_is_described_and_keeps_its_frames_and_cause() -> None:
    original = raised(NeverPicklesError("me"))
    original.__cause__ = raised(KeyError("below"))

    error = rebuild_exception(capture_failure(original))

    assert type(error) is RemoteError
    assert "NeverPicklesError: me" in str(error)
    assert functions(error) == ["raised", "fail"]
    assert isinstance(error.__cause__, KeyError)


def test_exception_of_a_missing_class_is_described_with_the_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_on_the_worker.py").write_text("class FarError(Exception):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    captured = capture_failure(raised(importlib.import_module("only_on_the_worker").FarError("far away")))
    monkeypatch.delitem(sys.modules, "only_on_the_worker")
    (tmp_path / "only_on_the_worker.py").unlink()
    importlib.invalidate_caches()

    error = rebuild_exception(captured)

    assert type(error) is RemoteError
    assert "FarError: far away" in str(error)
    assert "in fail" in str(error)


def test_chain_of_causes_and_contexts_comes_back_as_python_shows_it() -> None:
    def outermost() -> None:
        try:
            try:
                fail(KeyError("first"))
            except KeyError:
                fail(IndexError("while handling it"))
        except IndexError as error:
            raise ValueError("because of it") from error

    def hides() -> None:
        try:
            fail(KeyError("hidden"))
        except KeyError:
            raise ValueError("shown") from None

    with pytest.raises(ValueError, match="because of it") as chained:
        outermost()
    with pytest.raises(ValueError, match="shown") as alone:
        hides()
    error = rebuild_exception(capture_failure(chained.value))

    assert isinstance(error.__cause__, IndexError)
    assert isinstance(error.__cause__.__context__, KeyError)
    assert functions(error.__cause__.__context__)[-1] == "fail"
    alone_again = rebuild_exception(capture_failure(alone.value))
    assert alone_again.__cause__ is alone_again.__context__ is None


def test_cyclic_chain_of_exceptions_is_cut() -> None:
    one, other = raised(KeyError("one")), raised(KeyError("other"))
    one.__cause__, other.__cause__ = other, one

    assert isinstance(rebuild_exception(capture_failure(one)), KeyError)


@since_python_311
def test_group_of_exceptions_comes_back_with_its_members() -> None:
    group = raised(builtins.ExceptionGroup("several", [ValueError("a"), KeyError("b")]))

    error = rebuild_exception(capture_failure(group))

    assert isinstance(error, builtins.ExceptionGroup)
    assert [type(member) for member in error.exceptions] == [ValueError, KeyError]


def test_exception_of_this_process_is_the_same_object() -> None:
    error = ValueError()
    assert rebuild_exception(error) is error


def test_captured_failure_is_read_by_a_process_without_the_class() -> None:
    captured = capture_failure(raised(TwoWordsError("bread", second="butter")))
    code = (
        "import sys; from drivetrain._base.failure import rebuild_exception\n"
        "print(type(rebuild_exception(sys.stdin.buffer.read())).__name__)"
    )
    shown = subprocess.run([sys.executable, "-c", code], input=captured, stdout=subprocess.PIPE, check=True, cwd="/")
    assert shown.stdout.decode().strip() in ("RemoteError", "TwoWordsError")


def test_storage_failures_and_wrong_checkpoints_raise_different_classes() -> None:
    assert classify(StorageError()) is FailureKind.STORAGE
    assert classify(CheckpointError()) is FailureKind.USER_ERROR
    assert classify(ValueError()) is FailureKind.USER_ERROR


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [(None, "exited"), (0, "exited with code 0"), (3, "exited with code 3"), (-11, "was killed by SIGSEGV")],
)
def test_exit_of_a_process_is_described(exit_code: int | None, words: str) -> None:
    assert describe_exit(exit_code) == words


NO_THREADS = """
import resource, threading
from drivetrain._base.failure import classify, one_line

resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
try:
    threading.Thread(target=print).start()
except RuntimeError as error:
    caught = error
resource.setrlimit(resource.RLIMIT_AS, (1 << 34, resource.RLIM_INFINITY))
print(classify(caught).value, one_line(caught))
"""


def test_limit_on_threads_and_memory_is_named_and_is_no_user_error() -> None:
    done = subprocess.run([sys.executable, "-c", NO_THREADS], capture_output=True, text=True, check=True)

    assert done.stdout.startswith("infrastructure RuntimeError: can't start new thread (no thread could be started")
    assert "the address space in KiB (ulimit -v, 16777216)" in done.stdout


def test_busy_socket_is_not_taken_for_a_limit_on_processes() -> None:
    def read() -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with pytest.raises(BlockingIOError) as caught:
        read()
    assert classify(caught.value) is FailureKind.USER_ERROR
    assert "limit" not in one_line(caught.value)


FROM_ANOTHER_PROCESS = """Caught KeyError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "loader.py", line 3, in fetch
    data = self.rows[index]
           ~~~~~~~~~^^^^^^^
  File "data.py", line 9, in __getitem__
KeyError: 'price'
with a second line"""


class Group(Exception):
    """Like an ExceptionGroup, which Python 3.10 does not have."""

    def __init__(self, message: str, exceptions: list[Exception]) -> None:
        super().__init__(message)
        self.exceptions = tuple(exceptions)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyError("plain"), "KeyError: 'plain'"),
        (
            RuntimeError(FROM_ANOTHER_PROCESS),
            "RuntimeError: Caught KeyError in DataLoader worker process 0: KeyError: 'price'",
        ),
        (Group("in a TaskGroup", [ValueError("bad row")]), "Group: in a TaskGroup: ValueError: bad row"),
        (
            Group("outer", [Group("inner", [OSError("first"), OSError("second")]), OSError("third")]),
            "Group: outer: Group: inner: OSError: first and 1 more and 1 more",
        ),
        (ValueError("one\ntwo"), "ValueError: one"),
    ],
)
def test_first_line_contains_the_exception_of_another_process_or_of_a_group(error: Exception, line: str) -> None:
    assert one_line(error) == line
