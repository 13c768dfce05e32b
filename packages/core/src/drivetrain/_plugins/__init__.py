"""Finds, loads and checks plugins, and asks those that serve the objects of a run."""
