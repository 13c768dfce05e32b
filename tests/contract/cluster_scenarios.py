"""Driver scenarios on Ray clusters of several nodes; test_ray_cluster.py runs each with its own cluster."""

import contextlib
import ctypes
import dataclasses
import importlib.util
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
from unittest import mock

import ray
from ray.cluster_utils import Cluster

from drivetrain import (
    Callback,
    Checkpoint,
    DataParallelTrainer,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    get_checkpoint,
    get_context,
    get_preemption_info,
    report,
    resume_later,
    shared_checkpoint,
)
from drivetrain.plugin import Backend, BackendConfig, WorkerInfo
from drivetrain_ray import RayRuntime
from tests.s3 import FaultProxy, S3Server
from tests.support import Pipe, wait_for_release

CLONE_NEWNS = 0x00020000


class GroupWatcher(Callback):
    def __init__(self):
        self.groups = []
        self.failures = []

    def on_group_start(self, run, attempt, workers):
        self.groups.append([(w.rank, w.local_rank, w.node_rank, w.node_id) for w in workers])

    def on_failure(self, run, failure, retrying):
        self.failures.append((failure.kind.value, failure.rank))


def count_to_four(config):
    """Count in checkpoints; in the first attempt, block at 2 forever and notify the test."""
    checkpoint = get_checkpoint()
    count = int(Path(checkpoint.path, "count").read_text()) if checkpoint else 0
    while count < 4:
        count += 1
        with tempfile.TemporaryDirectory() as directory:
            mine = Path(directory, "count") if get_context().get_world_rank() == 0 else Path(directory, "other")
            mine.write_text(str(count))
            report({"count": count, "attempt": get_context().attempt}, checkpoint=Checkpoint(directory))
        if get_context().attempt == 0 and count == 2:
            # Two signals with the same number could be delivered as one.
            os.kill(config["driver"], signal.SIGUSR2 if get_context().get_world_rank() else signal.SIGUSR1)
            threading.Event().wait(60)


def fit(function, storage_path, scaling, *, config=None, callbacks=(), **options):
    return DataParallelTrainer(
        function,
        train_loop_config=config or {},
        scaling_config=scaling,
        run_config=RunConfig(storage_path=storage_path, verbose=0, callbacks=list(callbacks), **options),
    ).fit()


def lost_node_is_replaced(storage_path):
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(S3Server(Path(storage_path, "s3")))
        os.environ.update(server.environment)  # before the workers start
        cluster = stack.enter_context(cluster_of({"num_cpus": 1}, {"num_cpus": 1}, {"num_cpus": 1}))
        watcher = GroupWatcher()
        second_reports = []

        def remove_node_of_rank_1(*_):
            second_reports.append(1)
            if len(second_reports) == 2:  # both ranks have made their second report
                cluster.remove_node(node_of(cluster, watcher.groups[0][1][3]), allow_graceful=False)

        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, remove_node_of_rank_1)
        result = fit(
            count_to_four,
            storage_path,
            ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
            config={"driver": os.getpid()},
            callbacks=[watcher],
            failure_config=FailureConfig(max_failures=1),
        )
        shared = save_together(server)
        return {"failures": watcher.failures, "metrics": result.metrics, "groups": len(watcher.groups), **shared}


def save_part():
    rank = get_context().get_world_rank()
    with shared_checkpoint() as checkpoint:
        found = sorted(file.name for file in Path(checkpoint.path).iterdir())
        Path(checkpoint.path, f"{rank}.txt").write_text("part")
        report({"others_are_hidden": f"{1 - rank}.txt" not in found}, checkpoint=checkpoint)


def save_together(server):
    """Save a checkpoint in a bucket from two nodes, whose workers do not share a directory."""
    from pyarrow.fs import S3FileSystem

    with FaultProxy(server, markers=True) as proxy:
        server.make_bucket("bucket")
        filesystem = S3FileSystem(
            access_key=server.access_key,
            secret_key=server.secret_key,
            endpoint_override=proxy.endpoint,
            region="us-east-1",
            allow_delayed_open=True,
        )
        scaling = ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD")
        result = fit(save_part, "bucket", scaling, storage_filesystem=filesystem)
        result.checkpoint.verify()
        with result.checkpoint.as_directory() as directory:
            files = sorted(file.name for file in Path(directory).glob("*.txt"))
        return {"shared_files": files, "others_are_hidden": result.metrics["others_are_hidden"]}


