"""Search spaces, and the changes that a trial makes to a trainer's arguments."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import optuna
import pytest

import drivetrain
import drivetrain_tune as tune
from drivetrain import ConfigurationError, DataParallelTrainer, ScalingConfig
from drivetrain_tune.space import Space


def draw(tree: dict[str, Any], count: int = 50) -> list[dict[str, Any]]:
    space = Space(tree)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    return [space.draw(study.ask()).config for _ in range(count)]


DOMAINS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], bool]]] = {
    "uniform": (lambda lib: lib.uniform(-1, 2), lambda value: -1 <= value <= 2),
    "quniform": (
        lambda lib: lib.quniform(1, 2, 0.25),
        lambda value: 1 <= value <= 2 and value * 4 == int(value * 4),
    ),
    "loguniform": (lambda lib: lib.loguniform(1e-4, 1e-1), lambda value: 1e-4 <= value <= 1e-1),
    "qloguniform": (
        lambda lib: lib.qloguniform(0.5, 8, 0.5),
        lambda value: 0.5 <= value <= 8 and value * 2 % 1 == 0,
    ),
    "randn": (lambda lib: lib.randn(10, 2), lambda value: 0 < value < 20),
    "qrandn": (lambda lib: lib.qrandn(10, 2, 0.5), lambda value: 0 < value < 20 and value * 2 % 1 == 0),
    "randint": (lambda lib: lib.randint(2, 5), lambda value: value in (2, 3, 4)),
    "qrandint": (lambda lib: lib.qrandint(2, 8, 2), lambda value: value in (2, 4, 6, 8)),
    "lograndint": (lambda lib: lib.lograndint(1, 65), lambda value: 1 <= value <= 64),
    "qlograndint": (lambda lib: lib.qlograndint(2, 64, 2), lambda value: 2 <= value <= 64 and value % 2 == 0),
    "choice": (lambda lib: lib.choice(["a", ("b", 2)]), lambda value: value in ("a", ("b", 2))),
    "sample_from": (lambda lib: lib.sample_from(lambda config: config["other"] + 1), lambda value: value == 4),
}


@pytest.mark.parametrize("name", DOMAINS)
def test_values_are_within_their_domain_and_equal_for_domains_of_ray_tune(name: str) -> None:
    import ray.tune

    make, is_valid = DOMAINS[name]
    drawn = [config["value"] for config in draw({"value": make(tune), "other": 3})]

    assert all(map(is_valid, drawn))
    assert len(set(drawn)) > 1 or name == "sample_from"
    assert {type(value) for value in drawn} != {float} or "int" not in name
    assert [config["value"] for config in draw({"value": make(ray.tune), "other": 3})] == drawn


def test_every_combination_of_grids_is_used() -> None:
    tree = {"deep": {"a": tune.grid_search([1, 2])}, "b": [tune.grid_search(["x", [3]])], "c": tune.uniform(0, 1)}

    space = Space(tree)
    configs = [space.config({"c": 0.5, **fixed}) for fixed in space.grid]

    assert [(config["deep"]["a"], config["b"][0]) for config in configs] == [(1, "x"), (1, [3]), (2, "x"), (2, [3])]


def test_equal_booleans_and_numbers_are_different_choices() -> None:
    drawn = [config["value"] for config in draw({"value": tune.choice([1, True, 1.0])})]
    assert {type(value) for value in drawn} == {int, bool, float}


class Betas(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Options:
    lr: Any


def test_domains_in_options_are_drawn_only_with_their_option() -> None:
    space = Space({"a": tune.choice([0, {"b": tune.uniform(1, 2)}, (tune.choice([[tune.uniform(3, 4)]]),)])})
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    drawn = [space.draw(study.ask()) for _ in range(50)]

    for each in drawn:
        value = each.config["a"]
        if value == 0:
            assert each.values == {"a": 0}
        elif isinstance(value, dict):
            assert each.values == {"a": 1, "a/1/b": value["b"]}
        else:
            assert each.values == {"a": 2, "a/2/0": 0, "a/2/0/0/0": value[0][0]}
        assert space.config(each.values) == each.config
        assert space.distributions(each.values).keys() == each.values.keys()
        assert space.fits(each.values, {})
    assert {each.values["a"] for each in drawn} == {0, 1, 2}
    assert not space.fits({"a": 1}, {})
    assert not space.fits({"a": 0, "b": 1}, {})


def test_tuples_keep_their_type() -> None:
    given = {"drawn": Betas(tune.uniform(0, 1), 0.9), "plain": Betas(1, 2)}
    (config,) = draw(given, 1)
    assert isinstance(config["drawn"], Betas)
    assert 0 <= config["drawn"].first <= 1
    assert config["plain"] is given["plain"]


def test_grid_in_an_option_of_a_grid_applies_to_this_option() -> None:
    space = Space({"a": tune.grid_search([{"b": tune.grid_search([1, 2])}, 3]), "c": tune.grid_search([4, 5])})
    configs = [space.config(fixed) for fixed in space.grid]
    assert [(config["a"], config["c"]) for config in configs] == [
        ({"b": 1}, 4),
        ({"b": 1}, 5),
        ({"b": 2}, 4),
        ({"b": 2}, 5),
        (3, 4),
        (3, 5),
    ]


def test_functions_read_the_values_of_other_functions_in_any_order() -> None:
    space = {
        "all": tune.sample_from(lambda config: sum(config.values())),
        "first": tune.sample_from(lambda config: config["second"] + 1),
        "second": tune.sample_from(lambda config: config.get("third") + 1),
        "third": tune.sample_from(lambda config: tune.choice([config["fourth"], config["fourth"] * 2])),
        "fourth": tune.choice([10, 20]),
    }
    for config in draw(space, 10):
        assert config["third"] in (config["fourth"], config["fourth"] * 2)
        assert config["first"] == config["second"] + 1 == config["third"] + 2
        assert config["all"] == config["first"] + config["second"] + config["third"] + config["fourth"]


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"a/b": tune.uniform(0, 1), "a": {"b": 1}}, "one value with the path 'a/b', got 2"),
        ({1: tune.uniform(0, 1), "1": tune.uniform(0, 1)}, "one value with the path '1', got 2"),
        ({"a": tune.choice([[tune.uniform(0, 1)]]), "a/0/0": 1}, "one value with the path 'a/0/0', got 2"),
        ({"a": {tune.uniform(0, 1)}}, "got Range.* in a set at 'a'"),
        ({"a": [Options(tune.uniform(0, 1))]}, "got Range.* in a Options at 'a/0'"),
        (
            {"a": tune.sample_from(lambda config: config["b"]), "b": tune.sample_from(lambda config: config["a"])},
            "a, b",
        ),
        ({"a": tune.sample_from(lambda config: [tune.grid_search([1])])}, "returns no grid"),
    ],
)
def test_space_whose_values_cannot_be_drawn_is_rejected(space: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        draw(space, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tune.uniform(2, 1), "low <= high"),
        (lambda: tune.uniform(0, math.inf), "low <= high"),
        (lambda: tune.uniform("a", 2), "expected numbers"),  # type: ignore[arg-type]
        (lambda: tune.loguniform(0, 1), "lower bound > 0"),
        (lambda: tune.quniform(0.1, 1, 0.25), "multiples of the step"),
        (lambda: tune.choice([]), "at least one value"),
        (lambda: tune.choice("ab"), "at least one value"),
    ],
)
def test_empty_domain_is_rejected(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def train(config: dict[str, Any]) -> None:
    drivetrain.report(config)


TRAINER = DataParallelTrainer(
    train,
    train_loop_config={"lr": 0.1, "model": {"layers": 2, "width": 8}},
    scaling_config=ScalingConfig(num_workers=4, resources_per_worker={"CPU": 2}, placement_strategy="SPREAD"),
    datasets={"train": {"x": [1, 2]}, "test": "test.csv"},
    metadata={"of": "a test"},
)


def test_changes_are_merged_with_the_trainers_arguments() -> None:
    changes = {
        "train_loop_config": {"model": {"width": 16}, "epochs": 1},
        "scaling_config": {"num_workers": 2, "resources_per_worker": {"memory": 5}},
        "datasets": {"train": {"y": [3]}},
    }
    varied = TRAINER.vary(changes).given

    assert varied["train_loop_config"] == {"lr": 0.1, "model": {"layers": 2, "width": 16}, "epochs": 1}
    assert varied["scaling_config"] == ScalingConfig(
        num_workers=2, resources_per_worker={"CPU": 2, "memory": 5}, placement_strategy="SPREAD"
    )
    assert varied["datasets"] == {"train": {"y": [3]}, "test": "test.csv"}
    assert varied["metadata"] == {"of": "a test"}
    assert TRAINER.given["train_loop_config"]["model"]["width"] == 8, "the trainer itself does not change"


def test_configuration_object_replaces_the_trainers() -> None:
    changed = TRAINER.vary({"scaling_config": ScalingConfig(num_workers=1)}).given["scaling_config"]
    assert changed == ScalingConfig(num_workers=1)


class WithOwnArguments(DataParallelTrainer):
    """A trainer that computes the arguments of its base class from its own arguments."""

    def __init__(self, width: int, *, depth: int = 1) -> None:
        super().__init__(train, train_loop_config={"size": width * depth})


def test_changes_apply_to_the_own_arguments_of_a_subclass() -> None:
    varied = WithOwnArguments(3, depth=2).vary({"depth": 5})
    assert varied.given == {"width": 3, "depth": 5}
    assert varied.known_arguments == {"width", "depth"}


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"run_config": {"name": "a"}}, r"same for all trials\. Pass it to the Tuner"),
        ({"tune_config": 1}, r"same for all trials\. Pass it to the Tuner"),
        ({"lr": 1}, "got 'lr'.*train_loop_config"),
        ({"storage_path": "/tmp"}, "got 'storage_path'"),
        ({"scaling_config": {"workers": 1}}, "expected fields of ScalingConfig.*got 'workers'"),
    ],
)
def test_space_with_shared_or_unknown_arguments_is_rejected(space: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TRAINER.vary(space)
