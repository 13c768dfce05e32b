"""`load_checkpoint()` returns on every rank what this rank has saved last, as it was when it was saved."""

# arguments: 3; 1; 0

import sys
import tempfile
from pathlib import Path
from typing import Any

import drivetrain
import drivetrain_interactive
from drivetrain import Checkpoint
from drivetrain_interactive import Trainer


def train_func(config: dict[str, Any]) -> list[Any]:
    rank = drivetrain_interactive.world_rank()
    seen = [(drivetrain_interactive.load_checkpoint() or {}).get("state")]
    for epoch in range(3):
        state = [rank, epoch]
        drivetrain_interactive.save_checkpoint(state=state)
        state.append("changed later")
        seen.append((drivetrain_interactive.load_checkpoint() or {}).get("state"))
    if config["report"]:
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, f"of_rank_{rank}").touch()
            drivetrain.report(loss=1.0, checkpoint=Checkpoint.from_directory(directory))
        try:
            seen.append(drivetrain_interactive.load_checkpoint())
        except drivetrain.CheckpointError:
            seen.append("another checkpoint")
    return seen


if __name__ == "__main__":
    workers = int(sys.argv[1])
    with Trainer("none", num_workers=workers) as trainer:
        first = trainer.run(train_func, {"report": False})
        second = trainer.run(train_func, {"report": True}, checkpoint={"state": "given"})
    ranks = range(max(1, workers))
    states = [[[rank, epoch] for epoch in range(3)] for rank in ranks]
    print(first, second)
    right = first == [[None, *states[rank]] for rank in ranks]
    right = right and second == [["given", *states[rank], "another checkpoint"] for rank in ranks]
    sys.exit(not right)
