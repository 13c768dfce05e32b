"""Distributed XGBoost and LightGBM training for drivetrain."""

__all__: list[str] = []
