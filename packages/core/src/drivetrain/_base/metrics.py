"""Names of metrics, including nested ones: ``{"eval": {"accuracy": 0.9}}`` contains the metric ``eval/accuracy``.

Reports keep their nested form in ``result.json``, in the manifest and in ``Result.metrics``. All code that displays
metrics, or looks a metric up by name, uses the functions below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["AUTOMATIC", "MAX_TEXT", "find_metric", "flatten", "has_metric", "reported_metrics", "writable"]

MAX_TEXT = 100_000
"""The maximum length of a text in a file, in characters. Python's CSV reader rejects values that are much longer."""

AUTOMATIC = ("_training_iteration", "_timestamp", "_time_this_iter_s", "_time_total_s")
"""Automatic metrics by which a run can be stopped."""

_MAX_INTEGER_BITS = 10_000  # Python refuses to convert integers of more than 4,300 digits to text
_SEPARATOR = "/"
_NOT_NESTED = frozenset((bool, int, float, str, list, type(None)))


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings as one flat mapping, with names such as ``outer/inner``.

    If a name in ``values`` contains the separator, its value takes precedence over a nested value with the same name.
    """
    if _NOT_NESTED.issuperset(map(type, values.values())):  # five times as fast, and called for every report
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
    """Return the metric with the given name, in the form that :func:`flatten` produces.

    Args:
        metrics: a report's metrics, nested or flat.
        name: the name, such as ``loss`` or ``eval/accuracy``. The automatic metrics, such as ``_training_iteration``,
            are also found without the underscore, unless the train function reports another metric with that name.
        default: the value to return if there is no such metric.
    """
    if _SEPARATOR not in name:  # avoids flattening, because there may be thousands of reports per second
        return metrics[name] if name in metrics else metrics.get(f"_{name}", default)
    return flatten(metrics).get(name, default)


def has_metric(metrics: Mapping[str, Any], name: str) -> bool:
    """Return True if there is a metric with the given name, in the same form as in :func:`find_metric`."""
    return find_metric(metrics, name, _MISSING) is not _MISSING


def reported_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the metrics that the train function reported, flattened, without the metrics that drivetrain adds."""
    return {name: value for name, value in flatten(metrics or {}).items() if not name.startswith("_")}


_MISSING = object()


def writable(value: Any, max_text: int = MAX_TEXT) -> Any:
    """Return a metric in a form that can be written to a file and read again.

    Texts are shortened, and code points that cannot be encoded are escaped. An integer of thousands of digits is
    replaced by a text that states its size.

    Args:
        value: a number, text, boolean, None, or a list or mapping of them.
        max_text: the maximum length of a text, in characters.
    """
    if isinstance(value, str):
        if len(value) > max_text:
            value = f"{value[:max_text]}... ({len(value) - max_text:,} more characters)"
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
        return f"an integer of {value.bit_length():,} bits"
    if isinstance(value, list):
        return [writable(item, max_text) for item in value]
    if isinstance(value, dict):
        return {writable(name, max_text): writable(item, max_text) for name, item in value.items()}
    return value
