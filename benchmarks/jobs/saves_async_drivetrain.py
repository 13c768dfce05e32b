"""A worker without a framework that reports checkpoints in the background, on drivetrain, and copies in turn."""

from functools import partial
from pathlib import Path

from saving import clear, copy, in_turn, link, seconds, wait_until_committed, warm
from stamps import options

import drivetrain
from drivetrain import Checkpoint, DataParallelTrainer, RunConfig, ScalingConfig


def train_func(config):
    disk, memory, scratch = Path(config["disk"]), Path(config["memory"]), Path(config["storage"]) / "scratch"
    scratch.mkdir()

    def report(source, given_to=None):
        """Return the duration of a report of a directory, or of a copy in ``given_to`` that is given away."""
        before = drivetrain.get_checkpoint()
        warm(source)
        local = link(source, given_to) if given_to else source
        taken = seconds(
            drivetrain.report,
            {"loss": 0.5},
            Checkpoint.from_directory(local),
            checkpoint_upload_mode="async",
            delete_local_checkpoint_after_upload=given_to is not None,
        )
        clear(wait_until_committed(before))
        return taken

    def cp(source):
        warm(source)
        taken = seconds(copy, source, scratch / "copy")
        clear(scratch / "copy")
        return taken

    for name in sorted(path.name for path in disk.iterdir()):
        turn = partial(in_turn, config)
        turn(f"{name}, moved", {"drivetrain": partial(report, disk / name, scratch / "given")})
        for case, source, given_to in (
            ("given away, other filesystem", memory / name, memory / "given"),
            ("kept, other filesystem", memory / name, None),
            ("kept, same filesystem", disk / name, None),
        ):
            calls = {"drivetrain": partial(report, source, given_to), "cp -r": partial(cp, source)}
            turn(f"{name}, {case}", calls)


if __name__ == "__main__":
    config = options(disk="", memory="", repeats=1)
    trainer = DataParallelTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=1, runtime="local"),
        run_config=RunConfig(storage_path=config["storage"]),
    )
    trainer.fit()
