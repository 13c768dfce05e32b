"""A worker without a framework that reports checkpoints on the disk it saves to, on drivetrain, and cp in turn."""

from functools import partial
from pathlib import Path

from saving import clear, copy, in_turn, link, seconds, wait_until_committed, warm
from stamps import options

import drivetrain
from drivetrain import Checkpoint, DataParallelTrainer, RunConfig, ScalingConfig


def train_func(config):
    scratch = Path(config["storage"]) / "scratch"
    scratch.mkdir()

    def report(source, **how):
        before = drivetrain.get_checkpoint()
        warm(source)
        taken = seconds(drivetrain.report, {"loss": 0.5}, Checkpoint.from_directory(source), **how)
        clear(wait_until_committed(before))
        return taken

    def cp(source):
        warm(source)
        taken = seconds(copy, source, scratch / "copy")
        clear(scratch / "copy")
        return taken

    def give_away(source):
        return report(link(source, scratch / "given"), delete_local_checkpoint_after_upload=True)

    for source in sorted(Path(config["data"]).iterdir()):
        in_turn(config, source.name, {"drivetrain": partial(report, source), "cp -r": partial(cp, source)})
        in_turn(config, f"{source.name}, given away", {"drivetrain": partial(give_away, source)})


if __name__ == "__main__":
    config = options(data="", repeats=1)
    trainer = DataParallelTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=1, runtime="local"),
        run_config=RunConfig(storage_path=config["storage"]),
    )
    trainer.fit()
