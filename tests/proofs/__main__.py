"""Run ``drivetrain prove`` with many kills over a table of frameworks and runtimes, and print the results.

python -m tests.proofs --kills 200

The results are appended to a file. If the command is interrupted, the next one with the same file continues. Delete the
file to start from the beginning. A cell that has used up its time limit is reported as incomplete, and not run again.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain_testing import CannotProveError
from drivetrain_testing._prove.kills import Victim
from drivetrain_testing._prove.proof import prove_command

SCRIPTS = Path(__file__).parent / "scripts"
RUNTIMES: dict[str, tuple[Victim, ...]] = {"local": ("rank", "driver"), "ray": ("rank", "driver", "node")}
KILLS_PER_PROOF = 5


@dataclass(frozen=True)
class Job:
    """A script with its arguments.

    Attributes:
        framework: the name in the table.
        workers: the number of workers.
        script: the script and its arguments.
        ignore: see :func:`drivetrain_testing.prove`.
    """

    framework: str
    workers: int
    script: tuple[str, ...]
    ignore: tuple[str, ...] = ()


_SUMMARY_OF_TRANSFORMERS = (
    *("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss"),  # since the last restart
    "training_args.bin",  # contains the path of the run directory
)
JOBS = (
    Job("torch DDP", 2, ("torch_state.py", "ddp", "2")),
    Job("torch DDP", 3, ("torch_state.py", "ddp", "3")),
    Job("torch DDP", 4, ("torch_state.py", "ddp", "4")),
    Job("torch FSDP2", 2, ("torch_state.py", "fsdp2", "2")),
    Job("Lightning", 2, ("lightning_fit.py",)),
    Job("Transformers", 2, ("transformers_train.py",), _SUMMARY_OF_TRANSFORMERS),
    Job("Accelerate", 2, ("accelerate_loop.py",)),
    Job("Keras", 2, ("keras_loop.py",)),
    Job("XGBoost", 2, ("xgboost_tables.py",)),
    Job("LightGBM", 2, ("lightgbm_tables.py",)),
    Job("JAX", 2, ("jax_arrays.py",)),
)


@dataclass(frozen=True)
class Cell:
    """A job on a runtime, with its share of the kills."""

    job: Job
    runtime: str
    kills: int

    @property
    def name(self) -> str:
        """The name of the cell in the file of the results."""
        return f"{self.job.framework} {self.job.workers} {self.runtime}"

    def proofs(self) -> list[int]:
        """Return the number of kills of each proof."""
        full, rest = divmod(self.kills, KILLS_PER_PROOF)
        return [KILLS_PER_PROOF] * full + [rest] * bool(rest)


def cells(kills: int, chosen: str) -> list[Cell]:
    """Divide the kills among the jobs and runtimes whose names contain a text."""
    pairs = [(job, runtime) for runtime in RUNTIMES for job in JOBS]
    pairs = [pair for pair in pairs if chosen in Cell(*pair, 0).name]
    base, rest = divmod(kills, len(pairs)) if pairs else (0, 0)
    return [Cell(job, runtime, base + (number < rest)) for number, (job, runtime) in enumerate(pairs)]


def run_proof(cell: Cell, number: int, kills: int, seed: int, limit_s: float) -> dict[str, Any]:
    """Run one proof, and return its result for the file."""
    began = time.monotonic()
    record: dict[str, Any] = {"cell": cell.name, "proof": number, "seed": seed, "kills": 0, "equal": None}
    script, *arguments = cell.job.script
    try:
        proof = prove_command(
            [sys.executable, str(SCRIPTS / script), *arguments],
            kills=kills,
            victims=RUNTIMES[cell.runtime],
            ignore=cell.job.ignore,
            seed=seed,
            runtime=cell.runtime,
            timeout_s=limit_s,
        )
        found = proof.as_dict()
        record |= {"kills": len(proof.kills), "killed": found["kills"], "equal": proof.equal, "cause": proof.cause}
        record |= {"differences": found["differences"][:3], "notes": found["notes"]}
    except Exception as error:  # the table contains it, and the other cells run
        record["error"] = f"{'' if isinstance(error, CannotProveError) else type(error).__name__ + ': '}{error}"
    return {**record, "seconds": round(time.monotonic() - began, 1)}


def run_cell(cell: Cell, done: Sequence[dict[str, Any]], seed: int, limit_s: float) -> Iterator[dict[str, Any]]:
    """Yield the results of the proofs of a cell that are not done yet, until its time is up."""
    used_s = sum(each["seconds"] for each in done)
    for number, kills in enumerate(cell.proofs()):
        if any(each["proof"] == number for each in done):
            continue
        if used_s >= limit_s:
            return
        own_seed = random.Random(f"{seed} {cell.name} {number}").randrange(1 << 31)
        record = run_proof(cell, number, kills, own_seed, limit_s - used_s)
        used_s += record["seconds"]
        yield record


def read(path: Path) -> list[dict[str, Any]]:
    """Return the results in the file, without a line that was not written to its end."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def row_of(cell: Cell, results: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return the row of a cell in the table."""
    own = [each for each in results if each["cell"] == cell.name]
    different = [each for each in own if each["equal"] is False]
    failed = [each for each in own if each["equal"] is None]
    done = sum(each["kills"] for each in own)
    if different:
        first = different[0]["differences"][0]
        outcome = f"different: {different[0]['cause']} ({first['name'] or first['kind']}: {first['detail']:.60})"
    elif failed:
        outcome = f"not proven: {failed[0]['error']:.100}".replace("\n", " ")
    else:
        outcome = "equal" if len(own) == len(cell.proofs()) else "incomplete"
    seconds = f"{sum(each['seconds'] for each in own):.0f}"
    return cell.job.framework, cell.runtime, str(cell.job.workers), f"{done} of {cell.kills}", seconds, outcome


def main() -> int:
    """Run the proofs, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.proofs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="the number of kills in all (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the moments of the kills")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="the time limit of each cell (default: 1800)")
    parser.add_argument("--only", default="", help="only cells whose names contain this, such as 'torch DDP 3 ray'")
    parser.add_argument("--results", type=Path, default=Path("proofs.jsonl"), help="the file with the results")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that no process of a job is left
    chosen = cells(options.kills, options.only)
    for cell in chosen:
        done = [each for each in read(options.results) if each["cell"] == cell.name]
        for record in run_cell(cell, done, options.seed, options.limit_s):
            with options.results.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(f"{cell.name}: {json.dumps(record)}", file=sys.stderr, flush=True)
    results = read(options.results)
    rows = [("framework", "runtime", "workers", "kills", "s", "result"), *(row_of(cell, results) for cell in chosen)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip())
    return 0 if all(row[-1] == "equal" for row in rows[1:]) else 1


if __name__ == "__main__":
    sys.exit(main())
