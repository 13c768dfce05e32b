"""Where workers run: in this process, on this machine, or on a cluster."""
