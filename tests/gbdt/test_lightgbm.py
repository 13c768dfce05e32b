"""Distributed LightGBM training in several processes."""

import ctypes
import json
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pytest

import drivetrain
from drivetrain import ConfigurationError, Result, RunConfig, ScalingConfig, SessionError
from drivetrain_gbdt._parameters import ALIASES, NETWORK
from drivetrain_gbdt.lightgbm import (
    LightGBMConfig,
    LightGBMTrainer,
    RayTrainReportCallback,
    get_network_params,
    shared_bins,
)
from tests.gbdt.conftest import LABEL, DiesOnce

Fit = Callable[..., Result]
BINARY = {"objective": "binary", "metric": "binary_logloss", "num_leaves": 7, "verbosity": -1}


def trees(result: Result) -> str:
    """Return the model's text without the parameters, which contain the workers' addresses."""
    assert result.checkpoint is not None
    return LightGBMTrainer.get_model(result.checkpoint).model_to_string().partition("\nparameters:")[0]


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_any_number_of_workers_reaches_the_quality_of_one_process(fit: Fit, cancer: pd.DataFrame, workers: int) -> None:
    train, valid = cancer[:400], cancer[400:]
    matrix = lightgbm.Dataset(train.drop(columns=LABEL), train[LABEL])
    single: dict[str, Any] = {}
    lightgbm.train(
        BINARY,
        matrix,
        30,
        valid_sets=[lightgbm.Dataset(valid.drop(columns=LABEL), valid[LABEL], reference=matrix)],
        callbacks=[lightgbm.record_evaluation(single)],
    )

    result = fit(
        LightGBMTrainer,
        params=BINARY,
        label_column=LABEL,
        num_boost_round=30,
        datasets={"train": train, "valid": valid},
        workers=workers,
    )

    expected = single["valid_0"]["binary_logloss"][-1]
    assert result.metrics["valid-binary_logloss"] == pytest.approx(expected, abs=1e-6 if workers < 2 else 0.04)
    assert result.checkpoint is not None
    assert LightGBMTrainer.get_model(result.checkpoint).num_trees() == 30


@pytest.mark.parametrize(
    ("data", "params", "metric", "bound"),
    [
        ("diabetes", {"objective": "regression", "metric": "rmse"}, "valid-rmse", 65.0),
        ("digits", {"objective": "multiclass", "num_class": 10, "metric": "multi_error"}, "valid-multi_error", 0.08),
    ],
)
def test_two_workers_learn(
    fit: Fit, request: pytest.FixtureRequest, data: str, params: dict[str, Any], metric: str, bound: float
) -> None:
    frame = request.getfixturevalue(data)
    cut = len(frame) * 3 // 4
    result = fit(
        LightGBMTrainer,
        params={**params, "verbosity": -1},
        label_column=LABEL,
        num_boost_round=30,
        datasets={"train": frame[:cut], "valid": frame[cut:]},
    )
    assert result.metrics[metric] < bound


def test_groups_of_a_ranking_stay_on_one_worker(fit: Fit, ranking: pd.DataFrame) -> None:
    result = fit(
        LightGBMTrainer,
        params={"objective": "lambdarank", "metric": "ndcg", "eval_at": [5], "verbosity": -1},
        label_column=LABEL,
        num_boost_round=20,
        datasets={"train": ranking, "valid": ranking},
        dataset_params={"train": {"group": "query"}, "valid": {"group": "query"}},
    )
    assert result.metrics["valid-ndcg@5"] > 0.9


