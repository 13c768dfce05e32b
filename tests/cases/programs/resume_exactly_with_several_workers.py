"""A run that was killed and resumed has the same parameters, bit by bit, as a run that was not disturbed.

With three or more workers, DistributedDataParallel adds gradients in another order after the first step of a process.
"""

# arguments: 3 exact; 3 reproducible
# campaign: 2 exact; 4 exact; 4 reproducible

import hashlib
import os
import signal
import sys
import tempfile

import torch

import drivetrain
from drivetrain import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from drivetrain_torch import TorchConfig, TorchTrainer, enable_reproducibility, prepare_model

STEPS, SAVED, KILLED = 40, 20, 30


def train(config):
    context = drivetrain.get_context()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if config["how"] == "reproducible":
        enable_reproducibility()
    layers = torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU()
    network = torch.nn.Sequential(*layers, torch.nn.Linear(256, 10))
    first, saved = 0, None
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            saved = torch.load(os.path.join(directory, "state.pt"), weights_only=True)
        network.load_state_dict(saved["network"])
        first = saved["step"]
    model = prepare_model(network, exact=True if config["how"] == "exact" else None)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(first, STEPS):
        generator = torch.Generator().manual_seed(1000 * step + context.get_world_rank())
        inputs = torch.randn(16, 64, generator=generator)
        labels = torch.randint(0, 10, (16,), generator=generator)
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step + 1 == SAVED:
            with tempfile.TemporaryDirectory() as directory:
                state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, os.path.join(directory, "state.pt"))
                first_rank = context.get_world_rank() == 0
                drivetrain.report({"step": step}, Checkpoint.from_directory(directory) if first_rank else None)
        if config["kill"] and step == KILLED and context.get_world_rank() == 0 and context.attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    content = b"".join(value.numpy().tobytes() for value in network.state_dict().values())
    return hashlib.sha256(content).hexdigest()


def fit(workers, how, *, kill):
    trainer = TorchTrainer(
        train,
        train_loop_config={"kill": kill, "how": how},
        scaling_config=ScalingConfig(num_workers=workers),
        torch_config=TorchConfig(timeout_s=60),
        run_config=RunConfig(verbose=0, failure_config=FailureConfig(max_failures=2)),
    )
    return trainer.fit().return_value


if __name__ == "__main__":
    workers, how = int(sys.argv[1]), sys.argv[2]
    undisturbed, resumed = (fit(workers, how, kill=kill) for kill in (False, True))
    print(f"undisturbed {undisturbed}, resumed {resumed}")
    sys.exit(undisturbed != resumed)
