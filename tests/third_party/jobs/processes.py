"""Runs one of several cases on the runtime ``acme_processes``."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import drivetrain
from drivetrain import Checkpoint, DataParallelTrainer, FailureConfig, ResourceError, RunConfig, ScalingConfig
from drivetrain.plugin import Backend
from tests.support import release, send_line, wait_for_release

arguments = json.loads(sys.argv[1])


class KeepsRankZero(Backend):
    """A backend without collectives: the ranks that are not lost keep running."""

    survives_losses = True

    def rendezvous(self, group: Any) -> Sequence[Mapping[str, str]]:
        return [{} for _ in group.workers]

    @contextlib.contextmanager
    def session(self, context: Any, rendezvous: Mapping[str, str]) -> Iterator[None]:
        os.environ.update(rendezvous)
        yield

    def rejoin(self, group: Any, lost: Sequence[int]) -> Future[Sequence[Mapping[str, str]]]:
        future: Future[Sequence[Mapping[str, str]]] = Future()
        future.set_result([{"REPLACEMENT": "1"} for _ in lost])
        return future


def lose_rank_1(config: dict[str, str]) -> int:
    """Report and save in three steps; in the first attempt, rank 1 is killed after the second step."""
    context = drivetrain.get_context()
    rank, last = context.get_world_rank(), 0
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        last = int(pathlib.Path(checkpoint.path, "step").read_text())
    for step in range(last + 1, 4):
        with tempfile.TemporaryDirectory() as directory:
            pathlib.Path(directory, "step").write_text(str(step))
            saved = Checkpoint.from_directory(directory) if rank == 0 else None
            drivetrain.report({"step": step, "sum": rank + 1}, saved, reduce={"sum": "sum"})
        if step == 2 and context.attempt == 0:
            subprocess.Popen(["sleep", "1000"])
            if rank == 0:
                release(config["pipe"])
                threading.Event().wait()
            wait_for_release(config["pipe"])
            os.kill(os.getpid(), signal.SIGKILL)
    print(f"rank {rank} of {context.get_world_size()} reads {sys.stdin.read()!r}")
    return context.attempt


def wait(config: dict[str, str]) -> None:
    subprocess.Popen(["sleep", "1000"])
    send_line(config["pipe"], os.getpid())
    threading.Event().wait()


def be_replaced(config: dict[str, str]) -> int:
    """Kill rank 1 when rank 0 runs as well: only ranks that are lost after that are replaced."""
    if drivetrain.get_context().get_world_rank() == 0:
        release(config["pipe"])
        wait_for_release(config["replaced"])
    elif "REPLACEMENT" in os.environ:
        release(config["replaced"])
    else:
        wait_for_release(config["pipe"])
        os.kill(os.getpid(), signal.SIGKILL)
    return drivetrain.get_context().attempt


def fit(function: Any, backend: Any = None, **scaling: Any) -> None:
    result = DataParallelTrainer(
        function,
        train_loop_config=arguments,
        backend_config=backend,
        scaling_config=ScalingConfig(num_workers=2, runtime="acme_processes", **scaling),
        run_config=RunConfig(
            name=function.__name__,
            storage_path=arguments["storage_path"],
            verbose=0,
            start_timeout_s=180,
            failure_config=FailureConfig(max_failures=arguments["max_failures"]),
        ),
    ).fit(raise_on_failure=False)
    print(json.dumps({"attempt": result.return_value, "metrics": result.metrics, "error": str(result.error)}))


if __name__ == "__main__":
    match arguments["case"]:
        case "lose a rank":
            fit(lose_rank_1)
        case "wait":
            fit(wait)
        case "replace a rank":
            fit(be_replaced, KeepsRankZero())
        case "request GPUs":
            try:
                fit(wait, use_gpu=True)
            except ResourceError as error:
                print(error)
