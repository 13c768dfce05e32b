"""The conformance kits for the TensorFlow backend, and for the function that prepares datasets."""

from typing import Any

from drivetrain.testing import BackendConformance, PrepareConformance
from drivetrain_tf import TensorflowConfig


class TestTensorflow(BackendConformance):
    config = TensorflowConfig()
    runtimes = ("local",)

    @staticmethod
    def all_sum(value: float) -> float:
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()

        @tf.function
        def add(mine: tf.Tensor) -> tf.Tensor:
            return strategy.reduce("sum", strategy.run(lambda: mine), axis=None)

        return float(add(tf.constant(value)))


class TestPrepare(PrepareConformance):
    name = "tensorflow"
    backend = TensorflowConfig()

    @staticmethod
    def make_objects() -> list[Any]:
        import tensorflow as tf

        return [tf.data.Dataset.range(8).batch(2), tf.data.Dataset.range(8).repeat().batch(4)]
