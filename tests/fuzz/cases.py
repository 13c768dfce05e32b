"""Odd behaviour of train functions. Each case states how the run has to end.

Rank 1 behaves oddly, while rank 0 makes three ordinary reports. A case is a function without arguments that runs in the
process of rank 1, after that rank's first report.
"""

import asyncio
import collections
import contextlib
import ctypes
import dataclasses
import datetime
import decimal
import enum
import fractions
import gc
import io
import math
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import drivetrain
from drivetrain import Checkpoint
from tests.odd import (
    OwnBaseException,
    ReduceFails,
    TextExits,
    TextFails,
    fail_with_broken_streams,
    fail_with_closed_streams,
)

CASES: dict[str, "Case"] = {}


class End(enum.Enum):
    """The ways in which a run may end."""

    SUCCESS = "succeeds"
    USER_ERROR = "fails with a user error of rank 1"
    LOST = "fails because the process of rank 1 was lost"
    OUT_OF_MEMORY = "fails because rank 1 needed too much memory"
    PREEMPTED = "is preempted"
    HANG = "is ended as hung"


class Case(NamedTuple):
    """An odd train function.

    Attributes:
        run: what rank 1 does. Its return value is that of the rank.
        ends: how the run ends.
        words: text that the error contains.
    """

    run: Callable[[], Any]
    ends: End
    words: str = ""


def case(name: str, ends: End = End.SUCCESS, words: str = "") -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a case."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        assert name not in CASES
        CASES[name] = Case(function, ends, words)
        return function

    return register


def each(group: str, values: dict[str, Any], behave: Callable[[Any], Any], ends: End = End.SUCCESS) -> None:
    """Register a case for each value. A pair of a value and words is a user error that contains the words."""
    for name, value in values.items():
        given, words = value if isinstance(value, Refused) else (value, "")
        end = End.USER_ERROR if words else ends

        def run(given: Any = given) -> Any:
            return behave(given)

        case(f"{group}: {name}", end, words)(run)


class Refused(NamedTuple):
    """A value that causes a user error with certain words."""

    value: Any
    words: str


# Metrics


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


class Point(NamedTuple):
    x: int
    y: float


@dataclasses.dataclass
class Options:
    rate: float = 0.1


class NoRepr:
    def __repr__(self) -> str:
        raise ValueError("no representation")


class ReprIsNoText:
    def __repr__(self) -> str:
        return 3  # type: ignore[return-value]


class FloatFails:
    def __float__(self) -> float:
        raise ValueError("no number")


class NeverEqual:
    def __eq__(self, other: object) -> bool:
        raise ValueError("not comparable")

    __hash__ = None  # type: ignore[assignment]


class AttributesFail:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("no attributes")


class SubclassOfInt(int):
    def __repr__(self) -> str:
        return "many"


class SubclassOfDict(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("no items")


def deep(levels: int) -> dict[str, Any]:
    metrics: dict[str, Any] = {"loss": 1.0}
    for _ in range(levels):
        metrics = {"inner": metrics}
    return metrics


def cyclic() -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    metrics["inner"] = metrics
    return metrics


def report_value(value: Any) -> None:
    drivetrain.report({"odd": value})


VALUES: dict[str, Any] = {
    "nan": math.nan,
    "infinity": -math.inf,
    "true": True,
    "none": None,
    "huge integer": 10**5000,
    "negative zero": -0.0,
    "denormal": 5e-324,
    "empty text": "",
    "lone surrogate": "\ud800",
    "control characters": "\x00\x1b[31m\r\n\u2028",
    "long text": "x" * 1_000_000,
    "integer enum": Level.HIGH,
    "tuple": (1, 2),
    "named tuple": Point(1, 2.0),
    "ordered mapping": collections.OrderedDict(a=1),
    "counter": collections.Counter("aab"),
    "nested list": [[1, [2, [3]]]],
    "numpy float16": np.float16(0.5),
    "numpy longdouble": np.longdouble(0.5),
    "numpy integer": np.int64(2**62),
    "numpy bool": np.bool_(True),
    "numpy text": np.str_("text"),
    "numpy scalar array": np.array(3.0),
    "numpy record": np.zeros(1, dtype=[("a", "i4")]),
    "subclass of int": SubclassOfInt(3),
}
NO_VALUES: dict[str, Any] = {
    "bytes": b"\xff\x00",
    "bytearray": bytearray(b"12"),
    "complex": 1 + 2j,
    "decimal": decimal.Decimal("1.5"),
    "fraction": fractions.Fraction(1, 3),
    "datetime": datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc),
    "path": pathlib.Path("a/b"),
    "enum": Color.RED,
    "set": {1, 2},
    "frozen set": frozenset({1}),
    "data class": Options(),
    "range": range(3),
    "numpy complex": np.complex64(1j),
    "numpy time": np.datetime64("2026-01-01"),
    "numpy array": np.arange(4),
    "numpy nan array": np.full((2, 2), np.nan),
    "numpy object array": np.array([None, {}], dtype=object),
    "deep mapping": deep(50),
    "object without repr": NoRepr(),
    "object whose repr is no text": ReprIsNoText(),
    "object that is no number": FloatFails(),
}
each("metric", VALUES, report_value)
each("metric", {name: Refused(value, "DT-802") for name, value in NO_VALUES.items()}, report_value)

