"""The stacks of ranks on several nodes, one of which does not respond."""

import faulthandler
import os
import signal
from types import SimpleNamespace
from typing import cast

import pytest

from drivetrain._worker.stacks import dump_stacks_on_signal
from drivetrain_ray._group import RayGroup


@pytest.mark.ray
def test_node_that_is_lost_does_not_hide_the_stacks_of_other_nodes(ray_address: str) -> None:
    import ray

    here = ray.get_runtime_context().get_node_id()
    lost = "1" * len(here)
    reader, writer = os.pipe()
    dump_stacks_on_signal(writer)
    try:
        targets = {lost: {0: (1, 0)}, here: {1: (os.getpid(), writer)}}
        group = SimpleNamespace(stack_targets=lambda ranks: targets)
        stacks = RayGroup.stacks(cast(RayGroup, group), [0, 1])
    finally:
        faulthandler.unregister(signal.SIGRTMAX)
        os.close(reader)
        os.close(writer)

    assert stacks.keys() == {1}
    assert "test_node_that_is_lost_does_not_hide" in stacks[1]
