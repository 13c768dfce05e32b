"""One module per subject. Each :class:`~tests.gpu.check.Check` in it is run by ``python -m tests.gpu``."""

MODULES = (
    "torchrun",
    "process_group",
    "devices",
    "data",
    "precision",
    "sharded",
    "recovery",
    "lightning",
    "hf",
    "gbdt",
    "on_ray",
)
"""In the order of the report."""
