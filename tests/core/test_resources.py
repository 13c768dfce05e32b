import os
from pathlib import Path

import pytest

import drivetrain
from drivetrain import DataParallelTrainer, ResourceError, RunConfig, ScalingConfig
from drivetrain._runtimes.resources import (
    accelerator_sort_key,
    order_nodes,
    partition_gpus,
    threads_per_worker,
    usable_cpus,
    visible_gpus,
)
from tests.support import Collector


def scaling(workers: int, gpus: float | None = None, cpus: float | None = None) -> ScalingConfig:
    resources = {name: amount for name, amount in (("GPU", gpus), ("CPU", cpus)) if amount is not None}
    return ScalingConfig(num_workers=workers, use_gpu=gpus is not None, resources_per_worker=resources)


@pytest.mark.parametrize(
    ("variable", "gpus"),
    [
        ("0,1", ["0", "1"]),
        ("3", ["3"]),
        (" 2, 5 ", ["2", "5"]),
        ("", []),
        ("-1", []),
        ("GPU-8a,MIG-9b", ["GPU-8a", "MIG-9b"]),
        ("none", []),
        ("NoDevFiles", []),
        ("void", []),
        ("2,-1,3", ["2"]),  # CUDA stops reading at the first invalid entry
    ],
)
def test_visible_gpus_follow_the_environment_variable(variable: str, gpus: list[str]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": variable}) == gpus


def test_without_the_variable_the_device_files_are_counted(tmp_path: Path) -> None:
    for name in ("nvidia3", "nvidia12", "nvidiactl", "nvidia-uvm", "tty0"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1"]


@pytest.mark.parametrize(
    ("workers", "each", "expected"),
    [
        (2, 1, [("4",), ("5",)]),
        (2, 2, [("4", "5"), ("6", "7")]),
        (1, 3, [("4", "5", "6")]),
        (4, 0.5, [("4",), ("4",), ("5",), ("5",)]),
        (3, 0.4, [("4",), ("4",), ("5",)]),
        (10, 0.1, [("4",)] * 10),
        (3, 1 / 3, [("4",)] * 3),
    ],
)
def test_each_worker_gets_its_own_gpus(workers: int, each: float, expected: list[tuple[str, ...]]) -> None:
    assert partition_gpus(scaling(workers, each), ["4", "5", "6", "7"]) == expected


def test_workers_without_gpus_get_none() -> None:
    assert partition_gpus(scaling(2), ["0"]) == [(), ()]


@pytest.mark.parametrize(
    ("workers", "each", "words"),
    [
        (3, 1, "3 workers with 1 GPU each require 3 GPUs on this machine, which has 2 (0, 1)"),
        (5, 0.5, "require 3 GPUs on this machine, which has 2 (0, 1)"),
        (1, 1.5, "a whole number or a fraction below 1, got 1.5"),
    ],
)
def test_requesting_more_gpus_than_available_is_refused_with_both_numbers(
    workers: int, each: float, words: str
) -> None:
    with pytest.raises(ResourceError) as refused:
        partition_gpus(scaling(workers, each), ["0", "1"])
    assert words in str(refused.value)


def test_thread_count_is_the_workers_cpus_or_an_even_share_of_the_machine() -> None:
    machine = len(os.sched_getaffinity(0))
    assert threads_per_worker(scaling(2, cpus=3)) == 3
    assert threads_per_worker(scaling(2, cpus=0.5)) == 1
    assert threads_per_worker(scaling(1)) == machine
    assert threads_per_worker(scaling(10 * machine)) == 1


@pytest.mark.parametrize(
    ("nodes", "before", "order"),
    [
        ("abc", "", "bac"),  # the driver's node first
        ("abc", "cab", "cab"),
        ("ac", "cab", "ca"),
        ("abcd", "ca", "cabd"),
        ("acd", "cab", "cad"),
        ("bd", "adc", "bd"),
        ("ad", "cb", "ad"),
    ],
)
def test_nodes_keep_their_places_and_new_nodes_replace_lost_ones(nodes: str, before: str, order: str) -> None:
    assert "".join(order_nodes(set(nodes), "b", before)) == order


def test_gpus_are_sorted_by_number() -> None:
    workers = [("10", "11"), ("8", "9"), ("9", "12")]
    assert sorted(workers, key=accelerator_sort_key) == [("8", "9"), ("9", "12"), ("10", "11")]


@pytest.mark.parametrize(
    ("workers", "each", "expected"),
    [(2, 2, ["GPU-aa,GPU-bb", "GPU-cc,GPU-dd"]), (3, 0.5, ["GPU-aa", "GPU-aa", "GPU-bb"])],
    ids=["two", "half"],
)
def test_workers_see_only_their_own_gpus_and_keep_the_thread_count_that_was_set(
    tmp_path, monkeypatch: pytest.MonkeyPatch, workers: int, each: float, expected: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa,GPU-bb,GPU-cc,GPU-dd")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")

    def train() -> None:
        ids = drivetrain.get_context().worker.accelerator_ids
        names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
        drivetrain.report({"ids": ids, **{name: os.environ[name] for name in names}})

    collector = Collector()
    DataParallelTrainer(
        train,
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=True, resources_per_worker={"GPU": each}, runtime="local"
        ),
        run_config=RunConfig(name="run", storage_path=tmp_path, verbose=0, callbacks=[collector]),
    ).fit()

    metrics = [collector.metrics_of(rank)[0] for rank in range(workers)]
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in metrics] == expected
    assert [",".join(environment["ids"]) for environment in metrics] == expected
    assert {environment["OMP_NUM_THREADS"] for environment in metrics} == {"7"}


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/docker/a", {"docker/a/cpu.max": "150000 100000"}, 1),
        ("0::/docker/a", {"docker/cpu.max": "100000 100000", "docker/a/cpu.max": "max 100000"}, 1),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/a", {"a/cpu.max": "max 100000"}, None),
        ("0::/a", {"a/cpu.max": "damaged"}, None),
        ("0::/a", {}, None),
        ("4:cpu,cpuacct:/a\n0::/", {"cpu/a/cpu.cfs_quota_us": "100000", "cpu/a/cpu.cfs_period_us": "100000"}, 1),
        ("4:cpu,cpuacct:/a\n0::/", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_cpus_of_a_container_are_limited_by_its_quota(
    tmp_path: Path, own: str, files: dict[str, str], quota: int | None
) -> None:
    (tmp_path / "own").write_text(f"{own}\n")
    for name, content in files.items():
        file = tmp_path / "cgroups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    available = len(os.sched_getaffinity(0))
    assert usable_cpus(tmp_path / "cgroups", tmp_path / "own") == (available if quota is None else quota)
    assert usable_cpus(tmp_path / "cgroups", tmp_path / "missing") == available