def test_killed_worker_gives_the_same_trees_as_an_undisturbed_run(fit: Fit, cancer: pd.DataFrame) -> None:
    options: dict[str, Any] = {
        "params": {**BINARY, "deterministic": True, "force_row_wise": True},
        "label_column": LABEL,
        "num_boost_round": 12,
        "datasets": {"train": cancer},
        "frequency": 4,
    }
    undisturbed = fit(LightGBMTrainer, name="undisturbed", **options)
    killed = fit(LightGBMTrainer, name="killed", max_failures=1, callbacks=[DiesOnce(7)], **options)

    predicted = []
    for result in (undisturbed, killed):
        assert result.checkpoint is not None
        model = LightGBMTrainer.get_model(result.checkpoint)
        assert model.num_trees() == 12
        predicted.append(model.predict(cancer.drop(columns=LABEL)))
    np.testing.assert_allclose(predicted[1], predicted[0], rtol=1e-6)
    assert [metrics["_training_iteration"] for _, metrics in killed.best_checkpoints] == [4, 8, 12]


def test_weights_missing_values_and_categories(fit: Fit, cancer: pd.DataFrame) -> None:
    frame = cancer[["mean radius", "mean area", LABEL]].copy()
    frame.loc[::7, "mean radius"] = np.nan
    frame["w"] = np.where(frame[LABEL] == 1, 2.0, 1.0)
    frame["size"] = pd.cut(frame["mean area"], 4, labels=list("abcd"))
    result = fit(
        LightGBMTrainer,
        params=BINARY,
        label_column=LABEL,
        num_boost_round=20,
        datasets={"train": frame},
        dataset_params={"train": {"weight": "w"}},
    )
    assert result.metrics["train-binary_logloss"] < 0.3


def test_early_stopping_saves_the_final_model(fit: Fit, cancer: pd.DataFrame) -> None:
    result = fit(
        LightGBMTrainer,
        params={**BINARY, "learning_rate": 0.5},
        label_column=LABEL,
        num_boost_round=500,
        datasets={"train": cancer[:400], "valid": cancer[400:]},
        callbacks=[lightgbm.early_stopping(5, verbose=False)],
    )
    rounds = result.metrics["_training_iteration"]
    assert rounds < 500
    assert "Tree=0" in trees(result)


def test_early_stopping_remembers_the_rounds_before_a_failure(fit: Fit, cancer: pd.DataFrame) -> None:
    options: dict[str, Any] = {
        "params": {**BINARY, "learning_rate": 0.5, "early_stopping_round": 6},
        "label_column": LABEL,
        "num_boost_round": 300,
        "datasets": {"train": cancer[:400], "valid": cancer[400:]},
        "frequency": 1,
    }
    undisturbed = fit(LightGBMTrainer, name="undisturbed", **options)
    rounds = undisturbed.metrics["_training_iteration"]
    killed = fit(LightGBMTrainer, name="killed", max_failures=1, callbacks=[DiesOnce(rounds - 2)], **options)
    assert killed.metrics["_training_iteration"] == rounds < 300


@pytest.mark.parametrize("frequency", [0, 1])
def test_model_ends_at_its_best_round_and_metrics_at_the_last_round(
    fit: Fit, cancer: pd.DataFrame, frequency: int
) -> None:
    train, valid = cancer[:400], cancer[400:]
    result = fit(
        LightGBMTrainer,
        params={**BINARY, "learning_rate": 0.5, "early_stopping_round": 6, "metric": "binary_logloss"},
        label_column=LABEL,
        num_boost_round=300,
        datasets={"train": train, "valid": valid},
        frequency=frequency,
        workers=0,
    )
    assert result.checkpoint is not None
    model = LightGBMTrainer.get_model(result.checkpoint)
    matrix = lightgbm.Dataset(train.drop(columns=LABEL), train[LABEL])
    single: dict[str, Any] = {}
    whole = lightgbm.train(
        {**BINARY, "learning_rate": 0.5},
        matrix,
        300,
        valid_sets=[matrix.create_valid(valid.drop(columns=LABEL), valid[LABEL])],
        valid_names=["valid"],
        callbacks=[lightgbm.early_stopping(6, verbose=False), lightgbm.record_evaluation(single)],
    )
    assert model.num_trees() == whole.best_iteration
    assert result.metrics["valid-binary_logloss"] == pytest.approx(single["valid"]["binary_logloss"][-1], rel=1e-6)


