"""Search spaces, from which the values of trials are drawn. The functions have the same names as in Ray Tune.

A search space is a mapping, nested to any depth, with a domain for each value to draw. Domains of ``ray.tune`` are also
accepted.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from drivetrain import ConfigurationError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

__all__ = [
    "Domain",
    "Space",
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

_GRID = "grid_search"
_PLAIN = (bool, int, float, str, type(None))  # types that Optuna accepts as categories


class Domain(ABC):
    """A set of values, and the distribution by which a value of the set is drawn."""

    @abstractmethod
    def distribution(self) -> BaseDistribution:
        """Return the Optuna distribution from which Optuna draws a value; :meth:`decode` converts this value."""

    def decode(self, drawn: Any) -> Any:
        """Convert a value that Optuna has drawn to a value of this domain."""
        return drawn


@dataclass(frozen=True, kw_only=True)
class Range(Domain):
    """Numbers from ``low`` to ``high``, both included.

    Attributes:
        low: the minimum.
        high: the maximum.
        log: draw uniformly on a logarithmic scale.
        step: draw only multiples of this number; both bounds must be multiples of it. None draws any number.
        integer: draw only whole numbers.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None
    integer: bool = False

    def __post_init__(self) -> None:
        numbers = (self.low, self.high, 1 if self.step is None else self.step)
        if any(isinstance(number, bool) or not isinstance(number, (int, float)) for number in numbers):
            raise ConfigurationError(f"range: expected numbers, got {numbers[0]!r} to {numbers[1]!r}")
        if not -math.inf < self.low <= self.high < math.inf:
            raise ConfigurationError(f"range: expected finite bounds, low <= high, got {self.low} to {self.high}")
        if self.log and self.low <= 0:
            raise ConfigurationError(f"logarithmic range: expected a lower bound > 0, got {self.low}")
        if self.step is not None:
            if self.step <= 0:
                raise ConfigurationError(f"range: expected a step > 0, got {self.step}")
            for bound in (self.low, self.high):
                if abs(bound / self.step - round(bound / self.step)) > 1e-6:
                    raise ConfigurationError(
                        f"range: expected bounds that are multiples of the step {self.step}, got {bound}"
                    )

    def distribution(self) -> BaseDistribution:
        """See :class:`Domain`; :meth:`decode` rounds values of a logarithmic range with a step."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if self.integer and not (self.log and self.step):
            return IntDistribution(int(self.low), int(self.high), log=self.log, step=int(self.step or 1))
        return FloatDistribution(self.low, self.high, log=self.log, step=None if self.log else self.step)

    def decode(self, drawn: Any) -> Any:
        """See :class:`Domain`."""
        if self.log and self.step:
            drawn = min(max(round(drawn / self.step) * self.step, self.low), self.high)
        return int(drawn) if self.integer else float(drawn)


@dataclass(frozen=True)
class Normal(Domain):
    """Numbers of a normal distribution. Optuna draws a probability; :meth:`decode` returns the quantile for it."""

    mean: float = 0.0
    sd: float = 1.0
    step: float | None = None

    def distribution(self) -> BaseDistribution:
        """See :class:`Domain`."""
        from optuna.distributions import FloatDistribution

        return FloatDistribution(1e-9, 1 - 1e-9)

    def decode(self, drawn: Any) -> Any:
        """See :class:`Domain`."""
        value = NormalDist(self.mean, self.sd).inv_cdf(drawn)
        return round(value / self.step) * self.step if self.step else value


@dataclass(frozen=True)
class Choice(Domain):
    """One of several values of any kind."""

    options: Sequence[Any]

    def __post_init__(self) -> None:
        if isinstance(self.options, (str, Mapping)) or not hasattr(self.options, "__len__") or not len(self.options):
            raise ConfigurationError(f"choice: expected a list of at least one value, got {self.options!r}")

    @property
    def _is_plain(self) -> bool:
        plain = all(type(option) in _PLAIN for option in self.options)
        return plain and len(set(self.options)) == len(self.options)

    def distribution(self) -> BaseDistribution:
        """See :class:`Domain`; if Optuna does not accept the options as categories, it draws an index instead."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(list(self.options) if self._is_plain else list(range(len(self.options))))

    def encode(self, index: int) -> Any:
        """Return the value that represents the option with this index in Optuna."""
        return self.options[index] if self._is_plain else index

    def decode(self, drawn: Any) -> Any:
        """See :class:`Domain`."""
        return drawn if self._is_plain else self.options[drawn]


@dataclass(frozen=True)
class Grid(Choice):
    """Several values, each of which is tried in turn."""


@dataclass(frozen=True)
class Computed:
    """A value that a function computes from the drawn values."""

    function: Callable[[Any], Any]


def choice(categories: Sequence[Any]) -> Domain:
    """Draw one of several values, as in ``choice([16, 32, 64])``. The values may have any type, including datasets."""
    return Choice(categories)


def grid_search(values: Sequence[Any]) -> dict[str, list[Any]]:
    """Try every one of the values.

    There are ``num_samples`` trials for each value. With several grids, there are ``num_samples`` trials for each
    combination of their values.
    """
    return {_GRID: list(values)}


def uniform(lower: float, upper: float) -> Domain:
    """Draw a number between two bounds."""
    return Range(low=lower, high=upper)


def quniform(lower: float, upper: float, q: float) -> Domain:
    """Draw a multiple of ``q`` between two bounds, which must be multiples of ``q`` themselves."""
    return Range(low=lower, high=upper, step=q)


