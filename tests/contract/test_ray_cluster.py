"""What only a cluster of several nodes can show. Each scenario has a cluster and a driver process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray

SCRIPT = Path(__file__).with_name("cluster_scenarios.py")


def run(scenario, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    finished = subprocess.run(
        [sys.executable, str(SCRIPT), scenario, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**environment, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return {**json.loads(finished.stdout.splitlines()[-1]), "said": finished.stderr}


def test_ranks_are_packed_by_node_and_the_drivers_node_comes_first(tmp_path):
    seen = run("ranks_are_packed_by_node", tmp_path)
    assert seen["group"] == [[0, 0, 0], [1, 1, 0], [2, 0, 1], [3, 1, 1]]
    assert seen["first_node_is_the_drivers"]
    assert seen["local_world_size"] == 2


def test_lost_node_is_a_worker_failure_and_the_run_goes_on_elsewhere(tmp_path):
    seen = run("lost_node_is_replaced", tmp_path)
    assert seen["failures"] == [["infrastructure", 1]]
    assert seen["groups"] == 2
    assert seen["metrics"]["count"] == 4
    assert seen["metrics"]["attempt"] == 1
    assert seen["metrics"]["_training_iteration"] == 4, "the second attempt continued from the second report"


def test_node_that_has_lost_too_many_processes_is_avoided(tmp_path):
    seen = run("bad_node_is_avoided", tmp_path)
    assert seen["failures"] == [["infrastructure", 0]] * 2
    first, second, third = seen["nodes"]
    assert first == second != third


def test_spares_take_the_places_of_a_lost_group_with_its_resources(tmp_path):
    seen = run("spares_take_the_places_of_a_lost_group", tmp_path)
    first, second, third = seen["pids"]
    assert not set(first) & set(second)
    assert not set(second) & set(third)
    assert set(seen["seen"][:4]) == {*first, *second}, "the second group are the spares of the first"
    assert set(seen["seen"][4:]) == set(third), "which has new ones"
    assert seen["metrics"]["preloaded"]
    assert seen["gpus"] == [[["0"], ["1"]]] * 3
    assert seen["metrics"]["visible"] == "0", "the GPU of the worker that was lost"
    assert seen["metrics"]["threads"] == "2"
    assert seen["reservations"] == [seen["reservations"][0]] * 3, "nobody else could take the place meanwhile"
    assert seen["reserved"] == []
    assert seen["left"] == []


def test_request_that_the_cluster_cannot_meet_shows_what_was_asked_and_what_exists(tmp_path):
    seen = run("request_that_no_node_can_meet", tmp_path)
    assert seen["error"] == "ResourceError"
    assert "asked for 2 x {'CPU': 8}" in seen["message"]
    assert "CPU 1 (1 free)" in seen["message"]
    assert seen["seconds"] < 20


def test_interrupt_while_waiting_for_resources_ends_the_wait(tmp_path):
    assert run("interrupt_while_waiting_for_resources", tmp_path)["seconds"] < 10


@pytest.mark.skipif(os.geteuid() != 0, reason="hiding a directory from a node takes a mount, and that takes root")
def test_storage_that_the_nodes_do_not_share_is_said_at_the_start_and_refused_at_the_first_checkpoint(tmp_path):
    seen = run("storage_that_the_nodes_do_not_share", tmp_path)
    assert seen["error"] == "TrainingFailedError"
    assert seen["cause"] == "StorageError"
    assert "a run on several nodes wants a storage_path that all of them share" in seen["message"]
    assert "a checkpoint reported on" in seen["said"].partition("Traceback")[0]
