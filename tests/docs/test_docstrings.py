"""The examples in docstrings are executed."""

import doctest
import importlib
import os
import pkgutil
from pathlib import Path

import pytest

import drivetrain
import drivetrain_data
import drivetrain_gbdt
import drivetrain_hf
import drivetrain_horovod
import drivetrain_jax
import drivetrain_lightning
import drivetrain_tf
import drivetrain_torch

PACKAGES = (
    drivetrain_data,
    *(drivetrain, drivetrain_torch, drivetrain_lightning, drivetrain_hf, drivetrain_tf, drivetrain_gbdt),
    drivetrain_horovod,
    drivetrain_jax,
)


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = []
    for package in PACKAGES:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("._warmup"):  # importing it has a side effect for workers only
                found += [test for test in finder.find(importlib.import_module(module.name)) if test.examples]
    return found


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_example_runs(
    example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRIVETRAIN_STORAGE_PATH", str(tmp_path))
    monkeypatch.setenv("TMPDIR", os.fspath(tmp_path))
    failed, attempted = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
    assert attempted
    assert not failed, capsys.readouterr().out


def test_classes_that_users_meet_first_have_an_example() -> None:
    names = {example.name.rpartition(".")[2] for example in examples()}
    assert {"DataParallelTrainer", "ScalingConfig", "Checkpoint", "TorchTrainer"} <= names
