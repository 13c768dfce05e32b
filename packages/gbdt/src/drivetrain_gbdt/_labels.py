"""Checks labels before a run starts, because each objective accepts only certain labels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drivetrain import ConfigurationError

if TYPE_CHECKING:
    from drivetrain_data import TableShard

__all__ = ["LabelRules", "Labels"]


@dataclass(frozen=True)
class Labels:
    """The range of the labels of one dataset, and whether they are whole numbers.

    Attributes:
        dataset: the name of the dataset.
        column: the name of the column.
        minimum: the smallest label.
        maximum: the largest label.
        integers: True if all labels are whole numbers.
    """

    dataset: str
    column: str
    minimum: float
    maximum: float
    integers: bool

    @classmethod
    def read(cls, dataset: str, column: str, shard: TableShard) -> Labels:
        """Read the labels of a shard, and determine their range and whether they are whole numbers.

        Raises:
            ConfigurationError: a label is missing, infinite or not a number.
        """
        import pyarrow.compute as pc

        minimum, maximum, integers = math.inf, -math.inf, True
        for table in shard.reader.tables([column]):
            values = pc.cast(table.column(column), "float64")
            if values.null_count or not pc.all(pc.is_finite(values), min_count=0).as_py():
                raise ConfigurationError(
                    f"[DT-732] dataset {dataset!r}: expected finite labels, got missing or infinite ones in column "
                    f"{column!r}"
                )
            if len(values):
                bounds = pc.min_max(values).as_py()
                minimum, maximum = min(minimum, bounds["min"]), max(maximum, bounds["max"])
                integers = integers and pc.all(pc.equal(pc.floor(values), values)).as_py()
        return cls(dataset, column, minimum, maximum, integers)

    @property
    def range(self) -> str:
        """The range as text: ``1 to 2``, or ``1`` if all labels are equal."""
        return f"{self.minimum:g}" if self.minimum == self.maximum else f"{self.minimum:g} to {self.maximum:g}"


@dataclass(frozen=True)
class Domain:
    """The labels that an objective accepts.

    Attributes:
        minimum: the smallest label that is accepted.
        maximum: the largest label that is accepted.
        integers: True if only whole numbers are accepted.
        positive: True if only numbers above 0 are accepted.
    """

    minimum: float = 0
    maximum: float = math.inf
    integers: bool = False
    positive: bool = False

    def accepts(self, labels: Labels) -> bool:
        """Return True if all labels are in the domain."""
        return (
            self.minimum <= labels.minimum
            and labels.maximum <= self.maximum
            and (labels.integers or not self.integers)
            and (labels.minimum > 0 or not self.positive)
        )

    def __str__(self) -> str:
        kind = "whole numbers" if self.integers else "numbers"
        if self.positive:
            return f"{kind} above 0"
        upper = f" to {self.maximum}" if self.maximum < math.inf else ""
        return f"{kind} from {self.minimum}{upper}"


_PROBABILITY = Domain(maximum=1)
_NOT_NEGATIVE = Domain()
_POSITIVE = Domain(positive=True)
_RELEVANCE = Domain(integers=True)
_DOMAINS = {
    "binary:logistic": _PROBABILITY,
    "binary:logitraw": _PROBABILITY,
    "reg:logistic": _PROBABILITY,
    "cross_entropy": _PROBABILITY,
    "binary:hinge": Domain(maximum=1, integers=True),
    "count:poisson": _NOT_NEGATIVE,
    "poisson": _NOT_NEGATIVE,
    "reg:tweedie": _NOT_NEGATIVE,
    "tweedie": _NOT_NEGATIVE,
    "reg:gamma": _POSITIVE,
    "gamma": _POSITIVE,
    "lambdarank": _RELEVANCE,
    "rank_xendcg": _RELEVANCE,
}
"""A mapping from the objectives of both libraries to the labels that they accept."""

_MULTICLASS = ("multi:softmax", "multi:softprob", "multiclass", "softmax", "multiclassova", "ova")


@dataclass(frozen=True)
class LabelRules:
    """The requirements of an objective on labels.

    Attributes:
        objective: the name of the objective; None if the objective is a function or the library's default.
        domain: the labels that the objective accepts; None if it accepts all labels.
    """

    objective: str | None
    domain: Domain | None

    @classmethod
    def of(cls, objective: str | None, classes: int | None) -> LabelRules | None:
        """Return the rules of an objective; None if the labels are not checked for this objective.

        Args:
            objective: the name of the objective; None if the objective is a function or the library's default.
            classes: the number of classes; None if the objective has none.
        """
        if objective is None:
            return cls(None, None)
        if objective.startswith("survival:"):  # trains on bounds in other columns, or on the sign of the labels
            return None
        if objective in _MULTICLASS and classes:
            return cls(objective, Domain(maximum=classes - 1, integers=True))
        return cls(objective, _DOMAINS.get(objective))

    def check_domain(self, labels: Labels) -> None:
        """Check that the objective accepts the labels.

        Raises:
            ConfigurationError: the objective does not accept some of the labels.
        """
        if self.domain is None or self.domain.accepts(labels):
            return
        fractions = "" if labels.integers else "fractions "
        raise ConfigurationError(
            f"[DT-732] dataset {labels.dataset!r}: expected labels that are {self.domain} for objective "
            f"{self.objective!r}, got {fractions}from {labels.minimum:g} to {labels.maximum:g} in column "
            f"{labels.column!r}"
        )

    def check_differences(self, labels: Labels) -> None:
        """Check that there is something to learn: the labels have at least two values, or belong to two classes.

        Raises:
            ConfigurationError: all labels are equal, or belong to one class.
        """
        if self.objective == "binary":  # for LightGBM, all labels above 0 are one class
            kind, all_equal = "classes", (labels.minimum > 0) == (labels.maximum > 0)
        else:
            kind, all_equal = "values", labels.minimum == labels.maximum
        if all_equal:
            raise ConfigurationError(
                f"[DT-732] dataset {labels.dataset!r}: expected labels with at least two {kind}, "
                f"got only {labels.range} in column {labels.column!r}"
            )
