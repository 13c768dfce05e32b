"""Distributed TensorFlow training for drivetrain."""

__all__: list[str] = []
