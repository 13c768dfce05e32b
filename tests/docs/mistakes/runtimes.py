import subprocess
import sys

from drivetrain_subprocess import SubprocessRuntime

from tests.docs.mistakes.making import install, load, mistake, train

RUNTIME = """
class plugin(Runtime):
    def validate(self, scaling): ...
    def room(self, scaling, running, avoided): return 1
    def launch(self, spec): ...
"""


def start_instead(*command):
    """Make the example runtime start another command."""
    popen = subprocess.Popen
    subprocess.Popen = lambda arguments, **options: popen(command, **options)


@mistake("a missing `room()`")
def missing_method():
    load("runtime", RUNTIME.replace("room", "place"))


@mistake("`lauch()` instead of `launch()`")
def misspelled():
    load("runtime", RUNTIME.replace("launch", "lauch"))


@mistake("a constructor that requires arguments")
def required_arguments():
    load("runtime", RUNTIME + "    def __init__(self, host, port): ...")


@mistake("`detect()` raises")
def detect_raises():
    install("runtime", RUNTIME + "    @classmethod\n    def detect(cls): return {}['CLUSTER']")
    train(num_workers=1)


@mistake("a process that exits before it connects")
def process_exits():
    start_instead(sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(3)")
    train(num_workers=1, runtime=SubprocessRuntime())


@mistake("a process that never connects")
def process_waits():
    start_instead(sys.executable, "-c", "import sys; sys.stdin.read()")
    train(num_workers=2, runtime=SubprocessRuntime(), start_timeout_s=1.0)


@mistake('`runtime="subproces"`')
def misspelled_name():
    train(num_workers=2, runtime="subproces")
