"""Transformers, Accelerate and DeepSpeed for drivetrain, each in a separate module.

Importing this package or one of its modules does not import these frameworks. A worker imports them when it first needs
them.
"""

__all__: list[str] = []
