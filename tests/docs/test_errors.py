"""Error codes: the messages, the command and the page agree, and every example raises the error that it explains."""

import ast
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain_console._commands.explain import Explanation, load_explanations
from tests.support import ROOT

EXPLANATIONS = load_explanations()
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def codes_in_messages() -> Iterator[str]:
    """The codes with which string literals of the packages begin."""
    for file in ROOT.glob("packages/*/src/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from re.findall(r"^\[(DT-\d{3})\] ", node.value)


def blocks(explanation: Explanation, kind: str) -> list[str]:
    return [content for info, content in _BLOCK.findall(explanation.text) if info == kind]


def test_every_code_in_a_message_is_explained_and_every_explained_code_is_in_a_message() -> None:
    assert set(codes_in_messages()) == set(EXPLANATIONS)


def test_codes_are_in_order() -> None:
    assert list(EXPLANATIONS) == sorted(EXPLANATIONS)


@pytest.mark.parametrize("code", EXPLANATIONS)
def test_explanation_has_a_cause_an_example_and_a_remedy(code: str) -> None:
    explanation = EXPLANATIONS[code]
    assert "\nRemedy: " in explanation.text
    assert len(blocks(explanation, "python")) + len(blocks(explanation, "text")) == 1
    assert all(shown.startswith(f"[{code}] ") for shown in blocks(explanation, "text"))


@pytest.mark.parametrize("code", [code for code, found in EXPLANATIONS.items() if blocks(found, "python")])
def test_example_raises_the_error(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DRIVETRAIN_STORAGE_PATH", str(tmp_path / "runs"))
    names: dict[str, Any] = {name: getattr(drivetrain, name) for name in drivetrain.__all__}
    modules = {"drivetrain": drivetrain, "os": os, "signal": signal, "tempfile": tempfile, "threading": threading}
    names.update(modules, time=time, Path=Path, train_func=print, __name__="__main__")
    (example,) = blocks(EXPLANATIONS[code], "python")
    with pytest.raises(drivetrain.DrivetrainError) as raised:
        exec(compile(example, code, "exec"), names)
    assert raised.value.code == code, str(raised.value)
