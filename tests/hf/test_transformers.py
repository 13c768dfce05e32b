"""``transformers.Trainer`` in runs of two processes."""

import os
import signal
from collections.abc import Callable, Iterator
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import drivetrain
from drivetrain import CheckpointConfig, ConfigurationError, Result, ScalingConfig, TrainingFailedError
from drivetrain_hf.transformers import TransformersTrainer, prepare_trainer
from tests.hf.texts import dataset
from tests.hf.trainers import losses, make_trainer, saved_history, train
from tests.support import read_lines, wait_for_stop_step

STEPS = 12
FIRST_EVALUATION_ROW = 1000
KEEP_BEST = {"run": {"checkpoint_config": CheckpointConfig(checkpoint_score_attribute="eval_accuracy")}}


def config_of(count: int = 256, **arguments: Any) -> dict[str, Any]:
    examples, vocabulary = dataset(count)
    return {"examples": examples, "vocabulary": vocabulary, "arguments": arguments}


def train_and_return_history(config: dict[str, Any]) -> list[dict[str, Any]]:
    return train(config).state.log_history


def test_two_workers_reach_the_losses_of_a_single_process(fit: Callable[..., Result]):
    epochs = {"count": 768, "num_train_epochs": 3, "eval_strategy": "epoch"}
    alone = fit(train_and_return_history, config_of(per_device_train_batch_size=16, **epochs), workers=0)
    together = fit(train_and_return_history, config_of(per_device_train_batch_size=8, **epochs))
    assert alone.metrics["eval_accuracy"] > 0.75
    assert together.metrics["eval_accuracy"] == pytest.approx(alone.metrics["eval_accuracy"], abs=0.1)
    expected, actual = losses(alone.return_value), losses(together.return_value)
    assert expected.keys() == actual.keys()
    steps = range(1, 13)
    assert [actual[step] for step in steps] == pytest.approx([expected[step] for step in steps], abs=2e-3)


