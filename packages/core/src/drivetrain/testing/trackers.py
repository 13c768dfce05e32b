"""The conformance kit for trackers, as tests that a plugin inherits.

A plugin author writes a class with one method, and pytest collects the tests::

    from drivetrain.testing import TrackerConformance

    class TestMyTracker(TrackerConformance):
        def make_tracker(self, directory):
            return MyTracker(f"file:{directory}", token="s3cr3t-token")

Further tests run if the class can read what the service has received::

        secret = "s3cr3t-token"

        def read_metrics(self, directory, result):
            return {name: {1: 0.5, 2: 0.25} for name in my_service.open(directory).metrics}

        def read_status(self, directory, result):
            return my_service.open(directory).status

A test that cannot pass for a tracker must be overridden with ``@pytest.mark.xfail(reason=...)``. Overriding a test
without a reason is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from drivetrain._driver.result import Result
from drivetrain.loggers.tracker import TrackerCallback
from drivetrain.testing.conformance import check_overrides

__all__ = ["TrackerConformance"]


class TrackerConformance:
    """Tests of a tracker in real runs of two workers. Derive a class from it, and define :meth:`make_tracker`.

    Attributes:
        secret: a secret that :meth:`make_tracker` gives to the tracker, for example in its settings or in an
            environment variable; empty if the tracker has none. The test that needs it is then skipped.
    """

    secret: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.make_tracker is TrackerConformance.make_tracker:
            raise TypeError(f"{cls.__name__}: expected a method make_tracker(directory), got none")
        check_overrides(cls, TrackerConformance)

    def make_tracker(self, directory: Path) -> TrackerCallback:
        """Create the tracker.

        Args:
            directory: a directory for the data of the service. It is empty unless a run is resumed.
        """
        raise NotImplementedError

    def read_metrics(self, directory: Path, result: Result) -> Mapping[str, Mapping[int, Any]]:
        """Return the metrics that the service has stored: for each name, the values by iteration.

        Without this method, the tests that need it are skipped.

        Args:
            directory: the directory that was passed to :meth:`make_tracker`.
            result: the result of the run; its ``path`` is the run directory.
        """
        pytest.skip(f"{type(self).__name__} does not define read_metrics()")

    def read_status(self, directory: Path, result: Result) -> str:
        """Return the status that the service shows for the run: ``"finished"`` or ``"failed"``.

        Without this method, the test that needs it is skipped.

        Args:
            directory: the directory that was passed to :meth:`make_tracker`.
            result: the result of the run; its ``path`` is the run directory.
        """
        pytest.skip(f"{type(self).__name__} does not define read_status()")
