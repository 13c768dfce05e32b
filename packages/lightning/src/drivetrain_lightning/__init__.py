"""Lightning strategies and callbacks for drivetrain."""

__all__: list[str] = []