def test_categories_in_files_have_the_same_codes_on_every_worker(fit: Fit, tmp_path: Path) -> None:
    files = []
    for number, letters in enumerate(("abc", "cd")):
        letter = pd.Series(list(letters) * 60)
        category = letter.astype(pd.CategoricalDtype(list(letters)))
        files.append(tmp_path / f"{number}.parquet")
        pd.DataFrame({"x": category, LABEL: letter.isin(["a", "d"]) * 1.0}).to_parquet(files[-1])
    for datasets in ({"train": [str(file) for file in files]}, {"train": lambda: [str(file) for file in files]}):
        result = fit(
            LightGBMTrainer,
            params={
                **{"objective": "regression", "metric": "l2", "learning_rate": 1.0, "min_data_in_leaf": 1},
                **{"min_data_per_group": 1, "cat_smooth": 0, "max_cat_to_onehot": 10, "verbosity": -1},
            },
            label_column=LABEL,
            num_boost_round=5,
            datasets=datasets,
        )
        assert result.metrics["train-l2"] < 0.01


def train_sklearn() -> int:
    frame = drivetrain.get_dataset_shard("train").to_pandas()
    report = RayTrainReportCallback(metrics={"loss": "training-binary_logloss"}, frequency=2, checkpoint_at_end=False)
    classifier = lightgbm.LGBMClassifier(n_estimators=5, verbosity=-1, **get_network_params())
    features, label = frame.drop(columns=LABEL), frame[LABEL]
    classifier.fit(features, label, eval_set=[(features, label)], callbacks=[report])
    return int(classifier.booster_.num_trees())


def test_train_function_with_an_estimator_reports_the_selected_metrics(fit: Fit, cancer: pd.DataFrame) -> None:
    result = fit(LightGBMTrainer, train_sklearn, datasets={"train": cancer})
    assert result.return_value == 5
    assert {name for name in result.metrics if not name.startswith("_")} == {"loss"}
    assert [metrics["_training_iteration"] for _, metrics in result.best_checkpoints] == [2, 4]


@pytest.mark.ray
def test_training_on_ray_workers(fit: Fit, ray_address: str, cancer: pd.DataFrame) -> None:
    result = fit(LightGBMTrainer, params=BINARY, label_column=LABEL, datasets={"train": cancer}, runtime="ray")
    assert result.metrics["train-binary_logloss"] < 0.1


def reserved_ports() -> list[int]:
    return [int(entry.rpartition(":")[2]) for entry in get_network_params()["machines"].split(",")]


def test_reserved_ports_differ_and_are_outside_the_ephemeral_range(fit: Fit) -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = fit(LightGBMTrainer, reserved_ports, workers=4).return_value
    assert len(set(ports)) == 4
    assert not [port for port in ports if first <= port <= last]
    with socket.socket() as probe:
        probe.bind(("", ports[0]))


def test_fewer_rows_than_workers_are_rejected(fit: Fit) -> None:
    frame = pd.DataFrame({"x": np.arange(3.0), LABEL: [0, 1, 0]})
    with pytest.raises(drivetrain.TrainingFailedError, match="at least one row of dataset 'train' on each worker"):
        fit(LightGBMTrainer, params=BINARY, label_column=LABEL, datasets={"train": frame}, workers=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_column": "nothing"}, "expected a column 'nothing', got 'x', 'target'"),
        ({"params": {"objective": "multiclass"}}, "expected num_class for objective 'multiclass', got none"),
        (
            {"datasets": {"train": {"x": [1.0, 2.0], LABEL: [1, 2]}}},
            "labels with at least two classes, got only 1 to 2 in column 'target'",
        ),
        ({"params": {"device_type": "gpu"}}, "expected GPUs, got ScalingConfig(use_gpu=False)"),
        ({"dataset_params": {"test": {}}}, "expected names of datasets ('train'), got 'test'"),
    ],
)
def test_wrong_arguments_are_rejected_before_a_worker_starts(
    options: dict[str, Any], message: str, tmp_path: Any
) -> None:
    given: dict[str, Any] = {
        "params": BINARY,
        "label_column": LABEL,
        "datasets": {"train": {"x": [1.0, 2.0, 1.0], LABEL: [0, 1, 1]}},
        **options,
    }
    with pytest.raises(ConfigurationError) as error:
        LightGBMTrainer(
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=tmp_path, verbose=0),
            **given,
        ).fit()
    assert message in str(error.value)


