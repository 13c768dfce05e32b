"""``drivetrain prove`` on scripts that are right, and on scripts that are wrong on purpose."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import drivetrain
from drivetrain import Checkpoint, ConfigurationError, DataParallelTrainer, RunConfig, ScalingConfig
from drivetrain_console import main
from drivetrain_testing import CannotProveError, prove
from drivetrain_testing._prove.comparing import Rules, compare_values
from drivetrain_testing._prove.contents import have_same_bytes, list_files, read_values
from drivetrain_testing._prove.digests import row_digests
from drivetrain_testing._prove.proof import Proof, prove_command

SCRIPTS = Path(__file__).parent / "prove"

CAUSES = {
    "missing_set_epoch": "missing set_epoch",
    "order_of_buckets": "order of DDP's buckets",
    "order_of_set": "order of sets",
    "order_of_threads": "nondeterministic operation",
    "rank_dependent": "rank-dependent state",
    "replicas": "batch norm per replica",
    "restarted_epoch": "data",
    "shuffled_by_random_state": "random state",
    "unsaved_average": "unsaved state",
    "unsaved_buffers": "unsaved buffers",
    "unsaved_optimizer": "unsaved optimizer",
    "unsaved_random_state": "random state",
    "unsaved_scheduler": "unsaved scheduler",
    "unsaved_velocity": "unsaved optimizer",
    "unseeded_sampler": "unseeded sampler",
    "unseeded_weights": "unseeded random numbers",
    "clock": "clock",
}


ONLY_ALL = (
    "order_of_buckets",
    "order_of_threads",
    "replicas",
    "restarted_epoch",
    "unsaved_average",
    "unsaved_buffers",
    "unsaved_random_state",
    "unsaved_scheduler",
)
"""The scripts that take long, or whose cause is found in the same way as that of another one."""


def selected() -> list[str]:
    return [name for name in CAUSES if name not in ONLY_ALL or os.environ.get("DRIVETRAIN_PROOFS") == "all"]


def run(script: str, **options: object) -> Proof:
    return prove_command([sys.executable, str(SCRIPTS / f"{script}.py")], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("script", ["right_plain", "right_torch", "right_buckets"])
def test_right_scripts_are_equal(script: str) -> None:
    proof = run(script)

    assert proof.equal, proof
    assert len(proof.kills) == 2
    assert len(proof.resumed_from) == 2
    assert 0 not in proof.resumed_from
    assert proof.cause is None


@pytest.mark.parametrize("script", selected())
def test_cause_of_wrong_scripts_is_named(script: str) -> None:
    proof = run(script)

    assert not proof.equal
    assert proof.cause == CAUSES[script], proof
    assert proof.differences
    assert "likely cause" in str(proof)


def test_first_difference_is_that_after_the_first_restart() -> None:
    proof = run("unsaved_velocity", kills=1)

    first = proof.differences[0]
    assert first.iteration == proof.resumed_from[0] + 1
    assert first.name == "weight"
    assert {each.kind for each in proof.differences} == {"metric", "checkpoint"}
    assert "velocity" in proof.causes[0].evidence


def test_ignored_metric_may_differ() -> None:
    assert run("clock", ignore=["seconds"]).equal


def test_equal_epochs_of_a_loader_that_shuffles_are_a_warning() -> None:
    proof = run("same_order", kills=1)

    assert proof.equal, proof
    assert "call loader.set_epoch(epoch)" in "".join(proof.notes)
    assert "warning" not in "".join(run("right_torch", kills=1).notes)


def test_resumes_only_between_epochs_are_noted() -> None:
    noted = {
        script: "start of an epoch" in "".join(run(script).notes) for script in ("same_order", "right_within_epochs")
    }
    assert noted == {"same_order": True, "right_within_epochs": False}


def test_more_kills_and_another_seed() -> None:
    proof = run("right_plain", kills=4, seed=3)

    assert proof.equal, proof
    assert len(proof.kills) == 4


def test_change_of_the_number_of_workers_compares_rows_together(tmp_path: Path) -> None:
    proof = run("resizable", resize=3)

    assert proof.equal, proof
    assert proof.workers == (2, 3)
    assert proof.tolerance > 0
    assert proof.as_dict()["comparison"] == "tolerance"


def make_trainer(*, broken: bool) -> DataParallelTrainer:
    def train_func() -> None:
        total, first = 0.0, 0
        if (checkpoint := drivetrain.get_checkpoint()) is not None:
            with checkpoint.as_directory() as directory:
                state = json.loads(Path(directory, "state.json").read_text())
            first = state["epoch"] + 1
            total = 0.0 if broken else state["total"]
        for epoch in range(first, 5):
            total += epoch
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "state.json").write_text(json.dumps({"epoch": epoch, "total": total}))
                drivetrain.report({"total": total}, Checkpoint.from_directory(directory))

    scaling = ScalingConfig(num_workers=1)
    return DataParallelTrainer(train_func, scaling_config=scaling, run_config=RunConfig(verbose=0))


def test_prove_accepts_a_trainer() -> None:
    assert prove(make_trainer(broken=False)).equal
    assert not prove(make_trainer(broken=True)).equal


def test_script_that_fails_or_has_no_checkpoint_cannot_be_proven(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise ValueError('no data')")
    with pytest.raises(CannotProveError, match="no data"):
        prove_command([sys.executable, str(script)])

    script.write_text("print('nothing')")
    with pytest.raises(CannotProveError, match="has started no run"):
        prove_command([sys.executable, str(script)])

    script.write_text("import drivetrain\ndrivetrain.DataParallelTrainer(lambda: drivetrain.report({'a': 1})).fit()\n")
    with pytest.raises(CannotProveError, match="expected a checkpoint before the last report"):
        prove_command([sys.executable, str(script)])


def test_time_limit_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(1000)")
    with pytest.raises(CannotProveError, match="within the time limit"):
        prove_command([sys.executable, str(script)], timeout_s=1)


def test_options_are_checked() -> None:
    for options in ({"kills": 0}, {"resize": 0}, {"tolerance": -1.0}, {"timeout_s": 0}, {"keep": Path(os.sep)}):
        with pytest.raises(ConfigurationError, match=next(iter(options)).removesuffix("_s")):
            prove_command(["true"], **options)  # type: ignore[arg-type]


def test_command_prints_json_and_returns_the_exit_code(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    status = main(["prove", "--json", "--kills", "1", "--keep", str(keep), str(SCRIPTS / "unsaved_average.py")])

    printed = json.loads(capsys.readouterr().out)
    assert status == 1
    assert printed["cause"] == "unsaved state"
    assert printed["equal"] is False
    assert (keep / "disturbed" / "runs" / "run" / "run.json").exists()
    assert main(["prove", str(tmp_path / "missing.py")]) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_leaves_no_process_and_no_directory(tmp_path: Path, number: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import pathlib, time; pathlib.Path({str(tmp_path / 'started')!r}).touch(); time.sleep(1000)")
    command = [Path(sys.executable).with_name("drivetrain"), "prove", script]
    temporary = tmp_path / ("long" * 30)  # longer than the address of a socket can be
    temporary.mkdir()
    process = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(temporary)}, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
    process.send_signal(number)

    assert process.wait(30) == 128 + number
    assert not list(temporary.glob("drivetrain-prove-*"))
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    assert not any(str(script).encode() in each for each in commands)


def test_checkpoint_files_are_compared_by_their_values_and_never_unpickled(tmp_path: Path) -> None:
    import numpy as np
    import torch
    from safetensors.torch import save_file

    for name, value in (("a", 1.0), ("b", 1.0 + 1e-6)):
        tensors = {"weight": torch.tensor([value, 2.0], dtype=torch.float64), "half": torch.ones(2).bfloat16()}
        torch.save({"model": tensors, "epoch": 3}, tmp_path / f"{name}.pt")
        save_file(tensors, tmp_path / f"{name}.safetensors")
        np.savez(tmp_path / f"{name}.npz", weight=np.array([value, 2.0]))
        (tmp_path / f"{name}.json").write_text(json.dumps({"weight": [value]}))
    for suffix in (".pt", ".safetensors", ".npz", ".json"):
        before, after = (read_values(tmp_path / f"{name}{suffix}") for name in "ab")
        assert before is not None
        assert after is not None
        exact = [name for name, _ in compare_values(before, after, Rules())]
        assert len(exact) == 1
        assert "weight" in exact[0]
        assert not list(compare_values(before, after, Rules(tolerance=1e-3)))

    torch.save({"path": tmp_path}, tmp_path / "pickled.pt")  # loading a path requires unpickling
    assert read_values(tmp_path / "pickled.pt") is None


def test_rows_are_identified_by_their_content_in_batches_of_any_kind() -> None:
    import numpy as np
    import torch

    numbers = np.arange(6, dtype=np.float32).reshape(3, 2)
    as_arrays = row_digests({"x": numbers})
    assert as_arrays == row_digests({"x": torch.tensor(numbers)})
    assert as_arrays[1:] == row_digests([numbers[1:]])
    assert len({*as_arrays}) == 3
    assert len(row_digests((torch.zeros(4, 2), torch.zeros(4)))) == 4
    assert row_digests(["a", "b"])[1] == row_digests(["b"])[0]
    assert len(row_digests(torch.ones(2, 2).bfloat16())) == 2


def test_parameters_of_an_attempt_in_a_model_of_lightgbm_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "model.txt"
    file.write_text(
        "tree\nleaf_value=1\n[machines: 127.0.0.1:1]\n[local_listen_port: 1]\n[num_iterations: 4]\n[seed: 3]\n"
    )
    assert read_values(file) == {"line 1": "tree", "line 2": "leaf_value=1", "line 3": "[seed: 3]"}

    file.write_text("[machines: 127.0.0.1:1]\n")
    assert read_values(file) == {"line 1": "[machines: 127.0.0.1:1]"}


def test_names_and_parts_of_names_are_ignored() -> None:
    rules = Rules(ignored=["seconds", "args.bin", "rng"])

    assert all(map(rules.ignores, ["seconds", "time/seconds", "trainer/args.bin", "model.rng.state"]))
    assert not any(map(rules.ignores, ["seconds_per_step", "other_args.bin", "bin"]))


def test_sharded_tensors_are_put_together_by_the_index_and_compared_by_name(tmp_path: Path) -> None:
    import torch

    halves = [torch.arange(4.0).reshape(2, 2), torch.arange(4.0, 8.0).reshape(2, 2)]

    def write(directory: Path, sizes: list[int], last: float) -> None:
        """Write a 4 x 2 tensor as one part for each rank, as ``TrainState`` does."""
        directory.mkdir()
        whole = torch.cat(halves)
        whole[3, 1] = last
        parts, start = [], 0
        for rank, size in enumerate(sizes):
            file = directory / f"__{rank}_0.distcp"
            torch.save(whole[start : start + size].clone(), file)
            parts.append([[start, 0], [size, 2], file.name, 0, file.stat().st_size])
            start += size
        tensors = {"model.weight": {"shape": [4, 2], "dtype": "float32", "parts": parts}}
        (directory / "sharded.json").write_text(json.dumps({"format": 1, "tensors": tensors}))

    write(tmp_path / "two", [2, 2], 7.0)
    write(tmp_path / "three", [1, 1, 2], 7.0)
    write(tmp_path / "other", [2, 2], 9.0)

    assert list_files(tmp_path / "two") == ["sharded.json"]
    two, three, other = (read_values(tmp_path / name / "sharded.json") for name in ("two", "three", "other"))
    assert two is not None
    assert three is not None
    assert other is not None
    assert not list(compare_values(two, three, Rules()))
    assert list(compare_values(two, other, Rules())) == [("model.weight", "1 of 8 numbers differ, by up to 2")]
    assert not have_same_bytes(tmp_path / "two" / "sharded.json", tmp_path / "other" / "sharded.json")
    assert have_same_bytes(tmp_path / "two" / "sharded.json", tmp_path / "two" / "sharded.json")
