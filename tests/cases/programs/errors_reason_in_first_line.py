"""The first line of the error contains the reason if another process, or a task of a group, has raised it."""
# arguments: local
# campaign: ray

import asyncio
import sys

import torch
from torch.utils.data import DataLoader, Dataset

from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig

REASON = "row 3 has no price"


class Rows(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise ValueError(REASON)
        return index


def in_a_loader() -> None:
    list(DataLoader(Rows(), num_workers=1))


def fail(rank: int) -> None:
    raise ValueError(REASON)


def in_a_spawned_process() -> None:
    torch.multiprocessing.spawn(fail)


async def wait_for_task() -> None:
    fail(0)


async def run_tasks() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(wait_for_task())


def in_a_group() -> None:
    asyncio.run(run_tasks())


if __name__ == "__main__":
    functions = [in_a_loader, in_a_spawned_process]
    if sys.version_info >= (3, 11):
        functions.append(in_a_group)
    missing = 0
    for function in functions:
        scaling = ScalingConfig(num_workers=1, runtime=sys.argv[1])
        trainer = DataParallelTrainer(function, scaling_config=scaling, run_config=RunConfig(verbose=0))
        first = str(trainer.fit(raise_on_failure=False).error).partition("\n")[0]
        print(first)
        missing += REASON not in first
    sys.exit(1 if missing else 0)
