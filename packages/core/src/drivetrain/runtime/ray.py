"""Workers as Ray actors in a placement group, on a cluster that is connected or on one started here.

Ray places the actors, and tells when one is gone. What workers report comes over a TCP connection that each of them
opens to the driver, as over the local runtime's sockets: a report costs no actor call, and nothing polls.
"""

from __future__ import annotations

import contextlib
import gc
import hmac
import importlib
import logging
import math
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.context import WorkerInfo
from drivetrain.errors import ConfigurationError, FailureKind, PluginNotFoundError, ResourceError, WorkerDiedError
from drivetrain.runtime.base import GroupSpec, rank_environment
from drivetrain.runtime.output import LogFollower, log_name, open_log
from drivetrain.runtime.remote import RemoteGroup
from drivetrain.runtime.resources import order_gpus, order_nodes
from drivetrain.runtime.stacks import answer_to_signal, collect_stacks
from drivetrain.runtime.wire import Channel, frame, receive, receive_bytes
from drivetrain.runtime.worker import flush_output, serve

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from drivetrain.config import ScalingConfig

__all__ = ["RayRuntime"]

_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")  # where ray.init() is documented to look
_TOKEN_BYTES = 32
_HELLO_WAIT_S = 10.0
_NOTICE_WAIT_S = 2.0
_END_WAIT_S = 10.0
_CLOSE_WAIT_S = 1.0
_QUIET_WAIT_S = 2.0
_LOOK_S = 0.2
_NODE_LABEL = "ray.io/node-id"  # which Ray gives every node
_TRIAL_S = 1
_RELEASE_WAIT_S = 1.0
_RELEASE_POLL_S = 0.005


class RayWorker:
    """The actor. Its one method runs on the main thread of its process until the driver closes the line."""

    def __init__(self, index: int, address: tuple[str, int], token: bytes) -> None:
        self._index = index
        self._address = address
        self._token = token

    def __repr__(self) -> str:
        return f"worker {self._index}"

    def serve(self, preload: Sequence[str]) -> None:
        """Connects to the driver and takes its commands."""
        import ray

        try:
            connection = socket.create_connection(self._address, timeout=_HELLO_WAIT_S)
        except OSError as error:
            host, port = self._address
            raise ConnectionError(
                f"a worker on {socket.gethostname()} cannot reach the driver at {host}:{port} ({error}): "
                "open the ports of the driver's node to the cluster's nodes"
            ) from error
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        context = ray.get_runtime_context()
        facts = {
            "index": self._index,
            "node_id": context.get_node_id(),
            "hostname": socket.gethostname(),
            "ip": ray.util.get_node_ip_address(),
            "pid": os.getpid(),
            "accelerator_ids": tuple(map(str, context.get_accelerator_ids().get("GPU", ()))),
        }
        connection.sendall(self._token + frame(facts))
        _preload(preload)
        global _output
        channel = Channel(connection)
        _output = _Output(channel)
        serve(channel, settle_output=_output.settle)


def _preload(names: Sequence[str]) -> None:
    """Imports modules without collections, a fifth of the time; later collections leave what they made alone."""
    gc.disable()
    for name in names:
        with contextlib.suppress(Exception):  # the backend's set-up meets the same error, and tells it
            importlib.import_module(name)
    gc.freeze()
    gc.enable()


class _Output:
    """In a worker: where its standard output and error go."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._follower: LogFollower | None = None

    def redirect(self, log: Path, rank: int, *, shown: bool) -> None:
        """Has them go to the log, and to the driver too where that shows them."""
        flush_output()
        descriptor = open_log(log.parent, rank)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        if shown:
            self._follower = LogFollower(log, lambda data: self._channel.send(("output", data)))

    def settle(self) -> None:
        """Waits until everything that was printed has reached the log, and the driver."""
        flush_output()
        if self._follower is not None:
            self._follower.catch_up()


_output: _Output | None = None  # one worker to a process


def _set_up(
    rank: int, environment: Mapping[str, str], module_path: Sequence[str], log: Path | None, shown: bool
) -> int:
    """Makes an actor's process what the local runtime's workers are: variables, output, stacks.

    Returns:
        The descriptor, in this process, to read its stacks from.
    """
    for name, value in environment.items():
        if name != "OMP_NUM_THREADS" or name not in os.environ:
            os.environ[name] = value
    sys.path.extend(entry for entry in module_path if entry not in sys.path)
    read_end, write_end = os.pipe()
    answer_to_signal(write_end)
    # On a node that does not share the run directory, the output stays with Ray's own logs.
    if _output is not None and log is not None and log.parent.parent.exists():
        _output.redirect(log, rank, shown=shown)
    return read_end


def _read_stacks(targets: Mapping[int, tuple[int, int]]) -> dict[int, str]:
    """On a worker's node: asks processes for their stacks; by rank, a process id and a descriptor in that process."""
    with contextlib.ExitStack() as opened:
        ours: dict[int, tuple[int, int]] = {}
        for rank, (pid, descriptor) in targets.items():
            with contextlib.suppress(OSError):
                pipe = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK)
                opened.callback(os.close, pipe)
                ours[rank] = (pid, pipe)
        return collect_stacks(ours)


