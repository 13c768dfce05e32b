"""Hyperparameter searches with Optuna on this machine.

The names are the same as in Ray Tune, so a script can be ported by changing its import. To use a trainer with Ray Tune
itself, call :meth:`~drivetrain.DataParallelTrainer.as_trainable`. Importing this package imports neither Optuna nor
Ray.
"""

from drivetrain_tune.results import ResultGrid, TrialResult
from drivetrain_tune.search import TuneConfig
from drivetrain_tune.space import (
    Domain,
    choice,
    grid_search,
    lograndint,
    loguniform,
    qlograndint,
    qloguniform,
    qrandint,
    qrandn,
    quniform,
    randint,
    randn,
    sample_from,
    uniform,
)
from drivetrain_tune.tuner import Tuner

__all__ = [
    "Domain",
    "ResultGrid",
    "TrialResult",
    "TuneConfig",
    "Tuner",
    "choice",
    "grid_search",
    "lograndint",
    "loguniform",
    "qlograndint",
    "qloguniform",
    "qrandint",
    "qrandn",
    "quniform",
    "randint",
    "randn",
    "sample_from",
    "uniform",
]

__version__ = "0.1.0"
