"""The connection of the workers: process ids on recorded TPU environments, GPUs, and errors that name the remedy."""

import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import ConfigurationError, FailureKind, Result, ScalingConfig, TrainingFailedError
from drivetrain.plugin import WorkerInfo
from drivetrain.plugin.backends import AttemptInfo, reserve_port
from drivetrain_jax import JaxConfig, JaxTrainer

Fit = Callable[..., Result]

# Variables on the hosts of a v5e-16 slice on GKE, in a job with one container per host.
SLICE = {"TPU_WORKER_HOSTNAMES": "job-0.tpu,job-1.tpu,job-2.tpu,job-3.tpu", "TPU_ACCELERATOR_TYPE": "v5litepod-16"}
V5E_16 = [{**SLICE, "TPU_WORKER_ID": str(worker)} for worker in range(4)]
# Two such slices in a JobSet, with the variables of GKE for multislice jobs.
SEVERAL = {"MEGASCALE_COORDINATOR_ADDRESS": "job-slice-0-0.tpu", "MEGASCALE_NUM_SLICES": "2"}
TWO_SLICES = [{**host, **SEVERAL, "MEGASCALE_SLICE_ID": str(number)} for number in range(2) for host in V5E_16]
# A v4 host with four chips, one process per chip.
ADDRESSES = ",".join(f"localhost:{8476 + chip}" for chip in range(4))
V4_CHIPS = [
    {
        "TPU_WORKER_ID": "0",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": "2,2,1",
        "TPU_VISIBLE_CHIPS": str(chip),
        "TPU_PROCESS_ADDRESSES": ADDRESSES,
        "TPU_PROCESS_PORT": str(8476 + chip),
        "CLOUD_TPU_TASK_ID": str(chip),
    }
    for chip in range(4)
]


