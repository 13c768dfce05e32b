from drivetrain_tally import TallyConfig, TallyTrainer

import drivetrain
from drivetrain import RunConfig, ScalingConfig
from drivetrain.plugin import BackendConfig
from tests.docs.mistakes.making import load, mistake


class OtherConfig(BackendConfig):
    def __repr__(self):
        return "OtherConfig()"


@mistake("the trainer gets the configuration of another backend")
def other_config():
    TallyTrainer(print, tally_config=OtherConfig())


@mistake("`backend_config=` for a trainer with its own argument")
def generic_argument():
    TallyTrainer(print, backend_config=TallyConfig())


@mistake("a trainer that is not registered")
def not_registered():
    class OtherTrainer(TallyTrainer): ...

    one_worker = ScalingConfig(num_workers=1)
    result = OtherTrainer(lambda: None, scaling_config=one_worker, run_config=RunConfig(verbose=0)).fit()
    drivetrain.restore(result.path)


@mistake("an entry point that refers to an object")
def an_object():
    load("trainer", "plugin = object()")


@mistake("a constructor without `**arguments`")
def no_further_arguments():
    class OtherTrainer(TallyTrainer):
        def __init__(self, values=()):
            super().__init__(lambda: None, scaling_config=ScalingConfig(num_workers=1))

    OtherTrainer.__qualname__ = "OtherTrainer"
    OtherTrainer.restore(OtherTrainer([1, 2]).fit().path)
