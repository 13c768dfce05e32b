"""Finds the cause of a difference, by experiments with further runs where that is possible.

1. *A second undisturbed run.* If it differs from the first, restarts are not to blame. Further pairs of runs, each with
   one source of randomness removed, show which one it is: the seeds, the order of sets, or the clock.
2. *The rows.* If they differ after a restart, the job runs again with kills, and each rank gets its random states back.
   If the rows are then right, their order depends on these states. Otherwise, it may be the order of an earlier epoch.
3. *What each rank holds.* Two further runs, one undisturbed and one with the same kills, record digests of everything
   that each rank holds at the same moments: before the first batch after the restart, and before the first step of an
   optimizer. What differs there first was not restored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from drivetrain_testing._prove.causes import Cause, cause_of
from drivetrain_testing._prove.comparing import Comparison, Rules, compare_runs
from drivetrain_testing._prove.contents import list_files, read_values
from drivetrain_testing._prove.digests import digest
from drivetrain_testing._prove.events import JobEvents, Probe
from drivetrain_testing._prove.job import JobRun, JobSpec, run_job
from drivetrain_testing._prove.kills import Kill

__all__ = ["Diagnosis", "diagnose"]

_KINDS = ("optimizer", "scheduler", "settings", "buffers", "parameters", "generator", "variable", "random")
"""The kinds of state, the most likely cause first. A random state is last, because it may be irrelevant."""

_OF_KIND = {
    "optimizer": "unsaved optimizer",
    "scheduler": "unsaved scheduler",
    "settings": "unsaved optimizer",
    "buffers": "unsaved buffers",
    "parameters": "unsaved parameters",
    "generator": "random state",
    "variable": "unsaved state",
    "random": "random state",
}
_OF_VARIABLE = (
    (re.compile(r"velocit|momentum|optim|adam|exp_avg|moment"), "unsaved optimizer"),
    (re.compile(r"sched|(^|_)lr($|_)|learning_rate|warmup|step_size|decay"), "unsaved scheduler"),
    (re.compile(r"(^|_)rng|random|generator|seed"), "random state"),
    (re.compile(r"running_(mean|var|std)|batch_?norm"), "unsaved buffers"),
)
_EXPERIMENTS = (("seed", "unseeded random numbers"), ("hash", "order of sets"), ("clock", "clock"))


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The likely causes of a difference, most likely first, and the number of runs that it took to find them."""

    causes: list[Cause]
    runs: int


def diagnose(
    spec: JobSpec,
    undisturbed: JobRun,
    disturbed: JobRun,
    comparison: Comparison,
    rules: Rules,
    *,
    resize: int | None,
    tell: Callable[[str], None],
) -> Diagnosis:
    """Find the cause of the differences between an undisturbed run and one with kills.

    Args:
        spec: the job.
        undisturbed: the undisturbed run.
        disturbed: the run with kills.
        comparison: the differences between them.
        rules: how runs are compared.
        resize: the number of workers after the first kill of the driver; None for no change.
        tell: called with a line about each further run.
    """
    runs = _Experiments(spec, undisturbed, rules, tell)
    if disturbed.failure:
        cause = cause_of("failed restart", disturbed.failure, tested=True)
        return Diagnosis(causes=[cause], runs=0)
    again = runs.run("again", "undisturbed once more", probe=True)
    repeated = compare_runs(undisturbed, again, Rules(ignored=rules.ignored))
    if repeated.differences:
        return Diagnosis(causes=_of_nondeterminism(runs, repeated), runs=runs.number)
    if resize is not None:
        return Diagnosis(causes=_of_resize(comparison), runs=runs.number)
    causes = list(_of_rows(runs, undisturbed, disturbed, comparison))
    if not causes:
        probed = runs.run(
            "probed", "with the same kills, to compare what each rank holds", disturbed.killed, probe=True
        )
        causes = _of_state(runs, again, probed, disturbed.killed)
    return Diagnosis(causes=causes or [_of_last_resort(comparison)], runs=runs.number)


class _Experiments:
    """Runs the job again with changes, and counts the runs."""

    def __init__(self, spec: JobSpec, undisturbed: JobRun, rules: Rules, tell: Callable[[str], None]) -> None:
        self.undisturbed = undisturbed
        self.rules = rules
        self.number = 0
        self._spec = spec
        self._tell = tell

    def run(
        self, name: str, description: str, kills: Sequence[Kill] = (), *, probe: bool = False, change: str = ""
    ) -> JobRun:
        self.number += 1
        self._tell(f"run {2 + self.number}: {description}")
        return run_job(self._spec, name, kills=kills, probe=probe, change=change)

    def differ(self, one: JobRun, other: JobRun) -> bool:
        """Return True if two runs differ, or one of them has failed."""
        failed = one.failure or other.failure or not (one.has_run and other.has_run)
        return bool(failed or compare_runs(one, other, self.rules).differences)


