"""Files that grow, on storage that can only replace files as a whole."""

import itertools
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import fsspec
import pytest

from drivetrain import (
    Checkpoint,
    CheckpointConfig,
    DataParallelTrainer,
    Result,
    RunConfig,
    ScalingConfig,
    StorageError,
    TrainingFailedError,
    report,
    runs,
)
from drivetrain._storage import segments
from drivetrain._storage.directory import Storage
from drivetrain._storage.layout import SEGMENTS
from drivetrain._storage.mirror import Mirror
from drivetrain._storage.remote import locate
from drivetrain._storage.reports import rank_files, tail_lines
from drivetrain._storage.segments import SegmentedFiles

NAME = "result.json"


class CountingFilesystem(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]  # fsspec has no types
    """A filesystem in memory that counts the bytes that are written, and names the files that are read."""

    protocol = "memory"
    cachable = False
    written = 0

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def pipe_file(self, path: str, value: bytes, **options: object) -> None:
        self.written += len(value)
        super().pipe_file(path, value, **options)

    def cat_file(self, path: str, **options: object) -> bytes:
        self.read.append(path)
        return bytes(super().cat_file(path, **options))

    def _open(self, path: str, mode: str = "rb", **options: object) -> object:
        file = super()._open(path, mode, **options)
        if "w" in mode:
            write = file.write

            def counted(data: bytes) -> int:
                self.written += len(data)
                return int(write(data))

            file.write = counted
        return file


@pytest.fixture
def filesystem() -> Iterator[CountingFilesystem]:
    filesystem = CountingFilesystem()
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


@pytest.fixture
def storage(filesystem: CountingFilesystem) -> Storage:
    return Storage(*locate("/runs/run", filesystem, what="path"))


@pytest.fixture
def make_mirror(storage: Storage, tmp_path: Path) -> Callable[[int], tuple[Mirror, Path]]:
    def make(driver: int) -> tuple[Mirror, Path]:
        directory = tmp_path / str(driver)
        directory.mkdir()
        return Mirror(str(directory), storage, "", period_s=300, warn=pytest.fail, driver=driver), directory / NAME

    return make


MakeMirror = Callable[[int], tuple[Mirror, Path]]


def append(path: Path, data: bytes) -> bytes:
    with path.open("ab") as file:
        file.write(data)
    return path.read_bytes()


def segments_of(storage: Storage) -> list[str]:
    return sorted(storage.walk(f"{SEGMENTS}/{NAME}"))


def test_only_what_was_added_is_uploaded(
    make_mirror: MakeMirror, storage: Storage, filesystem: CountingFilesystem
) -> None:
    mirror, path = make_mirror(1)
    for number in range(20):
        content = append(path, b"%d\n" % number * 1000)
        mirror.push_before_commit()
        assert storage.read_bytes(NAME) == content
    mirror.push_before_commit()
    mirror.push()

    assert filesystem.written == len(content)
    assert len(segments_of(storage)) == 20
    assert rank_files(storage) == {0: NAME}
    assert storage.exists(NAME)
    assert tail_lines(storage, NAME, 2) == [b"19", b"19"]


def test_small_file_is_whole_after_the_run_and_a_large_one_stays_in_segments(
    make_mirror: MakeMirror, storage: Storage, filesystem: CountingFilesystem
) -> None:
    mirror, path = make_mirror(1)
    large = path.with_name("result_rank_1.json")
    logs = path.parent / "logs" / "rank_0.log"
    logs.parent.mkdir()
    with mirror.running():
        for _ in range(3):
            append(path, b"1234567\n" * 10)
            append(logs, b"printed\n")
            append(large, b"1234567\n" * (1 << 18))
            mirror.push_before_commit()

    assert filesystem.cat_file(storage.path(NAME)) == storage.read_bytes(NAME) == path.read_bytes()
    assert filesystem.cat_file(storage.path("logs/rank_0.log")) == b"printed\n" * 3
    assert storage.read_bytes(large.name) == large.read_bytes()
    assert {os.path.dirname(name) for name in storage.walk(SEGMENTS)} == {large.name}
    assert rank_files(storage) == {0: NAME, 1: large.name}


