"""`drivetrain[interactive]` in an empty environment: one group of workers runs two functions."""

import os
import tempfile

from check_core import check_dependencies_are_complete, check_import_is_light


def train_func() -> int:
    from drivetrain_interactive import world_rank

    return 10 * world_rank()


def check_trainer_runs_functions_on_two_workers() -> None:
    from drivetrain_interactive import Trainer

    trainer = Trainer(backend="none", num_workers=2)
    trainer.start()
    assert trainer.run(train_func) == [0, 10]
    processes = trainer.run(os.getpid)
    assert processes == trainer.run(os.getpid)
    trainer.shutdown()


if __name__ == "__main__":
    check_dependencies_are_complete()
    check_import_is_light()
    with tempfile.TemporaryDirectory() as directory:
        os.environ["DRIVETRAIN_STORAGE_PATH"] = directory
        check_trainer_runs_functions_on_two_workers()
    print("ok: drivetrain[interactive]")
