"""The conformance kit for the TensorFlow backend."""

from drivetrain.testing import BackendConformance
from drivetrain_tf import TensorflowConfig


class TestTensorflow(BackendConformance):
    config = TensorflowConfig()
    framework = "tensorflow"

    @staticmethod
    def all_sum(value: float) -> float:
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()

        @tf.function
        def add(mine: tf.Tensor) -> tf.Tensor:
            return strategy.reduce("sum", strategy.run(lambda: mine), axis=None)

        return float(add(tf.constant(value)))
