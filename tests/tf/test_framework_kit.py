"""The conformance kit of frameworks, applied to TensorFlow and Keras."""

from collections.abc import Sequence
from typing import Any

from drivetrain_testing import FrameworkConformance


class TestTensorflow(FrameworkConformance):
    name = "tensorflow"

    @staticmethod
    def draw() -> Any:
        import tensorflow as tf

        return tf.random.uniform([3]).numpy().tolist()

    @staticmethod
    def draw_restored() -> Any:
        import tensorflow as tf

        return tf.random.get_global_generator().uniform([3]).numpy().tolist()

    @staticmethod
    def make_objects_of_process() -> Sequence[Any]:
        import tensorflow as tf

        return [tf.distribute.OneDeviceStrategy("/cpu:0")]


class TestKeras(FrameworkConformance):
    name = "keras"

    @staticmethod
    def draw() -> Any:
        import keras

        return keras.ops.convert_to_numpy(keras.random.uniform([3])).tolist()
