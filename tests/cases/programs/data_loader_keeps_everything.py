"""A prepared loader keeps the class, the arguments and the attributes of a subclass of DataLoader.

Its seed determines the order, and set_epoch reaches datasets that have this method.
"""

# arguments: local
# campaign: inprocess; ray

import sys
import warnings

import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset

import drivetrain
from drivetrain_torch import TorchTrainer, enable_reproducibility, prepare_data_loader


class Rows(Dataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((3,), float(index + 100 * self.epoch))


class Stream(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from torch.randperm(16, generator=torch.Generator().manual_seed(self.epoch)).tolist()


class GraphLoader(DataLoader):
    """Like the loaders of PyTorch Geometric: makes the collate function from its own arguments."""

    def __init__(self, dataset, batch_size=1, shuffle=False, follow_batch=None, **kwargs):
        kwargs.pop("collate_fn", None)

        def collate(items):
            return {"x": torch.stack(items), **{f"{name}_batch": len(items) for name in follow_batch or []}}

        super().__init__(dataset, batch_size, shuffle, collate_fn=collate, **kwargs)


class LimitedLoader(DataLoader):
    """A loader with an argument under another name, and an attribute that is set after construction."""

    limit = None

    def __init__(self, dataset, pad_to=None, **kwargs):
        self._pad_to = pad_to
        super().__init__(dataset, **kwargs)

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            if number == self.limit:
                return
            yield torch.nn.functional.pad(batch, (0, self._pad_to - batch.shape[1])) if self._pad_to else batch


def rows_of(loader):
    return [value for batch in loader for value in batch.flatten().tolist()]


def shuffled(seed, how):
    generator = None
    if how == "manual_seed":
        torch.manual_seed(seed)
    elif how == "enable_reproducibility":
        enable_reproducibility(seed)
    else:
        generator = torch.Generator().manual_seed(seed)
    return rows_of(prepare_data_loader(DataLoader(range(64), shuffle=True, generator=generator)))


def epochs(loader):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # streams cannot be sharded
        loader = prepare_data_loader(loader)
    found = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        found.append(rows_of(loader))
    return found[0] != found[1]


def train():
    graphs = prepare_data_loader(GraphLoader(Rows(), batch_size=2, follow_batch=["x"]))
    limited = LimitedLoader(Rows(), pad_to=5, batch_size=2)
    limited.limit = 1
    limited = prepare_data_loader(limited)
    batches = list(limited)
    kept = {
        "class": isinstance(graphs, GraphLoader) and isinstance(limited, LimitedLoader),
        "argument of a collate function": "x_batch" in next(iter(graphs)),
        "argument under another name": batches[0].shape[1] == 5,
        "attribute": len(batches) == 1,
        "epoch of a dataset": epochs(DataLoader(Rows())),
        "epoch of datasets in a dataset": epochs(DataLoader(ConcatDataset([Rows(), Rows()]))),
        "epoch of a stream": epochs(DataLoader(Stream())),
    }
    for how in ("manual_seed", "enable_reproducibility", "generator"):
        kept[f"order of {how}"] = shuffled(1, how) == shuffled(1, how) != shuffled(2, how)
    return kept


if __name__ == "__main__":
    runtime = sys.argv[1]
    workers = {"num_workers": 0 if runtime == "inprocess" else 2, "runtime": runtime}
    trainer = TorchTrainer(
        train,
        scaling_config=drivetrain.ScalingConfig(**workers),
        run_config=drivetrain.RunConfig(verbose=0),
    )
    lost = [name for name, kept in trainer.fit().return_value.items() if not kept]
    print("lost:", lost)
    sys.exit(bool(lost))
