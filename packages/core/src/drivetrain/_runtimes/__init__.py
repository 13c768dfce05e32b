"""Runtimes, which run workers in this process, on this machine or on a cluster."""
