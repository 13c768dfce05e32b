"""Epochs of a loader of prepare_data_loader and of a plain DataLoader with a DistributedSampler, in turn."""

import time

import torch
from stamps import options, stamp
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import drivetrain
from drivetrain import RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer, prepare_data_loader

ROWS, BATCH_ROWS = 64_000, 32


def train_func(config):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = TensorDataset(torch.rand(ROWS, 8), torch.rand(ROWS))
    processes = {"batch_size": BATCH_ROWS, "num_workers": config["processes"]}
    sampler = DistributedSampler(data, shuffle=True)
    plain = DataLoader(data, sampler=sampler, **processes)
    prepared = prepare_data_loader(DataLoader(data, shuffle=True, **processes))
    is_first = drivetrain.get_context().get_world_rank() == 0
    for number in range(-2, config["epochs"]):
        is_prepared = number % 4 in (1, 2)  # so that neither side is always the first of a pair
        torch.distributed.barrier()
        started, cpu_started = time.perf_counter(), time.process_time()
        if is_prepared:
            prepared.set_epoch(number // 2)
        else:
            sampler.set_epoch(number // 2)
        for _ in prepared if is_prepared else plain:
            pass
        facts = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu_started}
        if is_first and number >= 0:
            stamp(config, "read", prepared=is_prepared, **facts)


if __name__ == "__main__":
    config = options(epochs=4, processes=0)
    TorchTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=config["storage"], verbose=0),
    ).fit()
