from drivetrain import Callback
from drivetrain_track import TrackerCallback
from tests.docs.mistakes.making import load, mistake, train


@mistake("`on_reports()` instead of `on_report()`")
def misspelled():
    class Faulty(Callback):
        def on_reports(self, run, report): ...

    train(callbacks=[Faulty()])


@mistake("an entry point that refers to an object")
def an_object():
    load("callback", "plugin = Callback()")


@mistake('`("best", {"metrics": "loss"})`, an unknown option')
def unknown_option():
    train(callbacks=[("best", {"metrics": "loss"})])


@mistake('`callbacks=["bset"]`')
def misspelled_name():
    train(callbacks=["bset"])


@mistake("a hook with other parameters, such as `on_report(self, report)`")
def other_parameters():
    class Faulty(Callback):
        def on_report(self, report): ...

    Faulty.__qualname__ = "Faulty"
    train(callbacks=[Faulty()])


@mistake("an exception in a hook")
def raises():
    class Faulty(Callback):
        def on_report(self, run, report):
            report.metrics["accuracy"]

    Faulty.__qualname__ = "Faulty"
    train(callbacks=[Faulty()])


@mistake("a tracker that raises in `log()`")
def tracker_raises():
    class Faulty(TrackerCallback):
        def open(self, run): ...

        def log(self, entries):
            raise OSError("no such table")

    train(callbacks=[Faulty()])