def test_driver_that_resumes_a_run_continues_its_files(make_mirror: MakeMirror, storage: Storage) -> None:
    first, path = make_mirror(1)
    for number in range(5):
        append(path, b"%d\n" % number * 100)
        first.push_before_commit()

    second, resumed = make_mirror(2)
    second.pull()
    assert resumed.read_bytes() == path.read_bytes()
    os.truncate(resumed, 600)  # the lines of later iterations are removed
    append(resumed, b"again\n" * 200)
    append(path, b"late\n")  # by a driver that was suspended, and has not noticed that another one works on the run
    first.push_before_commit()
    second.push_before_commit()

    assert storage.read_bytes(NAME) == resumed.read_bytes()
    third, merged = make_mirror(3)
    third.pull()
    assert merged.read_bytes() == resumed.read_bytes()
    with third.running():
        append(merged, b"end\n")
    assert storage.read_bytes(NAME) == merged.read_bytes()
    assert segments_of(storage) == []


def test_logs_of_earlier_drivers_are_continued_without_a_download(
    make_mirror: MakeMirror, storage: Storage, filesystem: CountingFilesystem
) -> None:
    name = "logs/rank_0.log"
    for driver, line in ((1, b"first\n"), (2, b"second\n"), (3, b"third\n")):
        mirror, path = make_mirror(driver)
        mirror.pull()
        log = path.parent / name
        assert not log.exists()
        log.parent.mkdir(exist_ok=True)
        with mirror.running():
            append(log, line)
            mirror.push_before_commit()
            append(log, line)

    assert storage.read_bytes(name) == b"first\nfirst\nsecond\nsecond\nthird\nthird\n"


