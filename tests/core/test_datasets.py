"""The provider hook for datasets: which provider reads a dataset, and the errors for none, several or a broken one."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import (
    Checkpoint,
    ConfigurationError,
    DataConfig,
    DataParallelTrainer,
    FailureConfig,
    PluginBrokenError,
    PluginError,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
)
from drivetrain.plugin.datasets import OpenedDataset, required_runtime
from tests.core.conftest import Install

LETTERS = """
from drivetrain.plugin import DatasetProvider


class Letters:
    def __init__(self, text):
        self.text = text


class Shard:
    def __init__(self, text, name, position):
        self.text, self.name, self.position, self.state = text, name, position, None

    def iter_batches(self, *, batch_size=256):
        return [self.text]

    def state_dict(self):
        self.state = {"letters": len(self.text)}
        return self.state

    def load_state_dict(self, state):
        pass

    def take_state(self):
        state, self.state = self.state, None
        return state


class LetterDatasets(DatasetProvider):
    accepted = "letters"

    def accepts(self, dataset):
        return isinstance(dataset, Letters)

    def open(self, name, dataset, *, keep_together=None):
        super().open(name, dataset, keep_together=keep_together)
        return dataset.text

    def split(self, opened, request):
        parts = [opened if request.whole else opened[n :: request.world_size] for n in range(request.world_size)]
        return [Shard(part, request.name, request.position) for part in parts]
