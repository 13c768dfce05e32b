import drivetrain
import torch
from drivetrain_torch import TorchTrainer, TrainState, prepare_data_loader, prepare_model
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


def train_func(config: dict[str, float]) -> None:
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    loader = prepare_data_loader(DataLoader(data, batch_size=32, shuffle=True))
    model = prepare_model(torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    state = TrainState(model=model, optimizer=optimizer, loader=loader)
    for epoch in state.epochs(5):
        for batch, target in loader:
            loss = torch.nn.functional.cross_entropy(model(batch), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.step()
        state.save({"epoch": epoch, "loss": loss}, reduce={"loss": "mean"})


trainer = TorchTrainer(
    train_func,
    train_loop_config={"lr": 0.01},
    scaling_config=drivetrain.ScalingConfig(num_workers=2),
    run_config=drivetrain.RunConfig(failure_config=drivetrain.FailureConfig(max_failures=3)),
)
print(trainer.fit().metrics["loss"])
