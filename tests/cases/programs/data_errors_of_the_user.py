"""Data that no column can represent is an error of the user, which names the dataset and the column."""

import sys

import pandas as pd

from drivetrain import ConfigurationError, DataParallelTrainer, RunConfig, ScalingConfig


def error_of(dataset):
    trainer = DataParallelTrainer(
        print,
        datasets={"train": dataset},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(verbose=0),
    )
    try:
        trainer.fit()
    except ConfigurationError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    mixed = error_of(pd.DataFrame({"a": [1, "x", 2.0]}))
    equal = error_of(pd.DataFrame([[1, 2]], columns=["a", "a"]))
    print(mixed, equal, sep="\n")
    right = all("dataset 'train'" in error and "'a'" in error and "provider" not in error for error in (mixed, equal))
    sys.exit(0 if right else 1)
