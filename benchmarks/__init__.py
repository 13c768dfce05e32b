"""Measures drivetrain against Ray Train, torchrun and physical floors. Run it with ``python -m benchmarks``."""
