"""Runs that are damaged, or made to harm their readers: only their own row is affected, and nothing blocks."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drivetrain import (
    Checkpoint,
    DataParallelTrainer,
    Result,
    RunConfig,
    ScalingConfig,
    StorageError,
    get_checkpoint,
)
from drivetrain._storage import holder
from drivetrain._storage.directory import Storage
from drivetrain._storage.filesystem import LocalFilesystem
from drivetrain._storage.layout import run_file
from drivetrain._storage.lock import find_holder
from drivetrain._storage.manifest import CheckpointManager, read_manifest
from drivetrain._storage.reading import MAX_VALUES, is_damage
from drivetrain._storage.remote import FsspecFilesystem
from drivetrain.runs import RunReader
from drivetrain_console import main
from drivetrain_console._views.page import describe_run
from tests.security.conftest import ALL_ATTACKS, Command, read_in_python, reading_commands
from tests.support import local_storage

pytestmark = pytest.mark.timeout(1800 if ALL_ATTACKS else 120)

CHECKPOINT = "checkpoint_000001"
FILES = [
    "run.json",
    "manifest.json",
    "timeline.jsonl",
    "result.json",
    "error.json",
    "usage.jsonl",
    ".lock",
    "logs/rank_0.log",
    f"{CHECKPOINT}/.checkpoint.json",
    f"{CHECKPOINT}/.metadata.json",
]
SPARSE_BYTES = 1 << 42  # more than any machine has memory for


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(path.parent, os.O_RDONLY)
        try:
            listener.bind(f"/proc/self/fd/{here}/{path.name}")  # the path may be too long for an address
        finally:
            os.close(here)


def link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_outside(path: Path) -> None:
    outside = path.parents[3] / "outside.txt"
    outside.write_text('{"name": "CANARY", "message": "CANARY", "kind": "CANARY"}\n')
    path.symlink_to(outside)


def make_directory(path: Path) -> None:
    path.mkdir()


def make_endless_line(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(SPARSE_BYTES)


def make_deep_list(path: Path) -> None:
    path.write_text("[" * 200_000 + "\n")


def make_deep_object(path: Path) -> None:
    path.write_text('{"name": ' * 700 + "1" + "}" * 700 + "\n")


def make_binary(path: Path) -> None:
    path.write_bytes(b"\x80\xff\x00" * 100 + b"\n")


def make_huge_number(path: Path) -> None:
    path.write_text("1" * 5000 + "\n")


def make_list(path: Path) -> None:
    path.write_text("[1, 2, 3]\n")


MAKERS: list[Callable[[Path], None]] = [
    *(make_fifo, make_socket, link_to_device, link_outside, make_directory),
    *(make_endless_line, make_deep_list, make_deep_object, make_binary, make_huge_number, make_list),
]


def resume(run: Path) -> None:
    DataParallelTrainer(
        lambda: None,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(resume=str(run), verbose=0),
    ).fit()


def replace(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink(missing_ok=True)
    make(path)


def attack(place: Path, command: Command) -> None:
    """Reads the hostile run in every way, and checks that the good one is still shown."""
    run, good = place / "hostile", place / "good"
    for words in reading_commands(run, good, place.parent, both=ALL_ATTACKS):
        _, out, err = command(*words)
        assert "CANARY" not in out + err, words
        if words[:2] == ["runs", "list"] and words[-1] == "--json":
            rows = {row["location"]: row for row in json.loads(out)}
            assert rows[str(good)]["status"] == "failed"
            assert rows[str(good)]["reports"] == 3
            assert str(run) in rows
            assert rows[str(run)]["status"] != "unreadable" or rows[str(run)]["error"]
    read_in_python(run)


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_file_that_is_not_what_it_should_be(place: Path, command: Command, make: Callable[[Path], None]) -> None:
    for name in FILES if ALL_ATTACKS else FILES[:2]:
        original = (place / "hostile" / name).read_bytes() if (place / "hostile" / name).exists() else None
        replace(place / "hostile" / name, make)
        attack(place, command)
        if (place / "hostile" / name).is_dir():
            (place / "hostile" / name).rmdir()
        else:
            (place / "hostile" / name).unlink()
        if original is not None:
            (place / "hostile" / name).write_bytes(original)


@pytest.mark.parametrize("name", FILES)
def test_no_file_of_a_run_blocks_or_leads_outside(place: Path, command: Command, name: str) -> None:
    for make in (make_fifo, link_outside, make_endless_line):
        (place / "hostile" / name).unlink(missing_ok=True)
        make(place / "hostile" / name)
        attack(place, command)
        (place / "hostile" / name).unlink()


def test_directory_of_logs_that_is_a_link_is_not_followed(place: Path, command: Command) -> None:
    outside = place.parent / "outside"
    outside.mkdir()
    (outside / "rank_0.log").write_text("CANARY\n")
    (place / "hostile" / "logs" / "rank_0.log").unlink()
    (place / "hostile" / "logs").rmdir()
    (place / "hostile" / "logs").symlink_to(outside)
    status, out, err = command("runs", "tail", place / "hostile", "--logs", "--no-follow")
    assert status == 1
    assert "CANARY" not in out + err
    assert "symbolic link" in err


VALUES: list[Any] = [None, 5, float("nan"), float("inf"), "x", [1], {"a": 1}, True, 10**400, -1, [[]], [{}], ""]
MUTATED = [name for name in FILES if not name.endswith((".log", ".metadata.json"))]


def paths_in(value: Any) -> Iterator[tuple[Any, ...]]:
    """The path to every value in a JSON document, the document itself included."""
    yield ()
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        for path in paths_in(child):
            yield key, *path


def with_value(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[path[0]] = with_value(document[path[0]], path[1:], value)
    return copy


def mutations(text: str, *, is_lines: bool) -> Iterator[str]:
    """Yields the file with one value replaced by one of another type; one replacement per value unless ALL_ATTACKS."""
    lines = text.splitlines() if is_lines else [text]
    number = 0
    for position, line in enumerate(lines):
        document = json.loads(line)
        for path in paths_in(document):
            number += 1
            for value in VALUES if ALL_ATTACKS else [VALUES[number % len(VALUES)]]:
                changed = json.dumps(with_value(document, path, value))
                yield "\n".join([*lines[:position], changed, *lines[position + 1 :]]) + "\n"


@pytest.mark.parametrize("name", MUTATED)
def test_values_of_other_types(place: Path, good_run: Path, command: Command, name: str) -> None:
    file = place / "hostile" / name
    is_lines = name.endswith(".jsonl") or name == "result.json"
    every = list(mutations((good_run / name).read_text().rstrip("\n"), is_lines=is_lines))
    for text in every if ALL_ATTACKS else every[:: max(1, len(every) // 4)]:
        file.write_text(text)
        attack(place, command)


def test_reason_is_shown_in_the_list(place: Path, command: Command) -> None:
    replace(place / "hostile" / "manifest.json", make_fifo)
    status, out, _ = command("runs", "list", place)
    assert status == 0
    assert "manifest.json: expected a regular file, got a named pipe" in out
    assert [line.split()[:2] for line in out.splitlines()[1:3]] == [["good", "failed"], ["hostile", "unreadable"]]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"kind": None}, "error.json: expected 'kind' to be a string, got nothing"),
        ({"kind": "magic"}, "error.json: expected 'kind' to be a kind of failure, got 'magic'"),
        ({"message": [1]}, "error.json: expected 'message' to be a string, got a list of 1 values"),
        ({"rank": "first"}, "error.json: expected 'rank' to be an integer, got 'first'"),
    ],
)
def test_result_names_the_damaged_file(place: Path, change: dict[str, Any], expected: str) -> None:
    file = place / "hostile" / "error.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(StorageError) as raised:
        Result.from_path(place / "hostile")
    assert expected in str(raised.value)


@pytest.mark.parametrize("make", [make_fifo, make_socket, link_to_device, link_outside])
@pytest.mark.parametrize("name", ["result.json", "progress.csv", "timeline.jsonl", "logs/rank_0.log", ".lock"])
def test_run_with_special_files_is_not_resumed(place: Path, make: Callable[[Path], None], name: str) -> None:
    replace(place / "hostile" / name, make)
    with pytest.raises(StorageError, match=rf"{name}: expected a (regular file|file or directory of the run)"):
        resume(place / "hostile")


@pytest.mark.parametrize("make", [make_deep_list, make_endless_line, make_list])
def test_run_to_resume_is_refused_at_once(place: Path, make: Callable[[Path], None]) -> None:
    replace(place / "hostile" / "run.json", make)
    with pytest.raises(StorageError, match=r"run\.json: expected"):
        resume(place / "hostile")


@pytest.mark.parametrize("text", ["[1, 2]", '"text"', "{", '{"_training_iteration": "x"}'])
def test_run_with_damaged_reports_is_resumed(place: Path, text: str) -> None:
    (place / "hostile" / "result.json").write_text(f"{text}\n")
    resume(place / "hostile")


@pytest.mark.parametrize("identity", ["../../elsewhere", "", 5, "a" * 65, "x\0y"])
def test_id_of_a_run_is_a_plain_name(place: Path, command: Command, identity: object) -> None:
    file = place / "hostile" / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"id": identity}))
    with pytest.raises(StorageError, match="'id' to be"):
        resume(place / "hostile")
    assert command("stacks", place / "hostile")[0] == 1


def test_remote_file_above_its_limit_is_refused() -> None:
    import fsspec
    from pyarrow import fs

    from drivetrain._storage.directory import Storage
    from drivetrain._storage.remote import ArrowFilesystem, FsspecFilesystem

    memory = fsspec.filesystem("memory")
    memory.pipe_file("/security/.lock", b"x" * ((1 << 20) + 1))
    for filesystem in (FsspecFilesystem(memory), ArrowFilesystem(fs.PyFileSystem(fs.FSSpecHandler(memory)))):
        with pytest.raises(StorageError, match=r"at most 1,048,576 bytes, got 1,048,577"):
            Storage(filesystem, "/security").read_bytes(".lock")
    memory.rm("/security", recursive=True)


@pytest.mark.parametrize("pid", ["9" * 4200, "-1", "0"])
def test_lock_with_an_impossible_process_does_not_affect_reading(place: Path, pid: str) -> None:
    machine = json.dumps(holder.machine())
    hostile = f'{{"pid": {pid}, "host": "h", "since": "s", "machine": {machine}}}'
    (place / "hostile" / ".lock").write_text(hostile)

    assert main(["runs", "list", str(place)]) == 0
    assert find_holder(Storage(LocalFilesystem(), str(place / "hostile"))) is None


def test_lock_of_a_process_that_has_ended_without_its_start_holds_nothing(place: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    held = {"pid": int(ended.stdout), "host": "h", "since": "s", "machine": holder.machine()}
    (place / "hostile" / ".lock").write_text(json.dumps(held))

    assert find_holder(Storage(LocalFilesystem(), str(place / "hostile"))) is None


def limits() -> dict[str, int]:
    return {
        name: run_file(name).limit
        for name in [*FILES, "evaluations.json", "tuner.json", "result_rank_3.json", "trainer.pkl"]
    }


def test_limits_are_those_of_the_documentation() -> None:
    table = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    mebibyte = 1 << 20
    assert limits() == {
        "run.json": 16 * mebibyte,
        "manifest.json": 256 * mebibyte,
        "timeline.jsonl": 128 * mebibyte,
        "result.json": 4096 * mebibyte,
        "error.json": 64 * mebibyte,
        "usage.jsonl": 64 * mebibyte,
        ".lock": mebibyte,
        "logs/rank_0.log": 4096 * mebibyte,
        f"{CHECKPOINT}/.checkpoint.json": 64 * mebibyte,
        f"{CHECKPOINT}/.metadata.json": 64 * mebibyte,
        "evaluations.json": 1024 * mebibyte,
        "tuner.json": 1024 * mebibyte,
        "result_rank_3.json": 4096 * mebibyte,
        "trainer.pkl": 4096 * mebibyte,
    }
    for limit in ("1 MiB", "16 MiB", "64 MiB", "128 MiB", "256 MiB", "1 GiB", "4 GiB", f"{MAX_VALUES:,} values"):
        assert limit in table


# In a process of its own, because the peak of this process may be that of an earlier test.
MEMORY_OF_AN_ATTACK = """
import contextlib, io, os, re, sys
from pathlib import Path
from drivetrain_console import main
from tests.security.test_hostile_runs import attack

