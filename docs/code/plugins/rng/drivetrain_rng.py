"""Gives each worker its own stream of NumPy's random numbers, for `drivetrain.prepare`."""

from typing import Any

import numpy as np

import drivetrain


class RankGenerator(np.random.Generator):
    """The random numbers of one rank, which are independent of those of the other ranks."""


def prepare(value: Any) -> Any:
    """Prepare a generator. Other objects of NumPy are not ours."""
    if isinstance(value, RankGenerator):
        return value
    if not isinstance(value, np.random.Generator):
        return NotImplemented
    context = drivetrain.get_context()
    streams = value.bit_generator.spawn(context.get_world_size())
    return RankGenerator(streams[context.get_world_rank()])