class RecordedGroup:
    """Workers on machines whose environment was recorded. Functions run in this process, with these variables."""

    def __init__(self, environments: Sequence[Mapping[str, str]], gpus: Sequence[tuple[str, ...]] = ()) -> None:
        self._environments = environments
        self.attempt = AttemptInfo(number=0, run_name="run", run_id="0123abcd", start_timeout_s=30.0)
        self.workers = [
            WorkerInfo(
                rank=rank,
                local_rank=0,
                node_rank=rank,
                node_id="node" if gpus else f"node-{rank}",
                hostname=f"host-{rank}",
                ip=f"10.0.0.{rank + 1}",
                pid=1,
                accelerator_ids=gpus[rank] if gpus else (),
            )
            for rank in range(len(environments))
        ]

    def run(self, fn: Callable[..., Any], /, *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        if fn is reserve_port:  # a port would be reserved until the tests end
            return [8476]
        results = []
        for rank in range(len(self.workers)) if ranks is None else ranks:
            with pytest.MonkeyPatch.context() as patch:
                for name, value in self._environments[rank].items():
                    patch.setenv(name, value)
                results.append(fn(*args))
        return results


def rendezvous(environments: Sequence[Mapping[str, str]], **options: Any) -> Sequence[Mapping[str, str]]:
    return JaxConfig(**options).create().rendezvous(RecordedGroup(environments))


def processes(mappings: Sequence[Mapping[str, str]]) -> list[int]:
    return [int(mapping["process"]) for mapping in mappings]


@pytest.mark.parametrize("recorded", [V5E_16, TWO_SLICES, V4_CHIPS], ids=["slice", "two slices", "chips of a host"])
def test_process_ids_on_tpus_are_those_of_the_hardware_in_any_order_of_the_ranks(recorded: list[dict]) -> None:
    assert processes(rendezvous(recorded)) == list(range(len(recorded)))

    mappings = rendezvous(recorded[::-1])

    assert processes(mappings) == list(reversed(range(len(recorded))))
    (address,) = {mapping["address"] for mapping in mappings}
    assert address == f"10.0.0.{len(recorded)}:8476", "the coordinator runs in process 0"


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        (V5E_16[:3], r"one worker for each of the 4 TPU processes .* got 3 workers on the processes \[0, 1, 2\]"),
        ([*V5E_16[:3], V5E_16[0]], r"got 4 workers on the processes \[0, 0, 1, 2\]"),
        (TWO_SLICES[:4], r"each of the 8 TPU processes .* Set ScalingConfig\(num_workers=8\)"),
        ([V5E_16[0], {}], r"each of the 4 TPU processes"),
    ],
    ids=["missing host", "two workers on a host", "missing slice", "host without TPUs"],
)
def test_workers_that_are_not_the_processes_of_the_slices_are_an_error(recorded: list[dict], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        rendezvous(recorded)


def test_tpu_environment_is_ignored_on_another_platform() -> None:
    assert processes(rendezvous(V5E_16[:2], platform="cpu")) == [0, 1]


def test_workers_of_a_node_see_all_of_its_gpus_and_select_their_own() -> None:
    group = RecordedGroup([{}, {}], gpus=[("4", "5"), ("6", "7")])
    backend = JaxConfig().create()

    assert [backend.rank_environment(worker, group.workers) for worker in group.workers] == [
        {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    ] * 2
    assert [mapping["gpus"] for mapping in backend.rendezvous(group)] == ["4,5,6,7"] * 2
    without = RecordedGroup([{}, {}])
    assert backend.rank_environment(without.workers[0], without.workers) == {}


@pytest.mark.parametrize(
    ("platform", "scaling", "message"),
    [
        ("cpu", {"use_gpu": True}, "expected no GPU per worker, got 1. Set use_gpu=False"),
        ("tpu", {"use_gpu": True}, "expected no GPU per worker, got 1"),
        ("cuda", {}, "expected at least one GPU per worker, got 0. Set use_gpu=True"),
        (None, {"use_gpu": True, "resources_per_worker": {"GPU": 0.5}}, "expected whole GPUs for each worker, got 0.5"),
    ],
)
def test_unsuitable_workers_are_rejected_before_the_start(
    platform: str | None, scaling: dict, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # the runtime counts these GPUs
    trainer = JaxTrainer(
        print,
        jax_config=JaxConfig(platform=platform),
        scaling_config=ScalingConfig(num_workers=2, runtime="local", **scaling),
        run_config=drivetrain.RunConfig(storage_path=tmp_path),
    )
    with pytest.raises(ConfigurationError, match=message):
        trainer.fit()
    assert not list(tmp_path.iterdir())


def test_unknown_platform_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match=r"expected one of 'cpu', 'cuda', 'rocm', 'tpu', or None, got 'gpu'"):
        JaxConfig(platform="gpu")


def test_gpu_that_jax_does_not_find_is_an_error(fit: Fit) -> None:
    def train() -> None:
        context = drivetrain.get_context()
        with_gpu = dataclasses.replace(context, worker=dataclasses.replace(context.worker, accelerator_ids=("0",)))
        with JaxConfig().create().session(with_gpu, {}):
            pass

    with pytest.raises(TrainingFailedError, match=r"to find the worker's GPUs \(0\), got none\. Install JAX for them"):
        fit(train, workers=1)


class CreatesArray:
    """Creates an array when it is unpickled, like a module that the train function imports."""

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("__import__('jax.numpy').numpy.ones(3)",)


def test_array_that_is_created_before_the_workers_are_connected_is_an_error(fit: Fit) -> None:
    with pytest.raises(TrainingFailedError, match=r"JAX has not used a device, .* Create it in the train function"):
        fit(lambda config: None, {"array": CreatesArray()})


def test_categories_of_exceptions(fit: Fit) -> None:
    def train() -> list[Any]:
        import jax
        import jax.numpy as jnp

        backend = JaxConfig().create()
        error = jax.errors.JaxRuntimeError
        found = [
            backend.classify(raised)
            for raised in (
                error("UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n1"),
                ValueError("UNKNOWN: Gloo all-reduce failed: [tcp/pair.cc:547] Connection closed by peer [::1]:4"),
                error("INTERNAL: NCCL operation ncclAllReduce failed: remote process exited or network error"),
                error("INVALID_ARGUMENT: Gloo all-reduce: shapes differ"),
                ValueError("expected a shape"),
                KeyError("UNAVAILABLE: "),
            )
        ]
        try:
            jnp.ones((1 << 46,)).block_until_ready()
        except error as raised:
            found.append(backend.classify(raised))
        return found

    lost, other = FailureKind.INFRASTRUCTURE, None
    assert fit(train, workers=1).return_value == [lost, lost, lost, other, other, other, FailureKind.OUT_OF_MEMORY]


def test_sigterm_preempts_a_worker_although_jax_sets_its_own_handler(fit: Fit) -> None:
    def train() -> int:
        attempt = drivetrain.get_context().attempt
        if attempt == 0:
            if drivetrain.get_context().get_world_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(60)
        return attempt

    assert fit(train).return_value == 1, "a preemption is retried"
