from drivetrain import DataParallelTrainer
from tests.docs.mistakes.making import install, load, mistake

trainer = DataParallelTrainer(print)


@mistake("an entry point that refers to a string")
def a_string():
    load("trainable", "plugin = 'tune'")


@mistake('`as_trainable("swep")`')
def misspelled_name():
    trainer.as_trainable("swep")


@mistake("several plugins are installed, and none is selected")
def several():
    install("trainable", "def plugin(trainer, *, argument, autoscaling): ...")
    trainer.as_trainable()


@mistake("a config with a name that is no argument of the trainer")
def unknown_argument():
    trainer.as_trainable("sweep")({"lr": 0.1})
