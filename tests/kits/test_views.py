"""The conformance kit for views: the built-in views pass; broken ones are rejected by name of the mistake."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from drivetrain_testing import ViewConformance
from tests.core.conftest import Install
from tests.kits.rejecting import rejection


class TestPage(ViewConformance):
    name = "page"

    def make_options(self, directory: Path) -> Mapping[str, Any]:
        return {"path": directory / "run.html"}


class TestPlot(ViewConformance):
    name = "plot"

    @pytest.mark.xfail(reason="an error is clearer than an empty figure", raises=pytest.fail.Exception)
    def test_shows_a_run_without_reports(self, tmp_path: Path) -> None:
        super().test_shows_a_run_without_reports(tmp_path)


VIEW = """
from drivetrain.runs import RunReader

def show(storage):
    reader = RunReader(storage)
    return reader.record().status, reader.columns()
"""

BROKEN = {
    "needs an option": (
        "test_shows_a_finished_run",
        VIEW.replace("(storage):", "(storage, path):"),
        "expected that the view 'show-0' shows a finished run, got TypeError: show() missing 1 required",
    ),
    "needs a run that has finished": (
        "test_shows_a_failed_run",
        VIEW.replace("    return", "    assert reader.record().status == 'finished'\n    return"),
        "expected that the view 'show-1' shows a failed run, got AssertionError",
    ),
    "needs a report": (
        "test_shows_a_run_without_reports",
        VIEW.replace("reader.columns()", "reader.columns()['loss'][-1]"),
        "expected that the view 'show-2' shows a run without reports, got KeyError: 'loss'",
    ),
    "writes into the run": (
        "test_does_not_change_the_run_directory",
        VIEW.replace("    return", "    storage.write_bytes('seen', b'')\n    return"),
        "the files of the run that the view has changed: expected [], got ['seen']",
    ),
    "imports numpy": (
        "test_is_loaded_without_heavy_imports",
        "import numpy\n" + VIEW,
        "imports no framework, got imported: numpy. Import them in the function",
    ),
}


@pytest.mark.parametrize(
    ("number", "test", "source", "message"),
    [(number, *case) for number, case in enumerate(BROKEN.values())],
    ids=BROKEN,
)
def test_broken_view_is_rejected(
    request: pytest.FixtureRequest, install: Install, number: int, test: str, source: str, message: str
) -> None:
    name, module = f"show-{number}", f"show_{number}"
    install(f"{name}-dist", module, source, {"drivetrain.views": {name: f"{module}:show"}})
    assert message in rejection(request, ViewConformance, test, name=name)


def test_class_without_a_name_is_refused() -> None:
    with pytest.raises(TypeError, match="expected an attribute `name`"):
        type("TestNothing", (ViewConformance,), {})
