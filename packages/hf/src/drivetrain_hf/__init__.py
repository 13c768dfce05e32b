"""Transformers, Accelerate and DeepSpeed for drivetrain."""

__all__: list[str] = []
