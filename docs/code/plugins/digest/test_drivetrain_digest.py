from drivetrain_testing import ViewConformance


class TestDigest(ViewConformance):
    name = "digest"

    def make_options(self, directory):
        return {"rank": 1}
