"""Train a small transformer on handwritten digits with FSDP2 and tensor parallelism, on four workers.

python examples/tensor_parallel_digits.py --data 2 --tensor 2
"""

import argparse
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset, random_split

from drivetrain import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from drivetrain_torch import (
    TorchTrainer,
    TrainState,
    enable_reproducibility,
    get_device,
    prepare_data_loader,
    prepare_model,
)

BATCH_SIZE = 64  # of all workers together
WIDTH, HEAD_WIDTH, LAYERS = 64, 16, 2
GOAL = 0.95  # the accuracy on the test set

# Workers of a tensor group have different heads and hidden units, and add up the outputs of their parts.
PLAN = {
    **{f"layers.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "up")},
    **{f"layers.*.{name}": RowwiseParallel() for name in ("attended", "down")},
}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.attended = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, tokens):
        normed = self.norm(tokens)
        # The number of heads depends on the tensor group: -1 stands for those of this worker.
        parts = [part(normed).unflatten(-1, (-1, HEAD_WIDTH)) for part in (self.query, self.key, self.value)]
        heads = nn.functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts))
        tokens = tokens + self.attended(heads.transpose(1, 2).flatten(2))
        return tokens + self.down(nn.functional.gelu(self.up(self.second_norm(tokens))))


class Transformer(nn.Module):
    """Reads an image as eight tokens, one for each row of eight pixels."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.positions = nn.Parameter(torch.randn(8, WIDTH) * 0.1)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.classify = nn.Sequential(nn.LayerNorm(8 * WIDTH), nn.Linear(8 * WIDTH, 10))

    def forward(self, images):
        return self.classify(self.layers(self.embed(images) + self.positions).flatten(1))


def make_datasets():
    """Return 1,797 scans of 8 x 8 pixels with their labels, split into four fifths for training and one for testing."""
    images, digits = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 8, 8) / 16
    dataset = TensorDataset(images, torch.tensor(digits))
    return random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(0))


@torch.no_grad()
def accuracy(model, dataset):
    images, digits = (part.to(next(model.parameters()).device) for part in dataset[:])
    return (model(images).argmax(dim=1) == digits).float().mean().item()


def train_func(config):
    enable_reproducibility(seed=0)
    shape = config["data"], config["tensor"]
    mesh = init_device_mesh(get_device().type, shape, mesh_dim_names=("dp", "tp"))

    train_set, test_set = make_datasets()
    loader = DataLoader(train_set, batch_size=BATCH_SIZE // config["data"], shuffle=True)
    loader = prepare_data_loader(loader, mesh=mesh)
    model = parallelize_module(Transformer(), mesh["tp"], PLAN)
    model = prepare_model(model, True, "fsdp2", {"modules": [Layer]}, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    state = TrainState(model=model, optimizer=optimizer, loader=loader)  # knows the mesh of the model

    for epoch in state.epochs(config["epochs"]):
        for images, digits in loader:
            loss = nn.functional.cross_entropy(model(images), digits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.step()
        metrics = {"epoch": epoch + 1, "loss": loss, "accuracy": accuracy(model, test_set)}
        state.save(metrics, reduce={"loss": "mean"})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=int, default=2, help="the number of workers with different rows")
    parser.add_argument("--tensor", type=int, default=2, help="the number of workers that divide each layer")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--storage-path", help="the parent of the run directory (default: ~/drivetrain_results)")
    options = parser.parse_args()

    workers = options.data * options.tensor
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"data": options.data, "tensor": options.tensor, "epochs": options.epochs},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=torch.cuda.device_count() >= workers),
        run_config=RunConfig(
            storage_path=options.storage_path,
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=1),
        ),
    )
    result = trainer.fit()

    model = Transformer()  # in this process, the whole model
    TrainState(model=model).load(result.checkpoint)
    test_accuracy = accuracy(model, make_datasets()[1])
    print(f"The last checkpoint classifies {test_accuracy:.1%} of the test digits correctly.")
    print(f"The run directory is {result.path}")
    return 0 if test_accuracy >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
