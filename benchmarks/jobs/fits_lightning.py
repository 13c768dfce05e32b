"""A Lightning training by Lightning's own launcher."""

import os

from fits import fit
from stamps import options

if __name__ == "__main__":
    rank = int(os.environ.get("LOCAL_RANK", "0"))  # the launcher starts this script a second time, for rank 1
    fit(options(steps=800), rank, strategy="ddp", devices=2, accelerator="cpu")
    os._exit(0)  # the interpreter's exit after Gloo aborts sporadically, which would fail the pair