def test_lines_that_are_removed_at_the_end_of_a_segment_stay_removed_after_a_failed_upload(
    make_mirror: MakeMirror, storage: Storage, filesystem: CountingFilesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, path = make_mirror(1)
    for _ in range(2):
        append(path, b"line\n" * 20)
        mirror.push_before_commit()
    os.truncate(path, 100)
    with monkeypatch.context() as patch:
        patch.setattr(CountingFilesystem, "pipe_file", fail)
        with pytest.raises(StorageError):
            mirror.push_before_commit()
    mirror.push_before_commit()
    assert storage.read_bytes(NAME) == path.read_bytes()

    content = append(path, b"next\n")
    with mirror.running():
        mirror.push_before_commit()
        assert storage.read_bytes(NAME) == content
    assert (storage.read_bytes(NAME), segments_of(storage)) == (content, [])


def fail(*args: object, **options: object) -> None:
    raise PermissionError("no access")


def test_file_that_changes_during_its_upload_is_corrected_by_the_next_one(
    make_mirror: MakeMirror, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, path = make_mirror(1)
    append(path, b"first\n" * 100)

    def truncate_meanwhile(self: CountingFilesystem, name: str, value: bytes, **options: object) -> None:
        os.truncate(path, 0)
        append(path, b"again\n" * 200)
        write(self, name, value, **options)

    write = CountingFilesystem.pipe_file
    with monkeypatch.context() as patch:
        patch.setattr(CountingFilesystem, "pipe_file", truncate_meanwhile)
        mirror.push_before_commit()
    mirror.push_before_commit()

    assert storage.read_bytes(NAME) == b"again\n" * 200


def test_driver_that_is_killed_before_it_deletes_hidden_segments_leaves_a_readable_file(
    make_mirror: MakeMirror, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, path = make_mirror(1)
    for _ in range(4):
        append(path, b"line\n" * 20)
        first.push_before_commit()
    os.truncate(path, 50)
    with monkeypatch.context() as patch:
        patch.setattr(CountingFilesystem, "rm", fail)
        with pytest.raises(StorageError):
            first.push_before_commit()
    assert len(segments_of(storage)) == 5
    assert storage.read_bytes(NAME) == path.read_bytes()

    second, resumed = make_mirror(2)
    second.pull()
    with second.running():
        append(resumed, b"end\n")
        second.push_before_commit()
        assert storage.read_bytes(NAME) == resumed.read_bytes()
        assert len(segments_of(storage)) == 2
    assert (storage.read_bytes(NAME), segments_of(storage)) == (resumed.read_bytes(), [])


def test_merge_of_a_driver_that_has_lost_the_run_changes_nothing(make_mirror: MakeMirror, storage: Storage) -> None:
    first, path = make_mirror(1)
    second, resumed = make_mirror(2)
    with first.running():
        append(path, b"line\n" * 20)
        first.push()
        second.pull()
        content = append(resumed, b"of the second\n")
        second.push_before_commit()

    assert storage.read_bytes(NAME) == content
    assert len(segments_of(storage)) == 2


def test_damaged_file_does_not_prevent_a_resume(
    storage: Storage, filesystem: CountingFilesystem, make_mirror: MakeMirror, tmp_path: Path
) -> None:
    first, path = make_mirror(1)
    for _ in range(3):
        append(path, b"line\n")
        first.push_before_commit()
    filesystem.rm_file(storage.path(SEGMENTS, NAME, segments_of(storage)[1]))
    warnings: list[str] = []
    (tmp_path / "2").mkdir()
    second = Mirror(str(tmp_path / "2"), storage, "", period_s=300, warn=warnings.append, driver=2)
    second.pull()

    assert warnings == ["result.json: a segment is missing in .segments, so its last 10 bytes are lost"]
    append(tmp_path / "2" / NAME, b"again\n")
    second.push_before_commit()
    assert storage.read_bytes(NAME) == b"line\nagain\n"


def test_file_with_another_header_is_replaced(make_mirror: MakeMirror, storage: Storage) -> None:
    mirror, path = make_mirror(1)
    append(path, b"a\n" + b"0\n" * 100_000)
    mirror.push_before_commit()
    path.write_bytes(b"a,b\n" + b"0\n" * 100_000)
    mirror.push_before_commit()

    assert storage.read_bytes(NAME) == path.read_bytes()
    assert len(segments_of(storage)) == 1


def test_file_with_many_segments_is_no_longer_uploaded_before_each_commit(
    make_mirror: MakeMirror, storage: Storage
) -> None:
    mirror, path = make_mirror(1)
    for number in range(600):
        content = append(path, b"%d\n" % number)
        mirror.push_before_commit()
    assert len(segments_of(storage)) == 500
    mirror.push()

    assert len(segments_of(storage)) == 501
    assert storage.read_bytes(NAME) == content
    content = append(path, b"1234567\n" * (1 << 20))
    mirror.push_before_commit()
    assert storage.read_bytes(NAME) == content


def test_merge_that_is_interrupted_anywhere_loses_nothing(
    make_mirror: MakeMirror, storage: Storage, filesystem: CountingFilesystem
) -> None:
    mirror, path = make_mirror(1)
    for number in range(8):
        content = append(path, b"%d\n" % number * 100)
        mirror.push_before_commit()
    filesystem.pipe_file(storage.path(NAME), content)
    *others, _last = segments_of(storage)
    random.Random(0).shuffle(others)
    for name in others:
        filesystem.rm_file(storage.path(SEGMENTS, NAME, name))
        assert storage.read_bytes(NAME) == content


class Failures:
    """Makes one of the following changes of the storage fail, before or after it has taken effect.

    Args:
        patch: replaces the methods that change the filesystem.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._remaining: int | None = None
        self._takes_effect = False
        for name in ("pipe_file", "rm"):
            patch.setattr(CountingFilesystem, name, self._failing(getattr(CountingFilesystem, name)))

    def begin(self, changes: int, takes_effect: bool) -> None:
        """Make the change fail that follows a number of other changes."""
        self._remaining, self._takes_effect = changes, takes_effect

    def end(self) -> None:
        """Make no change fail."""
        self._remaining = None

    def _failing(self, change: Callable[..., None]) -> Callable[..., None]:
        def wrapper(*args: object, **options: object) -> None:
            fails = self._remaining == 0
            if self._remaining is not None:
                self._remaining -= 1
            if not fails or self._takes_effect:
                change(*args, **options)
            if fails:
                raise PermissionError("no access")

        return wrapper


def change_lines(generator: random.Random, path: Path, number: int) -> None:
    """Append lines, or remove lines as a logger does before an attempt resumes."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if generator.random() < 0.3:
        path.write_bytes(b"".join(lines[: generator.randint(0, len(lines))]))
    for line in range(generator.randrange(4)):
        append(path, b"%d.%d\n" % (number, line) * generator.randint(1, 5))


@pytest.mark.parametrize("seed", range(12))
def test_no_line_is_lost_or_comes_back_however_uploads_fail_and_drivers_are_killed(
    seed: int, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_MAX_SEGMENT_BYTES", 40)
    generator, failures, number = random.Random(seed), Failures(monkeypatch), 0
    stored = b""
    for driver in range(1, 30):
        directory = tmp_path / str(driver)
        directory.mkdir()
        path = directory / NAME
        files = SegmentedFiles(storage, str(directory), driver)
        files.pull()
        assert not stored or path.read_bytes() == stored
        for _ in range(generator.randrange(6)):
            number += 1
            change_lines(generator, path, number)
            path.touch()
            if generator.random() < 0.5:
                failures.begin(generator.randrange(4), generator.random() < 0.5)
            content = path.read_bytes()
            try:
                files.push([NAME])
            except StorageError:
                before, stored = stored, storage.read_bytes(NAME) or b""
                assert stored == before or content.startswith(stored)
                kept = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, content, strict=False))
                assert len(stored) >= len(list(kept))
            else:
                stored = storage.read_bytes(NAME)
                assert stored == content
            failures.end()
        if path.exists() and path.read_bytes() == stored and generator.random() < 0.3:
            failures.begin(generator.randrange(6), generator.random() < 0.5)
            with suppress(StorageError):
                files.merge()
            failures.end()
            assert (storage.read_bytes(NAME) or b"") == stored


def test_open_file_downloads_only_the_segments_that_are_read(
    make_mirror: MakeMirror, storage: Storage, filesystem: CountingFilesystem
) -> None:
    mirror, path = make_mirror(1)
    for number in range(10):
        content = append(path, b"%d\n" % number * 50_000)
        mirror.push_before_commit()
    assert tail_lines(storage, NAME, 2) == [b"9", b"9"]
    assert len(filesystem.read) == 1

    with storage.open_file(NAME) as file:
        generator = random.Random(0)
        for _ in range(100):
            start, count = generator.randrange(len(content) + 10), generator.randrange(200_000)
            file.seek(start)
            assert file.read(count) == content[start : start + count]


def test_open_file_reads_a_file_whose_end_was_replaced_and_whose_segments_are_merged_meanwhile(
    make_mirror: MakeMirror, storage: Storage
) -> None:
    mirror, path = make_mirror(1)
    with ExitStack() as stack:
        with mirror.running():
            for number in range(5):
                content = append(path, b"%d\n" % number * 1_000)
                mirror.push_before_commit()
            path.write_bytes(content[:7_001] + b"\n")
            content = append(path, b"more\n")
            mirror.push_before_commit()
            file = stack.enter_context(storage.open_file(NAME))
            assert file.read(10) == content[:10]
        assert segments_of(storage) == []
        assert file.read() == content[10:]


def test_missing_segment_is_an_error(make_mirror: MakeMirror, storage: Storage, filesystem: CountingFilesystem) -> None:
    mirror, path = make_mirror(1)
    for _ in range(3):
        append(path, b"line\n")
        mirror.push_before_commit()
    filesystem.rm_file(storage.path(SEGMENTS, NAME, segments_of(storage)[1]))

    with pytest.raises(StorageError, match=r"expected a segment in \.segments that begins at byte 5, got only later"):
        storage.read_bytes(NAME)


def train_function(config: dict[str, int]) -> None:
    metrics = {f"metric_{number}": number + 1 / 3 for number in range(20)}
    for step in range(config["first"], config["steps"]):
        if step % 500 != 499:
            report(metrics)
            continue
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step))
            report(metrics, Checkpoint.from_directory(directory))
    if config["fails"]:
        raise RuntimeError("the end")


