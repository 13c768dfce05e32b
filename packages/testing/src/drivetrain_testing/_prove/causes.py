"""The causes of differences that ``drivetrain prove`` knows, with their explanations and remedies."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["CAUSES", "CHECKLIST", "Cause", "cause_of"]


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A likely cause of a difference.

    Attributes:
        name: its name, a key of :data:`CAUSES`.
        explanation: what happens.
        remedy: what to change.
        evidence: what in the runs points to it.
        tested: True if an experiment has confirmed it; False if it is concluded from the differences.
    """

    name: str
    explanation: str
    remedy: str
    evidence: str = ""
    tested: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)


CAUSES: dict[str, tuple[str, str]] = {
    "data": (
        "the rows that the job reads after a restart are not those that follow",
        "save the position of the loader, and restore it before the loop",
    ),
    "random state": (
        "random numbers that the job draws after a restart differ, because their state is not restored",
        "save the random states of every rank (Python, NumPy, PyTorch, your own generators) with the checkpoint, and "
        "restore them after everything else is set up",
    ),
    "unsaved state": (
        "a value that the training changes is not in the checkpoint, so a restart loses it",
        "add it to the checkpoint, and restore it",
    ),
    "missing set_epoch": (
        "after a restart, the data begins with the order of an earlier epoch",
        "call loader.set_epoch(epoch) at the start of each epoch, with the number of the epoch in the whole run",
    ),
    "unseeded sampler": (
        "the order of the data comes from random numbers without a seed, so no two runs read the same",
        "pass a seeded generator to the loader, or seed the library in the train function before the loader is created",
    ),
    "unseeded random numbers": (
        "the job draws random numbers without a seed, so no two runs are equal, with or without a restart",
        "seed them in the train function: random.seed, numpy.random.seed, torch.manual_seed, or "
        "drivetrain_torch.enable_reproducibility(seed=0)",
    ),
    "unsaved optimizer": (
        "the state of the optimizer, such as its momentum, is lost in a restart",
        "save optimizer.state_dict() with the checkpoint, and load it",
    ),
    "unsaved scheduler": (
        "the learning rate starts from its first value after a restart",
        "save scheduler.state_dict() with the checkpoint, and load it",
    ),
    "unsaved buffers": (
        "buffers of the model, such as the running statistics of batch norm, are lost in a restart",
        "save model.state_dict(), which contains the buffers, instead of its parameters alone",
    ),
    "unsaved parameters": (
        "parameters of a model are not restored",
        "save model.state_dict() of each model that is trained or averaged, and load it",
    ),
    "batch norm per replica": (
        "each rank has its own running statistics of batch norm, and the checkpoint has those of one rank",
        "use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), or save the buffers of every rank in files whose "
        "names contain the rank",
    ),
    "rank-dependent state": (
        "the ranks have different state, and the checkpoint has that of one rank for all of them",
        "save the state of every rank in a file whose name contains the rank, and let each rank load its own",
    ),
    "order of DDP's buckets": (
        "with three or more workers, DistributedDataParallel sums gradients in another order after a restart",
        "pass exact=True to drivetrain_torch.prepare_model, or call enable_reproducibility",
    ),
    "clock": (
        "values that the job reports, saves or trains with are read from the clock",
        "pass metrics that are durations to --ignore; do not use the time as data or as a seed",
    ),
    "order of sets": (
        "the job iterates over a set of strings, whose order differs in every process",
        "sort it: for name in sorted(names)",
    ),
    "nondeterministic operation": (
        "an operation gives different results for the same input, for example by threads that end in any order",
        "with PyTorch, find it with torch.use_deterministic_algorithms(True), or call "
        "drivetrain_torch.enable_reproducibility; elsewhere, collect results of threads in a fixed order",
    ),
    "failed restart": (
        "the job fails when it resumes",
        "correct the error, which the last output shows",
    ),
    "number of workers": (
        "the training depends on the number of workers: each worker has its own batch size, so the number of rows in a "
        "step changes",
        "divide the global batch by the number of workers, or raise --tolerance",
    ),
}
"""For each cause, its explanation and its remedy."""

CHECKLIST = (
    "missing set_epoch",
    "unseeded sampler",
    "unsaved optimizer",
    "unsaved scheduler",
    "random state",
    "rank-dependent state",
    "batch norm per replica",
    "order of DDP's buckets",
    "nondeterministic operation",
    "clock",
)
"""The causes to check if none is found, in this order."""


def cause_of(name: str, evidence: str, *, tested: bool = False) -> Cause:
    """Return a cause by its name."""
    explanation, remedy = CAUSES[name]
    return Cause(name=name, explanation=explanation, remedy=remedy, evidence=evidence, tested=tested)
