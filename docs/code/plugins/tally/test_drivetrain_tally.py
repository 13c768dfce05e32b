from drivetrain_tally import TallyConfig, all_sum

from drivetrain_testing import BackendConformance


class TestTally(BackendConformance):
    config = TallyConfig()
    all_sum = staticmethod(all_sum)
