"""The conformance kit for callbacks, as tests that a plugin inherits.

A plugin author writes a class with one method, and pytest collects the tests::

    from drivetrain.testing import CallbackConformance

    class TestMyCallback(CallbackConformance):
        name = "webhook"  # its entry point in drivetrain.callbacks
        options = {"url": "http://127.0.0.1:9/"}

A callback without an entry point defines ``make_callback`` instead::

        def make_callback(self):
            return MyCallback(url="http://127.0.0.1:9/")

A test that cannot pass for a callback must be overridden with ``@pytest.mark.xfail(reason=...)``. Overriding a test
without a reason is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from drivetrain._hooks.callback import Callback
from drivetrain._hooks.plugins import load_plugin
from drivetrain.testing.conformance import check_overrides

__all__ = ["CallbackConformance"]


class CallbackConformance:
    """Tests of a callback in real runs of two workers. Derive a class from it, and set :attr:`name`.

    Attributes:
        name: the name of its entry point in ``drivetrain.callbacks``; empty for a callback without an entry point.
        options: the options with which users select it, as in ``RunConfig(callbacks=[(name, options)])``.
    """

    name: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.name and cls.make_callback is CallbackConformance.make_callback:
            raise TypeError(f"{cls.__name__}: expected an attribute `name`, or a method make_callback(), got neither")
        check_overrides(cls, CallbackConformance)

    def make_callback(self) -> Callback:
        """Create the callback. By default, the entry point :attr:`name` is created with :attr:`options`."""
        callback: Callback = load_plugin("callback", self.name)(**self.options)
        return callback
