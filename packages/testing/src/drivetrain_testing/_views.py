"""The conformance kit for views, as tests that a plugin inherits.

A plugin author writes a class with one attribute, and pytest collects the tests::

    from drivetrain_testing import ViewConformance

    class TestMyView(ViewConformance):
        name = "slides"  # its entry point in drivetrain.views

        def make_options(self, directory):
            return {"path": directory / "slides.html"}

A test that cannot pass for a view must be overridden with ``@pytest.mark.xfail(reason=...)``. Overriding a test without
a reason is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from drivetrain import DataParallelTrainer, FailureConfig, Result, RunConfig, ScalingConfig
from drivetrain.plugin.checks import one_line
from drivetrain_testing._checks import check_equal, find_heavy_imports, forget_test_name
from drivetrain_testing._conformance import check_overrides
from drivetrain_testing._retriedjob import make_trainer, run_two_workers

__all__ = ["ViewConformance"]


class ViewConformance:
    """Tests of a view. Derive a class from it, set :attr:`name`, and define :meth:`make_options` if necessary.

    Attributes:
        name: the name of its entry point in ``drivetrain.views``.
    """

    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not getattr(cls, "name", ""):
            raise TypeError(f"{cls.__name__}: expected an attribute `name` with the name of the entry point")
        check_overrides(cls, ViewConformance)

    def make_options(self, directory: Path) -> Mapping[str, Any]:
        """Return options for :meth:`drivetrain.Result.view`. By default, there are none.

        Args:
            directory: an empty directory for files that the view writes.
        """
        return {}

    def test_shows_a_finished_run(self, tmp_path: Path) -> None:
        run_two_workers(tmp_path / "runs")
        self._show("a finished run", tmp_path)

    def test_shows_a_failed_run(self, tmp_path: Path) -> None:
        make_trainer(tmp_path / "runs", failures=1, failure_config=FailureConfig()).fit(raise_on_failure=False)
        self._show("a failed run", tmp_path)

    def test_shows_a_run_without_reports(self, tmp_path: Path) -> None:
        forget_test_name()
        DataParallelTrainer(
            _return,
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(name="run", storage_path=tmp_path / "runs", verbose=0),
        ).fit()
        self._show("a run without reports", tmp_path)

    def test_does_not_change_the_run_directory(self, tmp_path: Path) -> None:
        run = Path(run_two_workers(tmp_path / "runs").path)
        before = _files_in(run)
        self._show("a finished run", tmp_path)
        after = _files_in(run)
        changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
        check_equal("the files of the run that the view has changed", changed, [])

    def test_is_loaded_without_heavy_imports(self) -> None:
        imported = find_heavy_imports("view", self.name)
        assert imported == "imported:", (
            f"expected that loading the view imports no framework, got {imported}. Import them in the function"
        )

    def _show(self, what: str, directory: Path) -> None:
        target = directory / "shown"
        target.mkdir()
        try:
            Result.from_path(directory / "runs" / "run").view(self.name, **self.make_options(target))
        except Exception as error:  # of the plugin
            pytest.fail(f"expected that the view {self.name!r} shows {what}, got {one_line(error)}")


def _return() -> None:
    """Report nothing."""


def _files_in(directory: Path) -> dict[str, bytes]:
    """Return the contents of all files in a directory, by relative path."""
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}
