"""Transformers, Accelerate and DeepSpeed for drivetrain, each in a separate module.

Importing this package or one of its modules does not import these frameworks. Each worker imports them on first use.
"""

__all__: list[str] = []

__version__ = "0.1.0"
