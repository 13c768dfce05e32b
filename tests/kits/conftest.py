"""Fixtures of the tests of the conformance kits."""

from tests.core.conftest import install

__all__ = ["install"]
