"""Horovod steps for horovodrun, without reports."""

from horovod_steps import train
from stamps import options

if __name__ == "__main__":
    train(options(steps=800))