def fit(filesystem: CountingFilesystem, *, first: int, steps: int, fails: bool) -> Result:
    return DataParallelTrainer(
        train_function,
        train_loop_config={"first": first, "steps": steps, "fails": fails},
        scaling_config=ScalingConfig(runtime="inprocess"),
        run_config=RunConfig(
            name="run",
            storage_path="/runs",
            storage_filesystem=filesystem,
            resume="auto",
            verbose=0,
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
    ).fit()


def test_metrics_of_a_run_cost_bytes_in_proportion_to_the_metrics(filesystem: CountingFilesystem) -> None:
    with pytest.raises(TrainingFailedError, match="the end"):
        fit(filesystem, first=0, steps=10_100, fails=True)
    run = runs.open_run("/runs/run", storage_filesystem=filesystem)
    sizes = {name: len(run.storage.read_bytes(name) or b"") for name in (NAME, "progress.csv", "timeline.jsonl")}

    assert len(list(run.reports())) == 10_100
    assert sum(sizes.values()) <= filesystem.written <= 1.1 * sum(sizes.values())
    written, filesystem.written = filesystem.written, 0

    result = fit(filesystem, first=10_000, steps=12_000, fails=False)

    assert [report["_training_iteration"] for report in run.reports()] == list(range(1, 12_001))
    assert len(result.metrics_dataframe) == 12_000
    rows = (run.storage.read_bytes("progress.csv") or b"").splitlines()
    assert len(rows) == 12_001
    assert filesystem.written < 0.5 * written, "a driver that resumes the run uploads the metrics again"
