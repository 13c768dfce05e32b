import pickle

import pytest

from drivetrain import DrivetrainError, FailureKind, TrainingFailedError, WaitTimeoutError, WorkerDiedError, errors

CLASSES = [
    value
    for name in errors.__all__
    if isinstance(value := getattr(errors, name), type) and issubclass(value, DrivetrainError)
]


@pytest.mark.parametrize("kind", CLASSES)
def test_exception_survives_pickling(kind: type[DrivetrainError]) -> None:
    error = kind("the expected value, and the value that was given")

    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is kind
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_attributes_of_an_exception_survive_pickling() -> None:
    failed = pickle.loads(pickle.dumps(TrainingFailedError("failed", kind=FailureKind.HANG, rank=3)))
    died = pickle.loads(pickle.dumps(WorkerDiedError("died", rank=2, exit_code=-9)))
    late = pickle.loads(pickle.dumps(WaitTimeoutError("late", ranks=[1, 2])))

    assert (failed.kind, failed.rank) == (FailureKind.HANG, 3)
    assert (died.rank, died.exit_code) == (2, -9)
    assert late.ranks == (1, 2)


def test_configuration_error_is_a_value_error_and_all_have_one_base() -> None:
    assert issubclass(errors.ConfigurationError, ValueError)
    assert len(CLASSES) == len(errors.__all__) - 1
