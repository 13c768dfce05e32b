"""PyTorch for drivetrain: a process group of all workers, and functions that prepare models and data loaders.

Importing this package does not import torch. Each worker imports torch on first use.
"""

from drivetrain_torch._config import TorchConfig, TorchXLAConfig
from drivetrain_torch._devices import get_device, get_devices
from drivetrain_torch._prepare import enable_reproducibility, prepare_data_loader, prepare_model
from drivetrain_torch._random import get_random_states, set_random_states
from drivetrain_torch._state import TrainState
from drivetrain_torch._strategies import ParallelStrategy
from drivetrain_torch._trainer import TorchTrainer

__all__ = [
    "ParallelStrategy",
    "TorchConfig",
    "TorchTrainer",
    "TorchXLAConfig",
    "TrainState",
    "enable_reproducibility",
    "get_device",
    "get_devices",
    "get_random_states",
    "prepare_data_loader",
    "prepare_model",
    "set_random_states",
]

__version__ = "0.1.0"
