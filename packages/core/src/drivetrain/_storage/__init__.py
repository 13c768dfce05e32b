"""The run directory: its layout, the supported filesystems, checkpoints, the commit, retention and the lock."""
