"""Loads torch's compiler as a side effect of importing this module.

Every feature that can be compiled imports the compiler on first use, for example the first optimizer of a process. In
torch 2.13 this loads 824 modules and takes most of a second. The process that workers are forked from imports this
module once for all of them.
"""

import torch

torch.compiler.reset()