def loguniform(lower: float, upper: float) -> Domain:
    """Draw a number between two bounds above 0, uniformly on a logarithmic scale."""
    return Range(low=lower, high=upper, log=True)


def qloguniform(lower: float, upper: float, q: float) -> Domain:
    """Draw a number like :func:`loguniform`, rounded to a multiple of ``q``. Both bounds must be multiples of ``q``."""
    return Range(low=lower, high=upper, log=True, step=q)


def randn(mean: float = 0.0, sd: float = 1.0) -> Domain:
    """Draw a number from a normal distribution."""
    return Normal(mean, sd)


def qrandn(mean: float, sd: float, q: float) -> Domain:
    """Draw a number like :func:`randn`, rounded to a multiple of ``q``."""
    return Normal(mean, sd, q)


def randint(lower: int, upper: int) -> Domain:
    """Draw a whole number from ``lower`` (included) to ``upper`` (excluded)."""
    return Range(low=lower, high=upper - 1, integer=True)


def qrandint(lower: int, upper: int, q: int = 1) -> Domain:
    """Draw a multiple of the integer ``q`` between two bounds, both included, which must also be multiples of ``q``."""
    return Range(low=lower, high=upper, step=q, integer=True)


def lograndint(lower: int, upper: int) -> Domain:
    """Draw a whole number like :func:`randint`, but uniformly on a logarithmic scale."""
    return Range(low=lower, high=upper - 1, log=True, integer=True)


def qlograndint(lower: int, upper: int, q: int) -> Domain:
    """Draw a whole number like :func:`qrandint`, but uniformly on a logarithmic scale."""
    return Range(low=lower, high=upper, log=True, step=q, integer=True)


def sample_from(function: Callable[[dict[str, Any]], Any]) -> Computed:
    """Compute a value by calling ``function`` with the trial's config, in which all drawn values are already set."""
    return Computed(function)


class Space:
    """A search space.

    Args:
        tree: nested mappings and lists with domains.

    Attributes:
        tree: nested mappings and lists with domains.
        domains: the domains by their paths, such as ``"train_loop_config/lr"``.

    Raises:
        ConfigurationError: a domain of Ray Tune is not supported.
    """

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.tree = tree
        self.domains: dict[str, Domain] = {}
        for path, value in _leaves(tree):
            if isinstance(value, Domain):
                self.domains[path] = value
        self._grids = {path: domain for path, domain in self.domains.items() if isinstance(domain, Grid)}

    @property
    def grid(self) -> list[dict[str, Any]]:
        """For each combination of the grids' values, a dict from each grid's path to the value as Optuna draws it.

        Without grids, there is a single, empty dict.
        """
        combinations = itertools.product(*(range(len(domain.options)) for domain in self._grids.values()))
        return [
            {path: domain.encode(index) for (path, domain), index in zip(self._grids.items(), indices, strict=True)}
            for indices in combinations
        ]

    def distributions(self) -> dict[str, BaseDistribution]:
        """Return the Optuna distributions of the domains, by path."""
        return {path: domain.distribution() for path, domain in self.domains.items()}

    def config(self, drawn: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of the tree with values instead of domains.

        Args:
            drawn: the values that Optuna has drawn, by path.
        """

        def fill(path: str, value: Any) -> Any:
            return value.decode(drawn[path]) if isinstance(value, Domain) else value

        config: dict[str, Any] = _map(self.tree, fill)

        def compute(path: str, value: Any) -> Any:
            return value.function(config) if isinstance(value, Computed) else value

        computed: dict[str, Any] = _map(config, compute)
        return computed


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    _map(tree, lambda path, value: leaves.append((path, value)), path)
    yield from leaves


def _map(tree: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return a copy of nested mappings and lists in which each leaf is replaced by ``change(path, leaf)``."""
    domain = _as_domain(tree)
    if domain is not None:
        return change(path, domain)
    if isinstance(tree, Mapping):
        return {key: _map(value, change, f"{path}/{key}" if path else str(key)) for key, value in tree.items()}
    if type(tree) is list:
        return [_map(value, change, f"{path}/{index}") for index, value in enumerate(tree)]
    return change(path, tree)


def _as_domain(value: Any) -> Domain | Computed | None:
    """Return a value as a domain, converting domains of Ray Tune; None if it is not a domain."""
    if isinstance(value, (Domain, Computed)):
        return value
    if isinstance(value, Mapping) and value.keys() == {_GRID}:
        return Grid(value[_GRID])
    if any(kind.__module__ == "ray.tune.search.sample" for kind in type(value).__mro__):
        return _from_ray(value)
    return None


def _from_ray(domain: Any) -> Domain | Computed:
    from ray.tune.search import sample

    if isinstance(domain, sample.Function):
        function = domain.func
        return Computed(function if domain.pass_config else lambda config: function())
    if isinstance(domain, sample.Categorical):
        return Choice(domain.categories)
    if not isinstance(domain, (sample.Float, sample.Integer)):
        raise ConfigurationError(f"param_space: expected a supported domain, got {domain!r} of Ray Tune")
    sampler, step = domain.get_sampler(), None
    if isinstance(sampler, sample.Quantized):
        step, sampler = sampler.q, sampler.get_sampler()
    if isinstance(sampler, sample.Normal):
        return Normal(sampler.mean, sampler.sd, step)
    integer = isinstance(domain, sample.Integer)
    high = domain.upper - 1 if integer and step is None else domain.upper
    return Range(low=domain.lower, high=high, log=isinstance(sampler, sample.LogUniform), step=step, integer=integer)
