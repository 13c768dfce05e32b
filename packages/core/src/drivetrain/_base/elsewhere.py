"""Where to import names that scripts look up in ``drivetrain``, but that belong to other packages."""

from __future__ import annotations

__all__ = ["PLACES", "import_of"]

PLACES = {
    "drivetrain_torch": (
        "prepare_model prepare_data_loader TorchTrainer TorchConfig TorchXLAConfig enable_reproducibility get_device "
        "get_devices"
    ),
    "drivetrain_lightning": (
        "prepare_trainer RayDDPStrategy RayFSDPStrategy RayDeepSpeedStrategy RayLightningEnvironment "
        "RayTrainReportCallback"
    ),
    "drivetrain_hf.transformers": "prepare_trainer TransformersTrainer",
    "drivetrain_hf.accelerate": "AccelerateTrainer",
    "drivetrain_gbdt.xgboost": "XGBoostTrainer XGBoostConfig",
    "drivetrain_gbdt.lightgbm": "LightGBMTrainer LightGBMConfig get_network_params",
    "drivetrain_tf": "TensorflowTrainer TensorflowConfig prepare_dataset_shard",
    "drivetrain_horovod": "HorovodTrainer HorovodConfig",
    "drivetrain_jax": "JaxTrainer JaxConfig",
    "drivetrain_tune": "Tuner",
}
"""The names of each module, separated by spaces. The first one is the example for the module itself."""

_MODULES = {"huggingface": "drivetrain_hf.transformers", "tensorflow": "drivetrain_tf"}
"""The modules of ``ray.train`` whose names differ from those of drivetrain's packages."""


def import_of(name: str) -> str | None:
    """Return the statement that imports a name, or an example for a module; None if the name is unknown."""
    for place, names in PLACES.items():
        if name in names.split():
            return f"from {place} import {name}"
        if place in (_MODULES.get(name), f"drivetrain_{name}", f"drivetrain_gbdt.{name}"):
            return f"from {place} import {names.split()[0]}"
    return None
