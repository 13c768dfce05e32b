"""Transformers, Accelerate and DeepSpeed for drivetrain, each in a module of its own.

Importing this package, or one of its modules, imports none of the three: a worker does, once it needs it.
"""

__all__: list[str] = []
