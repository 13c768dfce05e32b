"""Public programs, run under their own launcher and, ported, under drivetrain. See ``docs/ported-programs.md``.

It needs checkouts of the programs' repositories, so it is not part of ``nox``.
"""
