"""What a driver does on Ray clusters of several nodes; test_ray_cluster.py runs each with a cluster of its own."""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from drivetrain import (
    Backend,
    BackendConfig,
    Callback,
    Checkpoint,
    DataParallelTrainer,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    get_checkpoint,
    get_context,
    report,
)

CLONE_NEWNS = 0x00020000


class GroupWatcher(Callback):
    def __init__(self):
        self.groups = []
        self.failures = []

    def on_group_start(self, run, attempt, workers):
        self.groups.append([(w.rank, w.local_rank, w.node_rank, w.node_id) for w in workers])

    def on_failure(self, run, failure, retrying):
        self.failures.append((failure.kind.value, failure.rank))


def say_where(config):
    context = get_context()
    report(
        {
            "local_world_size": context.get_local_world_size(),
            "LOCAL_RANK": int(os.environ["LOCAL_RANK"]),
            "NODE_RANK": int(os.environ["NODE_RANK"]),
        }
    )


def count_to_four(config):
    """Counts in checkpoints; in the first attempt, stops at 2 for good and says so."""
    checkpoint = get_checkpoint()
    count = int(Path(checkpoint.path, "count").read_text()) if checkpoint else 0
    while count < 4:
        count += 1
        with tempfile.TemporaryDirectory() as directory:
            mine = Path(directory, "count") if get_context().get_world_rank() == 0 else Path(directory, "other")
            mine.write_text(str(count))
            report({"count": count, "attempt": get_context().attempt}, checkpoint=Checkpoint(directory))
        if get_context().attempt == 0 and count == 2:
            os.kill(config["driver"], signal.SIGUSR1)
            threading.Event().wait(60)


def fit(function, storage_path, scaling, *, config=None, callbacks=(), **options):
    return DataParallelTrainer(
        function,
        train_loop_config=config or {},
        scaling_config=scaling,
        run_config=RunConfig(storage_path=storage_path, verbose=0, callbacks=list(callbacks), **options),
    ).fit()


def ranks_are_packed_by_node(storage_path):
    with cluster_of({"num_cpus": 2}, {"num_cpus": 2}):
        watcher = GroupWatcher()
        result = fit(say_where, storage_path, ScalingConfig(num_workers=4), callbacks=[watcher])
        here = ray.get_runtime_context().get_node_id()
        return {
            "group": [(rank, local_rank, node_rank) for rank, local_rank, node_rank, _ in watcher.groups[0]],
            "first_node_is_the_drivers": watcher.groups[0][0][3] == here,
            "local_world_size": result.metrics["local_world_size"],
        }


def lost_node_is_replaced(storage_path):
    with cluster_of({"num_cpus": 1}, {"num_cpus": 1}, {"num_cpus": 1}) as cluster:
        watcher = GroupWatcher()
        told = []

        def remove_node_of_rank_1(*_):
            told.append(1)
            if len(told) == 2:  # both ranks have made their second report
                lost = watcher.groups[0][1][3]
                node = next(node for node in cluster.list_all_nodes() if node.node_id == lost)
                cluster.remove_node(node, allow_graceful=False)

        signal.signal(signal.SIGUSR1, remove_node_of_rank_1)
        result = fit(
            count_to_four,
            storage_path,
            ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
            config={"driver": os.getpid()},
            callbacks=[watcher],
            failure_config=FailureConfig(max_failures=1),
        )
        return {"failures": watcher.failures, "metrics": result.metrics, "groups": len(watcher.groups)}


class BadNode(GroupWatcher):
    """Keeps the other node busy until the run has failed twice on the first."""

    def on_group_start(self, run, attempt, workers):
        super().on_group_start(run, attempt, workers)
        if attempt == 0:
            self.reserved = ray.util.placement_group([{"CPU": 1}])
            assert self.reserved.wait(30)

    def on_failure(self, run, failure, retrying):
        super().on_failure(run, failure, retrying)
        if len(self.failures) == 2:
            ray.util.remove_placement_group(self.reserved)


def die_on_one_node(config):
    first, here = Path(config["first"]), ray.get_runtime_context().get_node_id()
    if not first.exists():
        first.write_text(here)
    if first.read_text() == here:
        os.kill(os.getpid(), signal.SIGKILL)


def bad_node_is_avoided(storage_path):
    with cluster_of({"num_cpus": 1}, {"num_cpus": 1}):
        watcher = BadNode()
        fit(
            die_on_one_node,
            storage_path,
            ScalingConfig(num_workers=1, runtime="ray"),
            config={"first": str(Path(storage_path, "first"))},
            callbacks=[watcher],
            failure_config=FailureConfig(max_failures=2, max_node_failures=2),
        )
        return {"failures": watcher.failures, "nodes": [group[0][3] for group in watcher.groups]}