def _of_nondeterminism(runs: _Experiments, repeated: Comparison) -> list[Cause]:
    """Return the cause of a difference between two undisturbed runs."""
    first = repeated.first
    where = f"two undisturbed runs differ, first {first}"
    for change, cause in _EXPERIMENTS:
        pair = [
            runs.run(f"{change}{number}", f"undisturbed, with fixed {_FIXED[change]} ({number} of 2)", change=change)
            for number in (1, 2)
        ]
        if not runs.differ(*pair):
            evidence = f"{where}; with fixed {_FIXED[change]}, they are equal"
            is_sampler = change == "seed" and first is not None and first.kind == "rows"
            return [cause_of("unseeded sampler" if is_sampler else cause, evidence, tested=True)]
    return [cause_of("nondeterministic operation", f"{where}; fixed seeds, order of sets and clock do not change that")]


_FIXED = {"seed": "seeds", "hash": "order of sets", "clock": "clocks"}


def _of_resize(comparison: Comparison) -> list[Cause]:
    first = comparison.first
    if first is not None and first.kind == "rows":
        return [cause_of("data", str(first))]
    return [cause_of("number of workers", str(first))]


def _of_rows(runs: _Experiments, undisturbed: JobRun, disturbed: JobRun, comparison: Comparison) -> Iterator[Cause]:
    """Yield the cause of rows that differ after a restart."""
    different = [each for each in comparison.differences if each.kind == "rows" and each.rank is not None]
    first = comparison.first
    if not different or first is None or first.iteration < different[0].iteration:
        return  # what the job trains with differs before the rows do
    rank, iteration = different[0].rank, different[0].iteration - 1
    assert rank is not None
    again = runs.run("random", "with the same kills, and restored random states", disturbed.killed, change="random")
    restored = [] if again.failure else compare_runs(undisturbed, again, runs.rules).differences
    if not again.failure and all(each.kind != "rows" for each in restored):
        yield cause_of("random state", f"{first}. With the random states restored, the rows are the same", tested=True)
        return
    if (earlier := _earlier_order(undisturbed.events, disturbed.events, rank, iteration)) is not None:
        evidence = f"{first}. The order is that after report {earlier} of the undisturbed run"
        yield cause_of("missing set_epoch", evidence)
        return
    others = [each.rank for each in different]
    if len(others) < disturbed.events.size and 0 not in others:
        yield cause_of("rank-dependent state", f"{first}. The rows of rank 0 are right")
        return
    yield cause_of("data", str(first))


def _earlier_order(before: JobEvents, after: JobEvents, rank: int, iteration: int) -> int | None:
    """Return an earlier report after which the undisturbed run read the rows in the order of a resumed run."""
    order = after.order(rank, iteration)
    expected = before.batches.get(rank, {}).get(iteration, [])
    if expected and expected[0].number:
        return None  # it has resumed within an epoch
    for earlier in range(iteration):
        if order and before.order(rank, earlier) == order:
            return earlier
    return None


def _of_state(runs: _Experiments, undisturbed: JobRun, disturbed: JobRun, kills: Sequence[Kill]) -> list[Cause]:
    """Return the causes that show in what the ranks hold after a restart."""
    for iteration in sorted({start for starts in disturbed.events.starts.values() for start in starts if start}):
        for at in ("batch", "step"):
            found = _held_differently(undisturbed.events, disturbed.events, iteration, at)
            if found:
                return list(_judge(runs, undisturbed, disturbed, found, iteration, at, kills))
        if found := _carried_differently(undisturbed, disturbed.events, iteration):
            return list(_judge(runs, undisturbed, disturbed, found, iteration, "report", kills))
    return []


def _held_differently(before: JobEvents, after: JobEvents, iteration: int, at: str) -> dict[str, set[int]]:
    """Return the ranks by the name of each thing that they hold in both runs at a moment, but with another content.

    Of the variables, only those count that the loop reads before it assigns them.
    """
    found: dict[str, set[int]] = {}
    for rank in after.starts:
        one, other = before.probes.get((rank, iteration, at)), after.probes.get((rank, iteration, at))
        report = before.probes.get((rank, iteration, "report"))
        if one is None or other is None or report is None:
            continue
        for name in _differing(one, other):
            kind, _, variable = name.partition(": ")
            if kind != "variable" or variable in report.carried:
                found.setdefault(name, set()).add(rank)
    return found


