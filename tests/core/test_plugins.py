import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import (
    DataParallelTrainer,
    PluginBrokenError,
    PluginError,
    PluginNotFoundError,
    RunConfig,
    ScalingConfig,
)
from drivetrain._plugins.loading import list_plugins, load_plugin, missing_runtimes
from drivetrain_console import main
from tests.core.conftest import Install

BACKEND = """
import contextlib
from drivetrain.plugin import Backend

class Quiet(Backend):
    name = "quiet"

    def rendezvous(self, group):
        return [{"address": "here"} for _ in group.workers]

    def session(self, context, rendezvous):
        assert rendezvous == {"address": "here"}
        return contextlib.nullcontext()
"""


@pytest.fixture
def quiet(install: Install) -> Path:
    return install("quiet-plugin", "quiet_plugin", BACKEND, {"drivetrain.backends": {"quiet": "quiet_plugin:Quiet"}})


@pytest.fixture
def broken(install: Install) -> Path:
    source = "import a_framework_that_is_not_there\n"
    entry_points = {"drivetrain.backends": {"shaky": "broken_plugin:Shaky"}}
    return install("broken-plugin", "broken_plugin", source, entry_points)


def test_own_plugins_are_listed() -> None:
    assert {"inprocess", "local", "ray"} <= {plugin.name for plugin in list_plugins("runtime")}
    assert {"json", "csv", "progress"} <= {plugin.name for plugin in list_plugins("callback")}


def test_plugin_is_listed_without_being_imported(quiet: Path) -> None:
    (plugin,) = [plugin for plugin in list_plugins("backend") if plugin.name == "quiet"]

    assert (plugin.distribution, plugin.version, plugin.target) == ("quiet-plugin", "1.2", "quiet_plugin:Quiet")
    assert "quiet_plugin" not in sys.modules


def test_backend_of_a_plugin_is_chosen_by_its_name(quiet: Path, tmp_path: Path) -> None:
    def train() -> int:
        return drivetrain.get_context().get_world_size()

    result = DataParallelTrainer(
        train,
        backend_config="quiet",
        scaling_config=ScalingConfig(num_workers=2, runtime="local"),
        run_config=RunConfig(name="run", storage_path=tmp_path, verbose=0),
    ).fit()

    assert result.return_value == 2


def test_missing_plugin_error_lists_the_installed_plugins_and_the_install_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(PluginNotFoundError, match=r"Installed: .*'csv', 'json'"):
        load_plugin("callback", "fax")
    monkeypatch.setattr(importlib.metadata, "entry_points", importlib.metadata.EntryPoints)
    monkeypatch.syspath_prepend(tmp_path)  # plugins are looked up again for another module path
    with pytest.raises(PluginNotFoundError, match=r'pip install "drivetrain\[tensorflow\]"'):
        load_plugin("backend", "tensorflow")
    for kind, name, requirement in (
        ("runtime", "command", '"drivetrain[launch]"'),
        ("command", "new-plugin", '"drivetrain[testing]"'),
        ("command", "prove", '"drivetrain[testing]"'),
        ("callback", "progress", "drivetrain"),
        ("view", "page", "drivetrain"),
        ("view", "plot", '"drivetrain[plot]"'),
    ):
        with pytest.raises(PluginNotFoundError) as error:
            load_plugin(kind, name)
        assert str(error.value).endswith(f". Run: pip install {requirement}")


def test_command_of_another_distribution_does_not_replace_a_built_in_one(install: Install) -> None:
    install("other-plugin", "other_plugin", "", {"drivetrain.commands": {"doctor": "other_plugin:add_doctor"}})
    assert load_plugin("command", "doctor").__module__ == "drivetrain_console._commands.doctor"


def test_broken_plugin_names_its_distribution_and_shows_the_error(broken: Path) -> None:
    with pytest.raises(
        PluginBrokenError, match=r"'shaky' of broken-plugin 1\.2 .*a_framework_that_is_not_there"
    ) as error:
        load_plugin("backend", "shaky")

    assert isinstance(error.value.__cause__, ModuleNotFoundError)


