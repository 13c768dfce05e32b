"""The page of a run with 1,000,000 reports: written, opened in Chromium, and shown by `drivetrain runs serve`.

The page is open when its script has drawn all of it. The live view shows the part that it has read within half a
second, and is complete when it has read everything.
"""

from collections.abc import Iterator

from benchmarks.measure import OURS, Bench, Goal, Job, Quantity, quantity

PAIRS = 5
REPORTS = 1_000_000
OPENS_WITHIN_S = 2.0


def measure(bench: Bench) -> Iterator[Quantity]:
    runs = bench.alternate({OURS: Job(script="pages.py", arguments={"reports": REPORTS})})
    goal = Goal(bound=OPENS_WITHIN_S)
    yield quantity("opening the page", "s", runs, lambda run: run.mean("looked", "opened"), goal)
    yield quantity("opening the live view", "s", runs, lambda run: run.mean("looked", "live"), goal)
    yield quantity("the live view, complete", "s", runs, lambda run: run.mean("looked", "complete"))
    yield quantity("writing the page", "s", runs, lambda run: run.mean("looked", "written"))
    yield quantity("size of the page", "MB", runs, lambda run: run.mean("looked", "size_mb"))