def command(*words):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main([str(word) for word in words])
    return status, out.getvalue(), err.getvalue()

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

place = Path(sys.argv[1])
os.chdir(place.parent)
before = peak()
attack(place, command)
print(peak() - before)
"""


def make_many_values(path: Path) -> None:
    """A small file that would take hundreds of times its size in memory, if the number of values had no limit."""
    path.write_bytes(b"[" + b"{}," * MAX_VALUES + b"{}]\n")


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith(".log")])
def test_number_of_values_in_a_file_is_limited(place: Path, name: str) -> None:
    replace(place / "hostile" / name, make_many_values)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_OF_AN_ATTACK, str(place)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 300_000, "kilobytes"


@pytest.mark.parametrize("make", [make_many_values, make_fifo, make_endless_line])
def test_page_of_a_run_is_shown_without_a_usage_file_that_cannot_be_read(
    place: Path, make: Callable[[Path], None]
) -> None:
    assert describe_run(local_storage(place / "hostile"))["usage"]
    replace(place / "hostile" / "usage.jsonl", make)
    document = describe_run(local_storage(place / "hostile"))
    assert document["usage"] == []
    assert document["curves"]


def test_page_of_a_run_is_not_shown_without_a_usage_file_that_the_storage_refuses(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunReader, "usage", lambda run: run.storage.call("read usage.jsonl", deny))
    with pytest.raises(StorageError, match=r"\[DT-406\] cannot read usage.jsonl"):
        describe_run(local_storage(place / "hostile"))


def test_number_of_values_in_all_lines_of_a_timeline_is_limited(place: Path, command: Command) -> None:
    line = json.dumps({"event": "attempt", "time": 1.5, "attempt": 0, "workers": [{}] * 100_000}).encode()
    (place / "hostile" / "timeline.jsonl").write_bytes(b"\n".join([line] * 21) + b"\n")
    status, out, _ = command("runs", "list", place)
    assert status == 0
    timeline = place / "hostile" / "timeline.jsonl"
    assert f"[DT-413] {timeline}: expected at most 4,000,000 values in the whole file, got more" in out
    assert out.splitlines()[1].split()[:2] == ["good", "failed"]


OUT_OF_MEMORY = """
import resource, sys
from drivetrain import StorageError
from drivetrain._storage.reading import damage_of, is_damage, parse_json
text = b'["' + b"x" * (1 << 26) + b'"]'
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 25), resource.RLIM_INFINITY))
try:
    parse_json(text, "run.json")
