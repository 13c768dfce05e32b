"""The checks that need a GPU. Run them with ``python -m tests.gpu``."""
