import drivetrain
from tests.docs.mistakes.making import load, mistake

trainer = drivetrain.DataParallelTrainer(lambda: None, run_config=drivetrain.RunConfig(verbose=0))


@mistake("an entry point that refers to a module")
def a_module():
    load("view", "plugin = sys.modules[__name__]")


@mistake('`result.view("digests")`')
def misspelled_name():
    trainer.fit().view("digests")


@mistake("an option that the view does not have")
def unknown_option():
    trainer.fit().view("digest", metric="loss")
