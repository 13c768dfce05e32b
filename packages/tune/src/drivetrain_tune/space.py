"""Search spaces, from which the values of trials are drawn. The functions have the same names as in Ray Tune.

A search space is a mapping, nested to any depth, with a domain for each value to draw. A domain can be a value of a
mapping, an item of a list or tuple, an option of another domain, or the return value of a function. Domains of
``ray.tune`` are also accepted.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from drivetrain import ConfigurationError

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

__all__ = [
    "Domain",
    "Drawn",
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
    "suggest",
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
            raise ConfigurationError(f"[DT-751] range: expected numbers, got {numbers[0]!r} to {numbers[1]!r}")
        if not -math.inf < self.low <= self.high < math.inf:
            raise ConfigurationError(
                f"[DT-751] range: expected finite bounds, low <= high, got {self.low} to {self.high}"
            )
        if self.log and self.low <= 0:
            raise ConfigurationError(f"[DT-751] logarithmic range: expected a lower bound > 0, got {self.low}")
        if self.step is not None:
            if self.step <= 0:
                raise ConfigurationError(f"[DT-751] range: expected a step > 0, got {self.step}")
            for bound in (self.low, self.high):
                if abs(bound / self.step - round(bound / self.step)) > 1e-6:
                    raise ConfigurationError(
                        f"[DT-751] range: expected bounds that are multiples of the step {self.step}, got {bound}"
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
            raise ConfigurationError(f"[DT-751] choice: expected a list of at least one value, got {self.options!r}")

    @property
    def is_plain(self) -> bool:
        """True if Optuna accepts the options as categories; otherwise, it draws the index of an option."""
        plain = all(type(option) in _PLAIN for option in self.options)
        return plain and len(set(self.options)) == len(self.options)

    def distribution(self) -> BaseDistribution:
        """See :class:`Domain`."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(list(self.options) if self.is_plain else list(range(len(self.options))))

    def encode(self, index: int) -> Any:
        """Return the value that represents the option with this index in Optuna."""
        return self.options[index] if self.is_plain else index

    def decode(self, drawn: Any) -> Any:
        """See :class:`Domain`."""
        return drawn if self.is_plain else self.options[drawn]


@dataclass(frozen=True)
class Grid(Choice):
    """Several values, each of which is tried in turn."""


@dataclass(frozen=True)
class Computed:
    """A value that a function computes from the drawn values. The value may contain domains.

    Attributes:
        function: computes the value from the config of the trial.
        path: the path of the value in the search space.
    """

    function: Callable[[Any], Any]
    path: str = ""


def choice(categories: Sequence[Any]) -> Domain:
    """Draw one of several values, as in ``choice([16, 32, 64])``.

    The values may have any type, including datasets. A value may be a domain or contain domains, which are drawn only
    in the trials with this value: ``choice([0.0, uniform(0.1, 0.5)])``.
    """
    return Choice(categories)


