"""The run directory: its layout, the filesystems it can be on, checkpoints, the commit, retention, the lock."""
