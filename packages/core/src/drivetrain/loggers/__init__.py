"""Callbacks that write what is reported: to files, and to the console."""