def test_entry_point_of_a_missing_object_is_broken(install: Install) -> None:
    install("empty-plugin", "empty_plugin", "", {"drivetrain.callbacks": {"empty": "empty_plugin:Nothing"}})

    with pytest.raises(PluginBrokenError, match=r"empty-plugin 1\.2 .*AttributeError"):
        load_plugin("callback", "empty")


def test_two_distributions_that_claim_one_name_are_both_named(quiet: Path, install: Install) -> None:
    install("other-plugin", "other_plugin", BACKEND, {"drivetrain.backends": {"quiet": "other_plugin:Quiet"}})

    with pytest.raises(PluginError, match=r"got other-plugin 1\.2 and quiet-plugin 1\.2\. Uninstall one"):
        load_plugin("backend", "quiet")


def shown_plugins(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """Run `drivetrain plugins`, and return the lines about each distribution."""
    main(["plugins"])
    paragraphs = capsys.readouterr().out.split("\n\n")
    return {paragraph.split()[0]: paragraph.splitlines() for paragraph in paragraphs[1:-1]}


def test_command_lists_what_every_distribution_provides_and_its_problems(
    quiet: Path, broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = shown_plugins(capsys)

    assert shown["quiet-plugin"] == [
        "quiet-plugin 1.2 (requires drivetrain of any version, API unknown)",
        "  backend    quiet",
    ]
    problem = shown["broken-plugin"][1]
    assert problem.startswith("  ! backend shaky is broken: [DT-602] the backend 'shaky' of broken-plugin 1.2 ")
    assert shown["drivetrain-core"][0] == f"drivetrain-core {drivetrain.__version__}"
    assert "  runtime    inprocess, local" in shown["drivetrain-core"]
    assert main(["plugins"]) == 1
    assert capsys.readouterr().out.endswith("\n\n1 problem, marked with !\n")


def test_command_fits_the_terminal(broken: Path, capsys: pytest.CaptureFixture[str], install: Install) -> None:
    source = "raise SystemExit('no GPU on this machine, as a message explains in many words ' * 3)"
    install("wordy-plugin", "wordy_plugin", source, {"drivetrain.callbacks": {"wordy": "wordy_plugin:Wordy"}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        shown = shown_plugins(capsys)
    assert max(len(line) for lines in shown.values() for line in lines) <= 80
    assert " ".join(" ".join(shown["wordy-plugin"]).split()).count("in many words") == 3


@pytest.mark.parametrize(
    ("requires", "text", "api"),
    [
        (["drivetrain<1,>=0.1"], "requires drivetrain>=0.1,<1, API 1", 1),
        (["drivetrain>=99"], "requires drivetrain>=99, API unknown", None),
        ([], "requires drivetrain of any version, API unknown", None),
    ],
)
def test_command_shows_the_version_of_the_api_that_a_distribution_requires(
    requires: list[str], text: str, api: int | None, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    entry_points = {"drivetrain.backends": {"quiet": "quiet_plugin:Quiet"}}
    install("quiet-plugin", "quiet_plugin", BACKEND, entry_points, requires=requires)

    assert shown_plugins(capsys)["quiet-plugin"][0] == f"quiet-plugin 1.2 ({text})"
    main(["plugins", "--json"])
    (row,) = [row for row in json.loads(capsys.readouterr().out) if row["name"] == "quiet"]
    assert row["api"] == api


def test_command_shows_names_that_are_claimed_twice(
    quiet: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("other-plugin", "other_plugin", BACKEND, {"drivetrain.backends": {"quiet": "other_plugin:Quiet"}})

    shown = shown_plugins(capsys)
    for distribution in ("quiet-plugin", "other-plugin"):
        problem = " ".join(" ".join(shown[distribution][1:]).split())
        assert problem.startswith("! backend quiet is broken: [DT-603] backend 'quiet': expected one distribution")
        assert "got other-plugin 1.2 and quiet-plugin 1.2. Uninstall one of them" in problem


def test_installed_command_runs_and_a_broken_plugin_does_not_break_the_import(broken: Path) -> None:
    command = Path(sys.executable).with_name("drivetrain")
    module = [sys.executable, "-m", "drivetrain"]
    environment = {**os.environ, "PYTHONPATH": str(broken)}

    shown = subprocess.run([*module, "plugins"], check=False, env=environment, stdout=subprocess.PIPE, text=True)
    version = subprocess.run([command, "--version"], env=environment, stdout=subprocess.PIPE, text=True, check=True)

    assert shown.returncode == 1
    assert "broken-plugin" in shown.stdout
    assert version.stdout == f"drivetrain {drivetrain.__version__}\n"


DETECTS_BADLY = """
from drivetrain.plugin import Runtime

class Detects(Runtime):
    name = "detects"
    def validate(self, scaling): ...
    def room(self, scaling, running, avoided): ...
    def launch(self, spec): ...

    @classmethod
    def detect(cls):
        raise OSError("no such device")
"""


def test_runtime_whose_detection_raises_is_named_in_a_warning_and_skipped(install: Install, tmp_path: Path) -> None:
    install("bad-runtime", "bad_runtime", DETECTS_BADLY, {"drivetrain.runtimes": {"detects": "bad_runtime:Detects"}})
    trainer = DataParallelTrainer(
        lambda: "ran",
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path=tmp_path / "runs", verbose=0),
    )

    with pytest.warns(UserWarning, match=r"runtime 'detects' of bad-runtime: detect\(\) raised OSError"):
        result = trainer.fit()

    assert result.return_value == "ran"


def test_run_fails_if_its_configured_runtime_is_broken(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("far-runtime", "far_runtime", "import no_such_module", {"drivetrain.runtimes": {"far": "far_runtime:Far"}})
    monkeypatch.setenv("FAR_ADDRESS", "head:6379")
    trainer = DataParallelTrainer(
        lambda: "ran",
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path=tmp_path / "runs", verbose=0),
    )

    with pytest.warns(UserWarning, match="no_such_module"), pytest.raises(PluginBrokenError, match="no_such_module"):
        trainer.fit()


def test_address_variable_without_a_runtime_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_ADDRESS", "database:5432")

    assert missing_runtimes() == {}


TRAINABLES = """
def make(trainer, *, argument, autoscaling):
    return lambda config: (argument, autoscaling, config)
"""


def test_one_of_several_trainables_is_selected_by_its_name(install: Install) -> None:
    entry_points = {"drivetrain.trainables": {"cloud": "trainables_plugin:make"}}
    install("trainables-plugin", "trainables_plugin", TRAINABLES, entry_points)
    trainer = DataParallelTrainer(print)

    with pytest.raises(PluginError, match=r"expected one installed trainable, got 'cloud' of trainables-plugin, .*ray"):
        trainer.as_trainable()
    made: Any = trainer.as_trainable("cloud", autoscaling=True)
    assert made({"lr": 1}) == (None, True, {"lr": 1})


CLOUD = """
from drivetrain.plugin.backends import Finding
from drivetrain.plugin.runtimes import LocalRuntime


class Cloud(LocalRuntime):
    name = "cloud"

    @classmethod
    def diagnose(cls, address):
        if address is None:
            raise RuntimeError("no sky")
        return [Finding("the cloud", "warning", f"{address} is far away", "come closer")]
"""


def test_doctor_shows_the_findings_of_installed_and_missing_runtimes(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("cloud-plugin", "cloud_plugin", CLOUD, {"drivetrain.runtimes": {"cloud": "cloud_plugin:Cloud"}})
    doctor = ["doctor", "--json", "--storage-path", str(tmp_path)]

    def findings(*arguments: str) -> dict[str, dict[str, str]]:
        main([*doctor, *arguments])
        return {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}

    raised = findings()["runtime cloud"]
    assert (raised["status"], raised["found"]) == ("problem", "diagnose() raised RuntimeError: no sky")
    named = findings("--address", "cloud=sky:1", "--address", "mars=red:2")
    assert named["the cloud"]["found"] == "sky:1 is far away"
    assert (named["runtime mars"]["status"], named["runtime mars"]["found"]) == ("problem", "not installed")
    monkeypatch.setenv("CLOUD_ADDRESS", "sky:3")
    assert findings()["the cloud"]["found"] == "sky:3 is far away"
