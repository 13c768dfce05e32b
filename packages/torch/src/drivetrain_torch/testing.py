"""The conformance kit for parallel strategies, as tests that a plugin inherits.

A plugin author writes a class with one attribute, and pytest collects the tests::

    from drivetrain_torch.testing import StrategyConformance

    class TestMyStrategy(StrategyConformance):
        name = "my_strategy"  # its entry point in drivetrain.strategies

A test that cannot pass for a strategy must be overridden with ``@pytest.mark.xfail(reason=...)``. Overriding a test
without a reason is an error. Requires pytest: run ``pip install "drivetrain[testing]"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from drivetrain.testing import check_overrides

__all__ = ["StrategyConformance"]


class StrategyConformance:
    """Tests of a strategy on two workers with Gloo. Derive a class from it, and set :attr:`name`.

    Attributes:
        name: the name of its entry point in ``drivetrain.strategies``.
        options: the arguments of the strategy, as in ``prepare_model(parallel_strategy_kwargs=...)``.
        invalid_options: arguments that the strategy must reject.
        tolerance: the accepted relative difference between the parameters after training on two workers and on one.
    """

    name: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    invalid_options: ClassVar[Mapping[str, Any]] = {"no_such_option": 1}
    tolerance: ClassVar[float] = 1e-5

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not getattr(cls, "name", ""):
            raise TypeError(f"{cls.__name__}: expected an attribute `name` with the name of the entry point")
        check_overrides(cls, StrategyConformance)
