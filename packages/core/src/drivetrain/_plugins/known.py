"""The distributions of this project that need not be installed: for the hints in error messages.

The metadata of ``drivetrain`` contain the same table, but an environment may contain only ``drivetrain-core``.
"""

__all__ = ["CORE", "EXTRAS", "OWN", "PROVIDERS"]

CORE = "drivetrain-core"
"""The distribution to which this module belongs."""

EXTRAS = {
    "torch": "drivetrain-torch",
    "lightning": "drivetrain-lightning",
    "transformers": "drivetrain-hf",
    "accelerate": "drivetrain-hf",
    "deepspeed": "drivetrain-hf",
    "tensorflow": "drivetrain-tf",
    "xgboost": "drivetrain-gbdt",
    "lightgbm": "drivetrain-gbdt",
    "horovod": "drivetrain-horovod",
    "jax": "drivetrain-jax",
    "ray": "drivetrain-ray",
    "tune": "drivetrain-tune",
    "ray-tune": "drivetrain-ray",
    "data": "drivetrain-data",
    "tensorboard": "drivetrain-track",
    "mlflow": "drivetrain-track",
    "wandb": "drivetrain-track",
    "comet": "drivetrain-track",
    "aim": "drivetrain-track",
    "launch": "drivetrain-launch",
    "interactive": "drivetrain-interactive",
    "rich": "drivetrain-console",
    "plot": "drivetrain-console",
    "completion": "drivetrain-console",
    "testing": "drivetrain-testing",
}
"""The distribution that each extra of ``drivetrain`` installs."""

PROVIDERS = {
    ("runtime", "command"): "drivetrain[launch]",
    ("command", "new-plugin"): "drivetrain[testing]",
    ("command", "prove"): "drivetrain[testing]",
    ("callback", "progress"): "drivetrain",
    ("view", "page"): "drivetrain",
}
"""The requirement that installs a plugin, by its kind and name, for plugins whose name is not that of an extra."""

OWN = frozenset({CORE, "drivetrain", *EXTRAS.values()})
"""All distributions of this project."""
