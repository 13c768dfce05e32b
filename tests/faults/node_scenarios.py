"""Runs on a Ray cluster that loses and gains nodes; test_nodes.py starts this script as a separate driver."""

import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.util import placement_group_table

from drivetrain import Callback, CheckpointConfig, DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig
from tests.contract.cluster_scenarios import cluster_of
from tests.faults.scenarios import VICTIM, Moment, Plan, train
from tests.support import Pipe, is_running, wait_until_exited


class Watch(Callback):
    """Records the node of the victim, and the outcome."""

    def __init__(self) -> None:
        self.groups: list[Any] = []
        self.failures: list[Any] = []
        self.stopped: list[float] = []

    def on_group_start(self, run: Any, attempt: int, workers: Any) -> None:
        self.groups.append(workers)

    def on_failure(self, run: Any, failure: Any, retrying: bool) -> None:
        self.failures.append(failure)

    def on_group_stop(self, run: Any, attempt: int) -> None:
        self.stopped.append(time.monotonic())


def strike(cluster: Any, watch: Watch, plan: Plan, gate: Pipe) -> None:
    """Remove the victim's node, or add a node."""
    plan.note()
    if plan.fault == "node added":
        cluster.add_node(num_cpus=1)
        gate.release()
        return
    lost = watch.groups[plan.moment.attempt][VICTIM].node_id
    node = next(node for node in cluster.list_all_nodes() if node.node_id == lost)
    cluster.remove_node(node, allow_graceful=False)


def signal_on_message(pipe: Pipe) -> None:
    pipe.receive()
    os.kill(os.getpid(), signal.SIGUSR1)


def fit(cluster: Any, fault: str, moment: Moment, directory: Path) -> dict[str, Any]:
    directory.mkdir()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as storage:
        pipe = Pipe(directory / "pipe")
        plan = Plan(fault=fault, moment=moment, directory=str(directory), pipe=pipe.path)
        for attempt in range(3):
            for rank in range(2):
                Pipe(Path(plan.gate(attempt, rank)))
        gate = Pipe(Path(plan.gate(9, VICTIM)))
        watch = Watch()
        # Ray starts nodes only on the main thread, which is in fit().
        signal.signal(signal.SIGUSR1, lambda *_: strike(cluster, watch, plan, gate))
        thread = threading.Thread(target=signal_on_message, args=(pipe,), daemon=True)
        thread.start()
        result = DataParallelTrainer(
            train,
            train_loop_config={"plan": plan},
            scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD", runtime="ray"),
            run_config=RunConfig(
                name="run",
                storage_path=storage,
                verbose=0,
                callbacks=[watch],
                start_timeout_s=60,
                checkpoint_config=CheckpointConfig(),
                failure_config=FailureConfig(max_failures=1 + (moment is Moment.RESTART)),
            ),
        ).fit(raise_on_failure=False)
        thread.join(30)
        pids = [worker.pid for group in watch.groups for worker in group]
        wait_until_exited(pids, deadline_s=10)
        return {
            "fault": fault,
            "moment": moment.value,
            "error": str(result.error or ""),
            "failures": [(failure.kind.value, failure.rank, failure.summary) for failure in watch.failures],
            "noticed_s": watch.stopped[moment.attempt] - plan.struck_at(),
            "resumed_at": result.return_value,
            "steps": [entry["step"] for _, entry in result.best_checkpoints],
            "left": [pid for pid in pids if is_running(pid)],
            "groups": sorted({group["state"] for group in placement_group_table().values()}),
            "lock": Path(result.path, ".lock").exists(),
            "nodes": sum(node["Alive"] for node in ray.nodes()),
        }


def main(directory: Path, cells: list[tuple[str, str]]) -> list[dict[str, Any]]:
    with cluster_of(*[{"num_cpus": 1}] * 4) as cluster:
        return [
            fit(cluster, fault, Moment(moment), directory / str(number)) for number, (fault, moment) in enumerate(cells)
        ]


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), json.loads(sys.argv[2]))))