class Workers(Callback):
    """The known facts about a run's workers, and their own reports, by rank."""

    def __init__(self):
        self.known = {}

    def on_group_start(self, run, attempt, workers):
        self.known = {worker.rank: dataclasses.asdict(worker) for worker in workers}

    def on_report(self, run, report):
        self.known[report.rank].update(report.metrics)


def report_devices(config):
    """Report a rank's place and its GPUs."""
    names = ("CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
    devices = {name: os.environ.get(name) for name in names}
    devices["local_world_size"] = get_context().get_local_world_size()
    if config["torch"] and get_context().get_world_rank() == 0:  # one rank is enough, as PyTorch is slow to import
        import drivetrain_torch

        devices["devices"] = [str(device) for device in drivetrain_torch.get_devices()]
    report(devices)


def workers_of(storage_path, *, torch=False, start_timeout_s=60, **scaling):
    """Return the workers of a run with these requests, or the error if it could not start."""
    workers = Workers()
    asked = ScalingConfig(runtime="ray", **scaling)
    config = {"torch": torch}
    try:
        fit(report_devices, storage_path, asked, config=config, callbacks=[workers], start_timeout_s=start_timeout_s)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return [known for _, known in sorted(workers.known.items())]


@ray.remote(num_cpus=0, num_gpus=9)
class Neighbour:
    """Holds GPUs, so that GPUs with two-digit numbers are left."""

    def gpus(self):
        return ray.get_gpu_ids()


def room_for(maximum, strategy, *, running=(), avoided=()):
    """Return how many workers with one CPU each could be placed in addition to those running on these nodes."""
    scaling = ScalingConfig(num_workers=(1, maximum), placement_strategy=strategy)
    somewhere = {"local_rank": 0, "node_rank": 0, "hostname": "", "ip": "", "pid": 0}
    workers = [WorkerInfo(rank=rank, node_id=node, **somewhere) for rank, node in enumerate(running)]
    with mock.patch("drivetrain_ray._cluster._PLACEMENT_TRIAL_S", 5):  # Ray is slow on a busy machine
        return RayRuntime().room(scaling, workers, frozenset(avoided))


def nodes_with_gpus(storage_path):
    """Ray believes the number of GPUs and TPUs that a node declares; no code here calls CUDA or uses a TPU."""
    a100 = {"num_cpus": 6, "num_gpus": 13, "resources": {"accelerator_type:A100": 1}}
    t4 = {"num_cpus": 3, "num_gpus": 2, "resources": {"accelerator_type:T4": 1, "TPU": 4}}
    with cluster_of(a100, t4) as cluster:
        neighbour = Neighbour.options(resources={"accelerator_type:A100": 0.001}).remote()
        taken = ray.get(neighbour.gpus.remote(), timeout=60)

        def gpus(number, each, **options):
            return workers_of(
                storage_path, num_workers=number, use_gpu=True, resources_per_worker={"GPU": each}, **options
            )

        def cpus(number, strategy, **options):
            return workers_of(storage_path, num_workers=number, placement_strategy=strategy, **options)

        here = ray.get_runtime_context().get_node_id()
        there = next(node.node_id for node in cluster.worker_nodes)
        return {
            "taken": sorted(taken),
            "here": here,
            "there": there,
            "room": {
                "all": room_for(9, "PACK"),
                "avoided": room_for(7, "PACK", avoided=[there]),
                "STRICT_SPREAD": room_for(9, "STRICT_SPREAD", running=[here, there]),
                "STRICT_PACK": room_for(6, "STRICT_PACK", running=[there, there]),
            },
            "several": gpus(3, 2, torch=importlib.util.find_spec("torch") is not None),
            "fraction": gpus(2, 0.5, accelerator_type="T4"),
            "tpus": workers_of(storage_path, num_workers=2, resources_per_worker={"TPU": 2}),
            "unknown type": gpus(1, 1, accelerator_type="H100", start_timeout_s=1),
            "PACK": cpus(2, "PACK"),
            "SPREAD": cpus(2, "SPREAD"),
            "STRICT_PACK": cpus(2, "STRICT_PACK"),
            "STRICT_SPREAD": cpus(2, "STRICT_SPREAD"),
            "too much for any node": workers_of(
                storage_path, num_workers=2, resources_per_worker={"CPU": 8}, start_timeout_s=1
            ),
            "too many for one node": gpus(3, 2, placement_strategy="STRICT_PACK", start_timeout_s=1),
            "too many for the nodes": cpus(3, "STRICT_SPREAD", start_timeout_s=1),
        }


class LosesAndGainsANode(GroupWatcher):
    """Removes a node at the first commit, adds one at the second, and permits one step per later commit."""

    def __init__(self, cluster, gate):
        super().__init__()
        self.cluster = cluster
        self.gate = gate
        self.commits = 0

    def on_checkpoint(self, run, checkpoint):
        self.commits += 1
        if self.commits == 1:
            self.cluster.remove_node(node_of(self.cluster, self.groups[0][1][3]), allow_graceful=False)
            return
        if self.commits == 2:
            self.cluster.add_node(num_cpus=1)
        self.gate.release()


def train_on_available_workers(config):
    """Count in checkpoints, one step per release; return when there are two workers again."""
    context = get_context()
    checkpoint = get_checkpoint()
    step = first = int(Path(checkpoint.path, "step").read_text()) if checkpoint else 0
    while True:
        step += 1
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step))
            saved = Checkpoint(directory) if context.get_world_rank() == 0 else None
            report({"step": step, "workers": context.get_world_size()}, checkpoint=saved)
        if context.attempt > 0 and context.get_world_size() == 2:
            return first
        wait_for_release(config["gate"])