def test_invalid_configurations_and_calls_are_rejected() -> None:
    with pytest.raises(ConfigurationError, match="'data' or 'voting', got 'serial'"):
        LightGBMConfig(tree_learner="serial")
    with pytest.raises(ConfigurationError, match=r"Call lightgbm\.train with them in the train function"):
        LightGBMTrainer(train_sklearn, params=BINARY)
    with pytest.raises(SessionError, match="in the train function of a LightGBMTrainer"):
        get_network_params()


def test_names_of_parameters_are_those_of_lightgbm() -> None:
    (path,) = Path(lightgbm.__file__).parent.rglob("lib_lightgbm.*")
    size, length = 1 << 20, ctypes.c_int64()
    text = ctypes.create_string_buffer(size)
    assert ctypes.CDLL(str(path)).LGBM_DumpParamAliases(ctypes.c_int64(size), ctypes.byref(length), text) == 0
    names = json.loads(text.value)
    assert {name: set(aliases) for name, aliases in ALIASES.items()} == {name: set(names[name]) for name in ALIASES}


NAMES_OF_NETWORK = [key for name in NETWORK for key in (name, *ALIASES[name])]


def trainer_with(params: dict[str, Any], workers: int = 2, **options: Any) -> LightGBMTrainer:
    return LightGBMTrainer(
        params=params,
        label_column=LABEL,
        datasets={"train": {"x": [1.0, 2.0], LABEL: [0, 1]}},
        scaling_config=ScalingConfig(num_workers=workers),
        **options,
    )


@pytest.mark.parametrize("name", NAMES_OF_NETWORK)
def test_parameters_of_the_network_are_ignored_with_a_warning(name: str) -> None:
    with pytest.warns(UserWarning, match=rf"got {name}=7\. They are ignored"):
        trainer_with({name: 7})


def test_parameters_of_a_saved_model_cause_one_warning_with_several_workers_and_none_with_one() -> None:
    saved = {"tree_learner": "serial", "num_machines": 1, "machines": "", "local_listen_port": 12400, "time_out": 120}
    with pytest.warns(UserWarning, match="got num_machines=1, tree_learner='serial'. They are ignored") as caught:
        trainer_with(saved)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer_with(saved, workers=1)
        trainer_with({"tree": "voting_parallel"})
    with pytest.warns(UserWarning, match="tree='voting'"):
        trainer_with({"tree": "voting"}, lightgbm_config=LightGBMConfig(tree_learner="data"))
    with pytest.raises(ConfigurationError, match="linear trees on one machine only"):
        trainer_with({"linear_trees": True})


def test_rounds_in_the_parameters_are_the_total_also_after_a_failure(fit: Fit, cancer: pd.DataFrame) -> None:
    result = fit(
        LightGBMTrainer,
        params={**BINARY, "n_estimators": 6},
        label_column=LABEL,
        num_boost_round=50,
        datasets={"train": cancer},
        max_failures=1,
        frequency=2,
        callbacks=[DiesOnce(5)],
    )
    assert result.checkpoint is not None
    assert LightGBMTrainer.get_model(result.checkpoint).num_trees() == 6


def ordered_rows() -> pd.DataFrame:
    day = np.sort(np.random.default_rng(0).random(2000))
    return pd.DataFrame({"day": day, LABEL: np.sin(6 * day)})


def squared_error(params: dict[str, Any]) -> float:
    frame = drivetrain.get_dataset_shard("train").to_pandas()
    features, label = frame.drop(columns=LABEL), frame[LABEL]
    params = {**params, "verbosity": -1}
    matrix = lightgbm.Dataset(features, label, reference=shared_bins(features, params))
    report = RayTrainReportCallback()
    model = lightgbm.train({**get_network_params(), **params}, matrix, 50, callbacks=[report])
    whole = ordered_rows()
    return float(((model.predict(whole[["day"]]) - whole[LABEL]) ** 2).mean())