METRICS: dict[str, Any] = {
    "no metrics": {},
    "empty name": {"": 1},
    "name with slash": {"a/b": 1, "a": {"b": 2}},
    "name with newline": {"a\nb": 1},
    "name with comma and quotes": {'a,"b': 1},
    "name with surrogate": {"\udfff": 1},
    "long name": {"n" * 100_000: 1},
    "many names": {f"metric {number}": number for number in range(2_000)},
    "name of an automatic metric": {"_timestamp": "now", "_training_iteration": -1},
    "number as name": Refused({1: 1}, "expected strings as names"),
    "none as name": Refused({None: 1}, "expected strings as names"),
    "tuple as name": Refused({("a", 1): 1}, "expected strings as names"),
    "subclass of dict": Refused(SubclassOfDict(a=1), "no items"),
    "none instead of metrics": None,
    "not a mapping": Refused([("a", 1)], "expected a mapping"),
}
each("metrics", METRICS, drivetrain.report)


@case("metrics: cyclic mapping", End.USER_ERROR, "inner")
def report_a_cycle() -> None:
    drivetrain.report(cyclic())


@case("metrics: very deep mapping", End.USER_ERROR, "inner")
def report_a_deep_mapping() -> None:
    drivetrain.report(deep(100_000))


@case("metrics: changed after the report")
def change_metrics_after_the_report() -> None:
    metrics: dict[str, Any] = {"values": [1]}
    drivetrain.report(metrics)
    metrics["values"].append(object())
    metrics.clear()


@case("metrics: a generator", End.USER_ERROR, "DT-802")
def report_a_generator() -> None:
    drivetrain.report({"odd": (number for number in range(3))})


@case("metrics: a lock", End.USER_ERROR, "DT-802")
def report_a_lock() -> None:
    drivetrain.report({"odd": threading.Lock()})


@case("metrics: a lambda and a module", End.USER_ERROR, "DT-802")
def report_code() -> None:
    drivetrain.report({"function": lambda: None, "module": math})


