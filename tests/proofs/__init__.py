"""A soak of ``drivetrain prove``: many kills of small jobs of each framework, on each runtime."""
