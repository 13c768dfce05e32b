"""Notes the environment at its import, as frameworks do."""

import os

THREADS = os.environ.get("TALLY_THREADS")
