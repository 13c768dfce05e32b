"""The names of metrics, nested ones included: ``{"eval": {"accuracy": 0.9}}`` has the metric ``eval/accuracy``.

Reports keep their nested form in ``result.json``, in the manifest and in ``Result.metrics``. Everything that shows a
metric, or looks one up by its name, uses the functions below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["find_metric", "flatten", "has_metric", "reported_metrics"]

_SEPARATOR = "/"
_NOT_NESTED = frozenset((bool, int, float, str, list, type(None)))


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested mappings as one mapping, with names such as ``outer/inner``.

    A value whose own name contains the separator takes precedence over a nested value with the same name.
    """
    if _NOT_NESTED.issuperset(map(type, values.values())):  # takes a fifth of the time, which counts in each report
        return dict(values)
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            for inner_name, inner_value in flatten(value).items():
                flat.setdefault(f"{name}{_SEPARATOR}{inner_name}", inner_value)
        else:
            flat[name] = value
    return flat


def find_metric(metrics: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Returns the metric with a name, which is its name in :func:`flatten`.

    Args:
        metrics: a report's metrics.
        name: such as ``loss`` or ``eval/accuracy``.
        default: the value to return if there is no such metric.
    """
    if _SEPARATOR not in name:  # so a lookup in each of thousands of reports per second flattens none of them
        return metrics.get(name, default)
    return flatten(metrics).get(name, default)


def has_metric(metrics: Mapping[str, Any], name: str) -> bool:
    """Returns whether there is a metric with a name, as in :func:`find_metric`."""
    return find_metric(metrics, name, _MISSING) is not _MISSING


def reported_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the metrics that the train function reported, flattened, without those that drivetrain fills in."""
    return {name: value for name, value in flatten(metrics or {}).items() if not name.startswith("_")}


_MISSING = object()
