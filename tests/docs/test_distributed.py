"""The scripts on the first page run before and after the change, and differ as the page shows."""

import difflib
import re
import sys
from pathlib import Path

import pytest

from tests.docs.pages import CODE
from tests.docs.test_pages import run_script

_SCRIPTS = CODE / "distributed"
_FRAMEWORKS = ("pytorch", "lightning", "transformers", "accelerate", "xgboost")
_SLOW = ("lightning", "transformers")
_WARNINGS = {"PYTHONWARNINGS": "ignore"}  # Lightning and Transformers warn about their own code


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "framework",
    [pytest.param(name, marks=[pytest.mark.campaign] * (name in _SLOW)) for name in _FRAMEWORKS],
)
def test_script_runs_before_and_after(framework: str, tmp_path: Path) -> None:
    after = (_SCRIPTS / f"{framework}_after.py").read_text()
    small = tmp_path / "after.py"
    small.write_text(re.sub(r"num_workers=8(, use_gpu=True)?", "num_workers=2", after))
    assert "num_workers=8" in after

    run_script(_SCRIPTS / f"{framework}_before.py", tmp_path, environment=_WARNINGS)
    printed = run_script(small, tmp_path, environment=_WARNINGS)

    metrics = printed.splitlines()[-1]
    assert re.search(r"'(loss|valid-logloss|train_loss)': [\d.]+", metrics), printed
    assert ("Checkpoint(" in metrics) == (framework != "accelerate")  # its script saves nothing


@pytest.mark.parametrize("framework", _FRAMEWORKS)
def test_difference_on_the_page_matches_the_scripts(framework: str) -> None:
    before, after = ((_SCRIPTS / f"{framework}_{side}.py").read_text().splitlines(True) for side in ("before", "after"))
    shown = (_SCRIPTS / f"{framework}.diff").read_text()

    *_, difference = "".join(difflib.unified_diff(before, after, n=1000)).partition(" @@\n")

    if shown != difference:
        sys.stdout.write(difference)
    assert shown == difference, f"write the output above into docs/code/distributed/{framework}.diff"
