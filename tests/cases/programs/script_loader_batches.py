"""A loader process returns a dataclass or a named tuple of the script, with every start method of multiprocessing."""

# arguments: local fork; local spawn
# campaign: local forkserver; inprocess spawn; ray fork

import dataclasses
import sys
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

import drivetrain
from drivetrain_torch import TorchTrainer, prepare_data_loader

Row = tuple[torch.Tensor, torch.Tensor]


class Squares(Dataset[Row]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Row:
        return torch.tensor([float(index)]), torch.tensor([float(index**2)])


@dataclasses.dataclass
class Batch:
    inputs: torch.Tensor
    targets: torch.Tensor


class Pair(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor


def as_dataclass(rows: list[Row]) -> Batch:
    return Batch(torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows]))


def as_pair(rows: list[Row]) -> Pair:
    return Pair(torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows]))


def train(config: dict[str, str]) -> list[bool]:
    outcomes = []
    for collate, kind in ((as_dataclass, Batch), (as_pair, Pair)):
        loader = DataLoader(
            Squares(),
            batch_size=4,
            num_workers=1,
            collate_fn=collate,
            multiprocessing_context=config["method"],
            timeout=60,
        )
        batches = list(prepare_data_loader(loader))
        outcomes.append(bool(batches) and all(type(batch) is kind for batch in batches))
    return outcomes


def main() -> bool:
    runtime, method = sys.argv[1:]
    workers = drivetrain.ScalingConfig(
        num_workers=0 if runtime == "inprocess" else 1, runtime=None if runtime == "inprocess" else runtime
    )
    result = TorchTrainer(
        train,
        train_loop_config={"method": method},
        scaling_config=workers,
        run_config=drivetrain.RunConfig(verbose=0),
    ).fit()
    print(result.return_value)
    return bool(result.return_value == [True, True])


if __name__ == "__main__":
    sys.exit(not main())
