"""Batches on the GPU: the prefetching loader and datasets."""

import time
from collections.abc import Iterable
from typing import Any

import drivetrain
from drivetrain_torch import get_device, prepare_data_loader
from tests.gpu.check import Figures, Run, check, equal

BATCHES = 24
SIZES = {"cuda": (8192, 2048), "cpu": (64, 32)}
"""Rows and columns of a batch; 64 MiB on the GPU."""
PRODUCTS = 2


def read_batches() -> dict[str, Any]:
    """Read synthetic batches with and without prefetching, while the GPU processes each batch."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    device, on_gpu = get_device(), get_device().type == "cuda"
    rows, columns = SIZES[device.type]
    numbers = torch.arange(BATCHES * rows, dtype=torch.float32)
    data = numbers.repeat_interleave(columns).reshape(BATCHES, rows, columns)
    # Batches are views of pinned memory, so that the loader's only work is copying them to the GPU.
    loader = DataLoader(TensorDataset(data.pin_memory() if on_gpu else data), batch_size=None)
    identity = torch.eye(columns, device=device)

    def use(batches: Iterable[Any]) -> tuple[list[float], float]:
        started, means = time.perf_counter(), []
        for (batch,) in batches:
            result = batch
            for _ in range(PRODUCTS):
                result = result @ identity
            means.append(result.mean(dtype=torch.float64))
            if on_gpu:  # if the memory were reused too early, this would corrupt the batch that is being copied
                batch.fill_(-1)
        return [mean.item() for mean in means], time.perf_counter() - started

    prefetching = prepare_data_loader(loader, add_dist_sampler=False)
    waiting = prepare_data_loader(loader, add_dist_sampler=False, auto_transfer=False)
    use(prefetching)  # warm up
    return {
        name: min((use(prepared) for _ in range(5)), key=lambda result: result[1])
        for name, prepared in (("prefetching", prefetching), ("waiting", waiting))
    }


@check(alone=True)
def prefetching(run: Run) -> Figures:
    """prepare_data_loader copies the next batch while the GPU works, and no batch is corrupted"""
    results = run.fit(read_batches).return_value
    rows = SIZES[run.device][0]
    expected = [number * rows + (rows - 1) / 2 for number in range(BATCHES)]
    for name, (means, _) in results.items():
        worst = max(abs(mean - exact) / exact for mean, exact in zip(means, expected, strict=True))
        assert worst < 1e-6, f"means of the batches, {name}: expected {expected}, got {means}"
    seconds = {name: result[1] for name, result in results.items()}
    return {
        "batches/s with prefetching": BATCHES / seconds["prefetching"],
        "without": BATCHES / seconds["waiting"],
        "time ratio": seconds["prefetching"] / seconds["waiting"],
    }


def read_dataset(config: dict[str, Any]) -> dict[str, Any]:
    import torch

    shard = drivetrain.get_dataset_shard("train")
    seen: dict[str, Any] = {}
    for device in ("auto", "cpu"):
        batches = list(shard.iter_torch_batches(batch_size=64, device=device, prefetch_batches=2))
        numbers = torch.cat([batch["number"] for batch in batches]).tolist()
        images = torch.cat([batch["image"][:, 0] for batch in batches]).tolist()
        seen[device] = {
            "devices": {str(value.device) for batch in batches for value in batch.values()},
            "numbers": sorted(numbers),
            "images match": numbers == images,
        }
    halves = next(iter(shard.iter_torch_batches(batch_size=8, dtypes={"number": torch.int32, "image": torch.bfloat16})))
    seen["dtypes"] = {name: (str(value.dtype), value.device.type) for name, value in halves.items()}
    return seen


@check(packages=("pyarrow", "numpy"))
def dataset_batches(run: Run) -> Figures:
    """iter_torch_batches(device="auto") yields the rows on the worker's GPU"""
    import numpy
    import pyarrow

    count = 1000
    images = numpy.repeat(numpy.arange(count, dtype=numpy.float32), 4).reshape(count, 4)
    table = pyarrow.table(
        {
            "number": numpy.arange(count, dtype=numpy.float32),
            "image": pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(images.ravel()), 4),
        }
    )
    got = run.fit(read_dataset, {}, datasets={"train": table}).return_value
    for device, expected in (("auto", "cuda:0" if run.device == "cuda" else "cpu"), ("cpu", "cpu")):
        equal(f"devices with device={device!r}", got[device]["devices"], {expected})
        equal(f"rows with device={device!r}", got[device]["numbers"], [float(row) for row in range(count)])
        equal(f"columns match with device={device!r}", got[device]["images match"], True)
    types = {"number": ("torch.int32", run.device), "image": ("torch.bfloat16", run.device)}
    equal("dtypes and devices", got["dtypes"], types)
    return {"rows": count}
