"""The command line, as used by people and programs."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import drivetrain
from drivetrain import Checkpoint, DataParallelTrainer, Result, RunConfig, ScalingConfig
from drivetrain.loggers import JsonLoggerCallback, ParquetLoggerCallback
from drivetrain_console import main
from tests.support import DEADLINE_S, open_pipe, send_line, snapshot, wait_for_release

OK, BAD, USAGE, MISSING = 0, 1, 2, 3

PROGRAM = [sys.executable, "-c", "import sys; from drivetrain_console import main; sys.exit(main())"]

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs the command in this process, on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: object) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


def every_command() -> list[list[str]]:
    commands = []
    for words in (
        *(["run"], ["stacks"], ["doctor"], ["plugins"], ["new-plugin"], ["prove"], ["completion"], ["explain"]),
        *(["runs", name] for name in ("list", "show", "plot", "compare", "tail", "gc", "report", "serve")),
        *(["checkpoints", name] for name in ("list", "verify", "export")),
    ):
        commands.append(words)
    return commands


@pytest.mark.parametrize("words", every_command(), ids=" ".join)
def test_every_command_has_help_with_examples_and_json(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"\n  drivetrain {' '.join(words)}" in shown.partition("examples:")[2]
    assert "--json" in shown


def test_command_without_its_object_lists_the_choices(command: Command) -> None:
    assert command()[0] == command("runs")[0] == USAGE
    assert "compare" in command("runs")[1]


def test_error_code_is_explained_in_any_spelling(command: Command) -> None:
    for code in ("DT-104", "dt-104", "104", "[DT-104]"):
        status, text, _ = command("explain", code)
        assert status == OK
        assert text.startswith("DT-104: ")
        assert "\n    DataParallelTrainer(train_two)" in text
        assert max(map(len, text.splitlines())) <= 80
    assert json.loads(command("explain", "DT-104", "--json")[1])["code"] == "DT-104"


def test_error_codes_are_listed_and_an_unknown_code_is_refused(command: Command) -> None:
    assert "DT-104  " in command("explain")[1]
    status, _, error = command("explain", "DT-999")
    assert status == MISSING
    assert "expected an error code such as DT-104, got 'DT-999'" in error


def test_runs_are_listed_the_newest_first_as_text_and_as_json(command: Command, runs: Path) -> None:
    status, text, _ = command("runs", "list", runs)
    assert status == OK
    header, *rows = text.splitlines()
    assert header.split()[:4] == ["RUN", "STATUS", "DURATION", "WORKERS"]
    assert [row.split()[:2] for row in rows] == [["story", "finished"], ["plain", "finished"]]
    assert max(map(len, text.splitlines())) <= 80

    found = json.loads(command("runs", "list", runs, "--json")[1])
    assert [(one["name"], one["attempts"], one["reports"]) for one in found] == [("story", 3, 60), ("plain", 1, 5)]
    assert json.loads(command("runs", "list", runs, "--status", "failed", "--json")[1]) == []


def test_text_is_as_wide_as_the_terminal(command: Command, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (60, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        for words in (["runs", "list", runs], ["runs", "show", runs / "story"], ["runs", "plot", runs / "story"]):
            text = command(*words)[1]
            assert max(map(len, text.splitlines())) <= columns, words
    assert "STARTED" in command("runs", "list", runs)[1]


def test_run_is_shown_with_its_failures(command: Command, runs: Path) -> None:
    status, text, _ = command("runs", "show", runs / "story")
    assert status == OK
    for words in ("\n2        ", "2 on ", "SIGKILL", "train_with_accidents", "checkpoint_"):
        assert words in text
    found = json.loads(command("runs", "show", runs / "story", "--json")[1])
    assert len(found["attempts"]) == 3
    assert found["attempts"][1]["failure"]["kind"] == "user error"


def test_run_is_found_by_its_name(command: Command, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_STORAGE_PATH", str(runs))
    assert command("runs", "show", "story")[0] == OK
    monkeypatch.delenv("DRIVETRAIN_STORAGE_PATH")
    monkeypatch.chdir(runs)
    assert command("runs", "show", "story")[0] == OK


def test_missing_object_has_its_own_status_and_error(command: Command, runs: Path, tmp_path: Path) -> None:
    story = runs / "story"
    for words in (
        ["runs", "show", tmp_path / "nothing"],
        ["runs", "list", tmp_path / "nothing"],
        ["runs", "gc", tmp_path / "nothing"],
        ["runs", "plot", story, "--metric", "lss"],
        ["runs", "tail", story, "--rank", 7],
        ["checkpoints", "verify", story, "checkpoint_999999"],
        ["checkpoints", "export", story, "best", tmp_path / "x", "--metric", "lss", "--mode", "max"],
    ):
        status, text, error = command(*words)
        assert (status, text) == (MISSING, ""), words
        assert error.startswith("drivetrain: ")
        assert "expected" in error
    status, _, error = command("runs", "show", tmp_path / "nothing", "--json")
    assert status == MISSING
    assert json.loads(error)["type"] == "MissingError"


def test_plot_shows_every_extreme_in_ascii_or_braille(command: Command, runs: Path) -> None:
    text = command("runs", "plot", runs / "story", "--metric", "loss", "--height", 8)[1]
    title, *lines = text.splitlines()
    assert title == "loss"
    assert lines[0].split("│")[0].strip() == "2.1"
    assert lines[-1].split() == ["*", "rank", "0", "+", "rank", "1"]
    alone = command("runs", "plot", runs / "story", "--metric", "loss", "--rank", 0, "--log")[1]
    assert any("\u2800" < letter <= "\u28ff" for letter in alone)


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_plot_is_written_to_a_file(command: Command, runs: Path, tmp_path: Path, suffix: str, start: bytes) -> None:
    pytest.importorskip("matplotlib")
    status, _, _ = command("runs", "plot", runs / "story", "--metric", "loss", "-o", tmp_path / f"loss.{suffix}")
    assert status == OK
    assert (tmp_path / f"loss.{suffix}").read_bytes().startswith(start)
    assert command("runs", "plot", runs / "story", "-o", tmp_path / "loss.txt")[0] == USAGE


def report_once(config: dict[str, str]) -> None:
    drivetrain.report({"step": 1})


def test_comparison_shows_long_settings_completely(command: Command, tmp_path: Path) -> None:
    runs = []
    for name in ("small", "large"):
        config = {f"setting_{number}": f"{name}_{number}" for number in range(8)}
        run_config = RunConfig(name=name, storage_path=str(tmp_path), verbose=0)
        in_this_process = ScalingConfig(num_workers=0)
        trainer = DataParallelTrainer(
            report_once, train_loop_config=config, scaling_config=in_this_process, run_config=run_config
        )
        runs.append(trainer.fit().path)

    _, text, _ = command("runs", "compare", *runs)

    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for number in range(8):
        assert f"small_{number}'" in text
        assert f"large_{number}'" in text


def test_comparison_of_runs_shows_only_differences(command: Command, runs: Path) -> None:
    status, text, _ = command("runs", "compare", runs / "plain", runs / "story", "--metric", "loss")
    assert status == OK
    rows = {line.split("  ")[0]: line.split()[-2:] for line in text.splitlines() if "  " in line}
    assert rows["attempts"] == ["1", "3"]
    assert rows["step, max"] == ["5", "60"]
    assert "{'steps': 5}" in text
    assert "scaling_config" not in text, "an identical setting is shown"
    assert command("runs", "compare", runs / "plain")[0] == USAGE


def test_tail_shows_the_last_reports_and_logs(command: Command, runs: Path) -> None:
    lines = command("runs", "tail", runs / "story", "-n", 2)[1].splitlines()
    assert [line.split()[1] for line in lines] == ["59", "60"]
    (line,) = command("runs", "tail", runs / "story", "-n", 1, "--rank", 1, "--json", "--no-follow")[1].splitlines()
    assert json.loads(line)["step"] == 60


def test_tail_shows_the_reports_of_a_rank_that_are_only_in_parquet_files(command: Command, tmp_path: Path) -> None:
    with open_pipe(tmp_path / "words") as words, open_pipe(tmp_path / "pipe") as pipe:

        def train(config: dict[str, str]) -> None:
            rank = drivetrain.get_context().get_world_rank()
            for step in range(1, 4):
                with tempfile.TemporaryDirectory() as directory:
                    Path(directory, f"rank_{rank}").touch()
                    metrics = {"step": step, "eval": {"accuracy": 0.5}}
                    # The rows of all ranks up to a commit are in a file when the next commit begins.
                    drivetrain.report(metrics, Checkpoint.from_directory(directory), wait=True)
            send_line(config["words"], "here")
            wait_for_release(config["pipe"])

        run = DataParallelTrainer(
            train,
            train_loop_config={"words": words.path, "pipe": pipe.path},
            run_config=RunConfig(
                name="columns",
                storage_path=str(tmp_path),
                verbose=0,
                callbacks=[JsonLoggerCallback(ranks=[0]), ParquetLoggerCallback()],
            ),
            scaling_config=ScalingConfig(num_workers=2),
        ).start()
        words.receive(2)
        place = tmp_path / "columns"
        status, _, error = command("runs", "tail", place, "--rank", 1)
        assert status == MISSING
        assert "--no-follow" in error
        pipe.release(2)
        run.result(DEADLINE_S)
    lines = command("runs", "tail", place, "--rank", 1, "-n", 2)[1].splitlines()
    assert [line.split(maxsplit=2)[1:] for line in lines] == [[n, f"step {n}  eval/accuracy 0.5"] for n in "23"]
    (line,) = command("runs", "tail", place, "--rank", 1, "-n", 1, "--json")[1].splitlines()
    assert json.loads(line)["eval/accuracy"] == 0.5


def test_tail_follows_a_run_to_its_end(runs: Path, tmp_path: Path) -> None:
    with open_pipe(tmp_path / "words") as words, open_pipe(tmp_path / "pipe") as pipe:

        def train(config: dict[str, str]) -> None:
            send_line(config["words"], "here")
            for step in range(1, 4):
                drivetrain.report({"step": step})
                wait_for_release(config["pipe"])

        run = DataParallelTrainer(
            train,
            train_loop_config={"words": words.path, "pipe": pipe.path},
            run_config=RunConfig(name="followed", storage_path=str(tmp_path), verbose=0),
            scaling_config=ScalingConfig(num_workers=1),
        ).start()
        words.receive()
        tail = subprocess.Popen(
            [*PROGRAM, "runs", "tail", str(tmp_path / "followed"), "--json"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert tail.stdout is not None
        steps = []
        for line in tail.stdout:  # each report is shown before the next one is made
            steps.append(json.loads(line)["step"])
            pipe.release()
        assert steps == [1, 2, 3]
        assert tail.wait(DEADLINE_S) == OK
        tail.stdout.close()
        run.result(DEADLINE_S)


def test_checkpoints_are_listed_verified_and_exported(command: Command, own_runs: Path, tmp_path: Path) -> None:
    story = own_runs / "story"
    found = json.loads(command("checkpoints", "list", story, "--json")[1])
    assert [one["iteration"] for one in found] == [40, 50, 60]
    assert all(one["files"] == 2 and not one["pinned"] for one in found)
    assert command("checkpoints", "list", story)[1].count("checkpoint_") == 3

    assert command("checkpoints", "verify", story)[0] == OK
    status, text, _ = command(
        "checkpoints", "export", story, "best", tmp_path / "a", "--metric", "loss", "--mode", "max"
    )
    assert status == OK
    assert (tmp_path / "a" / "step").read_text() == "40"
    command("checkpoints", "export", story, "latest", tmp_path / "b", "--include", "step")
    assert os.listdir(tmp_path / "b") == ["step"]
    assert command("checkpoints", "export", story, "latest", tmp_path / "b")[0] == USAGE, "the directory is not empty"

    Path(found[0]["path"], "weights").write_bytes(b"less")
    status, text, _ = command("checkpoints", "verify", story)
    assert status == BAD
    assert "has 4 bytes instead of 40000" in text


def leave_uncommitted(run: Path) -> Path:
    """Create the files of a checkpoint whose driver was killed before the commit."""
    left = run / "checkpoint_000998"
    left.mkdir()
    (left / "weights").write_bytes(b"w" * 5000)
    return left


def test_gc_deletes_only_after_confirmation_and_keeps_committed_checkpoints(command: Command, own_runs: Path) -> None:
    left = leave_uncommitted(own_runs / "story")
    before = snapshot(own_runs)

    status, text, error = command("runs", "gc", own_runs)
    assert status == USAGE
    assert "--yes" in error
    assert command("runs", "gc", own_runs, "--dry-run")[0] == OK
    assert snapshot(own_runs) == before, "files were changed without confirmation"
    assert left.name in text
    assert "4.9 KiB" in text

    found = json.loads(command("runs", "gc", own_runs, "--yes", "--json")[1])
    assert (found["deleted"], found["bytes"]) == (True, 5000)
    assert not left.exists()
    assert command("checkpoints", "verify", own_runs / "story")[0] == OK
    assert "nothing to delete" in command("runs", "gc", own_runs, "--yes")[1]


def test_gc_keeps_the_newest_the_pinned_and_the_last_usable_checkpoint(command: Command, own_runs: Path) -> None:
    story = own_runs / "story"
    first, second, third = [Checkpoint(one.path) for one, _ in Result.from_path(story).best_checkpoints]
    first.pin()
    Path(third.path, "weights").unlink()

    command("runs", "gc", story, "--keep-last", 1, "--yes")

    kept = [one for one, _ in Result.from_path(story).best_checkpoints]
    assert kept == [first, second, third], "the newest is damaged, so a run would resume from the second"
    Path(third.path, "weights").write_bytes(b"w" * 60_000)
    first.unpin()
    command("runs", "gc", story, "--keep-last", 1, "--yes")
    assert [one for one, _ in Result.from_path(story).best_checkpoints] == [third]
    assert not Path(second.path).exists()
    assert command("runs", "gc", story, "--keep-last", 0, "--yes")[0] == USAGE


def test_gc_does_not_touch_a_run_in_use(command: Command, tmp_path: Path) -> None:
    with open_pipe(tmp_path / "words") as words, open_pipe(tmp_path / "pipe") as pipe:

        def train(config: dict[str, str]) -> None:
            send_line(config["words"], "here")
            wait_for_release(config["pipe"])

        run = DataParallelTrainer(
            train,
            train_loop_config={"words": words.path, "pipe": pipe.path},
            run_config=RunConfig(name="live", storage_path=str(tmp_path), verbose=0),
        ).start()
        try:
            words.receive()
            left = leave_uncommitted(tmp_path / "live")
            status, text, _ = command("runs", "gc", tmp_path / "live", "--keep-last", 1, "--yes")
            assert status == OK
            assert "skipped" in text
            assert left.exists()
            assert json.loads(command("runs", "show", tmp_path / "live", "--json")[1])["status"] == "running"
        finally:
            pipe.release()
            run.result(DEADLINE_S)
    command("runs", "gc", tmp_path / "live", "--yes")
    assert not left.exists()


def test_page_is_written_to_the_given_path(command: Command, runs: Path, tmp_path: Path) -> None:
    status, text, _ = command("runs", "report", runs / "story", "-o", tmp_path / "deep" / "page.html")
    assert (status, text.strip()) == (OK, str(tmp_path / "deep" / "page.html"))
    assert "<title>story</title>" in (tmp_path / "deep" / "page.html").read_text()


def test_commands_accept_runs_in_other_storage(command: Command, tmp_path: Path) -> None:
    place = "memory://looked-at/runs"

    def train() -> None:
        (tmp_path / "weights").write_text("w")
        for step in range(1, 4):
            drivetrain.report({"step": step, "loss": 1 / step})
        drivetrain.report({"step": 4, "loss": 0.1}, Checkpoint.from_directory(tmp_path))

    DataParallelTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="far", storage_path=place, verbose=0),
    ).fit()

    (found,) = json.loads(command("runs", "list", place, "--json")[1])
    assert (found["status"], found["reports"], found["attempts"]) == ("finished", 4, 1)
    run = f"{place}/far"
    assert "checkpoint_000004" in command("runs", "show", run)[1]
    assert "loss" in command("runs", "plot", run)[1]
    assert command("runs", "tail", run, "-n", 1)[1].split()[1] == "4"
    assert command("checkpoints", "verify", run)[0] == OK
    assert command("runs", "gc", run, "--yes")[0] == OK
    assert command("runs", "report", run, "-o", tmp_path / "far.html")[0] == OK


def test_doctor_finds_no_problem_on_this_machine_and_measures_the_storage(command: Command, tmp_path: Path) -> None:
    status, text, _ = command("doctor", "--storage-path", tmp_path / "new" / "runs", "--json")
    findings = {finding["name"]: finding for finding in json.loads(text)["findings"]}
    assert status == (OK if all(one["status"] != "problem" for one in findings.values()) else BAD)
    assert {"system", "CPUs", "memory", "GPUs", "frameworks", "plugins", "storage", "network", "Ray"} <= set(findings)
    assert "MB/s" in findings["storage"]["found"]
    assert list(tmp_path.rglob("*probe*")) == [], "it tidies up"


def test_doctor_names_problems_and_remedies(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, text, _ = command("doctor", "--storage-path", tmp_path / "file")
    assert status == BAD
    assert "ERROR  storage" in text
    assert "-> choose another --storage-path" in text
    assert "problems: 1" in text


def test_error_for_a_program_is_json_too(command: Command) -> None:
    status, _, error = command("runs", "plot", "x", "-o", "x.doc", "--json")
    assert status == USAGE
    assert json.loads(error) == {
        "error": "runs plot -o: expected a .png, .svg or .pdf file, got x.doc",
        "type": "ConfigurationError",
    }


def test_closed_output_pipe_is_not_an_error(runs: Path) -> None:
    listed = subprocess.run(
        f"{shlex.join(PROGRAM)} runs tail {runs}/story -n 60 --json | head -n 1; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=False,
    )
    assert listed.stderr == ""
    assert listed.returncode in (0, 141)


def test_shell_completes_commands_and_options(tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    script = tmp_path / "completion.bash"
    with script.open("w") as file:
        subprocess.run([*PROGRAM, "completion", "bash"], stdout=file, check=True)

    def complete(*words: str) -> set[str]:
        ask = f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
        ask += f"$(complete -p drivetrain | grep -o '[^ ]*shtab[^ ]*') drivetrain {words[-1]}; "
        ask += "printf '%s\\n' \"${COMPREPLY[@]}\""
        return set(subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True).stdout.split())

    assert {"run", "runs"} <= complete("drivetrain", "ru")
    assert {"plot"} == complete("drivetrain", "runs", "pl")
    assert "--metric" in complete("drivetrain", "runs", "plot", "--me")


def test_export_is_complete_or_leaves_nothing_and_never_writes_into_a_run(
    command: Command, own_runs: Path, tmp_path: Path
) -> None:
    story = own_runs / "story"
    exported = json.loads(command("checkpoints", "list", story, "--json")[1])
    damaged = Path(exported[-1]["path"])
    next(file for file in damaged.iterdir() if not file.name.startswith(".")).unlink()
    (tmp_path / "empty").mkdir()

    for target in (tmp_path / "new", tmp_path / "empty", story / "artifacts" / "x", story / "x"):
        before = sorted(tmp_path.rglob("*"))
        assert command("checkpoints", "export", story, "latest", target)[0] != OK
        assert sorted(tmp_path.rglob("*")) == before
