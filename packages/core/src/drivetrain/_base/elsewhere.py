"""Where to import names that scripts look up in the modules of ``drivetrain``, but that belong to other packages."""

from __future__ import annotations

__all__ = ["PLACES", "import_of"]

PLACES = {
    "torch": (
        "prepare_model prepare_data_loader TorchTrainer TorchConfig TorchXLAConfig enable_reproducibility get_device "
        "get_devices"
    ),
    "lightning": (
        "prepare_trainer RayDDPStrategy RayFSDPStrategy RayDeepSpeedStrategy RayLightningEnvironment "
        "RayTrainReportCallback"
    ),
    "hf.transformers": "prepare_trainer TransformersTrainer",
    "hf.accelerate": "AccelerateTrainer",
    "gbdt.xgboost": "XGBoostTrainer XGBoostConfig",
    "gbdt.lightgbm": "LightGBMTrainer LightGBMConfig get_network_params",
    "tf": "TensorflowTrainer TensorflowConfig prepare_dataset_shard",
    "horovod": "HorovodTrainer HorovodConfig",
    "jax": "JaxTrainer JaxConfig",
    "tune": "Tuner",
    "interactive": (
        "Trainer TrainingCallback CheckpointStrategy TrainingIterator save_checkpoint load_checkpoint world_rank "
        "local_rank world_size"
    ),
    "launch": "CommandRuntime",
    "console": "ProgressCallback add_command emit find_run",
    "track": (
        "TrackerCallback numbers parameters TBXLoggerCallback MLflowLoggerCallback WandbLoggerCallback "
        "CometLoggerCallback AimLoggerCallback"
    ),
    "testing": (
        "BackendConformance TrainerConformance RuntimeConformance DatasetConformance CallbackConformance CrashHarness"
    ),
}
"""The names of each module, separated by spaces; the first one is the example for the module itself.

The names of the modules lack their prefix, so that a change of a plugin does not select every test.
"""

_MODULES = {
    "hf.transformers": "huggingface",
    "tf": "tensorflow",
    "gbdt.xgboost": "xgboost",
    "gbdt.lightgbm": "lightgbm",
}
"""The modules of ``ray.train`` whose names differ from those of drivetrain's packages."""


def import_of(name: str) -> str | None:
    """Return the statement that imports a name, or an example for a module; None if the name is unknown."""
    for place, names in PLACES.items():
        module = f"drivetrain_{place}"
        if name in names.split():
            return f"from {module} import {name}"
        if name == _MODULES.get(place, place):
            return f"from {module} import {names.split()[0]}"
    return None
