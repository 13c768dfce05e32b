"""The ``drivetrain`` command and its subcommands."""
