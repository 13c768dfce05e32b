"""The states of the random number generators of all ranks, for checkpoints.

The states consist of tensors and numbers, so ``torch.load(..., weights_only=True)`` loads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain import ConfigurationError, get_context
from drivetrain.plugin.state import random_states, restore_random_states

__all__ = ["get_random_states", "set_random_states"]


def get_random_states() -> list[dict[str, Any]]:
    """Return the states of the random number generators of all ranks, to save them in a checkpoint.

    The generators are those of Python, NumPy (if it is imported) and torch, on the CPU and on the worker's GPUs. Every
    rank must call this function, because the ranks exchange their states. A rank's state has about 10 kB.

    Returns:
        The state of each rank, in the order of the ranks, made of tensors and numbers. It is the same on every rank.

    Raises:
        SessionError: called outside a train function.

    Example:
        In a train function, on every rank::

            states = get_random_states()
            if rank == 0:
                torch.save({"network": network.state_dict(), "random": states}, path)
    """
    import torch.distributed as dist

    own = random_states()
    size = get_context().get_world_size()
    if size == 1:
        return [own]
    states: list[dict[str, Any]] = [{}] * size
    dist.all_gather_object(states, own)
    return states


def set_random_states(states: Sequence[Mapping[str, Any]]) -> bool:
    """Restore the state of this rank from the result of :func:`get_random_states`.

    Call this function last, after everything else has been restored, because creating a model or shuffling rows also
    draws random numbers.

    Args:
        states: the states of all ranks.

    Returns:
        True. False if the states are those of another number of ranks: nothing is changed then.

    Raises:
        ConfigurationError: the argument is not a result of :func:`get_random_states`.
        SessionError: called outside a train function.
    """
    given: object = states
    is_list = isinstance(given, (list, tuple)) and all(isinstance(each, Mapping) and "torch" in each for each in given)
    if not is_list:
        raise ConfigurationError(
            "[DT-762] set_random_states(): expected the list that get_random_states() returned, got "
            f"{type(given).__name__}. Save the whole list, and pass it on every rank"
        )
    context = get_context()
    if len(states) != context.get_world_size():
        return False
    restore_random_states(states[context.get_world_rank()])
    return True