def grid_search(values: Sequence[Any]) -> dict[str, list[Any]]:
    """Try every one of the values.

    There are ``num_samples`` trials for each value. With several grids, there are ``num_samples`` trials for each
    combination of their values. A grid inside a value of another grid applies only to this value.
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
    """Compute a value by calling ``function`` with the trial's config, in which all drawn values are already set.

    The function may also read values that other functions compute. It may return a domain, or a value that contains
    domains, except for grids; their values are drawn.
    """
    return Computed(function)


class Space:
    """A search space.

    Args:
        tree: nested mappings, lists and tuples with domains.

    Attributes:
        tree: nested mappings, lists and tuples with domains.
        domains: the domains by their paths, such as ``"train_loop_config/lr"``. A domain in an option of a choice has
            the number of the option in its path, as in ``"train_loop_config/lr/1"``.

    Raises:
        ConfigurationError: two domains have the same path, a domain is in an object that is not searched for domains,
            or a domain of Ray Tune is not supported.
    """

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.tree = tree
        leaves = list(_leaves(tree))
        self.domains = {path: leaf for path, leaf in leaves if isinstance(leaf, Domain)}
        counts = Counter(path for path, leaf in leaves)
        if repeated := next((path for path in self.domains if counts[path] > 1), None):
            raise ConfigurationError(
                f"[DT-751] param_space: expected one value with the path {repeated!r}, got {counts[repeated]}. Rename "
                "a key on this path"
            )
        for path, leaf in leaves:
            _require_no_domain(path, leaf)

    @property
    def grid(self) -> list[dict[str, Any]]:
        """For each combination of the grids' values, a dict from each grid's path to the value as Optuna draws it.

        Without grids, there is a single, empty dict.
        """
        return _combinations(self.tree)

    def draw(self, trial: optuna.Trial) -> Drawn:
        """Draw the values of a new trial."""
        values: dict[str, Any] = {}
        computed: dict[str, Any] = {}

        def draw(path: str, domain: Domain) -> Any:
            values[path] = suggest(trial, path, domain.distribution())
            return values[path]

        def compute(each: Computed, config: Any) -> Any:
            computed[each.path] = each.function(config)
            return computed[each.path]

        return Drawn(_resolve(self.tree, draw, compute), values, computed)

    def config(self, drawn: Mapping[str, Any], computed: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return a copy of the tree with values instead of domains.

        Args:
            drawn: the values that Optuna has drawn, by path.
            computed: known results of functions, by path; functions without a known result are called.

        Raises:
            LookupError: ``drawn`` does not contain the value of a domain.
        """
        return _resolve(self.tree, lambda path, domain: drawn[path], _known(computed or {}))

    def fits(self, drawn: Mapping[str, Any], computed: Mapping[str, Any]) -> bool:
        """Return True if a trial of this space can have these values. See :meth:`config` for the arguments."""
        try:
            return self.distributions(drawn, computed).keys() == drawn.keys()
        except LookupError:
            return False

    def distributions(
        self, drawn: Mapping[str, Any], computed: Mapping[str, Any] | None = None
    ) -> dict[str, BaseDistribution]:
        """Return the Optuna distributions of drawn values, by path. See :meth:`config` for the arguments."""
        used: dict[str, BaseDistribution] = {}

        def draw(path: str, domain: Domain) -> Any:
            used[path] = domain.distribution()
            return drawn[path]

        _resolve(self.tree, draw, _known(computed or {}))
        return used


@dataclass(frozen=True, slots=True)
class Drawn:
    """The values of a trial.

    Attributes:
        config: a copy of the search space with values instead of domains.
        values: the values that Optuna has drawn, by path.
        computed: the return values of the functions, by path.
    """

    config: dict[str, Any]
    values: dict[str, Any]
    computed: dict[str, Any]


def _known(computed: Mapping[str, Any]) -> Callable[[Computed, Any], Any]:
    return lambda each, config: computed[each.path] if each.path in computed else each.function(config)


def suggest(trial: optuna.Trial, path: str, distribution: BaseDistribution) -> Any:
    """Make Optuna draw a value.

    Each value is drawn when its domain is reached, because a domain in an option is used only in some trials.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(distribution, CategoricalDistribution):
        return trial.suggest_categorical(path, distribution.choices)
    if isinstance(distribution, IntDistribution):
        return trial.suggest_int(
            path, distribution.low, distribution.high, step=distribution.step, log=distribution.log
        )
    assert isinstance(distribution, FloatDistribution)
    return trial.suggest_float(path, distribution.low, distribution.high, step=distribution.step, log=distribution.log)


def _resolve(tree: Any, draw: Callable[[str, Domain], Any], compute: Callable[[Computed, Any], Any]) -> dict[str, Any]:
    """Return a copy of a search space with values instead of domains.

    Args:
        tree: the search space.
        draw: returns the value that Optuna draws for a domain with this path.
        compute: returns the result of a function, given the config.
    """

    def fill(path: str, leaf: Any, *, is_computed: bool = False) -> Any:
        if isinstance(leaf, Computed):
            return Computed(leaf.function, path)
        if not isinstance(leaf, Domain):
            return leaf
        # A function can return another domain in each trial, but Optuna accepts a single one for each name.
        drawn = draw(f"{path}: {leaf.distribution()}" if is_computed else path, leaf)
        value = leaf.decode(drawn)
        if not isinstance(leaf, Choice) or leaf.is_plain:
            return value
        return _map(value, partial(fill, is_computed=is_computed), f"{path}/{drawn}")

    config = _map(tree, fill)
    while waiting := [leaf for _, leaf in _leaves(config) if isinstance(leaf, Computed)]:
        for each in waiting:
            try:
                value = compute(each, _readable(config, each))
            except _NotComputedError:  # retried when other values are known
                continue
            if any(isinstance(leaf, Grid) for _, leaf in _leaves(value)):
                raise ConfigurationError(
                    f"[DT-752] sample_from at {each.path!r}: expected a function that returns no grid, because the "
                    f"number of trials is fixed, got {value!r}. Return tune.choice(...)"
                )
            config = _replace(config, each, _map(value, partial(fill, is_computed=True), each.path))
            break
        else:
            paths = ", ".join(each.path for each in waiting)
            raise ConfigurationError(
                f"[DT-752] sample_from: expected functions that do not depend on each other's values, got {paths}"
            )
    resolved: dict[str, Any] = config
    return resolved


def _replace(tree: Any, old: Any, new: Any) -> Any:
    return _map(tree, lambda _, leaf: new if leaf is old else leaf)


class _NotComputedError(Exception):
    """A function has read a value that another function has not computed yet."""


class _Config(dict[Any, Any]):
    """The config that a function of :func:`sample_from` receives. Values that are not computed yet cannot be read."""

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, Computed):
            raise _NotComputedError
        return value

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def values(self) -> Any:
        return [self[key] for key in self]

    def items(self) -> Any:
        return [(key, self[key]) for key in self]


def _readable(tree: Any, caller: Computed) -> Any:
    """Return nested mappings as :class:`_Config`, without the value that the caller computes."""
    if isinstance(tree, Mapping):
        return _Config((key, _readable(value, caller)) for key, value in tree.items() if value is not caller)
    return tree


def _combinations(tree: Any, path: str = "") -> list[dict[str, Any]]:
    """Return the combinations of the values of all grids in a tree, as :attr:`Space.grid` does."""
    node = _as_domain(tree) or tree
    inner = [_combinations(part, _join(path, name)) for name, part in _parts(node)]
    if isinstance(node, Grid):
        options = inner or [[{}]] * len(node.options)
        return [
            {path: node.encode(index), **combination}
            for index, combinations in enumerate(options)
            for combination in combinations
        ]
    products = itertools.product(*(combinations for combinations in inner if combinations != [{}]))
    return [{path: value for part in product for path, value in part.items()} for product in products]


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree with their paths. Domains are leaves, too, and so are the leaves of their options."""
    node = _as_domain(tree) or tree
    if isinstance(node, Domain) or not _is_nested(node):
        yield path, node
    for name, part in _parts(node):
        yield from _leaves(part, _join(path, name))


