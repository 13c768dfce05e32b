"""Distributed XGBoost training in several processes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
import xgboost

import drivetrain
from drivetrain import ConfigurationError, Result, RunConfig, ScalingConfig, TrainingFailedError
from drivetrain_gbdt.xgboost import RayTrainReportCallback, XGBoostConfig, XGBoostTrainer
from tests.gbdt.conftest import LABEL, DiesOnce, ShrinkingMachine, Sizes

Fit = Callable[..., Result]
BINARY = {"objective": "binary:logistic", "eval_metric": "logloss", "max_depth": 3}


def trees(result: Result) -> list[str]:
    assert result.checkpoint is not None
    return XGBoostTrainer.get_model(result.checkpoint).get_dump(dump_format="json")


def labels(*values: Any) -> dict[str, Any]:
    return {"train": {"x": [1.0, 2.0, 3.0], LABEL: list(values)}}


class DiesAfterRound(xgboost.callback.TrainingCallback):
    def __init__(self, after_round: int) -> None:
        super().__init__()
        self._dies = DiesOnce(after_round)

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        self._dies.die_after(epoch)
        return False


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_any_number_of_workers_reaches_the_metric_of_one_process(fit: Fit, cancer: pd.DataFrame, workers: int) -> None:
    train, valid = cancer[:400], cancer[400:]
    matrix = xgboost.QuantileDMatrix(train.drop(columns=LABEL), train[LABEL])
    held_out = xgboost.QuantileDMatrix(valid.drop(columns=LABEL), valid[LABEL], ref=matrix)
    single: dict[str, Any] = {}
    xgboost.train(BINARY, matrix, 20, evals=[(held_out, "valid")], evals_result=single, verbose_eval=False)

    result = fit(
        XGBoostTrainer,
        params=BINARY,
        label_column=LABEL,
        num_boost_round=20,
        datasets={"train": train, "valid": valid},
        workers=workers,
    )

    assert result.metrics["valid-logloss"] == pytest.approx(single["valid"]["logloss"][-1], rel=0.02)
    assert result.metrics["valid-logloss"] < 0.15
    assert len(trees(result)) == 20
    assert len(result.metrics_dataframe) == 20
    assert len(result.best_checkpoints) == 1


@pytest.mark.parametrize(
    ("data", "params", "metric", "bound"),
    [
        ("diabetes", {"objective": "reg:squarederror", "max_depth": 3}, "valid-rmse", 65.0),
        ("digits", {"objective": "multi:softprob", "num_class": 10, "eval_metric": "merror"}, "valid-merror", 0.08),
        ("diabetes", {"objective": "reg:squarederror", "booster": "gblinear"}, "valid-rmse", 80.0),
        ("diabetes", {"objective": "reg:squarederror", "tree_method": "approx"}, "valid-rmse", 75.0),
    ],
)
def test_two_workers_learn(
    fit: Fit, request: pytest.FixtureRequest, data: str, params: dict[str, Any], metric: str, bound: float
) -> None:
    frame = request.getfixturevalue(data)
    cut = len(frame) * 3 // 4
    result = fit(
        XGBoostTrainer,
        params=params,
        label_column=LABEL,
        num_boost_round=30,
        datasets={"train": frame[:cut], "valid": frame[cut:]},
    )
    assert result.metrics[metric] < bound


def test_groups_of_a_ranking_stay_on_one_worker(fit: Fit, ranking: pd.DataFrame) -> None:
    params = {"objective": "rank:ndcg", "eval_metric": "ndcg", "lambdarank_pair_method": "topk"}
    matrix = xgboost.QuantileDMatrix(ranking.drop(columns=[LABEL, "query"]), ranking[LABEL], qid=ranking["query"])
    single: dict[str, Any] = {}
    xgboost.train(params, matrix, 20, evals=[(matrix, "train")], evals_result=single, verbose_eval=False)

    result = fit(
        XGBoostTrainer,
        params=params,
        label_column=LABEL,
        num_boost_round=20,
        datasets={"train": ranking},
        dmatrix_params={"train": {"qid": "query"}},
    )
    assert result.metrics["train-ndcg"] == pytest.approx(single["train"]["ndcg"][-1], abs=0.02)


def test_ranking_uses_one_weight_per_group(fit: Fit, ranking: pd.DataFrame, tmp_path: Any) -> None:
    ranking = ranking.assign(w=1.0 + ranking["query"] % 3)
    ranking.to_parquet(tmp_path / "ranking.parquet", row_group_size=50)  # row groups end within query groups
    params = {"objective": "rank:ndcg", "eval_metric": "ndcg", "lambdarank_pair_method": "topk"}
    group_weights = ranking.groupby("query")["w"].first()
    features = ranking.drop(columns=[LABEL, "query", "w"])
    matrix = xgboost.QuantileDMatrix(features, ranking[LABEL], qid=ranking["query"], weight=group_weights)
    single: dict[str, Any] = {}
    xgboost.train(params, matrix, 20, evals=[(matrix, "train")], evals_result=single, verbose_eval=False)

    result = fit(
        XGBoostTrainer,
        params=params,
        label_column=LABEL,
        num_boost_round=20,
        datasets={"train": str(tmp_path / "ranking.parquet")},
        dmatrix_params={"train": {"qid": "query", "weight": "w"}},
    )
    assert result.metrics["train-ndcg"] == pytest.approx(single["train"]["ndcg"][-1], abs=0.02)


@pytest.mark.parametrize("workers", [0, 2])
def test_categories_in_the_validation_dataset(fit: Fit, cancer: pd.DataFrame, workers: int) -> None:
    frame = cancer[[LABEL]].assign(size=pd.cut(cancer["mean area"], 4, labels=list("abcd")))
    result = fit(
        XGBoostTrainer,
        params=BINARY,
        label_column=LABEL,
        datasets={"train": frame[:400], "valid": lambda: frame[400:]},
        dmatrix_params={"train": {"enable_categorical": True}},
        workers=workers,
    )
    assert result.metrics["valid-logloss"] < 0.45


@pytest.mark.parametrize("frequency", [0, 1])
def test_saved_model_is_the_one_that_early_stopping_returns(fit: Fit, cancer: pd.DataFrame, frequency: int) -> None:
    result = fit(
        XGBoostTrainer,
        params={**BINARY, "eta": 1.0},
        label_column=LABEL,
        num_boost_round=200,
        datasets={"train": cancer[:400], "valid": cancer[400:]},
        callbacks=[xgboost.callback.EarlyStopping(rounds=6, save_best=True)],
        frequency=frequency,
        name="first",
    )
    assert result.checkpoint is not None
    model = XGBoostTrainer.get_model(result.checkpoint)
    assert model.num_boosted_rounds() == model.best_iteration + 1 < 194
    assert len(result.metrics_dataframe) == model.best_iteration + 7  # six rounds were not better


def test_killed_worker_gives_the_same_trees_as_an_undisturbed_run(fit: Fit, cancer: pd.DataFrame) -> None:
    options: dict[str, Any] = {
        "params": BINARY,
        "label_column": LABEL,
        "num_boost_round": 12,
        "datasets": {"train": cancer},
        "frequency": 4,
    }
    undisturbed = fit(XGBoostTrainer, name="undisturbed", **options)
    killed = fit(XGBoostTrainer, name="killed", max_failures=1, callbacks=[DiesAfterRound(7)], **options)

    assert trees(killed) == trees(undisturbed)
    assert killed.metrics["train-logloss"] == pytest.approx(undisturbed.metrics["train-logloss"], rel=1e-6)
    assert [metrics["_training_iteration"] for _, metrics in killed.best_checkpoints] == [4, 8, 12]


def test_early_stopping_remembers_the_rounds_before_a_failure(fit: Fit, cancer: pd.DataFrame) -> None:
    options: dict[str, Any] = {
        "params": {**BINARY, "eta": 1.0},
        "label_column": LABEL,
        "num_boost_round": 200,
        "datasets": {"train": cancer[:400], "valid": cancer[400:]},
        "early_stopping_rounds": 6,
        "frequency": 1,
    }
    undisturbed = fit(XGBoostTrainer, name="undisturbed", **options)
    rounds = len(trees(undisturbed))
    killed = fit(XGBoostTrainer, name="killed", max_failures=1, callbacks=[DiesAfterRound(rounds - 2)], **options)
    complete = fit(XGBoostTrainer, name="complete", resume_from_checkpoint=killed.checkpoint, **options)

    assert rounds < 200
    assert len(trees(killed)) == rounds
    assert complete.metrics == {}
    models = [XGBoostTrainer.get_model(result.checkpoint) for result in (undisturbed, killed) if result.checkpoint]
    assert models[0].best_iteration == models[1].best_iteration == rounds - 7


def test_run_continues_with_the_remaining_worker(fit: Fit, cancer: pd.DataFrame) -> None:
    machine = ShrinkingMachine()
    sizes = Sizes(machine)
    result = fit(
        XGBoostTrainer,
        params=BINARY,
        label_column=LABEL,
        num_boost_round=12,
        datasets={"train": cancer},
        frequency=4,
        max_failures=1,
        callbacks=[DiesAfterRound(7)],
        workers=(1, 2),
        runtime=machine,
        run_callbacks=[sizes],
    )
    assert sizes.sizes == [2, 1]
    assert len(trees(result)) == 12
    assert result.metrics["train-logloss"] < 0.12


def test_each_of_a_million_rows_is_read_once(fit: Fit, tmp_path: Any) -> None:
    generator = np.random.default_rng(0)
    features = generator.random((1_000_000, 4), dtype=np.float32)
    columns = {name: features[:, number] for number, name in enumerate("abcd")}
    table = pa.table({**columns, LABEL: (features[:, 0] > features[:, 1]).astype(np.float32)})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=70_000)

    result = fit(
        XGBoostTrainer,
        params={"objective": "reg:squarederror", "tree_method": "hist", "max_depth": 1, "base_score": 0.0, "eta": 1.0},
        label_column=LABEL,
        num_boost_round=1,
        datasets={"train": str(tmp_path / "rows.parquet")},
    )
    assert result.checkpoint is not None
    frame = XGBoostTrainer.get_model(result.checkpoint).trees_to_dataframe()
    assert frame["Cover"][0] == 1_000_000


def test_survival_objective_trains_on_the_bounds_of_the_times(fit: Fit, cancer: pd.DataFrame) -> None:
    frame = cancer[["mean area"]].assign(low=1.0 + cancer[LABEL], high=2.0 + cancer[LABEL], **{LABEL: 0.0})
    result = fit(
        XGBoostTrainer,
        params={"objective": "survival:aft", "eval_metric": "aft-nloglik"},
        label_column=LABEL,
        datasets={"train": frame},
        dmatrix_params={"train": {"label_lower_bound": "low", "label_upper_bound": "high"}},
        workers=0,
    )
    assert "train-aft-nloglik" in result.metrics


def test_external_memory_gives_the_same_trees(fit: Fit, cancer: pd.DataFrame, tmp_path: Any) -> None:
    pyarrow.parquet.write_table(pa.Table.from_pandas(cancer), tmp_path / "train.parquet", row_group_size=100)
    results = [
        fit(
            XGBoostTrainer,
            params=BINARY,
            label_column=LABEL,
            datasets={"train": str(tmp_path / "train.parquet")},
            dmatrix_params={"train": {"external_memory": external}},
        )
        for external in (False, True)
    ]
    assert trees(results[0]) == trees(results[1])


def test_categories_in_several_files_have_the_same_codes_on_every_worker(fit: Fit, tmp_path: Any) -> None:
    files = []
    for number, letters in enumerate(("abc", "cab", "dca")):
        letter = pd.Series(list(letters) * 30)
        frame = pd.DataFrame(
            {"x": letter.astype(pd.CategoricalDtype(list(letters))), LABEL: letter.isin(["a", "d"]) * 1.0}
        )
        files.append(tmp_path / f"{number}.parquet")
        pyarrow.parquet.write_table(pa.Table.from_pandas(frame), files[-1])
    result = fit(
        XGBoostTrainer,
        params={"objective": "reg:squarederror", "eta": 1.0, "lambda": 0, "max_depth": 3, "min_child_weight": 0},
        label_column=LABEL,
        num_boost_round=3,
        datasets={"train": files},
        dmatrix_params={"train": {"enable_categorical": True}},
    )
    assert result.metrics["train-rmse"] < 1e-3


def test_files_weights_missing_values_and_categories(fit: Fit, cancer: pd.DataFrame, tmp_path: Any) -> None:
    frame = cancer.copy()
    frame.loc[::7, "mean radius"] = np.nan
    frame["w"] = np.where(frame[LABEL] == 1, 2.0, 1.0)
    frame["size"] = pd.cut(frame["mean area"], 4, labels=list("abcd"))
    plain = frame.drop(columns="size")
    pyarrow.parquet.write_table(pa.Table.from_pandas(plain), tmp_path / "train.parquet", row_group_size=50)

    weighted = fit(
        XGBoostTrainer,
        params=BINARY,
        label_column=LABEL,
        datasets={"train": str(tmp_path / "train.parquet")},
        dmatrix_params={"train": {"weight": "w"}},
    )
    matrix = xgboost.QuantileDMatrix(plain.drop(columns=[LABEL, "w"]), plain[LABEL], weight=plain["w"])
    single: dict[str, Any] = {}
    xgboost.train(BINARY, matrix, 10, evals=[(matrix, "train")], evals_result=single, verbose_eval=False)
    assert weighted.metrics["train-logloss"] == pytest.approx(single["train"]["logloss"][-1], rel=0.02)

    categories = fit(
        XGBoostTrainer,
        params=BINARY,
        label_column=LABEL,
        datasets={"train": frame[["size", LABEL]]},
        dmatrix_params={"train": {"enable_categorical": True}},
    )
    assert categories.metrics["train-logloss"] < 0.4
    assert categories.checkpoint is not None
    assert XGBoostTrainer.get_model(categories.checkpoint).feature_types == ["c"]


@pytest.mark.parametrize("rows", [3, 6])
def test_shards_may_be_empty_or_have_a_single_class(fit: Fit, rows: int) -> None:
    frame = pd.DataFrame({"x": np.arange(rows, dtype=float), LABEL: np.arange(rows) >= rows // 2})
    frame[LABEL] = frame[LABEL].astype(int)
    result = fit(
        XGBoostTrainer,
        params={**BINARY, "min_child_weight": 0},
        label_column=LABEL,
        num_boost_round=20,
        datasets={"train": frame},
        workers=4,
    )
    assert result.metrics["train-logloss"] < 0.3


def test_early_stopping_with_custom_objective_and_metric(fit: Fit, cancer: pd.DataFrame) -> None:
    def squared(predicted: Any, matrix: Any) -> tuple[Any, Any]:
        probability = 1 / (1 + np.exp(-predicted))
        return probability - matrix.get_label(), probability * (1 - probability)

    def wrong(predicted: Any, matrix: Any) -> tuple[str, float]:
        return "wrong", float(np.mean((predicted > 0) != matrix.get_label()))

    result = fit(
        XGBoostTrainer,
        params={"max_depth": 2, "eta": 1.0, "disable_default_eval_metric": True},
        label_column=LABEL,
        num_boost_round=300,
        datasets={"train": cancer[:400], "valid": cancer[400:]},
        obj=squared,
        custom_metric=wrong,
        early_stopping_rounds=5,
    )
    assert result.metrics["valid-wrong"] < 0.1
    assert len(trees(result)) < 300


def train_sklearn() -> int:
    frame = drivetrain.get_dataset_shard("train").to_pandas()
    report = RayTrainReportCallback(
        metrics={"loss": "validation_0-logloss"}, filename="cancer.json", frequency=2, checkpoint_at_end=False
    )
    classifier = xgboost.XGBClassifier(n_estimators=5, max_depth=3, callbacks=[report])
    features, label = frame.drop(columns=LABEL), frame[LABEL]
    classifier.fit(features, label, eval_set=[(features, label)], verbose=False)
    return int(classifier.get_booster().num_boosted_rounds())


def test_train_function_with_an_estimator_reports_the_selected_metrics(fit: Fit, cancer: pd.DataFrame) -> None:
    result = fit(XGBoostTrainer, train_sklearn, datasets={"train": cancer})
    assert result.return_value == 5
    assert {name for name in result.metrics if not name.startswith("_")} == {"loss"}
    assert [metrics["_training_iteration"] for _, metrics in result.best_checkpoints] == [2, 4]
    assert result.checkpoint is not None
    assert RayTrainReportCallback.get_model(result.checkpoint, "cancer.json").num_boosted_rounds() == 4
    with pytest.raises(ConfigurationError, match=r"expected a checkpoint with a file 'model.ubj', got .*cancer.json"):
        XGBoostTrainer.get_model(result.checkpoint)


@pytest.mark.ray
def test_training_on_ray_workers(fit: Fit, ray_address: str, cancer: pd.DataFrame) -> None:
    result = fit(XGBoostTrainer, params=BINARY, label_column=LABEL, datasets={"train": cancer}, runtime="ray")
    assert result.metrics["train-logloss"] < 0.15


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore:.*deprecated")  # raised within Ray Data
@pytest.mark.campaign
def test_training_on_ray_datasets(fit: Fit, ray_address: str, cancer: pd.DataFrame) -> None:
    import ray.data

    datasets = {"train": ray.data.from_pandas(cancer[:400]), "valid": ray.data.from_pandas(cancer[400:])}
    options = {"params": BINARY, "label_column": LABEL, "runtime": "ray"}
    result = fit(XGBoostTrainer, datasets=datasets, **options)
    assert result.metrics["valid-logloss"] < 0.25

    datasets["valid"] = datasets["valid"].drop_columns(["mean area"])
    with pytest.raises(
        TrainingFailedError, match="'valid': expected the same features as in 'train', got different ones: mean area"
    ):
        fit(XGBoostTrainer, datasets=datasets, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_column": "nothing"}, "expected a column 'nothing', got 'x', 'target'"),
        ({"label_column": None}, "expected either a train_loop_per_worker, or params"),
        ({"datasets": {"valid": {"x": [1.0], LABEL: [0]}}}, "datasets ['valid']"),
        ({"datasets": {"train": {"x": ["a", "b"], LABEL: [0, 1]}}}, "got column 'x' of type string"),
        (
            {"datasets": {"train": {"x": [1.0, 2.0], LABEL: [0, 1]}, "valid": {"y": [1.0], LABEL: [0]}}},
            "dataset 'valid': expected the same features as in 'train', got different ones: x, y",
        ),
        ({"params": {"objective": "multi:softmax"}}, "expected num_class for objective 'multi:softmax', got none"),
        (
            {"params": {"objective": "multi:softmax", "num_class": 3}, "datasets": labels(0, 1, 3)},
            "whole numbers from 0 to 2 for objective 'multi:softmax', got from 0 to 3 in column 'target'",
        ),
        ({"datasets": labels(1, 2, 1)}, "numbers from 0 to 1 for objective 'binary:logistic', got from 1 to 2"),
        ({"datasets": labels(1, 1, 1)}, "expected labels with at least two values, got only 1 in column 'target'"),
        (
            {"datasets": labels(0.0, 1.0, np.nan)},
            "expected finite labels, got missing or infinite ones in column 'target'",
        ),
        ({"datasets": labels("a", "b", "c")}, "expected numeric labels, got column 'target' of type string"),
        (
            {"params": {"objective": "reg:gamma"}, "datasets": labels(0.0, 1.0, 2.0)},
            "numbers above 0 for objective 'reg:gamma', got from 0 to 2",
        ),
        ({"params": {"device": "cuda"}}, "expected GPUs, got ScalingConfig(use_gpu=False)"),
        ({"dmatrix_params": {"test": {}}}, "expected names of datasets ('train'), got 'test'"),
        ({"dmatrix_params": {"train": {"weight": "w"}}}, "expected a column 'w'"),
        ({"dmatrix_params": {"train": {"qid": "x"}}}, "expected rows with the same 'x' next to each other"),
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
        XGBoostTrainer(
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=tmp_path, verbose=0),
            **given,
        ).fit()
    assert message in str(error.value)


def test_invalid_configurations_are_rejected() -> None:
    with pytest.raises(ConfigurationError, match="expected a number of seconds >= 1, got 0"):
        XGBoostConfig(timeout_s=0)
    with pytest.raises(ConfigurationError, match="expected XGBoostConfig, got"):
        XGBoostTrainer(train_sklearn, xgboost_config=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"Call xgboost\.train with them in the train function"):
        XGBoostTrainer(train_sklearn, params=BINARY)
    with pytest.raises(ConfigurationError, match="expected a number of rounds >= 0, got -1"):
        RayTrainReportCallback(frequency=-1)


def test_error_for_an_unknown_metric_lists_the_logged_metrics(fit: Fit, cancer: pd.DataFrame) -> None:
    def train() -> None:
        frame = drivetrain.get_dataset_shard("train").to_pandas()
        matrix = xgboost.DMatrix(frame.drop(columns=LABEL), frame[LABEL])
        report = RayTrainReportCallback(metrics="valid-auc")
        xgboost.train(BINARY, matrix, 2, evals=[(matrix, "train")], callbacks=[report], verbose_eval=False)

    with pytest.raises(TrainingFailedError, match=r"\('train-logloss'\), got 'valid-auc'"):
        fit(XGBoostTrainer, train, datasets={"train": cancer}, workers=0)


def test_training_continues_from_a_checkpoint_with_more_rounds(fit: Fit, cancer: pd.DataFrame) -> None:
    options = {"params": BINARY, "label_column": LABEL, "datasets": {"train": cancer}, "workers": 0}
    first = fit(XGBoostTrainer, name="first", num_boost_round=3, **options)
    more = fit(XGBoostTrainer, name="more", num_boost_round=5, resume_from_checkpoint=first.checkpoint, **options)
    assert trees(more)[:3] == trees(first)
    assert len(trees(more)) == 5


def table_trainer(workers: int = 2, **options: Any) -> XGBoostTrainer:
    given = {"params": {}, "label_column": LABEL, "datasets": {"train": {"x": [1.0, 2.0], LABEL: [0, 1]}}}
    return XGBoostTrainer(scaling_config=ScalingConfig(num_workers=workers), **{**given, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evals_result": {}}, r"evals_result=\.\.\.\): expected none.*Result\.metrics_dataframe"),
        ({"evals": []}, "Pass the data as further datasets"),
        ({"dmatrix_params": {"train": {"group": [1, 1]}}}, "'group': .*Pass 'qid', the name of a column"),
        ({"dmatrix_params": {"train": {"weight": [1.0, 2.0]}}}, r"'weight': .*the name of a column, got \[1.0, 2.0\]"),
        ({"params": {"objective": "rank:pairwise"}}, r"Pass dmatrix_params=\{'train': \{'qid': '<column>'\}\}"),
        ({"params": {"process_type": "update"}}, "expected one worker"),
        ({"train_loop_config": {"eta": 1}}, r"train_loop_config=\.\.\.\): expected none .*Pass .* as params"),
    ],
)
def test_arguments_that_tables_replace_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        table_trainer(**options)


SPECIFIED_UPDATER = pytest.mark.filterwarnings("ignore:.*manually specified the `updater`")


@SPECIFIED_UPDATER
def test_trees_are_updated_in_one_process_as_without_drivetrain(fit: Fit, cancer: pd.DataFrame) -> None:
    features = cancer.drop(columns=LABEL)
    base = xgboost.train({**BINARY, "nthread": 1}, xgboost.DMatrix(features, cancer[LABEL]), 4)
    params = {"process_type": "update", "updater": "refresh", "nthread": 1}
    other = 1 - cancer[LABEL]
    expected = xgboost.train(params, xgboost.DMatrix(features, other), 4, xgb_model=base)
    options = {"params": params, "label_column": LABEL, "num_boost_round": 4, "workers": 0, "frequency": 1}
    options["datasets"] = {"train": features.assign(**{LABEL: other})}
    result = fit(XGBoostTrainer, xgb_model=base, **options)
    assert trees(result) == expected.get_dump(dump_format="json")
    assert len(result.best_checkpoints) == 1


def test_feature_weights_and_the_parameters_of_the_first_model_act_as_without_drivetrain(
    fit: Fit, cancer: pd.DataFrame
) -> None:
    frame = cancer[["mean area", "mean radius", LABEL]]
    features, weights = frame.drop(columns=LABEL), [0.0, 1.0]
    matrix = xgboost.QuantileDMatrix(features, frame[LABEL], feature_weights=weights)
    base = xgboost.train({"nthread": 1, "max_depth": 2, "eta": 0.1}, matrix, 3)
    params = {"colsample_bytree": 0.5, "nthread": 1}
    expected = xgboost.train(params, matrix, 4, xgb_model=base)
    result = fit(
        XGBoostTrainer,
        params=params,
        label_column=LABEL,
        num_boost_round=4,
        datasets={"train": frame},
        dmatrix_params={"train": {"feature_weights": weights}},
        xgb_model=base,
        workers=0,
    )
    assert trees(result) == expected.get_dump(dump_format="json")


RANDOM: list[dict[str, Any]] = [
    {"subsample": 0.5, "colsample_bytree": 0.5},
    {"booster": "dart", "rate_drop": 0.4, "sample_type": "weighted"},
    {"num_parallel_tree": 2, "subsample": 0.5, "colsample_bynode": 0.5, "seed": 7},
]


@SPECIFIED_UPDATER
@pytest.mark.parametrize("params", RANDOM, ids=str)
def test_random_parameters_give_the_same_trees_from_any_checkpoint(
    fit: Fit, cancer: pd.DataFrame, params: dict[str, Any]
) -> None:
    options: dict[str, Any] = {
        "params": {**BINARY, "nthread": 1, **params},
        "label_column": LABEL,
        "datasets": {"train": cancer},
        "workers": 0,
        "frequency": 2,
    }
    whole = fit(XGBoostTrainer, num_boost_round=6, **options)
    for checkpoint, metrics in whole.best_checkpoints[:-1]:
        resumed = fit(XGBoostTrainer, num_boost_round=6, resume_from_checkpoint=checkpoint, **options)
        assert trees(resumed) == trees(whole), metrics


class FailsOnce(xgboost.callback.TrainingCallback):
    def __init__(self, marker: Path) -> None:
        super().__init__()
        self._marker = marker

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        if epoch == 3 and not self._marker.exists():
            self._marker.touch()
            raise ValueError("the first run fails")
        return False


def test_restored_run_does_not_count_the_rounds_of_the_first_model(
    fit: Fit, cancer: pd.DataFrame, tmp_path: Path
) -> None:
    features = cancer.drop(columns=LABEL)
    base = xgboost.train(BINARY, xgboost.DMatrix(features, cancer[LABEL]), 4)
    with pytest.raises(TrainingFailedError):
        fit(
            XGBoostTrainer,
            name="killed",
            params=BINARY,
            label_column=LABEL,
            num_boost_round=6,
            datasets={"train": cancer},
            xgb_model=base,
            frequency=2,
            callbacks=[FailsOnce(tmp_path / "failed")],
            workers=0,
        )
    result = XGBoostTrainer.restore(tmp_path / "killed", datasets={"train": cancer}).fit()
    assert len(trees(result)) == 10
