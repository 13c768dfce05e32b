"""The names of nested metrics, which every view and lookup of metrics uses."""

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain import CheckpointConfig
from drivetrain._base.metrics import find_metric, flatten, has_metric, reported_metrics
from drivetrain._storage.retention import rank_checkpoints, retained
from drivetrain.plugin.callbacks import CommittedCheckpoint
from drivetrain.runs import CurveReader
from tests.support import local_storage


@pytest.mark.parametrize(
    ("nested", "flat"),
    [
        ({}, {}),
        ({"loss": 1.0, "eval": {}}, {"loss": 1.0}),
        ({"eval": {"accuracy": 0.5, "by": {"cat": 1}}, "loss": 2}, {"eval/accuracy": 0.5, "eval/by/cat": 1, "loss": 2}),
        ({"eval": [{"a": 1}]}, {"eval": [{"a": 1}]}),
        ({"a/b": 1, "a": {"b": 2}}, {"a/b": 1}),
        ({"a": {"b": 2}, "a/b": 1}, {"a/b": 1}),
    ],
)
def test_nested_metrics_have_names_with_slashes(nested: dict[str, Any], flat: dict[str, Any]) -> None:
    assert flatten(nested) == flat
    for name, value in flat.items():
        assert find_metric(nested, name) == value
        assert has_metric(nested, name)
    assert not has_metric(nested, "eval/missing")
    assert find_metric(nested, "missing", 3) == 3


def test_reported_metrics_exclude_added_ones() -> None:
    assert reported_metrics({"a": {"_b": 1}, "_timestamp": 3, "_private": {"c": 1}}) == {"a/_b": 1}
    assert reported_metrics(None) == {}


def checkpoint(index: int, accuracy: float | None) -> CommittedCheckpoint:
    metrics = {"eval": {} if accuracy is None else {"accuracy": accuracy}}
    return CommittedCheckpoint(name=f"c{index}", number=index, iteration=index, metrics=metrics, time=0.0)


def test_checkpoints_are_ranked_and_retained_by_a_nested_metric() -> None:
    entries = [checkpoint(1, 0.5), checkpoint(2, 0.9), checkpoint(3, None), checkpoint(4, 0.1)]
    assert [entry.name for entry in rank_checkpoints(entries, "eval/accuracy", "max")] == ["c2", "c1", "c4", "c3"]
    kept = retained(entries, CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="eval/accuracy"))
    assert [entry.name for entry in kept] == ["c2", "c4"]


def test_latest_finite_checkpoint_is_kept_besides_those_that_the_rules_keep() -> None:
    nan, infinity = float("nan"), float("inf")
    entries = [checkpoint(1, 0.9), checkpoint(2, 0.5), checkpoint(3, nan), checkpoint(4, infinity), checkpoint(5, nan)]
    scored = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="eval/accuracy", checkpoint_score_order="min")
    assert [entry.name for entry in retained(entries, scored)] == ["c2", "c5"]
    assert [entry.name for entry in retained(entries, CheckpointConfig(num_to_keep=1))] == ["c4", "c5"]
    assert [entry.name for entry in retained(entries[:2], CheckpointConfig(num_to_keep=1))] == ["c2"]


def test_curves_have_nested_metrics_and_skip_lines_that_are_not_reports(tmp_path: Path) -> None:
    lines = ["5", '{"broken": ', *(json.dumps({"eval": {"accuracy": step}, "text": "{"}) for step in range(3)), "[1]"]
    (tmp_path / "result.json").write_text("".join(f"{line}\n" for line in lines))
    reader = CurveReader(local_storage(tmp_path))
    reader.update()
    assert [(key, curve.count) for key, curve in reader.curves().items()] == [((0, "eval/accuracy"), 3)]