def _parts(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of a mapping, list or tuple, or the options of a choice, with their keys or numbers."""
    if isinstance(node, Choice) and not node.is_plain:
        yield from enumerate(node.options)
    elif _is_nested(node):
        yield from node.items() if isinstance(node, Mapping) else enumerate(node)


def _is_nested(value: Any) -> bool:
    return isinstance(value, (Mapping, tuple)) or type(value) is list


def _join(path: str, name: Any) -> str:
    return f"{path}/{name}" if path else str(name)


def _map(tree: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return a copy of a tree in which each leaf is replaced by ``change(path, leaf)``.

    Dicts and lists are copied. Tuples, and mappings of other types, are returned unchanged if no leaf changes.
    """
    node = _as_domain(tree) or tree
    if not _is_nested(node):
        return change(path, node)
    parts = {name: _map(part, change, _join(path, name)) for name, part in _parts(node)}
    if type(node) is list:
        return list(parts.values())
    if type(node) is not dict and all(parts[name] is part for name, part in _parts(node)):
        return node
    if isinstance(node, Mapping):
        return parts
    return type(node)(*parts.values()) if hasattr(node, "_fields") else tuple(parts.values())


def _require_no_domain(path: str, leaf: Any) -> None:
    """Reject a domain in a set or in an attribute of an object, where it is not replaced."""
    parts: list[Any] = []
    if isinstance(leaf, (set, frozenset)):
        parts = list(leaf)
    elif is_dataclass(leaf) and not isinstance(leaf, (type, Domain, Computed)):
        parts = [getattr(leaf, each.name, None) for each in fields(leaf)]
    for part in parts:
        if isinstance(_as_domain(part), (Domain, Computed)):
            raise ConfigurationError(
                f"[DT-751] param_space: expected domains in mappings, lists and tuples, got {part!r} in a "
                f"{type(leaf).__name__} at {path!r}. Use a mapping, and create the object in the train function"
            )


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
        raise ConfigurationError(f"[DT-751] param_space: expected a supported domain, got {domain!r} of Ray Tune")
    sampler, step = domain.get_sampler(), None
    if isinstance(sampler, sample.Quantized):
        step, sampler = sampler.q, sampler.get_sampler()
    if isinstance(sampler, sample.Normal):
        return Normal(sampler.mean, sampler.sd, step)
    integer = isinstance(domain, sample.Integer)
    high = domain.upper - 1 if integer and step is None else domain.upper
    return Range(low=domain.lower, high=high, log=isinstance(sampler, sample.LogUniform), step=step, integer=integer)
