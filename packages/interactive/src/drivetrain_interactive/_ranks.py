"""Functions that return the position of this worker in the group."""

from __future__ import annotations

from drivetrain.plugin.sessions import active_session

__all__ = ["local_rank", "world_rank", "world_size"]


def world_rank() -> int:
    """Return the rank of this worker among all workers, from 0; short for ``get_context().get_world_rank()``."""
    return active_session("world_rank").context.get_world_rank()


def local_rank() -> int:
    """Return the rank of this worker on its node, from 0; short for ``get_context().get_local_rank()``."""
    return active_session("local_rank").context.get_local_rank()


def world_size() -> int:
    """Return the number of workers in the group; short for ``get_context().get_world_size()``."""
    return active_session("world_size").context.get_world_size()
