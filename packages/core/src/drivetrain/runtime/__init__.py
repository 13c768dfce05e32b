"""Runtimes start, watch and end worker processes; nothing else in the package knows processes or Ray."""
