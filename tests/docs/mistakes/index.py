from drivetrain import FailureConfig
from drivetrain_console import main
from tests.docs.mistakes.making import install, mistake, train

POLICY = "def plugin(failure, history): return False"


def train_with(policy):
    train(failure_config=FailureConfig(policy=policy))


@mistake("a group that is misspelled, such as `drivetrain.policy`")
def misspelled_group():
    install("policy", POLICY, group="drivetrain.policy")
    main(["plugins"])


@mistake("another unknown group that begins with `drivetrain.`")
def unknown_group():
    install("policy", POLICY, group="drivetrain.hooks")
    main(["plugins"])


@mistake("a name that another distribution has registered")
def used_name():
    install("policy", POLICY, name="patient")
    train_with("patient")


@mistake("a requirement that the installed drivetrain does not meet")
def unmet_requirement():
    install("policy", POLICY, requires=">=99")
    train_with("faulty")


@mistake("a target that does not exist")
def missing_target():
    install("policy", "")
    train_with("faulty")


@mistake("an exit while the module is imported")
def exits():
    install("policy", "sys.exit('no license')")
    train_with("faulty")


@mistake("a plugin that is not installed in the environment of the driver")
def not_installed():
    train_with("faulty")