except StorageError as error:
    assert is_damage(error)
    print(str(error)[-60:])
try:
    with damage_of("the run"):
        bytearray(1 << 30)
except StorageError as error:
    print(error)
"""


def test_lack_of_memory_is_an_error_of_the_file() -> None:
    done = subprocess.run([sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "xxx... (too large for the memory of this machine)".rjust(60, "x")[-60:],
        "the run: the run's files are damaged (MemoryError: )",
    ], done.stderr


def test_long_configuration_is_cut_so_that_the_run_can_be_read_and_resumed(tmp_path: Path) -> None:
    config = {"values": ["x" * (1 << 20)] * 17}
    for _ in range(2):
        DataParallelTrainer(
            lambda config: None,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name="run", storage_path=str(tmp_path), resume="auto", verbose=0),
        ).fit()
    text = Result.from_path(tmp_path / "run").storage.read_json("run.json")
    assert text is not None
    assert text.text("train_loop_config").endswith(f"x... ({len(repr(config)):,} characters)")


def test_metadata_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    for metadata, values in (({"text": "x" * (64 << 20)}, "4"), ({"list": [0] * MAX_VALUES}, "4,000,004")):
        expected = rf"expected at most 67,108,864 bytes of JSON with 4,000,000 values, got .* with {values} values"
        with pytest.raises(StorageError, match=f"checkpoint metadata: {expected}"):
            checkpoint.set_metadata(metadata)
    checkpoint.set_metadata({"list": [0] * 100_000})
    assert len(checkpoint.get_metadata()["list"]) == 100_000


@pytest.mark.parametrize("make", [make_fifo, link_outside, make_deep_list, make_endless_line])
def test_checkpoint_with_a_damaged_list_does_not_hide_the_others(
    place: Path, make: Callable[[Path], None], command: Command
) -> None:
    (place / "hostile" / "manifest.json").unlink()
    replace(place / "hostile" / "checkpoint_000002" / ".checkpoint.json", make)
    warnings: list[str] = []

    entries = read_manifest(local_storage(place / "hostile"), warnings.append)

    assert [entry.number for entry in entries] == [1, 3]
    assert "recovered 2 checkpoints from the lists of files in their directories" in warnings[0]
    row = next(row for row in json.loads(command("runs", "list", place, "--json")[1]) if row["name"] == "hostile")
    assert (row["status"], row["checkpoints"]) == ("failed", 2)


@pytest.mark.parametrize("size", [10**400, -1, 1 << 63, "x", None])
def test_impossible_size_of_a_file_affects_only_its_checkpoint(place: Path, command: Command, size: object) -> None:
    file = place / "hostile" / CHECKPOINT / ".checkpoint.json"
    listing = json.loads(file.read_text())
    listing["files"]["weights"] = [size, None]
    file.write_text(json.dumps(listing))
    status, out, _ = command("checkpoints", "list", place / "hostile")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == [f"checkpoint_00000{index}" for index in (1, 2, 3)]
    status, out, _ = command("checkpoints", "verify", place / "hostile")
    assert status == 1
    assert f"{CHECKPOINT}  " in out
    assert "expected the size and the checksum of 'weights'" in out


@pytest.mark.parametrize("make", [make_fifo, link_outside, make_deep_list, make_endless_line])
def test_run_resumes_from_the_checkpoint_before_one_with_a_damaged_list(
    place: Path, make: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    replace(place / "hostile" / "checkpoint_000003" / ".checkpoint.json", make)
    DataParallelTrainer(
        lambda: print("resumed from", Path(get_checkpoint().path).name),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(resume=str(place / "hostile"), verbose=0),
    ).fit()
    out, err = capfd.readouterr()
    assert "resumed from checkpoint_000002" in out
    assert "checkpoint_000003/.checkpoint.json: expected" in err


def test_checkpoints_of_a_bucket_that_cannot_be_read_are_not_taken_for_damaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe_file("/unreadable/checkpoint_000001/.checkpoint.json", b"{}")
    storage = Storage(FsspecFilesystem(memory), "/unreadable")
    monkeypatch.setattr(type(memory), "cat_file", deny)
    with pytest.raises(StorageError, match="PermissionError"):
        read_manifest(storage)
    memory.rm("/unreadable", recursive=True)


def test_checkpoint_whose_storage_answers_with_a_page_of_html_is_not_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of buckets raise a ``ValueError`` there, which is also the error about damaged content."""
    import fsspec

    memory = fsspec.filesystem("memory")
    listing = {
        "version": 1,
        "entry": {"name": CHECKPOINT, "number": 1, "iteration": 1, "metrics": {}, "time": 1.5, "ordinal": 1},
        "files": {"weights": [1, None]},
    }
    memory.pipe_file(f"/refused/{CHECKPOINT}/.checkpoint.json", json.dumps(listing).encode())
    memory.pipe_file(f"/refused/{CHECKPOINT}/weights", b"w")
    storage = Storage(FsspecFilesystem(memory), "/refused")
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "cat_file", answer_with_html)
        with pytest.raises(StorageError, match=r"\[DT-406\] cannot read .*JSONDecodeError") as refused:
            read_manifest(storage)
        assert not is_damage(refused.value)
        with pytest.raises(StorageError, match="JSONDecodeError"):
            CheckpointManager(storage).sweep()
    assert [entry.name for entry in read_manifest(storage)] == [CHECKPOINT]
    assert CheckpointManager(storage).sweep() == ([], 0)
    memory.rm("/refused", recursive=True)


def answer_with_html(*_: object, **__: object) -> bytes:
    return json.loads("<html>502 Bad Gateway</html>")


def deny(*_: object, **__: object) -> bytes:
    raise PermissionError(13, "Permission denied")
