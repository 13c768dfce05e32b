"""Fixtures of the tests of the core that these tests use too."""

from tests.core.conftest import install

__all__ = ["install"]
