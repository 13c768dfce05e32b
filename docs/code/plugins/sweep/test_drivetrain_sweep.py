from drivetrain_testing import TrainableConformance


class TestSweep(TrainableConformance):
    name = "sweep"

    def run_trial(self, trainable, config, directory):
        return trainable(config)
