"""Forks the server of local workers when a script imports what it needs for a run on several workers."""

from __future__ import annotations

from drivetrain._base.head import later_imports

__all__ = ["fork_server_at_head"]


def fork_server_at_head() -> None:
    """Fork the server if the main script is executing an import at its head. See :mod:`drivetrain._runtimes.ahead`."""
    if (imports := later_imports()) is not None:
        # Imported here, because it takes longer than all that is needed elsewhere: in workers, for example.
        from drivetrain._runtimes.ahead import fork_server

        fork_server(imports)