def _differing(one: Probe, other: Probe) -> list[str]:
    return [name for name, value in one.holds.items() if name in other.holds and other.holds[name] != value]


def _carried_differently(undisturbed: JobRun, after: JobEvents, iteration: int) -> dict[str, set[int]]:
    """Return the variables that differ after the first report since a restart, and were not saved at the restart.

    They change between reports, the loop reads them before it assigns them, and their content is not in the checkpoint.
    """
    found: dict[str, set[int]] = {}
    before = undisturbed.events
    saved = _saved_digests(undisturbed, iteration)
    for rank in after.starts:
        probes = [events.probes.get((rank, iteration + 1, "report")) for events in (before, after)]
        earlier = before.probes.get((rank, iteration, "report"))
        if probes[0] is None or probes[1] is None or earlier is None:
            continue
        for name in _differing(probes[0], probes[1]):
            kind, _, variable = name.partition(": ")
            is_state = kind != "variable" or variable in earlier.carried
            is_changed = earlier.holds.get(name) != probes[0].holds[name]
            if is_state and is_changed and earlier.holds.get(name) not in saved:
                found.setdefault(name, set()).add(rank)
    return found


def _saved_digests(run: JobRun, iteration: int) -> set[str | None]:
    """Return the digests of the values in a checkpoint, as :func:`~.digests.digest` returns them for variables."""
    directory = run.checkpoints.get(iteration)
    found: set[str | None] = set()
    for name in list_files(directory) if directory is not None else ():
        for value in (read_values(directory / name) or {}).values():  # type: ignore[operator]
            numbers = getattr(value, "numbers", None)
            array = numbers() if callable(numbers) else None
            if array is None:
                found.add(digest(value))
            elif value.dtype != "bfloat16":  # which NumPy does not have
                found.add(digest(array.astype(value.dtype).reshape(value.shape)))
    return found


def _judge(
    runs: _Experiments,
    undisturbed: JobRun,
    disturbed: JobRun,
    found: dict[str, set[int]],
    iteration: int,
    at: str,
    kills: Sequence[Kill],
) -> Iterator[Cause]:
    """Yield the causes for things that ranks hold with another content after a restart."""
    moments = {"batch": "before the first batch", "step": "before the first step of the optimizer"}
    where = f"{moments.get(at, 'at the first report')} after the restart at report {iteration}"
    names = sorted(found, key=lambda name: _KINDS.index(kind) if (kind := name.partition(":")[0]) in _KINDS else 99)
    real = [name for name in names if name.partition(":")[0] in _KINDS[:-1]]
    if not real:
        yield from _of_random_states(runs, disturbed, found, where, kills)
        return
    blamed = set()
    for name in real:
        kind, _, thing = name.partition(": ")
        ranks = found[name]
        cause = _OF_KIND[kind]
        if kind == "variable":
            cause = next((known for pattern, known in _OF_VARIABLE if pattern.search(thing.lower())), cause)
        where_else = f" on rank {', '.join(map(str, sorted(ranks)))}" if len(ranks) < disturbed.events.size else ""
        if 0 not in ranks:
            cause = "batch norm per replica" if cause == "unsaved buffers" else "rank-dependent state"
        if cause not in blamed:
            blamed.add(cause)
            yield cause_of(cause, f"{where}, {_NOUN[kind]} {thing!r} differs{where_else}", tested=at != "report")


_NOUN = {
    "optimizer": "the state of the optimizer",
    "scheduler": "the state of the scheduler",
    "settings": "the learning rate or another setting of the optimizer",
    "buffers": "a buffer of the model",
    "parameters": "a parameter of the model",
    "generator": "the state of the random generator",
    "variable": "the variable",
}


def _of_random_states(
    runs: _Experiments, disturbed: JobRun, found: dict[str, set[int]], where: str, kills: Sequence[Kill]
) -> Iterator[Cause]:
    """Restore the random states in a further run. If it equals the undisturbed run, they are the cause."""
    states = [name.partition(": ")[2] for name in found if name.startswith("random: ")]
    if states:
        again = runs.run("random", "with the same kills, and restored random states", kills, change="random")
        if not runs.differ(runs.undisturbed, again):
            evidence = f"{where}, the random state of {', '.join(states)} differs; with it restored, the runs are equal"
            yield cause_of("random state", evidence, tested=True)
            return
    if any(name.startswith("gradients: ") for name in found) and disturbed.events.size > 2:
        evidence = f"{where}, only the gradients differ, with {disturbed.events.size} workers"
        yield cause_of("order of DDP's buckets", evidence)
        return


def _of_last_resort(comparison: Comparison) -> Cause:
    return cause_of("unsaved state", f"{comparison.first}. Nothing that the ranks are known to hold explains it")
