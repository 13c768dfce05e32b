"""Names for trainers, and for systems that run trainers as trials."""

from drivetrain._base.lazy import publish
from drivetrain._base.pickling import dumps
from drivetrain._driver.arguments import (
    CommonArguments,
    ConfigT,
    TrainerArguments,
    TrainFunction,
    check_param_space,
    checked_config,
    merge_arguments,
    resolve_backend,
)
from drivetrain._driver.trainer import trainable_of

__all__ = [
    "CommonArguments",
    "ConfigT",
    "TrainFunction",
    "TrainerArguments",
    "check_param_space",
    "checked_config",
    "dumps",
    "merge_arguments",
    "resolve_backend",
    "trainable_of",
]

publish(__name__)
