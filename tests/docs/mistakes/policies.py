from drivetrain import FailureConfig
from tests.docs.mistakes.making import install, load, mistake, train


def fails():
    raise ZeroDivisionError("the failure of the train function")


@mistake("`decides()` instead of `decide()`")
def misspelled():
    load("policy", "class plugin:\n    def decides(self, failure, history): return True")


@mistake("a required argument, but no options")
def required_argument():
    source = """
    class plugin:
        def __init__(self, limit): ...
        def decide(self, failure, history): return True
    """
    install("policy", source)
    train(failure_config=FailureConfig(policy="faulty"))


@mistake('`policy="patiant"`')
def misspelled_name():
    train(failure_config=FailureConfig(policy="patiant"))


@mistake("no `return` statement")
def returns_nothing():
    train(fails, failure_config=FailureConfig(policy=lambda failure, history: None))


@mistake("a negative delay")
def returns_negative():
    train(fails, failure_config=FailureConfig(policy=lambda failure, history: -1))


@mistake("`decide(self, failure)`")
def other_parameters():
    class Faulty:
        def decide(self, failure):
            return True

    Faulty.__qualname__ = "Faulty"
    train(fails, failure_config=FailureConfig(policy=Faulty()))
