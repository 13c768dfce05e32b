"""The examples in docstrings are executed."""

import doctest
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGES = ROOT / "packages"


def modules_with_examples() -> Iterator[str]:
    """Yield the names of the modules whose text has an example. Importing all modules takes many seconds."""
    for source in sorted(PACKAGES.glob("*/src")):
        for file in sorted(source.rglob("*.py")):
            if ">>> " in file.read_text():
                yield ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


MODULES = list(modules_with_examples())


def examples(module: str) -> list[doctest.DocTest]:
    return [test for test in doctest.DocTestFinder().find(importlib.import_module(module)) if test.examples]


@pytest.mark.parametrize("module", MODULES)
def test_examples_run(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRIVETRAIN_STORAGE_PATH", str(tmp_path))
    monkeypatch.setenv("TMPDIR", os.fspath(tmp_path))
    found = examples(module)
    assert found
    for example in found:
        failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
        assert not failed, capsys.readouterr().out


def test_classes_that_users_meet_first_have_an_example() -> None:
    names = {example.name.rpartition(".")[2] for module in MODULES for example in examples(module)}
    assert {"DataParallelTrainer", "ScalingConfig", "Checkpoint", "TorchTrainer"} <= names