class RayGroup(RemoteGroup):
    """Workers that are Ray actors.

    Args:
        spec: what is wanted.
        resources: where the undoing of what is done here goes.
        nodes: the nodes of the run's last group, in the order of their ranks; becomes those of this one.
    """

    def __init__(self, spec: GroupSpec, resources: contextlib.ExitStack, nodes: list[str]) -> None:
        import ray

        super().__init__(time.monotonic() + spec.start_timeout_s, spec.interrupts)
        resources.callback(self.close_lines)
        self._spec = spec
        self._nodes = nodes
        self._actors: dict[int, Any] = {}  # by index, the order in which they were asked for
        self._rank_of: dict[int, int] = {}
        self._stack_pipes: dict[int, int] = {}
        self._ended: deque[tuple[int, BaseException | None]] = deque()
        self._dead: dict[int, tuple[str, FailureKind]] = {}
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
            resources.callback(end.close)
        self.watch(self._wake_read, self._hear_ray)
        group = _reserve(spec, self._deadline, resources)
        host = ray.util.get_node_ip_address()
        listener = resources.enter_context(socket.create_server((host, 0), backlog=spec.num_workers))
        token = secrets.token_bytes(_TOKEN_BYTES)
        hellos: dict[int, tuple[dict[str, Any], socket.socket]] = {}
        self.watch(listener, lambda: _accept(listener, token, hellos))
        resources.callback(self._end_actors)
        for index in range(spec.num_workers):
            self._start(index, group, (host, listener.getsockname()[1]), token)
        while missing := sorted(set(self._actors) - set(hellos)):
            for index in missing:
                if index in self._dead:
                    raise WorkerDiedError(f"worker {index} did not start: {self._dead[index][0]}")
            self.wait(f"workers {missing} to start on the Ray cluster", ())
        self.forget(listener)
        self._assign_ranks(hellos)
        self._set_up_workers()

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """See :meth:`drivetrain.runtime.base.Group.stacks`."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        by_node: dict[str, dict[int, tuple[int, int]]] = {}
        for rank in ranks:
            if rank in self._stack_pipes and rank not in self._gone:
                worker = self.workers[rank]
                by_node.setdefault(worker.node_id, {})[rank] = (worker.pid, self._stack_pipes[rank])
        ask = ray.remote(_read_stacks)
        answers = [
            ask.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
                targets
            )
            for node, targets in by_node.items()
        ]
        found: dict[int, str] = {}
        with contextlib.suppress(ray.exceptions.RayError):  # a node that does not answer is no reason to hide the rest
            for answer in ray.get(answers, timeout=_HELLO_WAIT_S):
                found.update(answer)
        return found

    def line_closed(self, rank: int) -> None:
        """Ray knows more about why, and says so at once, unless it is the node that is gone."""
        deadline = time.monotonic() + _NOTICE_WAIT_S
        while rank not in self._gone and (remaining := deadline - time.monotonic()) > 0:
            self._select(self._selector, remaining)
        self.note_exit(rank, None, "closed its connection to the driver")

    def _start(self, index: int, group: PlacementGroup, address: tuple[str, int], token: bytes) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = dict(group.bundle_specs[index])
        actor: Any = (
            ray.remote(RayWorker)
            .options(
                num_cpus=bundle.pop("CPU", 0),
                num_gpus=bundle.pop("GPU", 0),
                resources=bundle or None,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            )
            .remote(index, address, token)
        )
        self._actors[index] = actor
        actor.serve.remote(tuple(self._spec.preload)).future().add_done_callback(
            lambda future: self._tell(index, future.exception())
        )

    def _tell(self, index: int, error: BaseException | None) -> None:
        """On a thread of Ray's: passes on that an actor is gone."""
        self._ended.append((index, error))
        with contextlib.suppress(OSError):
            self._wake_write.send(b"!")

    def _hear_ray(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(4096)
        while self._ended:
            index, error = self._ended.popleft()
            reason = _brief_death(error)
            self._dead[index] = reason, _kind_of_death(error, reason)
            if index in self._rank_of:
                self.note_exit(self._rank_of[index], None, *self._dead[index])

    def _assign_ranks(self, hellos: Mapping[int, tuple[dict[str, Any], socket.socket]]) -> None:
        """Packs ranks by node, in the order of the last attempt's nodes, and of the GPUs on each."""
        import ray

        here = ray.get_runtime_context().get_node_id()
        self._nodes[:] = nodes = order_nodes({facts["node_id"] for facts, _ in hellos.values()}, here, self._nodes)
        places = {
            index: (nodes.index(facts["node_id"]), order_gpus(facts["accelerator_ids"]))
            for index, (facts, _) in hellos.items()
        }
        order = sorted(hellos, key=lambda index: (places[index], index))
        workers: list[WorkerInfo] = []
        for rank, index in enumerate(order):
            facts, connection = hellos[index]
            self._rank_of[index] = rank
            node_rank = nodes.index(facts["node_id"])
            workers.append(
                WorkerInfo(
                    rank=rank,
                    local_rank=sum(worker.node_rank == node_rank for worker in workers),
                    node_rank=node_rank,
                    **{name: value for name, value in facts.items() if name != "index"},
                )
            )
            self.add_line(rank, connection)
        self.workers = tuple(workers)
        for index, death in self._dead.items():
            self.note_exit(self._rank_of[index], None, *death)

    def _set_up_workers(self) -> None:
        spec = self._spec
        threads = str(max(1, math.floor(spec.scaling.num_cpus_per_worker or 1)))
        arguments: dict[int, tuple[Any, ...]] = {}
        for worker in self.workers:
            local_world_size = sum(other.node_rank == worker.node_rank for other in self.workers)
            environment = rank_environment(worker, world_size=len(self.workers), local_world_size=local_world_size)
            environment["OMP_NUM_THREADS"] = threads
            log = spec.log_directory / log_name(worker.rank) if spec.log_directory else None
            shown = worker.rank in spec.shown_ranks
            if shown:
                self.show_output(worker.rank, spec.console)
            arguments[worker.rank] = (worker.rank, environment, tuple(sys.path), log, shown)
        self._stack_pipes = dict(enumerate(self.run_each(_set_up, arguments)))

    def _end_actors(self) -> None:
        """Ends every actor, and waits until Ray has seen to it, and its process has ended: Ray tells a bit earlier."""
        import ray

        self.ignore_interrupts()
        for actor in self._actors.values():
            ray.kill(actor)
        deadline = time.monotonic() + _END_WAIT_S
        while len(self._dead) < len(self._actors) and (remaining := deadline - time.monotonic()) > 0:
            self._select(self._selector, remaining)
        self.await_closed_lines(_CLOSE_WAIT_S)


class RayRuntime:
    """Starts workers on a Ray cluster."""

    name = "ray"

    def __init__(self) -> None:
        self._nodes: list[str] = []

    def validate(self, scaling: ScalingConfig) -> None:
        """Refuses to go on without Ray."""
        try:
            importlib.import_module("ray")
        except ModuleNotFoundError:
            raise PluginNotFoundError(
                'the "ray" runtime wants Ray, which is not installed. Run: pip install "drivetrain[ray]"'
            ) from None

    def room(self, scaling: ScalingConfig, running: int, avoided: frozenset[str]) -> int:
        """The greatest number that Ray could place now, beside those that run; found by having it try."""
        import ray

        _connect(scaling)
        _await_release(time.monotonic() + _RELEASE_WAIT_S)
        labels = self._labels_of_further_workers(scaling, running, avoided)
        if labels is None:
            return running
        bundle, free = _bundle(scaling), ray.available_resources()
        more = math.floor(min((free.get(name, 0.0) / amount for name, amount in bundle.items()), default=0.0) + 1e-9)
        fits, too_many = running, min(scaling.max_workers, running + more) + 1
        number = too_many - 1
        while fits < number:
            if _fits([dict(bundle) for _ in range(number - running)], scaling.placement_strategy, labels):
                fits = number
            else:
                too_many = number
            number = (fits + too_many) // 2
        return fits

    def _labels_of_further_workers(
        self, scaling: ScalingConfig, running: int, avoided: frozenset[str]
    ) -> list[dict[str, str]] | None:
        """Where more workers could be, given where those are that run; None for nowhere."""
        if not running or not scaling.placement_strategy.startswith("STRICT_"):
            return _selectors(avoided)
        if scaling.placement_strategy == "STRICT_PACK":
            return [{_NODE_LABEL: self._nodes[0]}]
        taken = avoided.union(self._nodes)
        return _selectors(taken) if _alive_nodes() - taken else None

    @contextlib.contextmanager
    def launch(self, spec: GroupSpec) -> Iterator[RayGroup]:
        """Reserves resources and starts the actors; on leaving, both are given back."""
        _connect(spec.scaling)
        spec.interrupts.replace_handlers_of("ray")
        with contextlib.ExitStack() as resources:
            yield RayGroup(spec, resources, self._nodes)


def _connect(scaling: ScalingConfig) -> None:
    """Connects to the cluster that is configured or runs here, or starts one in this machine's size."""
    import ray

    if ray.is_initialized():
        return
    configured = os.environ.get("RAY_ADDRESS")
    address = configured or _running_cluster()
    if address is None:
        wanted = scaling.total_resources.get("CPU", 0)
        ray.init(
            address="local",
            num_cpus=max(len(os.sched_getaffinity(0)), math.ceil(wanted)),
            include_dashboard=False,
            logging_level=logging.ERROR,
        )
        return
    try:
        ray.init(address=address, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ConfigurationError(
            f"{'RAY_ADDRESS' if configured else 'the Ray cluster here'}={address!r} wants a running Ray cluster, "
            f"found none: {error}"
        ) from error


def _running_cluster() -> str | None:
    """The cluster that ``ray.init()`` would find on this machine, if it answers.

    Ray itself waits for minutes for one that has died and left its address behind.
    """
    try:
        address = _CURRENT_CLUSTER.read_text().strip()
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=_HELLO_WAIT_S):
            return address
    except (OSError, ValueError):
        return None


def _bundle(scaling: ScalingConfig) -> dict[str, float]:
    """What one worker asks Ray for."""
    worker = {"CPU": 1.0, **({"GPU": 1.0} if scaling.use_gpu else {}), **(scaling.resources_per_worker or {})}
    if scaling.accelerator_type:
        worker[f"accelerator_type:{scaling.accelerator_type}"] = 0.001
    return {name: amount for name, amount in worker.items() if amount}


def _alive_nodes() -> set[str]:
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _selectors(avoided: frozenset[str]) -> list[dict[str, str]]:
    """What keeps a bundle off nodes; nothing where there are no others."""
    alive = _alive_nodes()
    if not avoided & alive or alive <= avoided:
        return []
    return [{_NODE_LABEL: f"!in({','.join(sorted(avoided & alive))})"}]


def _fits(bundles: list[dict[str, float]], strategy: str, labels: list[dict[str, str]]) -> bool:
    """Whether Ray could place them now: it is asked to, and what it reserves is given back."""
    group = _placement_group(bundles, strategy, labels)
    try:
        return bool(group.wait(_TRIAL_S))
    finally:
        _release(group)


def _placement_group(bundles: list[dict[str, float]], strategy: str, labels: list[dict[str, str]]) -> PlacementGroup:
    """Asks Ray to reserve bundles, each on a node with the label, if there is one."""
    import ray

    options = {"bundle_label_selector": labels * len(bundles)} if labels else {}
    group: PlacementGroup = ray.util.placement_group(bundles, strategy=strategy, **options)
    return group


def _reserve(spec: GroupSpec, deadline: float, resources: contextlib.ExitStack) -> PlacementGroup:
    """Reserves the workers' resources; says what it waits for, and gives up in time."""
    scaling = spec.scaling
    bundle = _bundle(scaling)
    bundles = [dict(bundle) for _ in range(spec.num_workers)]
    trainer = {name: amount for name, amount in (scaling.trainer_resources or {}).items() if amount}
    if trainer:
        bundles.append(trainer)
    if not bundle:
        raise ConfigurationError("a worker on Ray wants at least a fraction of one resource, found none asked for")
    _await_release(deadline)
    group = _placement_group(bundles, scaling.placement_strategy, _selectors(spec.avoided))
    resources.callback(_release, group)
    asked = f"{spec.num_workers} x {bundle}" + (f" and {trainer} for the trainer" if trainer else "")
    reserved = threading.Event()

    def wait() -> None:
        # Ray's wait cannot be interrupted and takes whole seconds; on a thread it leaves Ctrl-C to the main one.
        with contextlib.suppress(Exception):  # the group may be removed meanwhile
            if group.wait(math.ceil(max(0.0, deadline - time.monotonic()))):
                reserved.set()

    threading.Thread(target=wait, name="drivetrain-reserve", daemon=True).start()
    if reserved.wait(min(_QUIET_WAIT_S, max(0.0, deadline - time.monotonic()))):
        return group
    spec.console.print(f"waiting for resources on the Ray cluster: asked for {asked}; {_inventory()}", error=True)
    while not reserved.wait(max(0.0, min(_LOOK_S, deadline - time.monotonic()))):
        spec.interrupts.act()
        if time.monotonic() < deadline:
            continue
        raise ResourceError(
            f"waited {spec.start_timeout_s:g} s (RunConfig.start_timeout_s) for resources on the Ray cluster: "
            f"asked for {asked} ({_strategy(scaling.placement_strategy)}); {_inventory()}: ask for less, or add nodes"
        )
    return group


def _strategy(name: str) -> str:
    """A placement strategy, with its rule where it has one."""
    rule = {"STRICT_PACK": ": all on one node", "STRICT_SPREAD": ": each on a node of its own"}.get(name, "")
    return name + rule


_released: set[str] = set()  # placement groups of this process whose resources may not be free yet


def _release(group: PlacementGroup) -> None:
    """Gives a reservation back, which Ray does in the background."""
    import ray

    _released.add(group.id.hex())
    ray.util.remove_placement_group(group)


def _await_release(deadline: float) -> None:
    """Waits until what was given back is free: Ray would try a reservation that comes too early again only 0.5 s later.

    A group's share of the cluster is listed as resources with its id in their names, which takes Ray 50 ms to end.
    """
    import ray

    deadline = min(deadline, time.monotonic() + _RELEASE_WAIT_S)
    while _released and time.monotonic() < deadline:
        names = list(ray.cluster_resources())
        _released.intersection_update(id_ for id_ in tuple(_released) if any(id_ in name for name in names))
        if _released:
            time.sleep(_RELEASE_POLL_S)
    _released.clear()


def _inventory() -> str:
    """What the cluster has, and what of it is free."""
    import ray

    free = ray.available_resources()
    total = ray.cluster_resources()
    shown = sorted(
        name for name in total if not name.startswith(("node:", "memory", "object_store")) and "_group_" not in name
    )
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    parts = ", ".join(f"{name} {total[name]:g} ({free.get(name, 0):g} free)" for name in shown)
    return f"the cluster's {nodes} nodes have {parts or 'nothing'}"


def _accept(listener: socket.socket, token: bytes, hellos: dict[int, tuple[dict[str, Any], socket.socket]]) -> None:
    """Takes a worker's connection, if it knows the token."""
    connection, _ = listener.accept()
    connection.settimeout(_HELLO_WAIT_S)
    try:
        sent = receive_bytes(connection, _TOKEN_BYTES)
        facts = receive(connection) if sent is not None and hmac.compare_digest(sent, token) else None
    except OSError:
        facts = None
    if facts is None:
        connection.close()
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    hellos[facts["index"]] = (facts, connection)


def _brief_death(error: BaseException | None) -> str:
    """What Ray says about the end of an actor, in one line."""
    from ray.exceptions import ActorUnavailableError

    if error is None:
        return "ended"
    if isinstance(error, ActorUnavailableError):
        return "cannot be reached any more (its node is gone, or the network to it)"
    text = " ".join(str(error).split()).partition(" Some common causes")[0]
    detail = re.search(r".*(?:Worker exit detail: |The actor is dead because )(.*)", text)
    return f"died, says Ray: {detail[1] if detail else text}"[:500].rstrip(".")


def _kind_of_death(error: BaseException | None, reason: str) -> FailureKind:
    from ray.exceptions import ActorDiedError

    if isinstance(error, ActorDiedError) and error.preempted:
        return FailureKind.PREEMPTION
    if re.search(r"running low on memory|OOM|out of memory", reason):
        return FailureKind.OUT_OF_MEMORY
    if re.search(r"SIGTERM|preempt|drain", reason):
        return FailureKind.PREEMPTION
    return FailureKind.INFRASTRUCTURE
