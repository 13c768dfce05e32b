import dataclasses
import pickle
from typing import Any

import pytest

from drivetrain import CheckpointConfig, ConfigurationError, FailureConfig, RunConfig, ScalingConfig, SyncConfig

REFUSED: list[tuple[type, dict[str, Any], str]] = [
    (ScalingConfig, {"spare_workers": -1}, "integer of at least 0, got -1"),
    (ScalingConfig, {"num_workers": -1}, "integer of at least 0, got -1"),
    (ScalingConfig, {"num_workers": "2"}, "integer of at least 0, got '2'"),
    (ScalingConfig, {"num_workers": 1.5}, "got 1.5"),
    (ScalingConfig, {"num_workers": True}, "got True"),
    (ScalingConfig, {"num_workers": None}, "got None"),
    (ScalingConfig, {"use_gpu": 1}, "True or False, got 1"),
    (ScalingConfig, {"use_gpu": "yes"}, "True or False, got 'yes'"),
    (ScalingConfig, {"resources_per_worker": 4}, "mapping such as"),
    (ScalingConfig, {"resources_per_worker": {"CPU": -1}}, "got 'CPU': -1"),
    (ScalingConfig, {"resources_per_worker": {"CPU": "two"}}, "got 'CPU': 'two'"),
    (ScalingConfig, {"resources_per_worker": {"CPU": float("nan")}}, "got 'CPU': nan"),
    (ScalingConfig, {"resources_per_worker": {1: 1}}, "got 1: 1"),
    (ScalingConfig, {"resources_per_worker": {"GPU": 2}}, "use_gpu is False, got 2 per worker. Set use_gpu=True"),
    (ScalingConfig, {"use_gpu": True, "resources_per_worker": {"GPU": 0}}, "got 0 GPUs per worker"),
    (ScalingConfig, {"trainer_resources": {"CPU": float("inf")}}, "trainer_resources"),
    (ScalingConfig, {"placement_strategy": "TIGHT"}, "'PACK', 'SPREAD', 'STRICT_PACK', 'STRICT_SPREAD', got 'TIGHT'"),
    (ScalingConfig, {"accelerator_type": 100}, "expected a str, got 100"),
    (ScalingConfig, {"num_workers": 0, "runtime": "local"}, "Set num_workers to at least 1"),
    (ScalingConfig, {"runtime": 3}, "a runtime's name or a Runtime, got 3"),
    (CheckpointConfig, {"num_to_keep": 0}, "at least 1, got 0"),
    (CheckpointConfig, {"num_to_keep": "all"}, "got 'all'"),
    (CheckpointConfig, {"checkpoint_score_attribute": 3}, "expected a str"),
    (CheckpointConfig, {"checkpoint_score_order": "best"}, "'max', 'min', got 'best'"),
    (CheckpointConfig, {"checkpoint_frequency": -1}, "at least 0"),
    (CheckpointConfig, {"checkpoint_at_end": "yes"}, "True or False"),
    (FailureConfig, {"max_failures": -2}, "at least -1, got -2"),
    (FailureConfig, {"max_failures": 1.0}, "got 1.0"),
    (FailureConfig, {"fail_fast": "fast"}, "got 'fast'"),
    (FailureConfig, {"fail_fast": True, "max_failures": 2}, "Set only one of them"),
    (FailureConfig, {"policy": 3}, "decide"),
    (SyncConfig, {"sync_period": 0}, "positive number of seconds, got 0"),
    (SyncConfig, {"sync_timeout": "1h"}, "got '1h'"),
    (SyncConfig, {"sync_artifacts": None}, "True or False"),
    (RunConfig, {"name": "a/b"}, "without slashes, got 'a/b'"),
    (RunConfig, {"name": "a\\b"}, "without slashes"),
    (RunConfig, {"name": ".."}, "directory name without slashes"),
    (RunConfig, {"name": ""}, "directory name without slashes"),
    (RunConfig, {"name": "two\nlines"}, "directory name without slashes"),
    (RunConfig, {"name": 5}, "expected a str, got 5"),
    (RunConfig, {"storage_path": 5}, "expected a path or URI, got 5"),
    (RunConfig, {"failure_config": 3}, "expected a FailureConfig, got 3"),
    (RunConfig, {"checkpoint_config": {"num_to_keep": 1}}, "expected a CheckpointConfig"),
    (RunConfig, {"sync_config": True}, "expected a SyncConfig"),
    (RunConfig, {"callbacks": "json"}, "a list of callbacks or names"),
    (RunConfig, {"callbacks": [print]}, "Callback objects, names, or pairs"),
    (RunConfig, {"stop": 3}, "a mapping or a function, got 3"),
    (RunConfig, {"stop": {"loss": "low"}}, "a number for 'loss', got 'low'"),
    (RunConfig, {"verbose": 3}, "0, 1, 2, got 3"),
    (RunConfig, {"log_to_file": "logs"}, "True or False"),
    (RunConfig, {"worker_output": "some"}, "'rank0', 'all', 'none', got 'some'"),
    (RunConfig, {"resume": "s3://bucket/run", "name": "run"}, "the path names the run"),
    (CheckpointConfig, {"keep_every": 2}, "Set num_to_keep"),
    (CheckpointConfig, {"num_to_keep": 1, "keep_every": 0}, "an integer of at least 1, got 0"),
    (CheckpointConfig, {"num_to_keep": 1, "keep_last": 0}, "an integer of at least 1, got 0"),
    (CheckpointConfig, {"max_uploads_in_flight": 0}, "an integer of at least 1, got 0"),
    (SyncConfig, {"transfer_threads": 0}, "an integer of at least 1, got 0"),
    (RunConfig, {"resume": True}, "'must' or the path of a run directory, got True"),
    (RunConfig, {"resume": "must"}, "Set name"),
    (RunConfig, {"detailed_metrics": 1}, "True or False"),
    (RunConfig, {"preload": "torch"}, "list of module names, got 'torch'"),
    (RunConfig, {"preload": None}, "list of module names, got None"),
    (RunConfig, {"preload": [pytest]}, "list of module names"),
    (RunConfig, {"start_timeout_s": 0}, "positive number of seconds"),
    (RunConfig, {"start_timeout_s": float("inf")}, "positive number of seconds"),
]


