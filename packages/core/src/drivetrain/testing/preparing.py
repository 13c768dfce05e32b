"""The conformance kit for plugins of ``drivetrain.prepare``, as tests that a plugin inherits.

A plugin author writes a class with two attributes and one method, and pytest collects the tests::

    from drivetrain.testing import PrepareConformance

    class TestMyFramework(PrepareConformance):
        name = "my_framework"  # its entry point in drivetrain.prepare
        backend = MyConfig()

        @staticmethod
        def make_objects():
            return [my_framework.Model()]

A test that cannot pass for a plugin must be overridden with ``@pytest.mark.xfail(reason=...)``. Overriding a test
without a reason is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from drivetrain._hooks.backend import BackendConfig
from drivetrain.testing.conformance import check_overrides

__all__ = ["PrepareConformance"]


class PrepareConformance:
    """Tests of a function that prepares the objects of a framework. Derive a class from it, and set :attr:`name`.

    Attributes:
        name: the name of its entry point in ``drivetrain.prepare``: the root module of the framework.
        backend: the configuration of the backend with which the objects are used.
    """

    name: ClassVar[str]
    backend: ClassVar[BackendConfig] = BackendConfig()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not getattr(cls, "name", ""):
            raise TypeError(f"{cls.__name__}: expected an attribute `name` with the name of the entry point")
        if cls.make_objects is PrepareConformance.make_objects:
            raise TypeError(f"{cls.__name__}: expected a static method make_objects(), got none")
        check_overrides(cls, PrepareConformance)

    @staticmethod
    def make_objects() -> Sequence[Any]:
        """Return one object of each kind that the function prepares. Called in a train function, on every worker."""
        raise NotImplementedError
