import torch
from drivetrain import FailureConfig, RunConfig, ScalingConfig
from drivetrain_torch import TorchTrainer, TrainState, prepare_data_loader, prepare_model
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def train():
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    loader = prepare_data_loader(DataLoader(data, batch_size=32, shuffle=True))
    model = prepare_model(torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = TrainState(model=model, optimizer=optimizer, loader=loader)
    for epoch in state.epochs(5):
        for inputs, targets in loader:
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.step()
        state.save({"epoch": epoch, "loss": loss}, reduce={"loss": "mean"})


workers = ScalingConfig(num_workers=8, use_gpu=True)
retries = RunConfig(failure_config=FailureConfig(max_failures=3))
result = TorchTrainer(train, scaling_config=workers, run_config=retries).fit()
print(result.metrics, result.checkpoint)
