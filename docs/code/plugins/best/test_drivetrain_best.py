from drivetrain_testing import CallbackConformance


class TestBestValue(CallbackConformance):
    name = "best"
    options = {"metric": "loss", "mode": "min"}
