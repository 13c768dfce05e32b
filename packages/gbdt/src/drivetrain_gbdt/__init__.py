"""Distributed XGBoost and LightGBM training for drivetrain."""

__all__: list[str] = []

__version__ = "0.1.0"