def elastic_run(cluster, storage_path):
    gate = Pipe(Path(storage_path, "gate"))
    watcher = LosesAndGainsANode(cluster, gate)
    result = fit(
        train_on_available_workers,
        storage_path,
        ScalingConfig(num_workers=(1, 2), elastic_resize_monitor_interval_s=0.05),
        config={"gate": gate.path},
        callbacks=[watcher],
        failure_config=FailureConfig(max_failures=1),
        name="elastic",
    )
    reports = [json.loads(line) for line in Path(result.path, "result.json").read_text().splitlines()]
    return {
        "failures": watcher.failures,
        "nodes": [[node for *_, node in group] for group in watcher.groups],
        "resumed_at": result.return_value,
        "metrics": result.metrics,
        "error": result.error,
        "reports": [(entry["step"], entry["workers"]) for entry in reports],
    }


class Drains(GroupWatcher):
    """At the first commit, drains a node and terminates it, as a cloud's autoscaler does."""

    def __init__(self, cluster):
        super().__init__()
        self.cluster = cluster

    def on_checkpoint(self, run, checkpoint):
        if len(self.groups) == 1:
            lost = self.groups[0][0][3]
            drain(self.cluster, lost, seconds=1)
            self.cluster.remove_node(node_of(self.cluster, lost), allow_graceful=False)


