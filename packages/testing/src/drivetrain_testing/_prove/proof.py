"""Proves that a resumed run equals an undisturbed one, or finds the first difference and its cause."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cloudpickle

from drivetrain import ConfigurationError, DataParallelTrainer
from drivetrain.plugin.callbacks import redact
from drivetrain_testing._prove.causes import CHECKLIST, Cause
from drivetrain_testing._prove.comparing import Comparison, Difference, Rules, compare_runs
from drivetrain_testing._prove.diagnosis import diagnose
from drivetrain_testing._prove.drivers import Drivers
from drivetrain_testing._prove.job import CannotProveError, JobRun, JobSpec, run_job
from drivetrain_testing._prove.kills import VICTIMS, Kill, Victim, choose_kills
from drivetrain_testing._prove.nodes import Nodes, ray_nodes

__all__ = ["Proof", "prove", "prove_command"]

_TIMEOUT_S = 600.0
_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Whether a job that was killed and resumed equals the same job undisturbed.

    Attributes:
        equal: True if everything that was compared is equal.
        differences: the differences, the earliest first; at most twenty.
        causes: the likely causes, the most likely first; empty if the runs are equal.
        kills: the kills that happened, as text.
        resumed_from: the iteration from which each attempt after the first resumed.
        compared: the number of compared ``reports``, ``rows`` (None if no loader has shown them) and ``entries`` of the
            last checkpoint.
        workers: the number of workers before and after a change of their number.
        tolerance: the tolerance for floating-point numbers; 0 if the comparison was bit for bit.
        runs: how often the job was run.
        seconds: how long that took.
        notes: what the reader should know in addition.
    """

    equal: bool
    differences: list[Difference] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    kills: list[str] = field(default_factory=list)
    resumed_from: list[int] = field(default_factory=list)
    compared: dict[str, int | None] = field(default_factory=dict)
    workers: tuple[int, int] = (0, 0)
    tolerance: float = 0.0
    runs: int = 2
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def cause(self) -> str | None:
        """The name of the most likely cause; None if the runs are equal."""
        return self.causes[0].name if self.causes else None

    @property
    def verdict(self) -> str:
        """The result in one sentence, with the first difference and its cause."""
        how = f"numbers within {self.tolerance:g}" if self.tolerance else "bit for bit"
        if self.equal:
            return f"equal to the undisturbed run, {how}"
        return f"different from the undisturbed run: {self.differences[0]}; likely cause: {self.cause}"

    def as_dict(self) -> dict[str, Any]:
        """Return the result as values that JSON can represent."""
        return {
            "equal": self.equal,
            "cause": self.cause,
            "comparison": "exact" if not self.tolerance else "tolerance",
            "tolerance": self.tolerance,
            "workers": list(self.workers),
            "kills": self.kills,
            "resumed_from": self.resumed_from,
            "compared": self.compared,
            "differences": [each.as_dict() for each in self.differences],
            "causes": [each.as_dict() for each in self.causes],
            "runs": self.runs,
            "seconds": round(self.seconds, 3),
            "notes": self.notes,
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        count = self.compared
        rows = "no rows (no loader has shown them)" if count.get("rows") is None else f"{count['rows']} rows"
        what = f"{count.get('reports', 0)} reports, {rows}, {count.get('entries', 0)} entries of the last checkpoint"
        how = f"numbers within {self.tolerance:g}" if self.tolerance else "bit for bit"
        yield f"{'equal' if self.equal else 'different'}: {what}, {how}"
        before, after = self.workers
        unit = "worker" if before == 1 else "workers"
        workers = f"{before} {unit}" if before == after else f"{before} {unit}, then {after}"
        points = ", ".join(f"report {each}" if each else "the start" for each in self.resumed_from) or "nothing"
        yield f"  killed: {'; '.join(self.kills) or 'nothing'}. Resumed from {points}; {workers}"
        if self.differences:
            yield f"first difference: {self.differences[0]}"
            for other in self.differences[1:3]:
                yield f"  also {other}"
        for number, cause in enumerate(self.causes[:3]):
            yield f"{'likely cause' if number == 0 else 'or'}: {cause.name}: {cause.explanation}"
            if cause.evidence:
                yield f"  found {'by an experiment' if cause.tested else 'by comparison'}: {cause.evidence}"
            yield f"  remedy: {cause.remedy}"
        if self.causes:
            rest = [name for name in CHECKLIST if name not in {cause.name for cause in self.causes}]
            yield f"other causes to check: {', '.join(rest)}"
        yield from (f"note: {note}" for note in self.notes)
        yield f"{self.runs} runs of the job in {self.seconds:.1f} s"


def prove(
    trainer: DataParallelTrainer,
    *,
    kills: int = 2,
    victims: Sequence[Victim] = VICTIMS,
    resize: int | None = None,
    ignore: Collection[str] = (),
    seed: int = 0,
    tolerance: float | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> Proof:
    """Run a trainer undisturbed and with kills, and compare the two runs.

    The runs are stored in a temporary directory. The trainer's own run directory is not used, and the trainer is not
    changed. It must report a checkpoint before its last report.

    Args:
        trainer: the trainer. Its train function and its config must be picklable, as for ``fit()``.
        kills: the number of kills.
        victims: what is killed, in turn: ``"rank"``, ``"driver"`` or ``"node"``. The nodes are those of the Ray cluster
            to which this process is connected, or of ``RAY_ADDRESS``, or else of one that is started for this purpose.
        resize: the number of workers after the first kill of the driver; None to keep their number. All kills are then
            of the driver.
        ignore: the names of metrics, and of entries of the checkpoints, that may differ, such as durations.
        seed: the seed with which the moments of the kills are chosen.
        tolerance: the absolute and relative difference that floating-point numbers may have. None for bit for bit, or
            0.001 with ``resize``.
        timeout_s: seconds within which all runs must end.

    Returns:
        The result, which also names the likely cause of a difference.

    Raises:
        CannotProveError: the job fails without kills, reports no checkpoint from which it could resume, or takes too
            long.
        ConfigurationError: an argument is out of range.

    Example:
        In a test::

            proof = drivetrain_testing.prove(trainer)
            assert proof.equal, proof
    """
    if not isinstance(trainer, DataParallelTrainer):
        raise ConfigurationError(f"[DT-103] prove: expected a trainer, got {trainer!r}")
    with tempfile.TemporaryDirectory(prefix="drivetrain-prove-") as directory:
        file = Path(directory, "trainer")
        with _pickled_by_value(trainer):
            file.write_bytes(cloudpickle.dumps(trainer))
        command = [sys.executable, "-m", "drivetrain_testing._prove.trainer", str(file)]
        return prove_command(
            command,
            kills=kills,
            victims=victims,
            resize=resize,
            ignore=ignore,
            seed=seed,
            tolerance=tolerance,
            timeout_s=timeout_s,
        )


@contextlib.contextmanager
def _pickled_by_value(trainer: DataParallelTrainer) -> Iterator[None]:
    """Pickle the objects of a test module by value, because another process may not be able to import it."""
    function = next(iter(trainer.given.values()), None)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or "site-packages" in (getattr(module, "__file__", "") or ""):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def prove_command(
    command: Sequence[str],
    *,
    kills: int = 2,
    victims: Sequence[Victim] = VICTIMS,
    resize: int | None = None,
    ignore: Collection[str] = (),
    seed: int = 0,
    tolerance: float | None = None,
    timeout_s: float = _TIMEOUT_S,
    runtime: str | None = None,
    keep: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Proof:
    """Prove the job of a command, such as ``["python", "train.py"]``: see :func:`prove`.

    Args:
        command: the command that starts the driver. It calls ``fit()``.
        kills: see :func:`prove`.
        victims: see :func:`prove`.
        resize: see :func:`prove`.
        ignore: see :func:`prove`.
        seed: see :func:`prove`.
        tolerance: see :func:`prove`.
        timeout_s: see :func:`prove`.
        runtime: the runtime that replaces the script's; None to keep it.
        keep: the directory, which must not exist, in which the run directories are kept; None to delete them.
        tell: called with a line about each run that is started.
    """
    _check_arguments(kills, resize, tolerance, timeout_s, keep)
    _check_victims(victims, resize, runtime)
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(_directory(keep))
        nodes = stack.enter_context(ray_nodes()) if "node" in victims else None
        spec = JobSpec(
            command=command,
            drivers=stack.enter_context(Drivers(command, directory)),
            directory=directory,
            deadline=started + timeout_s,
            scaling={**({} if nodes is None else nodes.scaling), **({} if runtime is None else {"runtime": runtime})},
            nodes=nodes,
        )
        tell("run 1 of 2: undisturbed")
        undisturbed = run_job(spec, "undisturbed", is_followed=True)
        events = undisturbed.events
        spec = replace(spec, all_report=all(events.reports.get(rank) for rank in range(events.size)))
        committed = _committed_before_end(undisturbed)
        _check_nodes(undisturbed, nodes)
        victims = victims if resize is None else ("driver",)  # without which the number of workers does not change
        chosen = choose_kills(events, committed, kills, seed, victims)
        tell(f"run 2 of 2: killing {'; '.join(map(str, chosen))}")
        disturbed = run_job(spec, "disturbed", kills=chosen, resize=resize)
        exact = resize is None or resize == events.size
        rules = Rules(
            ignored=frozenset(ignore),
            tolerance=tolerance if tolerance is not None else 0.0 if exact else _TOLERANCE,
            same_size=exact,
        )
        resize = None if exact else resize
        proof = _judge(spec, undisturbed, disturbed, chosen, rules, resize=resize, started=started, tell=tell)
        disturbed.note(proof.verdict)
        return proof


def _judge(
    spec: JobSpec,
    undisturbed: JobRun,
    disturbed: JobRun,
    chosen: Sequence[Kill],
    rules: Rules,
    *,
    resize: int | None,
    started: float,
    tell: Callable[[str], None],
) -> Proof:
    """Compare the two runs, and find the cause of a difference."""
    comparison = _compare(undisturbed, disturbed, rules)
    causes, runs = [], 2
    if comparison.differences:
        tell("the runs differ; looking for the cause with up to 7 further runs")
        diagnosis = diagnose(spec, undisturbed, disturbed, comparison, rules, resize=resize, tell=tell)
        causes, runs = diagnosis.causes, 2 + diagnosis.runs
    return Proof(
        equal=not comparison.differences,
        differences=comparison.differences,
        causes=causes,
        kills=[str(each) for each in disturbed.killed],
        resumed_from=disturbed.resumed_from,
        compared={"reports": comparison.reports, "rows": comparison.rows, "entries": comparison.entries},
        workers=(undisturbed.events.size, disturbed.events.size),
        tolerance=rules.tolerance,
        runs=runs,
        seconds=time.monotonic() - started,
        notes=[*_notes(undisturbed, disturbed, chosen, comparison), *_notes_on_generators(comparison)],
    )


def _check_arguments(
    kills: int, resize: int | None, tolerance: float | None, timeout_s: float, keep: Path | None
) -> None:
    if kills < 1:
        raise ConfigurationError(f"[DT-101] kills: expected an int >= 1, got {kills!r}")
    if resize is not None and resize < 1:
        raise ConfigurationError(f"[DT-101] resize: expected an int >= 1, got {resize!r}")
    if tolerance is not None and tolerance < 0:
        raise ConfigurationError(f"[DT-101] tolerance: expected a number >= 0, got {tolerance!r}")
    if timeout_s <= 0:
        raise ConfigurationError(f"[DT-101] timeout: expected a positive number of seconds, got {timeout_s!r}")
    if keep is not None and keep.exists():
        raise ConfigurationError(f"[DT-101] keep: expected a new directory, got {keep}, which exists")


def _check_victims(victims: Sequence[Victim], resize: int | None, runtime: str | None) -> None:
    if not victims or not {*victims} <= {"rank", "driver", "node"}:
        raise ConfigurationError(f"[DT-101] victims: expected some of rank, driver and node, got {victims!r}")
    if resize is not None and tuple(victims) not in (VICTIMS, ("driver",)):
        raise ConfigurationError(f"[DT-101] victims: expected only the driver with resize, got {victims!r}")
    if "node" in victims and runtime not in (None, "ray"):
        raise ConfigurationError(f"[DT-101] kill: expected --runtime ray for the kill of a node, got {runtime!r}")


def _check_nodes(run: JobRun, nodes: Nodes | None) -> None:
    """Check that the ranks of a run are on nodes that can be killed."""
    if nodes is None:
        return
    workers = run.reader.record().history.attempts[-1].workers
    if not workers or not all(nodes.has(worker["node_id"]) for worker in workers):
        raise ConfigurationError(
            "[DT-101] kill: expected a run on nodes of a Ray cluster for the kill of a node, got a run with another "
            "runtime. Pass --runtime ray, or ScalingConfig(runtime='ray')"
        )


@contextlib.contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    """Provide a directory for the runs. Its path is short, because the names of sockets are limited."""
    directory = Path(tempfile.mkdtemp(prefix="drivetrain-prove-"))
    try:
        yield directory
        if keep is not None:
            shutil.move(directory, keep)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _committed_before_end(run: JobRun) -> list[int]:
    """Return the iterations from whose checkpoints a run can resume, and after which it still reports.

    Raises:
        CannotProveError: the run has failed, or there is no such iteration.
    """
    if run.failure:
        raise CannotProveError(f"prove: expected a job that succeeds without kills, but it failed: {run.failure}")
    if not run.has_run:
        raise CannotProveError(
            "prove: expected a script that calls fit(), but it has started no run. Pass the script that creates the "
            "trainer, and arguments with which it trains"
        )
    last = max((iteration for reports in run.events.reports.values() for iteration in reports), default=0)
    committed = [iteration for iteration in sorted(run.checkpoints) if iteration < last]
    if not committed:
        raise CannotProveError(
            f"prove: expected a checkpoint before the last report, got {last} reports and {len(run.checkpoints)} "
            "checkpoints. Report checkpoints more often: report(metrics, checkpoint=...)"
        )
    return committed


def _compare(undisturbed: JobRun, disturbed: JobRun, rules: Rules) -> Comparison:
    if disturbed.failure:
        detail = f"the job did not finish after the kills: {redact(disturbed.failure)}"
        return Comparison(
            differences=[Difference(kind="failure", iteration=0, detail=detail)], reports=0, rows=None, entries=0
        )
    return compare_runs(undisturbed, disturbed, rules)


def _notes_on_generators(comparison: Comparison) -> Iterator[str]:
    if comparison.unseeded:
        names = ", ".join(comparison.unseeded)
        yield f"not compared, because no seed was set before the first checkpoint: {names}"


def _notes(undisturbed: JobRun, disturbed: JobRun, chosen: Sequence[Kill], comparison: Comparison) -> Iterator[str]:
    if len(disturbed.killed) < len(chosen):
        yield f"only {len(disturbed.killed)} of {len(chosen)} kills happened, because the job ended before"
    if not comparison.differences and undisturbed.events.repeats_its_order:
        yield (
            "warning: the loader shuffles, but every epoch reads the rows in the same order. Pass it to "
            "TrainState(loader=...), or call loader.set_epoch(epoch) at the start of each epoch"
        )
    if not comparison.differences and _resumed_only_between_epochs(disturbed):
        yield (
            "every resume was at the start of an epoch. To prove a resume within an epoch as well, let the script save "
            "more often than once per epoch"
        )
    others = len(os.listdir(undisturbed.directory / "runs")) - 1
    if others > 0:
        yield f"only the run of the first fit() was compared, not the {others} others of the script"


def _resumed_only_between_epochs(run: JobRun) -> bool:
    """Return True if each attempt after the first has begun with the first batch of an epoch, as far as is known."""
    batches = run.events.batches.values()
    first = [of_rank[start][0] for of_rank in batches for start in run.resumed_from if of_rank.get(start)]
    return bool(first) and all(batch.number == 0 for batch in first)
