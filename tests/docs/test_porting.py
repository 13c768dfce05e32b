"""The ported script differs from the original as the page shows, and is as accurate."""

import difflib
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.docs.pages import CODE
from tests.docs.test_pages import run_script

_BEFORE, _AFTER = CODE / "digits_before.py", CODE / "digits_after.py"

_AFTER_IN_ONE_PROCESS = f"""
import runpy
import drivetrain
from drivetrain_torch import TorchTrainer

train_func = runpy.run_path({str(_AFTER)!r})["train_func"]
in_this_process = drivetrain.ScalingConfig(num_workers=0)
result = TorchTrainer(train_func, scaling_config=in_this_process).fit()
print(result.checkpoint.path)
"""


@dataclass(frozen=True)
class Original:
    accuracy: float
    parameters: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """The accuracy and parameters of the script before it is ported."""
    directory = tmp_path_factory.mktemp("before")
    accuracy = last_accuracy(run_script(_BEFORE, directory))
    return Original(accuracy, torch.load(directory / "digits.pt"))


def last_accuracy(printed: str) -> float:
    word, value = printed.splitlines()[-1].split()
    assert word == "accuracy"
    return float(value)


def test_two_workers_are_as_accurate_as_the_original(original: Original, tmp_path: Path) -> None:
    accuracy = last_accuracy(run_script(_AFTER, tmp_path))

    assert original.accuracy >= 0.97
    assert accuracy == pytest.approx(original.accuracy, abs=0.01)


def test_one_worker_ends_with_the_parameters_of_the_original(original: Original, tmp_path: Path) -> None:
    script = tmp_path / "after_in_one_process.py"
    script.write_text(_AFTER_IN_ONE_PROCESS)

    checkpoint = Path(run_script(script, tmp_path).strip())

    parameters = torch.load(checkpoint / "state.pt")["model"]
    assert parameters.keys() == original.parameters.keys()
    assert all(torch.equal(parameters[name], original.parameters[name]) for name in parameters)


def test_difference_on_the_page_matches_the_files() -> None:
    lines = [script.read_text().splitlines(keepends=True) for script in (_BEFORE, _AFTER)]
    shown = (CODE / "digits.diff").read_text().splitlines(keepends=True)

    difference = list(difflib.unified_diff(*lines, _BEFORE.name, _AFTER.name))

    if shown != difference:
        sys.stdout.writelines(difference)
    assert shown == difference, "write the output above into docs/code/digits.diff"
