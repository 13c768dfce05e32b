"""Describes TensorFlow and Keras for drivetrain, which loads this module where the framework is imported."""

from __future__ import annotations

import random
import sys

from drivetrain.plugin import Framework

__all__ = ["KerasFramework", "TensorflowFramework"]

_system = random.SystemRandom()


class TensorflowFramework(Framework):
    """Seeds TensorFlow's generators, and knows its strategies."""

    def reseed(self) -> None:
        """Set the global seed, from which operations derive their seeds. This does not initialize TensorFlow."""
        import tensorflow as tf

        tf.random.set_seed(_system.getrandbits(63))

    def belongs_to_process(self, value: object) -> bool:
        """Return True for strategies, which contain the workers among which they distribute."""
        tensorflow = sys.modules.get("tensorflow")
        return tensorflow is not None and isinstance(value, tensorflow.distribute.Strategy)


class KerasFramework(Framework):
    """Seeds the generator of ``keras.random``."""

    def reseed(self) -> None:
        """Set the seed of Keras, which also resets its generator."""
        import keras  # type: ignore[import-untyped]

        keras.utils.set_random_seed(_system.getrandbits(32))
