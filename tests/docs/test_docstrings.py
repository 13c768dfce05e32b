"""The examples in docstrings are executed."""

import doctest
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "packages"


def modules_with_examples() -> Iterator[str]:
    """Yield names of modules. They are found by their text, because an import of all of them takes many seconds."""
    for file in sorted(SOURCES.glob("*/src/**/*.py")):
        if ">>> " in file.read_text():
            _, _, *parts = file.relative_to(SOURCES).with_suffix("").parts
            yield ".".join(parts).removesuffix(".__init__")


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
