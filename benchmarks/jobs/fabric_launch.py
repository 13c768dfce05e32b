"""Steps under Lightning Fabric, started by its own launcher."""

import os

from fabrics import train
from lightning.fabric import Fabric
from stamps import options

if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()  # starts this script a second time, for rank 1
    train(fabric, options(steps=800))
    fabric.barrier()
    os._exit(0)  # the interpreter's exit after Gloo aborts sporadically, which would fail the pair
