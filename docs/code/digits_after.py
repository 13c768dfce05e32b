import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain_torch import TorchTrainer, TrainState, prepare_data_loader, prepare_model


def load_data():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    parts = train_test_split(images, torch.tensor(labels), random_state=0)
    train_images, test_images, train_labels, test_labels = parts
    train_data = TensorDataset(train_images, train_labels)
    test_data = TensorDataset(test_images, test_labels)
    return train_data, test_data


def make_network():
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 10)),
    )


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    hits = []
    for images, labels in loader:
        hits.append(model(images).argmax(1) == labels)
    return torch.cat(hits).float().mean().item()


def train_func():
    torch.manual_seed(0)
    train_data, test_data = load_data()
    batch_size = 64 // drivetrain.get_context().get_world_size()
    train_loader = DataLoader(train_data, batch_size=batch_size, shuffle=True)
    train_loader = prepare_data_loader(train_loader)
    test_loader = DataLoader(test_data, batch_size=256)
    test_loader = prepare_data_loader(test_loader, add_dist_sampler=False)
    model = prepare_model(make_network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    state = TrainState(model=model, optimizer=optimizer, loader=train_loader)
    for epoch in state.epochs(8):
        model.train()
        for images, labels in train_loader:
            outputs = model(images)
            loss = nn.functional.cross_entropy(outputs, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.step()
        accuracy = evaluate(model, test_loader)
        metrics = {"epoch": epoch, "loss": loss, "accuracy": accuracy}
        state.save(metrics, reduce={"loss": "mean"})
    return accuracy


if __name__ == "__main__":
    scaling_config = drivetrain.ScalingConfig(num_workers=2)
    result = TorchTrainer(train_func, scaling_config=scaling_config).fit()
    print(f"accuracy {result.return_value:.4f}")
