"""LightGBM's parameters by any of their names: each of them has several."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Literal

__all__ = ["ALIASES", "NETWORK", "find", "pop", "pop_network", "pop_rounds"]

ALIASES: Mapping[str, tuple[str, ...]] = {
    "bagging_fraction": ("sub_row", "subsample", "bagging"),
    "bagging_freq": ("subsample_freq",),
    "bagging_seed": ("bagging_fraction_seed",),
    "bin_construct_sample_cnt": ("subsample_for_bin",),
    "boosting": ("boosting_type", "boost"),
    "data_random_seed": ("data_seed",),
    "device_type": ("device",),
    "drop_seed": (),
    "early_stopping_round": ("early_stopping_rounds", "early_stopping", "n_iter_no_change"),
    "extra_seed": (),
    "extra_trees": ("extra_tree",),
    "feature_fraction": ("sub_feature", "colsample_bytree"),
    "feature_fraction_bynode": ("sub_feature_bynode", "colsample_bynode"),
    "feature_fraction_seed": (),
    "linear_tree": ("linear_trees",),
    "local_listen_port": ("local_port", "port"),
    "machine_list_filename": ("machine_list_file", "machine_list", "mlist"),
    "machines": ("workers", "nodes"),
    "neg_bagging_fraction": ("neg_sub_row", "neg_subsample", "neg_bagging"),
    "num_class": ("num_classes",),
    "num_iterations": (
        *("num_iteration", "n_iter", "num_tree", "num_trees", "num_round", "num_rounds", "nrounds"),
        *("num_boost_round", "n_estimators", "max_iter"),
    ),
    "num_machines": ("num_machine",),
    "num_threads": ("num_thread", "nthread", "nthreads", "n_jobs"),
    "objective": ("objective_type", "app", "application", "loss"),
    "pos_bagging_fraction": ("pos_sub_row", "pos_subsample", "pos_bagging"),
    "pre_partition": ("is_pre_partition",),
    "seed": ("random_seed", "random_state"),
    "time_out": (),
    "tree_learner": ("tree", "tree_type", "tree_learner_type"),
}
"""For each parameter that drivetrain reads or sets: its other names. LightGBM has no public function for them."""

_DEFAULTS: Mapping[str, object] = {
    "machines": "",
    "num_machines": 1,
    "local_listen_port": 12400,
    "machine_list_filename": "",
    "pre_partition": False,
    "time_out": 120,
    "tree_learner": "serial",
}
"""The parameters of the network with LightGBM's defaults, which the parameters of a saved model contain."""

NETWORK = tuple(_DEFAULTS)
"""The parameters that drivetrain sets itself."""

_ALONE = ("num_machines", "tree_learner")  # their defaults select one machine

_Learner = Literal["data", "voting"]
_PARALLEL: Mapping[str, _Learner] = {
    "data": "data",
    "data_parallel": "data",
    "voting": "voting",
    "voting_parallel": "voting",
}


def find(params: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return the value of a parameter. If several of its names are given, LightGBM's own name has priority."""
    return next((params[key] for key in _names(name) if params.get(key) is not None), default)


def pop(params: MutableMapping[str, Any], name: str, default: Any = None) -> Any:
    """Remove a parameter under all its names, and return its value, as :func:`find` does."""
    value = find(params, name, default)
    for key in _names(name):
        params.pop(key, None)
    return value


def pop_rounds(params: MutableMapping[str, Any], rounds: int) -> int:
    """Remove the number of rounds from the parameters, where LightGBM gives it priority over ``num_boost_round``.

    Args:
        params: the parameters of the user.
        rounds: the value of ``num_boost_round``.
    """
    return int(pop(params, "num_iterations", rounds))


def pop_network(params: MutableMapping[str, Any], several: bool, configured: str | None) -> _Learner | None:
    """Remove the parameters of the network, and warn about those that do not describe this network.

    With them, a worker would train alone: the parameters of a saved model, for example, contain ``num_machines`` 1.

    Args:
        params: the parameters of the user.
        several: True if there are several workers.
        configured: the parallel algorithm in the configuration of the network; None if there is no configuration.

    Returns:
        The parallel algorithm that the parameters select; None if they select none.
    """
    given = {key: params[key] for name in NETWORK for key in _names(name) if key in params}
    values = {name: pop(params, name) for name in NETWORK}
    learner = values["tree_learner"]
    selected = _PARALLEL.get(str(learner))
    accepted = {name: value for name, value in _DEFAULTS.items() if not (several and name in _ALONE)}
    if configured in (None, selected):
        accepted["tree_learner"] = learner if selected else accepted.get("tree_learner")
    ignored = [
        f"{key}={value!r}"
        for name in NETWORK
        for key, value in given.items()
        if key in _names(name) and value not in (None, accepted.get(name))
    ]
    if ignored:
        warnings.warn(
            f"LightGBMTrainer(params=...): expected no parameters of the network, because the trainer connects its "
            f"workers itself, got {', '.join(ignored)}. They are ignored. Remove them; set the number of workers with "
            "ScalingConfig(num_workers=...), and the algorithm with LightGBMConfig(tree_learner=...)",
            stacklevel=5,
        )
    return selected


def _names(name: str) -> Iterator[str]:
    yield name
    yield from ALIASES[name]
