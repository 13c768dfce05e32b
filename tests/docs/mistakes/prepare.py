import sys

import numpy as np

import drivetrain
from tests.docs.mistakes.making import load, mistake, train


@mistake("an entry point named `numpy.random` instead of `numpy`")
def no_root_module():
    load("prepare", "def plugin(value): return value", name="numpy.random")


@mistake("a function that returns `NotImplemented` for its own objects")
def not_implemented():
    drivetrain_rng = __import__("drivetrain_rng")
    drivetrain_rng.prepare = lambda value: NotImplemented
    train(lambda: drivetrain.prepare(np.random.default_rng()))


@mistake("an entry point that refers to a mapping")
def a_mapping():
    load("prepare", "plugin = {}")


@mistake("a call outside a train function")
def outside():
    assert "drivetrain_rng" not in sys.modules
    drivetrain.prepare(np.random.default_rng())
