import torch
from drivetrain_fp16 import FP16Strategy

from drivetrain_torch import prepare_model
from tests.docs.mistakes.making import install, load, mistake, train


def prepare_with(strategy, **options):
    model = torch.nn.Linear(1, 1)
    train(lambda: prepare_model(model, parallel_strategy=strategy, parallel_strategy_kwargs=options))


@mistake("`warp()` instead of `wrap()`")
def misspelled():
    load("strategy", "class plugin:\n    def warp(self, model, device): ...")


@mistake("a constructor that requires an argument")
def required_argument():
    load(
        "strategy",
        """
        class plugin:
            def __init__(self, size): ...
            def wrap(self, model, device): ...
        """,
    )


@mistake('`parallel_strategy="fp61"`')
def misspelled_name():
    prepare_with("fp61")


@mistake('`parallel_strategy_kwargs={"bucket": 1}`, an unknown argument')
def unknown_argument():
    prepare_with("fp16", bucket=1)


@mistake("a class instead of an object or a name")
def a_class():
    prepare_with(FP16Strategy)


@mistake("a class that does not derive from `ParallelStrategy`")
def unrelated_class():
    install("strategy", "class plugin:\n    def wrap(self, model, device): ...")
    prepare_with("faulty")
