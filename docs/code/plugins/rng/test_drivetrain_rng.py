import numpy as np

from drivetrain_testing import PrepareConformance


class TestPrepare(PrepareConformance):
    name = "numpy"

    @staticmethod
    def make_objects():
        return [np.random.default_rng(seed=0)]
