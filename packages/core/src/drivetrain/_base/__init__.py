"""Utilities that all other packages may use: the console, pickling, captured failures, interrupts."""
