"""A class that is read from the standard input can be pickled by its name in a worker, and so can one of a notebook."""

# standard input

import pickle

import drivetrain


class State:
    pass


def train() -> bool:
    return type(pickle.loads(pickle.dumps(State()))) is State


result = drivetrain.DataParallelTrainer(
    train,
    scaling_config=drivetrain.ScalingConfig(num_workers=2),
    run_config=drivetrain.RunConfig(verbose=0),
).fit()
raise SystemExit(result.return_value is not True)
