"""Convert reported metrics to plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal, SupportsFloat, get_args

from drivetrain.errors import SessionError

__all__ = ["REDUCTIONS", "MetricValue", "Reduction", "check_reductions", "plain_metrics"]

Reduction = Literal["mean", "sum", "min", "max"]
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)

MetricValue = SupportsFloat | str | Sequence[Any] | Mapping[str, Any] | None
"""The type of a metric. Tensors and arrays with one element can be converted to a number."""
_PLAIN_TYPES = frozenset((bool, int, float, str, type(None)))
_MAX_DEPTH = 50  # less than the readers of run directories accept


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the metrics with plain Python values.

    Raises:
        SessionError: a key is not a string, or a value cannot be converted. The message names the key.
    """
    if not isinstance(metrics, Mapping):
        raise SessionError(f"[DT-802] report(): expected a mapping from metric to value, got {_describe_type(metrics)}")
    if _PLAIN_TYPES.issuperset(map(type, metrics.values())) and {str}.issuperset(map(type, metrics)):
        return dict(metrics)
    values: dict[str, Any] = {}
    for key, value in metrics.items():
        if type(key) is not str:
            raise SessionError(f"[DT-802] report(): expected strings as names of metrics, got {key!r}")
        values[key] = value if type(value) in _PLAIN_TYPES else _plain_value(key, value)
    return values


def _plain_value(key: str, value: Any, depth: int = 1) -> Any:
    if depth > _MAX_DEPTH:
        raise SessionError(
            f"[DT-802] report(): expected lists and mappings nested at most {_MAX_DEPTH} levels deep, got more in "
            f"metric {key[:80]!r}. Does it contain itself?"
        )
    if type(value) in _PLAIN_TYPES:
        return value
    if isinstance(value, (list, tuple)):
        return [_plain_value(f"{key}[{place}]", item, depth + 1) for place, item in enumerate(value)]
    if isinstance(value, Mapping):
        if bad := [name for name in value if not isinstance(name, str)]:
            raise SessionError(f"[DT-802] report(): expected strings as names in metric {key!r}, got {bad[0]!r}")
        return {str(name): _plain_value(f"{key}.{name}", item, depth + 1) for name, item in value.items()}
    shape = getattr(value, "shape", None)
    if shape is not None:
        if math.prod(shape) != 1:
            raise SessionError(
                f"[DT-802] report(): expected plain values, got {_describe_type(value)} of shape {tuple(shape)} as "
                f"metric {key!r}. Report a number such as its mean, or save it in a checkpoint"
            )
        array = value if hasattr(value, "item") else value.numpy()  # TensorFlow's tensors have no item()
        item = array.item()
        if type(item) is type(value) and isinstance(item, Real):  # numpy.longdouble, which has no plain equivalent
            return float(item)
        return _plain_value(key, item, depth + 1)
    for kind in (bool, int, float, str):  # subclasses, such as numpy.float64 or an IntEnum
        if isinstance(value, kind):
            return kind(value)
    raise SessionError(
        f"[DT-802] report(): expected plain values (numbers, strings, booleans, None, and lists and mappings of them), "
        f"got {_describe_type(value)} as metric {key!r}"
    )


def check_reductions(reduce: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Check the ``reduce`` argument of ``report``.

    Raises:
        SessionError: a reduction is unknown, or no number was reported for its metric.
    """
    for key, how in reduce.items():
        if how not in REDUCTIONS:
            raise SessionError(
                f"[DT-803] report(reduce=...): expected one of {', '.join(REDUCTIONS)} for {key!r}, got {how!r}"
            )
        if isinstance(values.get(key), bool) or not isinstance(values.get(key), (int, float)):
            raise SessionError(
                f"[DT-803] report(reduce=...): expected a number reported as {key!r}, got "
                f"{values.get(key, 'no such metric')!r}"
            )


def _describe_type(value: object) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}".replace("a builtins.", "a ")
