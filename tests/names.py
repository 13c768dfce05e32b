"""The public names of all packages."""

import importlib
from collections.abc import Iterator
from pathlib import Path

import drivetrain.plugin

MODULES = (
    *("drivetrain", "drivetrain.errors", "drivetrain.plugin", "drivetrain.runs", "drivetrain.loggers"),
    *(f"drivetrain.plugin.{file.stem}" for file in sorted(Path(drivetrain.plugin.__path__[0]).glob("[a-z]*.py"))),
    *("drivetrain_console", "drivetrain_interactive", "drivetrain_launch"),
    *("drivetrain_testing", "drivetrain_testing.kits", "drivetrain_track.testing"),
    "drivetrain_ray",
    "drivetrain_data",
    "drivetrain_track",
    "drivetrain_tune",
    *("drivetrain_torch", "drivetrain_lightning", "drivetrain_gbdt.xgboost", "drivetrain_gbdt.lightgbm"),
    *("drivetrain_hf.transformers", "drivetrain_hf.accelerate", "drivetrain_hf.deepspeed", "drivetrain_horovod"),
    *("drivetrain_tf", "drivetrain_tf.keras", "drivetrain_torch.testing"),
    "drivetrain_jax",
)


def public_names() -> Iterator[tuple[str, str]]:
    """Yield the module and the name of everything public, except for names that are in ``drivetrain`` as well."""
    for module in MODULES:
        for name in importlib.import_module(module).__all__:
            if module != "drivetrain.plugin" or name not in drivetrain.__all__:
                yield module, name
