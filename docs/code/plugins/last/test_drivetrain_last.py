from drivetrain_testing import CommandConformance


class TestLast(CommandConformance):
    name = "last"

    def make_arguments(self, run):
        return [str(run)]
