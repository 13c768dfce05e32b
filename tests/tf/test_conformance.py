"""The conformance kit for the TensorFlow backend."""

from drivetrain.testing import BackendConformance
from drivetrain_tf import TensorflowConfig
from tests.tf import jobs


class TestTensorflow(BackendConformance):
    config = TensorflowConfig()
    framework = "tensorflow"
    all_sum = staticmethod(jobs.all_sum)
