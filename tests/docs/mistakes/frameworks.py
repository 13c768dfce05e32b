from tests.docs.mistakes.making import load, mistake

CLASS = "from drivetrain.plugin import Framework\nclass plugin(Framework):\n    def belongs_to_process(self): ..."


@mistake("an entry point named `numpy.random` instead of `numpy`")
def no_root_module():
    load("framework", "from drivetrain.plugin import Framework as plugin", name="numpy.random")


@mistake("an entry point that refers to a function")
def a_function():
    load("framework", "def plugin(): ...")


@mistake("a method without its parameter")
def no_parameter():
    load("framework", CLASS)