@case("metrics: reported by several threads")
def report_from_threads() -> None:
    threads = [threading.Thread(target=drivetrain.report, args=({"thread": number},)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@case("metrics: an unknown reduction", End.USER_ERROR, "reduce")
def reduce_with_an_unknown_name() -> None:
    drivetrain.report({"loss": 1.0}, reduce={"loss": "median"})


# Exceptions


class NeedsArguments(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class UnpicklesBadly(Exception):
    def __reduce__(self) -> Any:
        return sys.exit, (5,)


class HoldsALock(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def chained(length: int) -> BaseException:
    error: BaseException = ValueError("the first error")
    for number in range(length):
        following = ValueError(f"error {number}")
        following.__cause__ = error
        error = following
    return error


def cyclic_cause() -> BaseException:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    return first


def with_notes() -> BaseException:
    error = ValueError("has notes")
    error.__notes__ = ["one", 2, NoRepr()]  # type: ignore[attr-defined]
    return error


def with_empty_type_name() -> BaseException:
    return types.new_class("", (Exception,))("without a name")  # type: ignore[no-any-return]


def throw(error: BaseException) -> None:
    raise error


EXCEPTIONS: dict[str, Any] = {
    "os error": Refused(OSError(13, "Permission denied", "/data"), "PermissionError"),
    "unicode error": Refused(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), "UnicodeDecodeError"),
    "key error": Refused(KeyError(("a", 1)), "KeyError"),
    "stop iteration": Refused(StopIteration(3), "StopIteration"),
    "generator exit": Refused(GeneratorExit(), "GeneratorExit"),
    "cancelled": Refused(asyncio.CancelledError("by the loop"), "CancelledError"),
    "keyboard interrupt": Refused(KeyboardInterrupt(), "KeyboardInterrupt"),
    "own base exception": Refused(OwnBaseException("own"), "OwnBaseException"),
    "text fails": Refused(TextFails(), "TextFails"),
    "text exits": Refused(TextExits(), "TextExits"),
    "cannot be pickled": Refused(ReduceFails("secret"), "ReduceFails"),
    "needs arguments": Refused(NeedsArguments(1, 2), "1 and 2"),
    "unpickles to an exit": Refused(UnpicklesBadly("exits"), "UnpicklesBadly"),
    "holds a lock": Refused(HoldsALock(), "holds a lock"),
    "cyclic cause": Refused(cyclic_cause(), "first"),
    "long chain": Refused(chained(2_000), "error 1999"),
    "odd notes": Refused(with_notes(), "has notes"),
    "empty type name": Refused(with_empty_type_name(), "without a name"),
    "long message": Refused(ValueError("x" * 5_000_000), "xxx"),
    "lone surrogate": Refused(ValueError("\ud800"), "ValueError"),
    "control characters": Refused(ValueError("\x1b]0;title\x07\x00"), "ValueError"),
    "many lines": Refused(ValueError("line\n" * 10_000), "line"),
    "no message": Refused(ValueError(), "ValueError"),
    "class as argument": Refused(ValueError(ValueError), "ValueError"),
    "warning": Refused(UserWarning("as an error"), "UserWarning"),
    "exit with text": Refused(SystemExit("the data is missing"), "the data is missing"),
    "exit with a number": Refused(SystemExit(3), "3"),
}
each("exception", EXCEPTIONS, throw)


@case("exception: recursion", End.USER_ERROR, "RecursionError")
def recurse() -> None:
    recurse()


@case("exception: out of memory in Python", End.OUT_OF_MEMORY, "MemoryError")
def allocate_too_much() -> None:
    bytearray(1 << 62)


@case("exception: in a finalizer")
def raise_in_a_finalizer() -> None:
    class Finalized:
        def __del__(self) -> None:
            raise ValueError("in a finalizer")

    Finalized()
    gc.collect()


@case("exception: in another thread")
def raise_in_a_thread() -> None:
    thread = threading.Thread(target=throw, args=(ValueError("in a thread"),))
    thread.start()
    thread.join()


@case("exception: while another one is handled", End.USER_ERROR, "the second")
def raise_while_handling() -> None:
    try:
        raise ValueError("the first")
    except ValueError:
        raise KeyError("the second")  # noqa: B904


case("exception: with broken streams", End.USER_ERROR, "the real error")(fail_with_broken_streams)
case("exception: with closed streams", End.USER_ERROR, "the real error")(fail_with_closed_streams)


@case("exception: with a broken traceback module", End.USER_ERROR, "ZeroDivisionError")
def raise_with_a_broken_traceback_module() -> None:
    import traceback

    traceback.format_exception = traceback.TracebackException = None  # type: ignore[assignment, misc]
    raise ZeroDivisionError("the real error")


@case("exception: of a local class", End.USER_ERROR, "LocalError")
def raise_a_local_class() -> None:
    class LocalError(Exception):
        pass

    raise LocalError("local")


@case("exception: exit with 0")
def exit_with_success() -> None:
    sys.exit(0)


@case("exception: exit without a number")
def exit_without_a_number() -> None:
    sys.exit(None)


@case("exception: warnings are errors", End.USER_ERROR, "UserWarning")
def raise_a_warning() -> None:
    warnings.simplefilter("error")
    warnings.warn("an ordinary warning", UserWarning, stacklevel=1)


# The end of the process


def killer(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


for fatal in (signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGXCPU, signal.SIGPIPE):
    if fatal is signal.SIGPIPE:  # Python ignores this signal
        case(f"process: {fatal.name}")(killer(fatal))
    else:
        case(f"process: {fatal.name}", End.LOST, fatal.name)(killer(fatal))
case("process: SIGSTOP", End.HANG, "rank 1")(killer(signal.SIGSTOP))
case("process: SIGINT", End.USER_ERROR, "KeyboardInterrupt")(killer(signal.SIGINT))


@case("process: SIGTERM", End.PREEMPTED, "SIGTERM")
def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()


@case("process: _exit with 0", End.LOST, "exited with code 0")
def leave_with_success() -> None:
    os._exit(0)


@case("process: _exit with 7", End.LOST, "exited with code 7")
def leave_with_failure() -> None:
    os._exit(7)


@case("process: invalid memory access", End.LOST, "SIGSEGV")
def access_invalid_memory() -> None:
    ctypes.string_at(0)


@case("process: waits forever", End.HANG, "wait_forever")
def wait_forever() -> None:
    threading.Event().wait()


@case("process: waits in the kernel forever", End.HANG, "read")
def read_forever() -> None:
    ours, _theirs = socket.socketpair()
    ours.recv(1)


@case("process: a forked child returns")
def fork_a_child() -> Any:
    if os.fork() == 0:
        return "child"
    os.wait()
    return "parent"


@case("process: a thread that does not end")
def leave_a_daemon_thread() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


@case("process: standard streams closed")
def close_the_standard_streams() -> None:
    for descriptor in range(3):
        os.close(descriptor)
    drivetrain.report({"step": 2})


@case("process: all descriptors closed", End.LOST, "rank 1")
def close_all_descriptors() -> None:
    os.closerange(3, 4096)


@case("process: working directory deleted")
def delete_the_working_directory() -> None:
    os.chdir(tempfile.mkdtemp())
    os.rmdir(os.getcwd())
    drivetrain.report({"step": 2})


@case("process: no environment")
def clear_the_environment() -> None:
    os.environ.clear()
    drivetrain.report({"step": 2})


@case("process: no module path")
def clear_the_module_path() -> None:
    sys.path.clear()
    drivetrain.report({"step": 2})


@case("process: few descriptors")
def limit_the_descriptors() -> None:
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, used + 8))
    drivetrain.report({"step": 2})


@case("process: SIGTERM ignored")
def ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGTERM)


@case("process: an alarm", End.LOST, "SIGALRM")
def set_an_alarm() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    threading.Event().wait()


@case("process: clock of another day")
def change_the_clock() -> None:
    import time

    time.time = lambda: 0.0
    drivetrain.report({"step": 2})


@case("process: a subprocess that fails")
def run_a_subprocess() -> None:
    subprocess.run([sys.executable, "-c", "raise SystemExit(3)"], check=False, timeout=30)


# Output


def write(data: Any) -> None:
    if isinstance(data, bytes):
        os.write(1, data)
    else:
        print(data)


OUTPUT: dict[str, Any] = {
    "invalid UTF-8": b"\xff\xfe\n",
    "half a character": "\u00e9".encode()[:1],
    "null bytes": b"\x00" * 1000,
    "escape sequences": "\x1b[2J\x1b]0;title\x07\x1b[31m",
    "carriage returns": "10%\r20%\r30%",
    "a long line": "x" * 3_000_000,
    "many lines": "line\n" * 50_000,
    "no newline at the end": b"no newline",
}
each("output", OUTPUT, write)


@case("output: by a child process")
def print_in_a_child() -> None:
    subprocess.run([sys.executable, "-c", "print('from a child')"], check=True, timeout=30)


@case("output: without encoding")
def print_a_surrogate() -> None:
    with contextlib.suppress(UnicodeEncodeError):  # depends on the locale
        sys.stdout.write("\udc80\n")


@case("output: replaced stream")
def replace_stdout() -> None:
    sys.stdout = io.StringIO()
    print("to memory")


# Checkpoints


def save(names: Any) -> None:
    """Report a checkpoint with these files, and read it again."""
    with tempfile.TemporaryDirectory() as directory:
        for name in names:
            path = os.path.join(os.fsencode(directory), name if isinstance(name, bytes) else os.fsencode(name))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(b"content")
        drivetrain.report({"step": 2}, checkpoint=Checkpoint(directory))


FILES: dict[str, Any] = {
    "unicode name": ["\u00e9\U0001f600"],
    "name with spaces and quotes": ["a b'\"c"],
    "name that is an option": ["-rf"],
    "hidden file": [".hidden"],
    "long name": ["n" * 250],
    "deep directory": ["/".join("d" * 60) + "/file"],
    "names that differ in case": ["a", "A"],
    "many files": [f"file {number}" for number in range(300)],
    "name of a log": ["result.json"],
    "name with percent signs": ["100%20", "%2e%2e"],
    "name with a backslash": ["a\\b"],
    "name with a newline": ["a\nb"],
    "name that is no UTF-8": [b"\xff"],
}
each("checkpoint", FILES, save)


@case("checkpoint: empty directory", End.USER_ERROR, "empty directory")
def save_nothing() -> None:
    drivetrain.report({}, checkpoint=Checkpoint(tempfile.mkdtemp()))


@case("checkpoint: missing directory", End.USER_ERROR, "/nowhere")
def save_a_missing_directory() -> None:
    drivetrain.report({}, checkpoint=Checkpoint("/nowhere"))


@case("checkpoint: a file instead of a directory", End.USER_ERROR, "directory")
def save_a_file() -> None:
    path = pathlib.Path(tempfile.mkdtemp(), "file")
    path.write_text("content")
    drivetrain.report({}, checkpoint=Checkpoint(path))


@case("checkpoint: not a checkpoint", End.USER_ERROR, "Checkpoint")
def save_a_path() -> None:
    drivetrain.report({}, checkpoint="/tmp")  # type: ignore[arg-type]


@case("checkpoint: empty file and large sparse file")
def save_unusual_sizes() -> None:
    with tempfile.TemporaryDirectory() as directory:
        pathlib.Path(directory, "empty").touch()
        with open(os.path.join(directory, "sparse"), "wb") as file:
            file.truncate(50_000_000)
        drivetrain.report({}, checkpoint=Checkpoint(directory))


@case("checkpoint: a named pipe")
def save_a_named_pipe() -> None:
    with tempfile.TemporaryDirectory() as directory:
        pathlib.Path(directory, "file").write_text("content")
        os.mkfifo(os.path.join(directory, "pipe"))
        drivetrain.report({}, checkpoint=Checkpoint(directory))


@case("checkpoint: a link that leads nowhere")
def save_a_broken_link() -> None:
    with tempfile.TemporaryDirectory() as directory:
        pathlib.Path(directory, "file").write_text("content")
        os.symlink("/nowhere", os.path.join(directory, "link"))
        drivetrain.report({}, checkpoint=Checkpoint(directory))


@case("checkpoint: deleted directly after the report")
def delete_a_checkpoint() -> None:
    import shutil

    directory = tempfile.mkdtemp()
    pathlib.Path(directory, "file").write_text("content")
    drivetrain.report({}, checkpoint=Checkpoint(directory))
    shutil.rmtree(directory, ignore_errors=True)


@case("checkpoint: a name that leaves the run", End.USER_ERROR, "checkpoint_dir_name")
def save_outside_of_the_run() -> None:
    with tempfile.TemporaryDirectory() as directory:
        pathlib.Path(directory, "file").write_text("content")
        drivetrain.report({}, checkpoint=Checkpoint(directory), checkpoint_dir_name="../outside")


@case("checkpoint: metadata that is no JSON", End.USER_ERROR, "metadata")
def save_odd_metadata() -> None:
    with tempfile.TemporaryDirectory() as directory:
        pathlib.Path(directory, "file").write_text("content")
        checkpoint = Checkpoint(directory)
        checkpoint.set_metadata({"object": object()})
        drivetrain.report({}, checkpoint=checkpoint)


# Return values


def numbers() -> Iterator[int]:
    yield from range(3)


def give(value: Any) -> Any:
    return value


RETURNED: dict[str, Any] = {
    "not a number": math.nan,
    "lambda": lambda: 1,
    "local class": type("Local", (), {}),
    "large bytes": bytes(20_000_000),
    "exception": ValueError("returned, not raised"),
    "module": math,
    "object without repr": NoRepr(),
}
each("return value", RETURNED, give)


@case("return value: a lock")
def return_a_lock() -> Any:
    return threading.Lock()


@case("return value: a generator")
def return_a_generator() -> Any:
    return numbers()


@case("return value: unpickles to an exit")
def return_an_exit() -> Any:
    return UnpicklesBadly("exits")


@case("return value: a coroutine")
def return_a_coroutine() -> Any:
    return asyncio.sleep(0)