"""


@pytest.fixture
def letters(install: Install) -> Any:
    """A module with a dataset class, and an installed provider for it."""
    install("letters-plugin", "letters", LETTERS, {"drivetrain.datasets": {"letters": "letters:LetterDatasets"}})
    module = __import__("letters")
    yield module
    del sys.modules["letters"]


def train_on_letters(config: Mapping[str, Any]) -> None:
    context = drivetrain.get_context()
    shard = drivetrain.get_dataset_shard("train")
    position = shard.position and shard.position["letters"]
    shard.state_dict()
    directory = Path(context.get_trial_dir(), "model")
    directory.mkdir(exist_ok=True)
    checkpoint = Checkpoint.from_directory(directory) if context.get_world_rank() == 0 else None
    drivetrain.report({"text": "".join(shard.iter_batches()), "position": position}, checkpoint)
    if context.attempt == 0:
        raise RuntimeError("the first attempt fails in this test")


def test_provider_of_a_plugin_gets_the_position_of_its_dataset_after_a_failure(letters: Any, tmp_path: Path) -> None:
    result = DataParallelTrainer(
        train_on_letters,
        train_loop_config={},
        datasets={"train": letters.Letters("abcdef"), "all": letters.Letters("xyz")},
        dataset_config=DataConfig(datasets_to_split=["train"]),
        scaling_config=ScalingConfig(num_workers=1, runtime="local"),
        run_config=RunConfig(storage_path=tmp_path, verbose=0, failure_config=FailureConfig(max_failures=1)),
    ).fit()
    assert (result.metrics["text"], result.metrics["position"]) == ("abcdef", 6)


def test_opened_datasets_are_split_without_asking_the_providers_again(letters: Any) -> None:
    config = DataConfig()
    opened = config.open({"train": letters.Letters("abc"), "made": lambda: letters.Letters("de")})
    assert isinstance(opened["train"], OpenedDataset)
    assert opened["train"].value == "abc"
    shards = config.configure(opened, 2)
    assert [shard["train"].text for shard in shards] == ["ac", "b"]
    assert [shard["made"].text for shard in shards] == ["d", "e"]


def test_workers_at_one_position_of_a_mesh_get_the_same_shard(letters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letters.LetterDatasets, "shares", True)
    for mesh, expected in (
        ({"dp": 2, "tp": 2}, ["ac", "ac", "bd", "bd"]),
        ({"tp": -1, "data": 2}, ["ac", "bd", "ac", "bd"]),
        ({"pp": 1, "dp_replicate": 2, "fsdp": 2}, ["a", "b", "c", "d"]),
        ({"context": 4}, ["abcd"] * 4),
    ):
        shards = DataConfig(mesh=mesh).configure({"train": letters.Letters("abcd")}, 4)
        assert [shard["train"].text for shard in shards] == expected


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"dp": 2, "ep": 2}, "expected at most one dimension of each kind, with a known name, got 'ep'"),
        ({"tp": 2, "tensor": 2}, "got the tensor dimensions 'tp' and 'tensor'"),
        ({"dp": 0}, "expected a mapping from names to sizes >= 1, of which one may be -1, got {'dp': 0}"),
        ({"dp": -1, "tp": -1}, "of which one may be -1, got {'dp': -1, 'tp': -1}"),
        ({}, "expected a mapping from names to sizes"),
        ((2, 2), "expected a mapping from names to sizes"),
    ],
    ids=str,
)
def test_mesh_without_a_meaning_is_refused(mesh: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        DataConfig(mesh=mesh)
    assert str(caught.value).startswith("[DT-101] DataConfig(mesh=...): ")
    assert message in str(caught.value)


def test_mesh_is_refused_for_datasets_that_workers_cannot_share(letters: Any) -> None:
    config = DataConfig(mesh={"dp": 2, "tp": 2})
    with pytest.raises(
        ConfigurationError, match=r"\[DT-117\] dataset 'train': .* got one of 'letters' of letters-plugin"
    ):
        config.open({"train": letters.Letters("abc")})
    whole = DataConfig(mesh={"dp": 2, "tp": 2}, datasets_to_split=[])
    assert [shard["train"].text for shard in whole.configure({"train": letters.Letters("abc")}, 4)] == ["abc"] * 4


def test_mesh_of_another_number_of_workers_is_refused_before_the_start(letters: Any, tmp_path: Path) -> None:
    trainer = DataParallelTrainer(
        train_on_letters,
        dataset_config=DataConfig(mesh={"dp": -1, "tp": 2}),
        scaling_config=ScalingConfig(num_workers=3, runtime="local"),
        run_config=RunConfig(name="run", storage_path=tmp_path),
    )
    with pytest.raises(ConfigurationError, match=r"\[DT-117\] .* a mesh of all 3 workers, got {'dp': -1, 'tp': 2}"):
        trainer.fit()
    assert not (tmp_path / "run").exists()


def test_keeping_rows_together_is_refused_if_the_provider_does_not_support_it(letters: Any) -> None:
    config = DataConfig(keep_together={"train": "group"})
    with pytest.raises(ConfigurationError, match=r"'group'.* is not supported for letters"):
        config.open({"train": letters.Letters("abc")})


def test_two_providers_that_accept_a_dataset_are_both_named_in_the_error(letters: Any, install: Install) -> None:
    source = "from letters import LetterDatasets as Other\n"
    install("other-plugin", "other_letters", source, {"drivetrain.datasets": {"other": "other_letters:Other"}})
    expected = r"'letters' of letters-plugin 1\.2 and 'other' of other-plugin 1\.2\. Uninstall one"
    with pytest.raises(PluginError, match=expected):
        DataConfig().open({"train": letters.Letters("abc")})


def test_dataset_that_no_provider_accepts_is_refused_with_the_installed_ones(letters: Any, tmp_path: Path) -> None:
    trainer = DataParallelTrainer(
        train_on_letters, datasets={"train": object()}, run_config=RunConfig(name="run", storage_path=tmp_path)
    )
    with pytest.raises(ConfigurationError, match=r"'train': .* of type object\. .*'letters' of letters-plugin 1\.2 \("):
        trainer.fit()
    assert not (tmp_path / "run").exists()


BROKEN = {
    "exits": "raise SystemExit(3)\n",
    "raises": "import a_library_that_is_not_there\n",
    "is no provider": "Provider = dict\n",
    "is abstract": "from drivetrain.plugin import DatasetProvider\nclass Provider(DatasetProvider): pass\n",
    "raises when asked": LETTERS.replace("isinstance(dataset, Letters)", "1 / 0").replace("LetterDatasets", "Provider"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_provider_affects_no_dataset_that_another_accepts(how: str, letters: Any, install: Install) -> None:
    module = f"broken_{how.replace(' ', '_')}"
    install("broken-plugin", module, BROKEN[how], {"drivetrain.datasets": {"broken": f"{module}:Provider"}})
    opened = DataConfig().open({"train": letters.Letters("abc")})
    assert [shard["train"].text for shard in DataConfig().configure(opened, 1)] == ["abc"]
    assert required_runtime({"train": letters.Letters("abc")}) is None
    with pytest.raises(PluginBrokenError, match=r"no installed provider accepts .*Broken: .*broken-plugin 1\.2"):
        DataConfig().open({"train": object()})


ODD = {
    "accepts": (
        "return isinstance(dataset, Letters)",
        "isinstance(dataset, Letters)",
        "expected True or False, got None",
    ),
    "open": ("return dataset.text", "raise KeyError('x')", "KeyError: 'x'"),
    "split raises": ("parts = [", "raise KeyError('x')\n        parts = [", "KeyError: 'x'"),
    "split returns None": ("return [Shard", "[Shard", "expected a list with one shard per rank, got None"),
    "split returns dict": ("return [", "return {}\n        [", "expected a list with one shard per rank, got {}"),
    "split returns too many": ("for part in parts]", "for part in 'abc']", "expected 2 shards, one per rank, got 3"),
    "split returns rows": (
        "return [Shard",
        "return parts\n        [Shard",
        "expected shards with .*iter_batches.*'ac'",
    ),
}


@pytest.mark.parametrize("how", ODD)
def test_mistake_of_a_provider_is_named_with_the_dataset_and_the_method(how: str, install: Install) -> None:
    right, wrong, problem = ODD[how]
    module = f"odd_{how.replace(' ', '_')}"
    install(
        "odd-plugin",
        module,
        LETTERS.replace(right, wrong),
        {"drivetrain.datasets": {"odd": f"{module}:LetterDatasets"}},
    )
    message = rf"\[DT-.*dataset 'train': .*'odd' of odd-plugin 1\.2 failed in {how.partition(' ')[0]}\(\): {problem}"
    with pytest.raises(PluginBrokenError, match=message) as raised:
        DataConfig().configure({"train": __import__(module).Letters("abc")}, 2)
    assert isinstance(raised.value.__cause__, KeyError) == ("KeyError" in problem)


def test_refusal_of_a_provider_is_not_changed(install: Install) -> None:
    source = LETTERS.replace("return dataset.text", "raise __import__('drivetrain').ConfigurationError('no letters')")
    install("strict-plugin", "strict", source, {"drivetrain.datasets": {"strict": "strict:LetterDatasets"}})
    with pytest.raises(ConfigurationError, match=r"^no letters$"):
        DataConfig().open({"train": __import__("strict").Letters("abc")})


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        (
            "parts = [",
            "raise KeyError('x')\n        parts = [",
            r"the provider 'bad' of .* failed in split\(\): KeyError: 'x'",
        ),
        (
            "self.text, self.name",
            "self.lock = __import__('threading').Lock()\n        self.text, self.name",
            r"expected shards that can be pickled, got Shard \(TypeError: .*lock.*\)\. Open files in iter_batches\(\)",
        ),
    ],
)
def test_run_names_the_dataset_of_a_mistake(
    right: str, wrong: str, problem: str, install: Install, tmp_path: Path
) -> None:
    module = "bad_raises" if "raise" in wrong else "bad_lock"
    install(
        "bad-plugin",
        module,
        LETTERS.replace(right, wrong),
        {"drivetrain.datasets": {"bad": f"{module}:LetterDatasets"}},
    )
    trainer = DataParallelTrainer(
        print,
        datasets={"train": __import__(module).Letters("abc")},
        scaling_config=ScalingConfig(num_workers=1, runtime="local"),
        run_config=RunConfig(storage_path=tmp_path, verbose=0),
    )
    with pytest.raises(TrainingFailedError, match=rf"^\[DT-602\] dataset 'train': {problem}") as failed:
        trainer.fit()
    assert isinstance(failed.value.__cause__, KeyError if "raise" in wrong else TypeError)


def test_provider_declares_the_runtimes_that_can_read_its_shards(install: Install, tmp_path: Path) -> None:
    source = LETTERS.replace('accepted = "letters"', 'runtimes = ("cloud", "inprocess")')
    install("cloud-plugin", "cloud_letters", source, {"drivetrain.datasets": {"cloud": "cloud_letters:LetterDatasets"}})
    dataset = __import__("cloud_letters").Letters("abc")
    assert required_runtime({"other": {"x": [1]}, "train": dataset}) == "cloud"
    assert required_runtime(DataConfig().open({"train": dataset})) == "cloud"

    def fit(given: Any = dataset, **scaling: Any) -> None:
        DataParallelTrainer(
            print,
            datasets={"train": given},
            scaling_config=ScalingConfig(**scaling),
            run_config=RunConfig(name="run", storage_path=tmp_path, verbose=0),
        ).fit()

    with pytest.raises(ConfigurationError, match=r"'train': .*\('cloud', 'inprocess'\), got 'local'\. Use .*'cloud'"):
        fit(num_workers=1, runtime="local")
    with pytest.raises(PluginError, match="no runtime 'cloud' is installed"):
        fit(num_workers=1)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigurationError, match=r"'train': .*can read a Letters .*got 'local'\. Use .*'cloud'"):
        fit(lambda: dataset, num_workers=1, runtime="local")
    shutil.rmtree(tmp_path / "run")
    fit(lambda: dataset, num_workers=0)


def test_asking_the_providers_imports_no_library() -> None:
    code = (
        "import sys; from drivetrain.plugin.datasets import required_runtime\n"
        "assert required_runtime({'a': 'rows.csv', 'b': object(), 'c': {'x': [1]}}) is None\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    assert not {"numpy", "pyarrow", "pandas", "polars", "datasets", "ray", "torch"} & set(run.stdout.split())