def test_train_function_uses_the_bins_of_all_workers(fit: Fit) -> None:
    for params in ({}, {"subsample_for_bin": 800}):
        result = fit(LightGBMTrainer, squared_error, train_loop_config=params, datasets={"train": ordered_rows()})
        assert result.return_value < 1e-3


def test_train_function_that_trains_alone_is_refused(fit: Fit) -> None:
    with pytest.raises(drivetrain.TrainingFailedError, match=r"DT-731.*got num_machines=1\. Pass {\*\*params"):
        fit(
            LightGBMTrainer,
            squared_error,
            train_loop_config={"num_machines": 1},
            datasets={"train": ordered_rows()},
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"valid_sets": []}, "Pass the data as further datasets"),
        ({"evals_result": {}}, r"Result\.metrics_dataframe"),
        ({"feature_name": ["a"]}, "Rename the columns"),
        ({"dataset_params": {"train": {"feature_name": ["a"]}}}, "'feature_name': .*Rename the columns"),
        ({"dataset_params": {"train": {"init_score": np.zeros(2)}}}, "'init_score': .*the name of a column, got array"),
    ],
)
def test_arguments_that_tables_replace_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        trainer_with({}, **options)


@pytest.mark.parametrize("objective", ["lambdarank", "rank_xendcg"])
def test_ranking_requires_a_group(objective: str) -> None:
    with pytest.raises(ConfigurationError, match=r"Pass dataset_params=\{'train': \{'group': '<column>'\}\}"):
        trainer_with({"objective": objective})


RANDOM: list[dict[str, Any]] = [
    {"bagging_fraction": 0.5, "bagging_freq": 3},
    {"pos_bagging_fraction": 0.5, "neg_bagging_fraction": 0.9, "bagging_freq": 1, "seed": 7},
    {"colsample_bytree": 0.5, "feature_fraction_bynode": 0.5, "extra_trees": True},
    {"boosting": "rf", "bagging_fraction": 0.5, "bagging_freq": 1},
]


@pytest.mark.parametrize("params", RANDOM, ids=str)
def test_random_parameters_give_the_same_trees_from_any_checkpoint(
    fit: Fit, cancer: pd.DataFrame, params: dict[str, Any]
) -> None:
    options: dict[str, Any] = {
        "params": {**BINARY, "num_threads": 1, "deterministic": True, "force_row_wise": True, **params},
        "label_column": LABEL,
        "datasets": {"train": cancer},
        "workers": 0,
        "frequency": 2,
    }
    whole = fit(LightGBMTrainer, num_boost_round=6, **options)
    for checkpoint, metrics in whole.best_checkpoints[:-1]:
        resumed = fit(LightGBMTrainer, num_boost_round=6, resume_from_checkpoint=checkpoint, **options)
        assert trees(resumed) == trees(whole), metrics


class CountsRecordedRounds:
    def __init__(self) -> None:
        self.order = 45  # after the callback that records
        self.recorded: dict[str, Any] = {}
        self.record = lightgbm.record_evaluation(self.recorded)

    def __call__(self, env: Any) -> None:
        assert len(self.recorded["train"]["binary_logloss"]) == env.iteration + 1


def test_recorded_evaluations_contain_the_rounds_before_a_resume(fit: Fit, cancer: pd.DataFrame) -> None:
    options: dict[str, Any] = {"params": BINARY, "label_column": LABEL, "datasets": {"train": cancer}, "workers": 0}
    first = fit(LightGBMTrainer, num_boost_round=3, **options)
    counts = CountsRecordedRounds()
    options["callbacks"] = [counts.record, counts]
    result = fit(LightGBMTrainer, num_boost_round=5, resume_from_checkpoint=first.checkpoint, **options)
    assert result.checkpoint is not None
    assert LightGBMTrainer.get_model(result.checkpoint).num_trees() == 5
