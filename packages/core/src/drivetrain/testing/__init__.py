"""For plugin authors: checks that any backend has to pass. Needs pytest (``pip install "drivetrain[testing]"``)."""

from drivetrain.testing.conformance import BackendConformance

__all__ = ["BackendConformance"]
