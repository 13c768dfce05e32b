"""Lets `drivetrain.prepare` give each worker its own stream of random numbers."""

from typing import Any

import numpy as np

import drivetrain


class RankGenerator(np.random.Generator):
    """The random numbers of one rank, independent of those of the others."""


def prepare(value: Any) -> Any:
    """Prepare a generator. Other objects of NumPy are not ours."""
    if isinstance(value, RankGenerator):
        return value
    if not isinstance(value, np.random.Generator):
        return NotImplemented
    context = drivetrain.get_context()
    streams = value.bit_generator.spawn(context.get_world_size())
    return RankGenerator(streams[context.get_world_rank()])
