"""The conformance kit applied to the function that prepares datasets of TensorFlow."""

from typing import Any

from drivetrain_testing import PrepareConformance
from drivetrain_tf import TensorflowConfig


class TestPrepare(PrepareConformance):
    name = "tensorflow"
    backend = TensorflowConfig()

    @staticmethod
    def make_objects() -> list[Any]:
        import tensorflow as tf

        return [tf.data.Dataset.range(8).batch(2), tf.data.Dataset.range(8).repeat().batch(4)]