@pytest.mark.parametrize(("config", "arguments", "words"), REFUSED)
def test_bad_value_is_refused_with_the_expected_and_the_given_value(
    config: type, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        config(**arguments)

    assert words in str(refused.value)
    assert config.__name__ in str(refused.value)
    assert list(arguments)[-1] in str(refused.value)


@pytest.mark.parametrize("config", [ScalingConfig, CheckpointConfig, FailureConfig, SyncConfig, RunConfig])
def test_config_is_frozen_survives_pickling_and_limits_positional_arguments(config: type) -> None:
    made = config()

    assert pickle.loads(pickle.dumps(made)) == made
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"DT-140.*pass it ray\.tune\.RunConfig"):
        setattr(made, dataclasses.fields(config)[0].name, None)
    with pytest.raises(TypeError, match="Pass the others by name"):
        config(*[None] * 7)


def test_none_selects_the_default_config() -> None:
    assert RunConfig(failure_config=None, checkpoint_config=None, sync_config=None, callbacks=None) == RunConfig()


def test_scaling_config_sums_the_requested_resources() -> None:
    config = ScalingConfig(
        num_workers=3, use_gpu=True, resources_per_worker={"CPU": 2, "GPU": 0.5}, trainer_resources={"CPU": 1}
    )

    assert config.total_resources == {"CPU": 7.0, "GPU": 1.5}
    assert (config.num_cpus_per_worker, config.num_gpus_per_worker) == (2.0, 0.5)
    assert ScalingConfig(num_workers=2, use_gpu=True).total_resources == {"CPU": 2.0, "GPU": 2.0}
    assert ScalingConfig().num_gpus_per_worker == 0.0


def test_scaling_config_copies_the_resources() -> None:
    given = {"CPU": 1.0}
    config = ScalingConfig(resources_per_worker=given)
    given["CPU"] = 99.0

    assert config.num_cpus_per_worker == 1.0


def test_secret_options_of_a_policy_are_not_shown_even_after_a_restore() -> None:
    config = RunConfig(failure_config=FailureConfig(policy=("backoff", {"token": "s3cret"})))

    for each in (config, dataclasses.replace(pickle.loads(pickle.dumps(config)), name="restored")):
        assert "s3cret" not in repr(each)
        assert each.failure_config.policy == ("backoff", {"token": "s3cret"})


def test_secret_options_of_a_callback_are_not_shown() -> None:
    config = RunConfig(callbacks=[("webhook", {"url": "https://host/", "token": "s3cret", "tokenizer": "bpe"})])

    assert "s3cret" not in f"{config!r} {config._repr_html_()}"
    assert "'tokenizer': 'bpe'" in repr(config)
    for each in (config, pickle.loads(pickle.dumps(config)), dataclasses.replace(config)):
        assert each.callbacks == (("webhook", {"url": "https://host/", "token": "s3cret", "tokenizer": "bpe"}),)
