"""Loads torch's compiler as a side effect of importing this module.

Each torch feature that supports compilation imports the compiler when it is first used, for example when a process
creates its first ``DistributedDataParallel``. In torch 2.13 this import loads 824 modules and takes most of a second.
The process from which workers are forked imports this module once for all workers. It also reads the metadata of all
installed distributions, in which ``prepare_model`` looks up strategies, once for all workers.
"""

import torch

from drivetrain.plugin import load_plugin

load_plugin("strategy", "ddp")
torch.compiler.reset()
