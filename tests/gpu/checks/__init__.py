"""One module per subject. ``python -m tests.gpu`` runs each :class:`~tests.gpu.check.Check` in these modules."""

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
"""The modules in the order of the report."""
