"""The conformance kit for failure policies, as tests that a plugin inherits.

A plugin author writes a class with one attribute, and pytest collects the tests::

    from drivetrain.testing import PolicyConformance

    class TestMyPolicy(PolicyConformance):
        name = "backoff"  # its entry point in drivetrain.policies

A policy without an entry point defines ``make_policy`` instead::

        def make_policy(self):
            return Backoff(first_s=1.0)

A test that cannot pass for a policy must be overridden with ``@pytest.mark.xfail(reason=...)``. Overriding a test
without a reason is an error.
"""

from __future__ import annotations

from typing import Any, ClassVar

from drivetrain._hooks.plugins import load_plugin
from drivetrain.testing.conformance import check_overrides

__all__ = ["PolicyConformance"]


class PolicyConformance:
    """Tests of a failure policy, alone and in a real run of two workers. Derive a class from it, and set :attr:`name`.

    Attributes:
        name: the name of its entry point in ``drivetrain.policies``; empty for a policy without an entry point.
        ends: True if the policy ends a run whose attempts fail again and again without progress. False if it retries
            forever; each retry must then be delayed by at least a second in the end.
    """

    name: ClassVar[str] = ""
    ends: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.name and cls.make_policy is PolicyConformance.make_policy:
            raise TypeError(f"{cls.__name__}: expected an attribute `name`, or a method make_policy(), got neither")
        check_overrides(cls, PolicyConformance)

    def make_policy(self) -> Any:
        """Return the policy: an object, a class or a function. By default, it is the entry point :attr:`name`."""
        return load_plugin("policy", self.name)
