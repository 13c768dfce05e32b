"""PyTorch for drivetrain: a process group on every worker, and functions that prepare models and data loaders for it.

Importing this package does not import torch. A worker imports torch when it first needs it.
"""

from drivetrain_torch._config import TorchConfig, TorchXLAConfig
from drivetrain_torch._devices import get_device, get_devices
from drivetrain_torch._prepare import enable_reproducibility, prepare_data_loader, prepare_model
from drivetrain_torch._sharded import load_sharded, save_sharded
from drivetrain_torch._trainer import TorchTrainer

__all__ = [
    "TorchConfig",
    "TorchTrainer",
    "TorchXLAConfig",
    "enable_reproducibility",
    "get_device",
    "get_devices",
    "load_sharded",
    "prepare_data_loader",
    "prepare_model",
    "save_sharded",
]