class Preloaded(BackendConfig):
    """A backend whose preloaded module says, in each process that imports it, that it does."""

    def create(self):
        return PreloadingBackend()


class PreloadingBackend(Backend):
    preload = ("told_of_import",)

    def session(self, context, rendezvous):
        return contextlib.nullcontext()


class SpareWatcher(Callback):
    def __init__(self):
        self.pids = []
        self.gpus = []
        self.reservations = []

    def on_group_start(self, run, attempt, workers):
        self.pids.append([worker.pid for worker in workers])
        self.gpus.append([worker.accelerator_ids for worker in workers])
        table = ray.util.placement_group_table()
        self.reservations.append([name for name, group in table.items() if group["state"] == "CREATED"])


def die_once_the_spares_are_there(config):
    context = get_context()
    report(
        {
            "attempt": context.attempt,
            "preloaded": "told_of_import" in sys.modules,
            "visible": os.environ["CUDA_VISIBLE_DEVICES"],
            "threads": os.environ["OMP_NUM_THREADS"],
        }
    )
    if context.attempt < 2 and context.get_world_rank() == 1:
        with open(config["told"]) as told, open(config["seen"], "a") as seen:
            for _ in range(4 if context.attempt == 0 else 2):
                seen.write(told.readline())
        os.kill(os.getpid(), signal.SIGKILL)
    elif context.attempt < 2:
        threading.Event().wait(60)


def spares_take_the_places_of_a_lost_group(storage_path):
    modules = Path(storage_path, "modules")
    modules.mkdir()
    told, seen = Path(storage_path, "told"), Path(storage_path, "seen")
    os.mkfifo(told)
    opened = os.open(told, os.O_RDWR)  # which keeps what was written until it is read
    Path(modules, "told_of_import.py").write_text(
        f"import os\nwith open({str(told)!r}, 'w') as told:\n    told.write(f'{{os.getpid()}}\\n')\n"
    )
    os.environ["PYTHONPATH"] = os.pathsep.join([str(modules), os.environ.get("PYTHONPATH", "")])
    with cluster_of({"num_cpus": 4, "num_gpus": 2}):
        watcher = SpareWatcher()
        result = DataParallelTrainer(
            die_once_the_spares_are_there,
            train_loop_config={"told": str(told), "seen": str(seen)},
            backend_config=Preloaded(),
            scaling_config=ScalingConfig(
                num_workers=2, spare_workers=2, use_gpu=True, resources_per_worker={"CPU": 2}, runtime="ray"
            ),
            run_config=RunConfig(
                storage_path=storage_path,
                verbose=0,
                callbacks=[watcher],
                failure_config=FailureConfig(max_failures=2),
                detailed_metrics=True,
            ),
        ).fit()
        lost = [int(pid) for pid in seen.read_text().split()]
        left = [pid for pid in lost if not ends(pid)]
        table = ray.util.placement_group_table()
    os.close(opened)
    return {
        "pids": watcher.pids,
        "gpus": watcher.gpus,
        "seen": lost,
        "left": left,
        "metrics": result.metrics,
        "reservations": watcher.reservations,
        "reserved": [name for name, group in table.items() if group["state"] != "REMOVED"],
    }


def ends(pid, deadline_s=20):
    """Whether a process is gone, or goes in time."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], deadline_s)[0])
    finally:
        os.close(process)


def request_that_no_node_can_meet(storage_path):
    with cluster_of({"num_cpus": 1}):
        start = time.monotonic()
        try:
            scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 8})
            fit(say_where, storage_path, scaling, start_timeout_s=3)
        except Exception as error:
            return {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - start}


def interrupt_while_waiting_for_resources(storage_path):
    with cluster_of({"num_cpus": 1}):
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        start = time.monotonic()
        try:
            fit(say_where, storage_path, ScalingConfig(num_workers=8), start_timeout_s=60)
        except KeyboardInterrupt:
            return {"seconds": time.monotonic() - start}


def storage_that_the_nodes_do_not_share(storage_path):
    """The driver and the second node see another directory under the path than the first node does."""
    hidden = Path(storage_path, "runs")
    hidden.mkdir()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with cluster_of({"num_cpus": 1}) as cluster:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNS) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", str(hidden)], check=True)
        cluster.add_node(num_cpus=1)
        try:
            scaling = ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD")
            fit(count_to_four, hidden, scaling, config={"driver": os.getpid()})
        except Exception as error:
            return {"error": type(error).__name__, "cause": type(error.__cause__).__name__, "message": str(error)}


@contextlib.contextmanager
def cluster_of(*nodes):
    """A cluster with these nodes, which the process is connected to; started by hand, so that it can lose some."""
    cluster = Cluster(initialize_head=True, head_node_args=nodes[0])
    try:
        for node in nodes[1:]:
            cluster.add_node(**node)
        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2])))
