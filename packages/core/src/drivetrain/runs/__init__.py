"""Reads all information about runs, finished or running, from their directories."""
