"""Imported for its effect: loads torch's compiler, which everything that can be compiled imports on first use.

That is 824 modules and most of a second in torch 2.13, for the first optimizer of a process for example. In the
process that workers are forked from it is paid once for all of them.
"""

import torch

torch.compiler.reset()
