from drivetrain_console import main
from tests.docs.mistakes.making import install, load, mistake


@mistake("an entry point that refers to a module")
def a_module():
    load("command", "plugin = sys.modules[__name__]")


@mistake("an exit at import")
def exits():
    load("command", "sys.exit('usage: ...')")


@mistake("an entry point whose name differs from the command")
def other_name():
    source = """
    from drivetrain_console import add_command
    def plugin(commands):
        add_command(commands, "list-runs", print, "list runs", "")
    """
    install("command", source, name="lst")
    main(["lst"])


@mistake("a function without the parameter `commands`")
def no_parameter():
    load("command", "def plugin(): ...")
