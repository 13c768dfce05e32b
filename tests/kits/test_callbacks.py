"""The conformance kit for callbacks, applied to the callbacks of the core."""

from drivetrain import Callback
from drivetrain_testing import CallbackConformance


class TestCallback(CallbackConformance):
    def make_callback(self) -> Callback:
        return Callback()


class TestJson(CallbackConformance):
    name = "json"


class TestCSV(CallbackConformance):
    name = "csv"


class TestProgress(CallbackConformance):
    name = "progress"
