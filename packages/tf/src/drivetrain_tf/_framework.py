"""Describes TensorFlow and Keras for drivetrain, which loads this module where the framework is imported."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

from drivetrain.plugin import Framework

__all__ = ["KerasFramework", "TensorflowFramework"]

_system = random.SystemRandom()


class TensorflowFramework(Framework):
    """Seeds TensorFlow's generators, restores the global ``tf.random.Generator``, and knows TensorFlow's strategies.

    Operations such as ``tf.random.uniform`` have generators of their own, whose states TensorFlow does not return.
    """

    def reseed(self) -> None:
        """Set the global seed, from which operations derive their seeds. This does not initialize TensorFlow."""
        import tensorflow as tf

        tf.random.set_seed(_system.getrandbits(63))

    def random_state(self) -> Mapping[str, Any]:
        """Return the state of the global generator; nothing as long as TensorFlow is imported, but not used."""
        import tensorflow as tf

        if not _is_used():
            return {}
        try:
            generator = tf.random.get_global_generator()
        except RuntimeError:  # operations are deterministic, and the program has set no generator
            return {}
        return {"algorithm": int(generator.algorithm), "state": generator.state.numpy().tolist()}

    def set_random_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the global generator."""
        import tensorflow as tf

        try:
            generator = tf.random.get_global_generator()
        except RuntimeError:
            tf.random.set_global_generator(tf.random.Generator.from_state(state["state"], alg=state["algorithm"]))
            return
        if generator.algorithm != state["algorithm"]:
            raise ValueError(f"expected the algorithm {generator.algorithm}, got {state['algorithm']!r:.100}")
        generator.state.assign(state["state"])

    def belongs_to_process(self, value: object) -> bool:
        """Return True for strategies, which contain the workers among which they distribute."""
        tensorflow = sys.modules.get("tensorflow")
        return tensorflow is not None and isinstance(value, tensorflow.distribute.Strategy)


def _is_used() -> bool:
    """Return True if TensorFlow has started its threads and devices, after which their number cannot be changed."""
    import tensorflow as tf

    threading = tf.config.threading
    threads = threading.get_inter_op_parallelism_threads()
    try:
        threading.set_inter_op_parallelism_threads(threads + 1)
        threading.set_inter_op_parallelism_threads(threads)
    except RuntimeError:
        return True
    return False


class KerasFramework(Framework):
    """Seeds the generator of ``keras.random``, whose state Keras does not return."""

    def reseed(self) -> None:
        """Set the seed of Keras, which also resets its generator."""
        import keras  # type: ignore[import-untyped]

        keras.utils.set_random_seed(_system.getrandbits(32))
