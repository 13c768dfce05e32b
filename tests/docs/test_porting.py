"""The ported script is the original with the difference that the page shows, and is as accurate."""

import difflib
import runpy
import sys
from pathlib import Path

import drivetrain
import pytest
from drivetrain_torch import TorchTrainer

from tests.docs.pages import CODE
from tests.docs.test_pages import run_script

_BEFORE, _AFTER = CODE / "digits_before.py", CODE / "digits_after.py"


def last_accuracy(printed: str) -> float:
    word, value = printed.splitlines()[-1].split()
    assert word == "accuracy"
    return float(value)


def test_two_workers_are_as_accurate_as_the_original(tmp_path: Path) -> None:
    accuracies = []
    for script in (_BEFORE, _AFTER):
        directory = tmp_path / script.stem
        directory.mkdir()
        accuracies.append(last_accuracy(run_script(script, directory)))

    before, after = accuracies
    assert before >= 0.97
    assert after == pytest.approx(before, abs=0.01)


def test_one_worker_computes_the_numbers_of_the_original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(_BEFORE))["main"]
    train_func = runpy.run_path(str(_AFTER))["train_func"]

    result = TorchTrainer(
        train_func,
        scaling_config=drivetrain.ScalingConfig(num_workers=0),
        run_config=drivetrain.RunConfig(storage_path=tmp_path, verbose=0),
    ).fit()

    assert result.return_value == main()


def test_difference_on_the_page_is_that_of_the_files() -> None:
    lines = [script.read_text().splitlines(keepends=True) for script in (_BEFORE, _AFTER)]
    shown = (CODE / "digits.diff").read_text().splitlines(keepends=True)

    difference = list(difflib.unified_diff(*lines, _BEFORE.name, _AFTER.name))

    if shown != difference:
        sys.stdout.writelines(difference)
    assert shown == difference, "write what is printed above into docs/code/digits.diff"
