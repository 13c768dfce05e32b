"""The random number generators from which a data loader draws, and their states in a form that JSON can represent.

This module imports torch, so other modules import it only inside functions.
"""

from __future__ import annotations

import base64
import contextlib
import random
import sys
import zlib
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain_torch._blocks import innermost_sampler, seed_of

__all__ = ["States", "capture", "decode", "encode", "own_generators", "playing", "restore"]

States = Mapping[str, Any]
"""The states of generators: ``"torch"``, ``"python"`` and ``"numpy"`` are the global generators of the process.
``"loader"`` and ``"sampler"`` are generators that the user has passed to the loader and to its sampler."""


def own_generators(loader: DataLoader[Any]) -> dict[str, torch.Generator]:
    """Return the generators that the user has passed to a loader and to its sampler, by name.

    A generator that the loader and its sampler share is named ``"loader"``.
    """
    found: dict[str, torch.Generator] = {}
    for sampler in (loader.sampler, loader.batch_sampler, innermost_sampler(loader.batch_sampler)):
        generator = getattr(sampler, "generator", None)
        if seed_of(sampler) is not None:  # a sampler of Accelerate, which seeds its generator before each epoch
            continue
        if isinstance(generator, torch.Generator) and generator is not loader.generator:
            found["sampler"] = generator
    if loader.generator is not None:
        found["loader"] = loader.generator
    return found


def capture(own: Mapping[str, torch.Generator], *names: str) -> States:
    """Return the states of the own generators, and of the global generators with the given names."""
    states: dict[str, Any] = {name: generator.get_state() for name, generator in own.items()}
    if "torch" in names:
        states["torch"] = torch.get_rng_state()
    if "python" in names:
        states["python"] = random.getstate()
    if "numpy" in names and (numpy_random := sys.modules.get("numpy.random")) is not None:
        states["numpy"] = numpy_random.get_state()
    return states


def restore(states: States, own: Mapping[str, torch.Generator]) -> None:
    """Set the generators to the states. States of own generators that do not exist are ignored."""
    for name, generator in own.items():
        if name in states:
            generator.set_state(states[name])
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])


@contextlib.contextmanager
def playing(states: States, own: Mapping[str, torch.Generator], *, sets_back: bool = False) -> Iterator[None]:
    """Set generators to earlier states. At the end, set the global generators back to their current states.

    Args:
        states: the states.
        own: the user's own generators.
        sets_back: set back the own generators, too. Otherwise, they continue after the numbers that were drawn within
            the context, as they did in the interrupted run.
    """
    current = capture(own, "torch", "python", "numpy")
    restore(states, own)
    try:
        yield
    finally:
        restore(current, own if sets_back else {})


def encode(states: States) -> dict[str, Any]:
    """Return the states as values that JSON can represent: about 4 kB for each generator."""
    encoded: dict[str, Any] = {}
    for name, state in states.items():
        if name == "python":
            version, numbers, gauss = state
            encoded[name] = [version, _text(array("Q", numbers).tobytes()), gauss]
        elif name == "numpy":
            kind, key, *rest = state
            encoded[name] = [kind, _text(array("Q", key.tolist()).tobytes()), *rest]
        else:
            encoded[name] = _text(bytes(state.tolist()))
    return encoded


def decode(encoded: Mapping[str, Any]) -> States:
    """Return the states that :func:`encode` has encoded."""
    states: dict[str, Any] = {}
    for name, state in encoded.items():
        if name == "python":
            version, numbers, gauss = state
            states[name] = (version, tuple(array("Q", _data(numbers))), gauss)
        elif name == "numpy":
            import numpy

            kind, key, *rest = state
            states[name] = (kind, numpy.array(array("Q", _data(key)), dtype="uint32"), *rest)
        else:
            states[name] = torch.frombuffer(bytearray(_data(state)), dtype=torch.uint8)
    return states


def _text(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def _data(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))
