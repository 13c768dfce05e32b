"""Code for all scripts in this folder: a trainer, checkpoints, and a small model of PyTorch."""

import itertools
import json
import tempfile
from pathlib import Path

import drivetrain
from drivetrain import Checkpoint, DataParallelTrainer, RunConfig, ScalingConfig

EPOCHS = 6


def run(train_func, trainer=DataParallelTrainer, num_workers=2):
    trainer(train_func, scaling_config=ScalingConfig(num_workers=num_workers), run_config=RunConfig(verbose=0)).fit()


def rank():
    return drivetrain.get_context().get_world_rank()


def load(name="state.json"):
    """Return the saved state; None at the start."""
    checkpoint = drivetrain.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as directory:
        return json.loads(Path(directory, name).read_text())


def save(metrics, state, name="state.json", everywhere=False):
    """Report metrics with a checkpoint, of rank 0 or of every rank."""
    if rank() and not everywhere:
        drivetrain.report(metrics)
        return
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, name).write_text(json.dumps(state))
        ranks = "all" if everywhere else [0]
        drivetrain.report(metrics, Checkpoint.from_directory(directory), checkpoint_ranks=ranks)


def load_torch():
    import torch

    checkpoint = drivetrain.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as directory:
        return torch.load(Path(directory, "state.pt"), weights_only=True)


def save_torch(metrics, state):
    import torch

    if rank():
        drivetrain.report(metrics)
        return
    with tempfile.TemporaryDirectory() as directory:
        torch.save(state, Path(directory, "state.pt"))
        drivetrain.report(metrics, Checkpoint.from_directory(directory), checkpoint_ranks=[0])


def train_torch(
    *,
    dropout=0.0,
    batch_norm=False,
    momentum=0.0,
    decay=1.0,
    shift_epochs=0,
    fixed_order=False,
    leave_out=(),
    only_parameters=False,
    broadcast_buffers=True,
):
    """Train a small model; the arguments select what it has, and which part of the state is wrong."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from drivetrain_torch import prepare_data_loader, prepare_model

    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    loader = prepare_data_loader(DataLoader(data, batch_size=8, shuffle=True))
    normal = torch.nn.BatchNorm1d(8) if batch_norm else torch.nn.Identity()
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), normal, torch.nn.Dropout(dropout), torch.nn.Linear(8, 1))
    parallel = prepare_model(model, parallel_strategy_kwargs={"broadcast_buffers": broadcast_buffers})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=momentum)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    first = 0
    if (state := load_torch()) is not None:
        model.load_state_dict(state["model"], strict=not only_parameters)
        if "optimizer" not in leave_out:
            optimizer.load_state_dict(state["optimizer"])
        if "scheduler" not in leave_out:
            scheduler.load_state_dict(state["scheduler"])
        first = state["epoch"] + 1
    for number, epoch in enumerate(range(first, EPOCHS)):
        if not fixed_order:
            loader.set_epoch(number if shift_epochs else epoch)
        for rows, targets in loader:
            loss = ((parallel(rows) - targets) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        error = float(((model(inputs) - data.tensors[1]) ** 2).mean())
        model.train()
        weights = dict(model.named_parameters()) if only_parameters else model.state_dict()
        weights = {name: value.detach() for name, value in weights.items()}
        parts = {"model": weights, "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        parts = {name: part for name, part in parts.items() if name not in leave_out}
        save_torch({"error": error}, {**parts, "epoch": epoch})


def run_torch(train_func, num_workers=2):
    from drivetrain_torch import TorchTrainer

    run(train_func, TorchTrainer, num_workers)


def train_wide(*, exact):
    """Train a network whose gradients DistributedDataParallel distributes to several buckets."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from drivetrain_torch import TrainState, prepare_data_loader, prepare_model

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(96, 64), torch.randint(0, 10, (96,)))
    loader = prepare_data_loader(DataLoader(data, batch_size=16, shuffle=True))
    widths = [64, 256, 256, 10]
    layers = [torch.nn.Linear(*pair) for pair in itertools.pairwise(widths)]
    model = prepare_model(torch.nn.Sequential(*layers), exact=exact)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    state = TrainState(model=model, optimizer=optimizer, loader=loader)
    for _ in state.epochs(EPOCHS):
        for rows, targets in loader:
            loss = torch.nn.functional.cross_entropy(model(rows), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.step()
        state.save({"loss": float(loss.detach())})
