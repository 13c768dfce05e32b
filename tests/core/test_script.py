"""The module ``__main__`` of a worker: what is sent, what is missing, and what is loaded late."""

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support import PROCESS_LIMIT_S

START = """
import pickle, sys, threading
import drivetrain
import drivetrain_interactive

def fit(function, **options):
    trainer = drivetrain.DataParallelTrainer(
        function,
        scaling_config=drivetrain.ScalingConfig(num_workers=1),
        run_config=drivetrain.RunConfig(verbose=0),
        **options,
    )
    return trainer.fit().return_value
"""


def output_of(program: str, folder: Path, *options: str) -> str:
    (folder / "script.py").write_text(START + dedent(program))
    done = subprocess.run(
        [sys.executable, *(options or ("script.py",))],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT_S,
        check=False,
    )
    return (done.stdout + done.stderr).strip()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRIVETRAIN_STORAGE_PATH", str(tmp_path / "runs"))
    return tmp_path


def test_package_that_only_the_driver_uses_is_imported_when_a_definition_that_needs_it_is_looked_up(
    folder: Path,
) -> None:
    program = """
    import pandas

    class Table(pandas.DataFrame):
        pass

    def train():
        import __main__
        before = "pandas" in sys.modules
        return before, __main__.Table.__name__, "pandas" in sys.modules

    print(fit(train))
    """
    assert output_of(program, folder) == "(False, 'Table', True)"


def test_definition_that_cannot_be_loaded_on_a_node_does_not_affect_the_others(folder: Path) -> None:
    program = """
    class Fails(type):
        def __call__(cls, *arguments):
            raise ImportError("not on this node")

    class Before:
        pass

    class NotOnNode:
        value = threading.local

        def __init_subclass__(cls):
            if "drivetrain commands" in {thread.name for thread in threading.enumerate()}:
                raise ImportError("no such package on this node")

    class Part(NotOnNode):
        pass

    class After:
        before = Before

    def train():
        import __main__
        try:
            __main__.Part
        except AttributeError as error:
            return __main__.After.before is __main__.Before, str(error)

    print(fit(train))
    """
    output = output_of(program, folder)
    assert output.startswith("(True,"), output
    assert "[DT-121] workers do not have 'Part' of the script: ImportError: no such package on this node" in output


def test_missing_name_is_explained_in_the_error_of_the_run(folder: Path) -> None:
    program = """
    lock = threading.Lock()

    def locked():
        with lock:
            return 1

    def train():
        return sys.modules["__main__"].locked()

    fit(train)
    """
    output = output_of(program, folder)
    assert (
        "NameError: name 'lock' is not defined. [DT-121] workers do not have 'lock' of the script: the train" in output
    )


def test_class_in_the_config_of_an_imported_train_function_is_in_the_module_main(folder: Path) -> None:
    (folder / "library.py").write_text(
        "import pickle\n\n"
        "def train(config):\n    return type(pickle.loads(pickle.dumps(config['value']))) is type(config['value'])\n"
    )
    program = """
    import library

    class Value:
        pass

    print(fit(library.train, train_loop_config={"value": Value()}))
    """
    assert output_of(program, folder) == "True"


def test_module_that_is_run_by_its_name_is_imported_by_spawned_processes(folder: Path) -> None:
    program = """
    import concurrent.futures, multiprocessing
    from .other import NUMBER

    class Value:
        pass

    def make(number):
        return Value()

    def train():
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            return type(pool.submit(make, 1).result(60)) is Value, NUMBER

    if __name__ == "__main__":
        print(fit(train))
    """
    package = folder / "package"
    package.mkdir()
    (package / "other.py").write_text("NUMBER = 3\n")
    (package / "script.py").write_text(START + dedent(program))
    assert output_of("", folder, "-m", "package.script") == "(True, 3)"


def test_cell_of_a_notebook_that_defines_a_class_again_gives_the_new_class(folder: Path) -> None:
    program = """
    with drivetrain_interactive.Trainer("none", num_workers=1) as trainer:
        class Value:
            number = 1

        def train():
            return Value.number, type(pickle.loads(pickle.dumps(Value()))) is Value

        first = trainer.run(train)

        class Value:
            number = 2

        print(first, trainer.run(train), trainer.run(lambda: Value)[0] is Value)
    """
    assert output_of(program, folder) == "[(1, True)] [(2, True)] True"


def test_interpreter_options_arrive_in_local_workers(folder: Path) -> None:
    program = """
    print(fit(lambda: (sys.flags.optimize, sys.flags.dev_mode, "error::UserWarning" in sys.warnoptions)))
    """
    assert output_of(program, folder, "-O", "-X", "dev", "-W", "error::UserWarning", "script.py") == "(1, True, True)"