def drain(cluster, node_id, *, seconds):
    command = [str(Path(sys.executable).with_name("ray")), "drain-node", "--address", cluster.address]
    command += ["--node-id", node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
    command += ["--deadline-remaining-seconds", str(seconds)]
    subprocess.run(command, check=True, stdout=sys.stderr)


def report_and_wait(config):
    """Save and block, except in the second attempt."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "state").touch()
        report({"attempt": get_context().attempt}, checkpoint=Checkpoint(directory))
    if get_context().attempt == 0:
        threading.Event().wait(60)


def drained_run(cluster, storage_path):
    watcher = Drains(cluster)
    result = fit(report_and_wait, storage_path, ScalingConfig(num_workers=1), callbacks=[watcher], name="drained")
    return {
        "failures": watcher.failures,
        "nodes": [group[0][3] for group in watcher.groups],
        "attempt": result.metrics["attempt"],
    }


class DrainsTheNodeOfRank1(GroupWatcher):
    def __init__(self, cluster):
        super().__init__()
        self.cluster = cluster
        self.drained_at = None

    def on_report(self, run, report):
        if self.drained_at is None:
            self.drained_at = time.time()
            drain(self.cluster, self.groups[0][1][3], seconds=40)


def poll_until_notified(config):
    """In the first attempt, poll until a notice arrives, save it, and return."""
    checkpoint = get_checkpoint()
    if checkpoint is not None:
        return json.loads(Path(checkpoint.path, "notice").read_text())
    report({"waits": True})
    while (info := get_preemption_info()) is None:
        time.sleep(0.01)
    with tempfile.TemporaryDirectory() as directory:
        notice = {"ranks": info.ranks, "deadline": info.deadline, "reason": info.reason, "time": time.time()}
        Path(directory, "notice").write_text(json.dumps(notice))
        report({"waits": False}, checkpoint=Checkpoint(directory) if get_context().get_world_rank() == 0 else None)
    resume_later()


def notified_run(cluster, storage_path):
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    watcher = DrainsTheNodeOfRank1(cluster)
    result = fit(poll_until_notified, storage_path, ScalingConfig(num_workers=2), callbacks=[watcher], name="notified")
    return {
        "failures": watcher.failures,
        "nodes": [[node for *_, node in group] for group in watcher.groups],
        "drained_at": watcher.drained_at,
        "notice": result.return_value,
    }


def nodes_leave_and_join(storage_path):
    with cluster_of({"num_cpus": 0}, {"num_cpus": 1}, {"num_cpus": 1}) as cluster:
        return {
            "elastic": elastic_run(cluster, storage_path),
            "drained": drained_run(cluster, storage_path),
            "notified": notified_run(cluster, storage_path),
        }


def node_of(cluster, node_id):
    return next(node for node in cluster.list_all_nodes() if node.node_id == node_id)


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
    """A backend with a preloaded module that notifies the test in each process that imports it."""

    def create(self):
        return PreloadingBackend()


class PreloadingBackend(Backend):
    preload = ("records_imports",)

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
            "preloaded": "records_imports" in sys.modules,
            "visible": os.environ["CUDA_VISIBLE_DEVICES"],
            "threads": os.environ["OMP_NUM_THREADS"],
        }
    )
    if context.attempt < 2 and context.get_world_rank() == 1:
        with open(config["imports"]) as imports, open(config["seen"], "a") as seen:
            for _ in range(4 if context.attempt == 0 else 2):
                seen.write(imports.readline())
        os.kill(os.getpid(), signal.SIGKILL)
    elif context.attempt < 2:
        threading.Event().wait(60)


def spares_take_the_places_of_a_lost_group(storage_path):
    modules = Path(storage_path, "modules")
    modules.mkdir()
    imports, seen = Path(storage_path, "imports"), Path(storage_path, "seen")
    os.mkfifo(imports)
    opened = os.open(imports, os.O_RDWR)  # keeps written data in the pipe until it is read
    Path(modules, "records_imports.py").write_text(
        f"import os\nwith open({str(imports)!r}, 'w') as imports:\n    imports.write(f'{{os.getpid()}}\\n')\n"
    )
    os.environ["PYTHONPATH"] = os.pathsep.join([str(modules), os.environ.get("PYTHONPATH", "")])
    with cluster_of({"num_cpus": 4, "num_gpus": 2}):
        watcher = SpareWatcher()
        result = DataParallelTrainer(
            die_once_the_spares_are_there,
            train_loop_config={"imports": str(imports), "seen": str(seen)},
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
        left = [pid for pid in lost if not exits(pid)]
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


def exits(pid, deadline_s=20):
    """Return True if a process has exited or exits within the deadline."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], deadline_s)[0])
    finally:
        os.close(process)


def interrupt_while_waiting_for_resources(storage_path):
    with cluster_of({"num_cpus": 1}):
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        start = time.monotonic()
        try:
            fit(report_devices, storage_path, ScalingConfig(num_workers=8), start_timeout_s=60)
        except KeyboardInterrupt:
            return {"seconds": time.monotonic() - start}


def storage_that_the_nodes_do_not_share(storage_path):
    """The driver and the second node see a different directory under the path than the first node."""
    hidden = Path(storage_path, "runs")
    hidden.mkdir()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
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
    """Start a cluster with these nodes, and connect to it. The nodes are started by hand, so they can be removed.

    This process connects while only the head exists: Ray chooses one of the nodes with the same IP address, and cannot
    remove the chosen one.
    """
    cluster = Cluster(initialize_head=True, head_node_args=nodes[0])
    try:
        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
        for node in nodes[1:]:
            cluster.add_node(**node)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2])))
