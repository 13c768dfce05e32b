"""Behaviour that only a cluster of several nodes can show. Each scenario has its own cluster and driver process."""

import importlib.metadata
import os

import pytest
from packaging.version import Version

from tests.support import run_with_new_cluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1900)]

SCRIPT = "tests.contract.cluster_scenarios"


def run(scenario, tmp_path):
    results, errors = run_with_new_cluster(SCRIPT, scenario, str(tmp_path), directory=tmp_path)
    return {**results, "stderr": errors}


def test_lost_node_is_a_worker_failure_and_the_run_continues_elsewhere(tmp_path):
    results = run("lost_node_is_replaced", tmp_path)
    assert results["failures"] == [["infrastructure", 1]]
    assert results["groups"] == 2
    assert results["metrics"]["count"] == 4
    assert results["metrics"]["attempt"] == 1
    assert results["metrics"]["_training_iteration"] == 4, "the second attempt continued from the second report"
    assert results["shared_files"] == ["0.txt", "1.txt"], "the nodes uploaded the parts of a shared checkpoint"
    assert results["others_are_hidden"]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Runs on a cluster whose nodes leave and join."""
    return run("nodes_leave_and_join", tmp_path_factory.mktemp("nodes"))


def test_elastic_run_continues_without_a_lost_node_and_grows_when_one_joins(nodes):
    results = nodes["elastic"]
    assert results["failures"] == [["infrastructure", 1]]
    (kept, lost), *rest, (first, added) = results["nodes"]
    assert rest[0] == [kept]
    # On a busy machine a new node may be judged too slow once. It then has the single worker, or is used the next time.
    assert all(each in ([kept], [added]) for each in rest), results["nodes"]
    assert first == kept, "the remaining node has other ranks"
    assert added not in (kept, lost)
    assert results["error"] is None
    assert results["metrics"]["workers"] == 2
    steps = [step for step, _ in results["reports"]]
    assert steps == list(range(1, len(steps) + 1)), "an attempt did not resume from the last commit"
    assert results["resumed_at"] == steps[-1] - 1
    assert [workers for _, workers in results["reports"]] == [2] + [1] * (len(steps) - 2) + [2]


def test_exit_of_a_drained_node_is_a_preemption_and_not_counted_as_a_failure(nodes):
    results = nodes["drained"]
    assert results["failures"] == [["preemption", 0]]
    first, second = results["nodes"]
    assert first != second
    assert results["attempt"] == 1


def test_ranks_are_notified_before_their_node_is_drained_and_the_run_continues_elsewhere(nodes):
    results = nodes["notified"]
    notice = results["notice"]
    assert notice["ranks"] == [1]
    assert notice["reason"] == "Ray drains the node of ranks 1"
    # `ray drain-node` itself takes seconds: the deadline is 40 s after it has reached Ray.
    assert notice["time"] - (notice["deadline"] - 40) < 20
    assert results["drained_at"] < notice["time"] < notice["deadline"]
    assert results["failures"] == [["preemption", None]]
    (kept, drained), second = results["nodes"]
    assert kept in second
    assert drained not in second


def test_node_that_has_lost_too_many_processes_is_avoided(tmp_path):
    results = run("bad_node_is_avoided", tmp_path)
    assert results["failures"] == [["infrastructure", 0]] * 2
    first, second, third = results["nodes"]
    assert first == second != third


def test_spares_replace_a_lost_group_and_use_its_resources(tmp_path):
    results = run("spares_take_the_places_of_a_lost_group", tmp_path)
    first, second, third = results["pids"]
    assert not set(first) & set(second)
    assert not set(second) & set(third)
    assert set(results["seen"][:4]) == {*first, *second}, "the second group must consist of the spares of the first"
    assert set(results["seen"][4:]) == set(third), "the third group must have new processes"
    assert results["metrics"]["preloaded"]
    assert results["gpus"] == [[["0"], ["1"]]] * 3
    assert results["metrics"]["visible"] == "0", "the GPU of the worker that was lost"
    assert results["metrics"]["threads"] == "2"
    assert results["reservations"] == [results["reservations"][0]] * 3, "the reservation was released meanwhile"
    assert results["reserved"] == []
    assert results["left"] == []


def test_interrupt_while_waiting_for_resources_ends_the_wait(tmp_path):
    assert run("interrupt_while_waiting_for_resources", tmp_path)["seconds"] < 10


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    """Runs on two nodes: one with GPUs 0 to 12, the first nine in use, and one with GPUs 0 and 1."""
    results = run("nodes_with_gpus", tmp_path_factory.mktemp("gpus"))
    assert results["taken"] == list(range(9))
    return results


def facts(workers, *names):
    return [tuple(worker[name] for name in names) for worker in workers]


def test_ranks_are_packed_by_node_and_the_drivers_node_comes_first(gpus):
    assert facts(gpus["several"], "node_id") == [(gpus["here"],), (gpus["here"],), (gpus["there"],)]
    assert facts(gpus["several"], "local_world_size") == [(2,), (2,), (1,)]


def test_request_that_the_cluster_cannot_meet_shows_requested_and_existing_resources(gpus):
    assert gpus["too much for any node"].startswith("ResourceError: ")
    assert "requested 2 x {'CPU': 8}" in gpus["too much for any node"]
    assert "CPU 9 (9 free)" in gpus["too much for any node"]


def test_worker_sees_only_its_own_gpus_and_ranks_follow_their_order(gpus):
    workers = gpus["several"]
    assert facts(workers, "node_rank", "local_rank", "accelerator_ids") == [
        (0, 0, ["9", "10"]),
        (0, 1, ["11", "12"]),
        (1, 0, ["0", "1"]),
    ]
    assert facts(workers, "CUDA_VISIBLE_DEVICES") == [("9,10",), ("11,12",), ("0,1",)]
    names = ("NODE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert facts(workers, *names) == [("0", "0", "2"), ("0", "1", "2"), ("1", "0", "1")]


def test_torch_plugin_returns_each_gpu_of_a_worker(gpus):
    pytest.importorskip("torch")
    assert gpus["several"][0]["devices"] == ["cuda:0", "cuda:1"]


def test_workers_with_half_a_gpu_share_one(gpus):
    workers = gpus["fraction"]
    assert facts(workers, "local_rank") == [(0,), (1,)]
    assert workers[0]["accelerator_ids"] == workers[1]["accelerator_ids"]
    assert len(workers[0]["accelerator_ids"]) == 1
    assert {worker["CUDA_VISIBLE_DEVICES"] for worker in workers} == set(workers[0]["accelerator_ids"])


def test_worker_has_the_ids_of_its_tpus_and_ranks_follow_their_order(gpus):
    workers = gpus["tpus"]
    assert facts(workers, "accelerator_ids", "other_accelerators", "TPU_VISIBLE_CHIPS") == [
        ([], {"TPU": ["0", "1"]}, "0,1"),
        ([], {"TPU": ["2", "3"]}, "2,3"),
    ]


def test_workers_are_placed_on_nodes_with_the_accelerator_type(gpus):
    assert {worker["node_id"] for worker in gpus["fraction"]} == {gpus["there"]}


def test_missing_accelerator_type_is_named_with_the_existing_types(gpus):
    assert gpus["unknown type"].startswith("ResourceError: ")
    assert "accelerator_type:H100" in gpus["unknown type"]
    assert "accelerator_type:A100 1" in gpus["unknown type"]


@pytest.mark.parametrize(("strategy", "nodes"), [("PACK", 1), ("SPREAD", 2), ("STRICT_PACK", 1), ("STRICT_SPREAD", 2)])
def test_placement_strategy_decides_on_how_many_nodes_two_workers_run(gpus, strategy, nodes):
    assert len({worker["node_id"] for worker in gpus[strategy]}) == nodes


@pytest.mark.parametrize(
    ("asked", "strategy", "rule"),
    [
        ("too many for one node", "STRICT_PACK", "all on one node"),
        ("too many for the nodes", "STRICT_SPREAD", "each on a separate node"),
    ],
)
def test_strategy_that_cannot_be_met_is_named_with_its_rule(gpus, asked, strategy, rule):
    assert gpus[asked].startswith("ResourceError: ")
    assert f"({strategy}: {rule})" in gpus[asked]


@pytest.mark.parametrize(
    ("case", "number"),
    [("all", 9), ("avoided", 6), ("STRICT_SPREAD", 2), ("STRICT_PACK", 5)],
)
def test_room_is_the_number_of_workers_that_the_strategy_could_place_on_allowed_nodes(gpus, case, number):
    """There are nine CPUs, three of them on the second node."""
    if case == "STRICT_PACK" and Version(importlib.metadata.version("ray")) < Version("2.54"):
        pytest.skip("with this strategy, Ray ignores the labels of nodes until 2.53")
    assert gpus["room"][case] == number


@pytest.mark.skipif(os.geteuid() != 0, reason="hiding a directory from a node requires a mount, which requires root")
def test_storage_not_shared_by_the_nodes_is_reported_at_the_start_and_refused_at_the_first_checkpoint(tmp_path):
    results = run("storage_that_the_nodes_do_not_share", tmp_path)
    assert results["error"] == "TrainingFailedError"
    assert results["cause"] == "StorageError"
    assert "Set a storage_path that all nodes share" in results["message"]
    assert "checkpoints reported on" in results["stderr"].partition("Traceback")[0]