def kill_after(step: int | None) -> Any:
    """Return a callback that kills rank 1 after a step in the first attempt."""
    from transformers import TrainerCallback

    class Kill(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            context = drivetrain.get_context()
            if (context.attempt, context.get_world_rank(), state.global_step) == (0, 1, step):
                os.kill(os.getpid(), signal.SIGKILL)

    return Kill()


def train_until_killed(config: dict[str, Any]) -> list[dict[str, Any]]:
    return train(config, kill_after(config["kill_at"])).state.log_history


RANDOM = {"max_steps": STEPS, "dropout": 0.3, "lr_scheduler_type": "linear"}


@pytest.fixture(scope="module")
def undisturbed_run(fit: Callable[..., Result]) -> Result:
    """A run without a failure."""
    return fit(train_and_return_history, config_of(**RANDOM))


@pytest.fixture
def undisturbed(undisturbed_run: Result) -> dict[int, float]:
    """The loss of each step of the run without a failure."""
    return losses(undisturbed_run.return_value)


def test_killed_run_resumes_with_the_losses_of_an_undisturbed_one(
    fit: Callable[..., Result], undisturbed: dict[int, float]
):
    config = config_of(save_strategy="steps", save_steps=3, **RANDOM)
    disturbed = fit(train_until_killed, {**config, "kill_at": 7}, max_failures=1)
    assert losses(disturbed.return_value) == undisturbed
    assert len(undisturbed) == STEPS
    # The second attempt runs only the steps after the checkpoint.
    steps = [line["step"] for line in read_lines(Path(disturbed.path, "result.json"))]
    assert steps == [3, 6, 9, 12, 12]


SAVING = [
    {"save_strategy": "no"},
    {"save_strategy": "epoch"},
    {"save_strategy": "steps", "save_steps": 2},
    {"save_strategy": "steps", "save_steps": 3},
]
EVALUATING = [
    {"eval_strategy": "no"},
    {"eval_strategy": "epoch"},
    {"eval_strategy": "steps", "eval_steps": 2},
    {"eval_strategy": "steps", "eval_steps": 3},
]
LOGGING = [
    {"logging_strategy": "no"},
    {"logging_strategy": "epoch"},
    {"logging_strategy": "steps", "logging_steps": 1},
]
COMBINATIONS = [
    {**saving, **evaluating, **logging}
    for (saving, evaluating), logging in zip(product(SAVING, EVALUATING), cycle(LOGGING), strict=False)
]
SAVED_AT = {"no": [], "epoch": [3, 6], 2: [2, 4, 6], 3: [3, 6]}


def train_every_combination(config: dict[str, Any]) -> None:
    """Train with each combination in turn in one run, for two epochs of three steps each."""
    from drivetrain_hf.transformers import RayTrainReportCallback

    for number, strategies in enumerate(COMBINATIONS):
        drivetrain.report({"combination": number})
        trainer = make_trainer(
            config["examples"],
            config["vocabulary"],
            **strategies,
            num_train_epochs=2,
            output_dir=str(Path(drivetrain.get_context().get_trial_dir(), f"out{number}")),
        )
        trainer.add_callback(RayTrainReportCallback())
        prepare_trainer(trainer).train()


def test_checkpoints_have_the_metrics_of_their_step_with_all_strategies(fit: Callable[..., Result]):
    config = config_of()
    result = fit(train_every_combination, {**config, "examples": config["examples"][:64]})
    lines = read_lines(Path(result.path, "result.json"))
    starts = [place for place, line in enumerate(lines) if "combination" in line]
    reported = [lines[start + 1 : end] for start, end in zip(starts, [*starts[1:], len(lines)], strict=True)]
    kept = {metrics["_training_iteration"]: checkpoint for checkpoint, metrics in result.best_checkpoints}

    for strategies, reports in zip(COMBINATIONS, reported, strict=True):
        *saved, last = reports
        steps = dict.fromkeys(line["step"] for line in saved)  # some versions save twice at the end
        assert list(steps) == SAVED_AT[strategies.get("save_steps", strategies["save_strategy"])]
        assert [line["_training_iteration"] in kept for line in reports] == [True] * len(saved) + [False]
        for line in saved:
            logged = saved_history(kept[line["_training_iteration"]])  # the log at the time of saving
            evaluated = [entry.get("eval_loss") for entry in logged if entry["step"] == line["step"]]
            assert line.get("eval_loss") == next(filter(None, evaluated), None), strategies
            trained = [entry["loss"] for entry in logged if "loss" in entry]
            assert line.get("loss") == (trained[-1] if trained else None), strategies
        assert last["step"] == 6
        assert "train_loss" in last
        assert ("eval_loss" in last) == (strategies["eval_strategy"] != "no")


def train_to_the_best(config: dict[str, Any]) -> tuple[float, list[float]]:
    """Train each attempt in a new directory, as on a new node; return the final loss and all evaluation losses."""
    context = drivetrain.get_context()
    arguments = {**config["arguments"], "output_dir": str(Path(context.get_trial_dir(), f"out{context.attempt}"))}
    trainer = train({**config, "arguments": arguments}, kill_after(config["kill_at"]))
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return trainer.evaluate()["eval_loss"], evaluated


def test_best_model_is_loaded_at_the_end_even_if_another_node_has_saved_it(fit: Callable[..., Result]):
    # "Best" means the highest loss here, so that the best checkpoint is an early one.
    each_two_steps = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    best = {"load_best_model_at_end": True, "greater_is_better": True, "metric_for_best_model": "loss"}
    config = config_of(max_steps=8, learning_rate=0.02, **best, **each_two_steps)
    final, evaluated = fit(train_to_the_best, {**config, "kill_at": 7}, max_failures=1).return_value
    assert len(evaluated) == 4
    assert max(evaluated) != evaluated[-1]
    assert final == pytest.approx(max(evaluated), abs=1e-5)


def preempt_after(step: int) -> Any:
    """Return a callback that sends SIGTERM to rank 1 after a step in the first attempt, and waits for the stop step."""
    from transformers import TrainerCallback

    class Preempt(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            context = drivetrain.get_context()
            if (context.attempt, state.global_step) == (0, step):
                if context.get_world_rank() == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                wait_for_stop_step()

    return Preempt()


def train_and_be_preempted(config: dict[str, Any]) -> list[dict[str, Any]]:
    return train(config, preempt_after(4)).state.log_history


def test_preempted_run_saves_at_the_stop_step_and_resumes_with_the_same_losses(
    fit: Callable[..., Result], undisturbed: dict[int, float]
):
    preempted = fit(train_and_be_preempted, config_of(save_strategy="epoch", **RANDOM))
    assert losses(preempted.return_value) == undisturbed
    steps = [line["step"] for line in read_lines(Path(preempted.path, "result.json"))]
    assert steps[0] == 5
    assert set(steps[1:]) == {STEPS}  # the report of the checkpoint, and others depending on the version


class Batches:
    """The batches of one worker, as a plain iterable."""

    def __init__(self, examples: list[dict[str, Any]], size: int) -> None:
        self._examples, self._size = examples, size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self._examples), self._size):
            rows = self._examples[start : start + self._size]
            yield {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def train_on_batches(config: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the log of a training run, and of another that resumes from its first checkpoint."""
    context = drivetrain.get_context()
    own = config["examples"][context.get_world_rank() :: context.get_world_size()]
    histories = []
    for first in (None, str(Path(context.get_trial_dir(), "out", "checkpoint-4"))):
        trainer = make_trainer(own, config["vocabulary"], **config["arguments"])
        trainer.train_dataset, trainer.eval_dataset = Batches(own[:96], 8), {"held": Batches(own[96:], 8)}
        prepare_trainer(trainer).train(resume_from_checkpoint=first)
        histories.append(trainer.state.log_history)
    return tuple(histories)


def test_iterables_are_treated_as_batches_of_their_worker(fit: Callable[..., Result]):
    each_four_steps = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    whole, resumed = fit(train_on_batches, config_of(max_steps=STEPS, **each_four_steps)).return_value
    assert losses(resumed) == losses(whole)
    evaluated = [entry["eval_held_loss"] for entry in whole if "eval_held_loss" in entry]
    assert evaluated == [entry["eval_held_loss"] for entry in resumed if "eval_held_loss" in entry]
    assert len(evaluated) == 3


def train_on_shards(config: dict[str, Any]) -> tuple[float, int]:
    shards = {name: drivetrain.get_dataset_shard(name).iter_torch_batches(batch_size=8) for name in ("train", "valid")}
    trainer = make_trainer(config["examples"][:1], config["vocabulary"], **config["arguments"])
    trainer.train_dataset, trainer.eval_dataset = shards["train"], shards["valid"]
    prepare_trainer(trainer).train()
    return trainer.evaluate()["eval_accuracy"], len(trainer.state.log_history)


def test_dataset_shards_are_treated_as_batches_of_their_worker(fit: Callable[..., Result]):
    config = config_of(max_steps=40)
    columns = {name: np.array([row[name] for row in config["examples"]]) for name in config["examples"][0]}
    split = len(config["examples"]) * 3 // 4
    parts = {
        "train": {name: column[:split] for name, column in columns.items()},
        "valid": {name: column[split:] for name, column in columns.items()},
    }
    accuracy, _ = fit(train_on_shards, config, datasets=parts).return_value
    assert accuracy > 0.55


def test_only_rank_0_shows_progress(undisturbed_run: Result):
    shown, hidden = (Path(undisturbed_run.path, "logs", f"rank_{rank}.log").read_text() for rank in range(2))
    assert f"| {STEPS}/{STEPS} [" in shown
    assert "it/s" not in hidden
    assert "'loss'" not in hidden


def prepare_misconfigured_trainers(config: dict[str, Any]) -> dict[str, str]:
    """Return the error message for each trainer that does not fit the run."""
    messages = {}
    attempts = {
        "no trainer": lambda: prepare_trainer(config),
        "alone": lambda: prepare_trainer(trainer_without_environment(config)),
        "without evaluation": lambda: prepare_trainer(trainer_of(config, save_strategy="epoch")),
        "epochs and steps": lambda: prepare_trainer(
            trainer_of(config, save_strategy="epoch", eval_strategy="steps", eval_steps=2)
        ),
        "unaligned": lambda: prepare_trainer(
            trainer_of(config, save_strategy="steps", save_steps=3, eval_strategy="steps", eval_steps=2)
        ),
        "endless": lambda: prepare_trainer(trainer_without_length(config)),
        "callback alone": lambda: train(
            {**config, "arguments": {"save_strategy": "epoch"}}, prepare=lambda trainer: trainer
        ),
    }
    for name, attempt in attempts.items():
        with pytest.raises(ConfigurationError) as caught:
            attempt()
        messages[name] = str(caught.value)
    for values in ({"save_steps": 4, "eval_steps": 2}, {"save_steps": 0.4, "eval_steps": 0.2}):
        prepare_trainer(trainer_of(config, save_strategy="steps", eval_strategy="steps", **values))
    return messages


def trainer_of(config: dict[str, Any], **arguments: Any) -> Any:
    return make_trainer(config["examples"], config["vocabulary"], **arguments)


def trainer_without_environment(config: dict[str, Any]) -> Any:
    """Return a trainer created without the variables that describe the other processes."""
    removed = {name: os.environ.pop(name) for name in ("ACCELERATE_USE_CPU", "LOCAL_RANK", "WORLD_SIZE")}
    try:
        return trainer_of(config)
    finally:
        os.environ.update(removed)


def trainer_without_length(config: dict[str, Any]) -> Any:
    """Return a trainer with data of unknown length and no ``max_steps``."""
    trainer = trainer_of(config, save_strategy="epoch", eval_strategy="epoch")
    trainer.train_dataset = Batches(config["examples"], 8)
    return trainer


def test_misconfigured_trainers_are_refused_with_a_remedy(fit: Callable[..., Result]):
    messages = fit(prepare_misconfigured_trainers, config_of(), **KEEP_BEST).return_value
    assert "expected a transformers.Trainer, got {" in messages["no trainer"]
    assert "a world size of 2, the number of workers, got 1, with which each worker" in messages["alone"]
    assert "got eval_strategy='no' and save_strategy='epoch'" in messages["without evaluation"]
    assert "got eval_strategy='steps' every 2 and save_strategy='epoch'" in messages["epochs and steps"]
    assert "every 2 and save_strategy='steps' every 3. Use" in messages["unaligned"]
    assert "max_steps=..." in messages["endless"]
    assert messages["callback alone"] == messages["without evaluation"]


def test_score_that_is_never_logged_is_reported_at_the_first_checkpoint(fit: Callable[..., Result]):
    unknown = {"run": {"checkpoint_config": CheckpointConfig(checkpoint_score_attribute="accuracy")}}
    each_step = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    config = config_of(max_steps=2, **each_step)
    message = r"before it saves \(.*eval_accuracy.*\), got 'accuracy'\. Use one of these"
    with pytest.raises(TrainingFailedError, match=message) as caught:
        fit(train_and_return_history, config, workers=0, **unknown)
    assert isinstance(caught.value.__cause__, ConfigurationError)


def init_trainer(train_dataset: Any, eval_dataset: Any, **config: Any) -> Any:
    trainer = make_trainer(train_dataset, config.pop("vocabulary"), save_strategy="steps", save_steps=2, **config)
    trainer.eval_dataset = eval_dataset
    return trainer


def test_older_trainer_runs_the_trainer_of_its_function_and_resumes_from_its_checkpoint(fit: Callable[..., Result]):
    examples, vocabulary = dataset()
    config = {"vocabulary": vocabulary, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    result = fit(
        init_trainer,
        trainer=TransformersTrainer,
        workers=1,
        trainer_init_config=config,
        datasets={"train": examples[:192], "evaluation": examples[192:]},
    )
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == [2, 4]
    restored = TransformersTrainer.restore(
        result.path, trainer_init_config={**config, "max_steps": 6}, scaling_config=ScalingConfig(num_workers=0)
    ).fit()
    assert [metrics["step"] for _, metrics in restored.best_checkpoints] == [2, 4, 6]
    assert list(losses(saved_history(restored.checkpoint))) == [1, 2, 3, 4, 5, 6]


def init_with_counters(train_dataset: Any, eval_dataset: Any, *, seen: str, vocabulary: int, **config: Any) -> Any:
    """Return a trainer that records the numbers of the rows it trains on, and counts the rows it evaluates."""
    from transformers import default_data_collator

    examples, _ = dataset()
    trainer = make_trainer(examples[:4], vocabulary, save_strategy="no", **config)
    trainer.train_dataset, trainer.eval_dataset = train_dataset, eval_dataset
    trainer.compute_metrics = lambda output: {"rows": len(output.label_ids), "sum": int(sum(output.label_ids))}
    file = Path(seen, str(drivetrain.get_context().get_world_rank()))

    def collate(rows: list[dict[str, Any]]) -> Any:
        with file.open("a") as stream:
            stream.writelines(f"{row['row']}\n" for row in rows if row["row"] < FIRST_EVALUATION_ROW)
        return default_data_collator([{name: row[name] for name in row if name != "row"} for row in rows])

    trainer.data_collator = collate
    return trainer


def numbered(examples: list[dict[str, Any]], first: int = 0) -> Any:
    columns = {name: [row[name] for row in examples] for name in examples[0]}
    return pa.table({**columns, "row": range(first, first + len(examples))})


def rows_seen(directory: Path) -> list[list[int]]:
    return [[int(line) for line in (directory / str(rank)).read_text().split()] for rank in range(2)]


def test_older_trainer_makes_each_worker_read_its_part_of_files(tmp_path: Path, fit: Callable[..., Result]):
    examples, vocabulary = dataset()
    tables = {"train": numbered(examples[:191]), "evaluation": numbered(examples[191:240], FIRST_EVALUATION_ROW)}
    for name, table in tables.items():
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=50)
    counting = {"num_train_epochs": 2, "eval_strategy": "epoch", "remove_unused_columns": False}
    result = fit(
        init_with_counters,
        trainer=TransformersTrainer,
        trainer_init_config={"seen": str(tmp_path), "vocabulary": vocabulary, **counting},
        datasets={name: tmp_path / f"{name}.parquet" for name in tables},
    )
    assert (result.metrics["step"], result.metrics["epoch"]) == (2 * 12, 2)  # 96 and 95 rows in batches of 8
    first, second = rows_seen(tmp_path)
    assert (sorted(first), sorted(second)) == (sorted([*range(95)] * 2), sorted([*range(95, 191)] * 2))
    assert result.metrics["eval_rows"] == 49
    assert result.metrics["eval_sum"] == sum(row["labels"] for row in examples[191:240])


def init_with_datasets(train_dataset: Any, eval_dataset: Any, **config: Any) -> Any:
    trainer = make_trainer(dataset()[0][:4], **config)
    trainer.train_dataset, trainer.eval_dataset = train_dataset, eval_dataset
    return trainer


def test_older_trainer_drops_columns_that_the_model_does_not_take(fit: Callable[..., Result]):
    examples, vocabulary = dataset()
    result = fit(
        init_with_datasets,
        trainer=TransformersTrainer,
        trainer_init_config={"vocabulary": vocabulary, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 4},
        datasets={"train": numbered(examples[:192]), "evaluation": numbered(examples[192:])},
    )
    assert result.metrics["step"] == 4


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore:.*deprecated")  # Ray Data warns about its own code
@pytest.mark.campaign
def test_older_trainer_reads_ray_datasets(tmp_path: Path, fit: Callable[..., Result], ray_address: str):
    import ray.data

    examples, vocabulary = dataset()
    counting = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 6, "remove_unused_columns": False}
    result = fit(
        init_with_counters,
        trainer=TransformersTrainer,
        runtime="ray",
        trainer_init_config={"seen": str(tmp_path), "vocabulary": vocabulary, **counting},
        datasets={
            "train": ray.data.from_arrow(numbered(examples[:96])),
            "evaluation": ray.data.from_arrow(numbered(examples[96:145], FIRST_EVALUATION_ROW)),
        },
    )
    assert sorted(row for part in rows_seen(tmp_path) for row in part) == [*range(96)]
    assert result.metrics["eval_rows"] == 49


def test_older_trainer_refuses_invalid_arguments():
    with pytest.raises(ConfigurationError, match=r"trainer_init_per_worker=.*expected a function, got 3"):
        TransformersTrainer(3)
    with pytest.raises(ConfigurationError, match="expected the names 'train' and 'evaluation', got 'eval'"):
        TransformersTrainer(init_trainer, datasets={"eval": []})


@pytest.mark.ray
def test_trainer_runs_on_ray(fit: Callable[..., Result], ray_address: str):
    result = fit(train_and_return_history, config_of(max_steps=2, save_strategy="epoch"), runtime="ray")
    assert losses(saved_history(result.checkpoint)) == losses(result.return_value)
    assert len(list(Path(result.checkpoint.path, "checkpoint").glob("rng_state_*.pth"))) == 2
