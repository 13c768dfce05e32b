"""Describes this machine as a line of JSON: ``python -m tests.gpu.machine DEVICE``.

It runs in a separate process, because the initialization of CUDA may hang or crash.
"""

import importlib.metadata
import json
import os
import platform
import sys
from typing import Any

PACKAGES = (
    *("torch", "triton", "numpy", "pandas", "pyarrow", "scikit-learn", "cloudpickle", "fsspec"),
    *("lightning", "pytorch-lightning", "transformers", "accelerate", "deepspeed", "xgboost", "xgboost-cpu", "ray"),
)


def describe(device: str) -> dict[str, Any]:
    """Return a description of the machine for the report. It includes the GPUs only if the device is ``"cuda"``."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "packages": {name: version for name in PACKAGES if (version := version_of(name)) is not None},
        **(_describe_gpus() if device == "cuda" else {"gpus": []}),
    }


def version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _describe_gpus() -> dict[str, Any]:
    try:
        import torch
    except ImportError as error:
        return {"gpus": [], "problem": f"PyTorch cannot be imported ({error})"}
    if torch.version.cuda is None:
        return {"gpus": [], "problem": f"PyTorch {torch.__version__} is built without CUDA"}
    if not torch.cuda.is_available():
        return {"gpus": [], "problem": f"PyTorch {torch.__version__} finds no usable CUDA device"}
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = [
        {"name": gpu.name, "memory_mib": gpu.total_memory >> 20, "compute_capability": f"{gpu.major}.{gpu.minor}"}
        for gpu in properties
    ]
    torch.ones(1, device="cuda").add_(1).cpu()  # raises an error if the build has no code for this GPU
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
    return {"gpus": gpus, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "nccl": nccl}


if __name__ == "__main__":
    json.dump(describe(sys.argv[1]), sys.stdout)
