"""Mistakes that authors of plugins make: each is found, and explained in one line that names the distribution."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from drivetrain import PluginError, PluginNotFoundError
from drivetrain._plugins.loading import KINDS, check_plugin, find_unknown_groups, list_plugins, load_plugin
from drivetrain_console import main
from tests.core.conftest import Install

IMPORTS = """
import contextlib, sys
from dataclasses import dataclass
from drivetrain.plugin import Backend, BackendConfig
from drivetrain import Callback, DataParallelTrainer
from drivetrain.plugin import DatasetProvider, Runtime
"""

BACKEND = """
class Quiet(Backend):
    def session(self, context, rendezvous):
        return contextlib.nullcontext()
"""

RUNTIME = """
class Cloud(Runtime):
    def validate(self, scaling): ...
    def room(self, scaling, running, avoided): return 1
    def launch(self, spec): ...
"""

DATASET = """
class Rows(DatasetProvider):
    accepted = "rows"
    def accepts(self, dataset): return False
    def open(self, name, dataset, *, keep_together=None): return dataset
    def split(self, opened, request): return []
"""


class Mistake(NamedTuple):
    """A mistake in a plugin.

    Attributes:
        kind: the kind of the plugin.
        source: the module. The entry point is the name ``plugin`` in it.
        message: what the error contains.
    """

    kind: str
    source: str
    message: str


MISTAKES = {
    "import of a missing module": Mistake("backend", "import a_missing_module", "No module named 'a_missing_module'"),
    "exit at import": Mistake("backend", "sys.exit('no GPU')", "SystemExit: no GPU"),
    "exception at import": Mistake("callback", "1 / 0", "ZeroDivisionError: division by zero"),
    "syntax error": Mistake("callback", "def plugin(:", "SyntaxError"),
    "missing attribute": Mistake("callback", "", "has no attribute 'plugin'"),
    "backend: an object": Mistake(
        "backend",
        BACKEND + "plugin = Quiet()",
        "expected a drivetrain.plugin.BackendConfig class, got an object of Quiet. Register the class itself",
    ),
    "backend: a function": Mistake("backend", "def plugin(): ...", "got the function plugin. Register the class"),
    "backend: a module": Mistake("backend", "plugin = contextlib", "got the module contextlib. Register the class"),
    "backend: an unrelated class": Mistake(
        "backend",
        "class plugin:\n    def create(self): ...",
        "expected a subclass of drivetrain.plugin.BackendConfig, got the class plugin. Derive it from BackendConfig",
    ),
    "backend: a configuration without create": Mistake(
        "backend", "class plugin(BackendConfig): ...", "plugin does not implement create()"
    ),
    "backend: misspelled create": Mistake(
        "backend",
        BACKEND + "class plugin(BackendConfig):\n    def creat(self): return Quiet()",
        "does not implement create(). Is creat() meant to be create()?",
    ),
    "backend: a required field": Mistake(
        "backend",
        BACKEND
        + "@dataclass(frozen=True)\nclass plugin(BackendConfig):\n    url: str\n    def create(self): return Quiet()",
        "can be created without arguments, got plugin(url). Give the arguments default values",
    ),
    "backend: no session": Mistake("backend", "class plugin(Backend): ...", "plugin does not implement session()"),
    "backend: misspelled session": Mistake(
        "backend",
        "class plugin(Backend):\n    def sesion(self, context, rendezvous): ...",
        "does not implement session(). Is sesion() meant to be session()?",
    ),
    "runtime: an unrelated class": Mistake(
        "runtime",
        "class plugin: ...",
        "expected a drivetrain.plugin.Runtime class, got the class plugin without validate(), room(), launch()",
    ),
    "runtime: a missing method": Mistake(
        "runtime",
        "class plugin(Runtime):\n    def validate(self, scaling): ...\n    def launch(self, spec): ...",
        "plugin does not implement room()",
    ),
    "runtime: a misspelled method": Mistake(
        "runtime",
        RUNTIME.replace("launch", "lauch") + "plugin = Cloud",
        "Cloud does not implement launch(). Is lauch() meant to be launch()?",
    ),
    "runtime: required arguments": Mistake(
        "runtime",
        RUNTIME + "class plugin(Cloud):\n    def __init__(self, host, port): ...",
        "can be created without arguments, got plugin(host, port)",
    ),
    "runtime: an object": Mistake("runtime", RUNTIME + "plugin = Cloud()", "got an object of Cloud. Register the"),
    "runtime: a name": Mistake("runtime", "plugin = 'cloud'", "got an object of str. Register the class itself"),
    "callback: an unrelated class": Mistake(
        "callback",
        "class plugin:\n    def on_report(self, run, report): ...",
        "expected a subclass of drivetrain.Callback, got the class plugin. Derive it from Callback",
    ),
    "callback: an object": Mistake("callback", "plugin = Callback()", "got an object of Callback. Register the class"),
    "callback: a function": Mistake("callback", "def plugin(run, report): ...", "got the function plugin. Register"),
    "dataset: an unrelated class": Mistake(
        "dataset",
        DATASET.replace("(DatasetProvider)", "") + "plugin = Rows",
        "expected a subclass of drivetrain.plugin.DatasetProvider, got the class Rows. Derive it from DatasetProvider",
    ),
    "dataset: a missing method": Mistake(
        "dataset", DATASET.replace("split", "divide") + "plugin = Rows", "Rows does not implement split()"
    ),
    "dataset: a misspelled method": Mistake(
        "dataset",
        DATASET.replace("accepts", "accept") + "plugin = Rows",
        "Rows does not implement accepts(). Is accept() meant to be accepts()?",
    ),
    "dataset: required arguments": Mistake(
        "dataset",
        DATASET + "class plugin(Rows):\n    def __init__(self, path): ...",
        "can be created without arguments, got plugin(path)",
    ),
    "policy: an unrelated class": Mistake(
        "policy",
        "class plugin: ...",
        "expected a drivetrain.plugin.FailurePolicy, or a function, got the class plugin without decide()",
    ),
    "policy: a misspelled method": Mistake(
        "policy",
        "class plugin:\n    def decides(self, failure, history): return True",
        "without decide(). Is decides() meant to be decide()?",
    ),
    "policy: a number": Mistake("policy", "plugin = 3", "got an object of int without decide()"),
    "policy: a missing parameter": Mistake(
        "policy",
        "class plugin:\n    def decide(self, failure): return True",
        "plugin.decide: expected the parameters (failure, history), got (failure)",
    ),
    "policy: a function with a missing parameter": Mistake(
        "policy",
        "def plugin(failure): return True",
        "the function plugin: expected the parameters (failure, history), got (failure)",
    ),
    "policy: a coroutine function": Mistake(
        "policy",
        "class plugin:\n    async def decide(self, failure, history): return True",
        "plugin.decide: expected a normal function, got one with `async def`",
    ),
    "callback: a missing parameter": Mistake(
        "callback",
        "class plugin(Callback):\n    def on_report(self, report): ...",
        "plugin.on_report: expected the parameters (run, report), got (report)",
    ),
    "callback: a coroutine function": Mistake(
        "callback",
        "class plugin(Callback):\n    async def on_run_start(self, run): ...",
        "plugin.on_run_start: expected a normal function",
    ),
    "dataset: a missing keyword": Mistake(
        "dataset",
        DATASET + "class plugin(Rows):\n    def open(self, name, dataset): return dataset",
        "plugin.open: expected the parameters (name, dataset, *, keep_together), got (name, dataset)",
    ),
    "trainer: an object": Mistake(
        "trainer", "plugin = object()", "expected a drivetrain.DataParallelTrainer class, got an object"
    ),
    "trainer: an unrelated class": Mistake("trainer", "class plugin: ...", "got the class plugin without fit()"),
    "trainer: a constructor without the arguments of restore": Mistake(
        "trainer",
        "class plugin(DataParallelTrainer):\n    def __init__(self, function): super().__init__(function)",
        "plugin.__init__: expected the parameters scaling_config, run_config, which restore() passes",
    ),
    "trainable: not a function": Mistake("trainable", "plugin = 'tune'", "expected a function, got an object of str"),
    "prepare: not a function": Mistake("prepare", "plugin = {}", "expected a function, got an object of dict"),
    "strategy: no class": Mistake(
        "strategy", "plugin = None", "expected a drivetrain_torch.ParallelStrategy class, got an object of NoneType"
    ),
    "strategy: misspelled wrap": Mistake(
        "strategy",
        "class plugin:\n    def warp(self, model, device): ...",
        "without wrap(). Is warp() meant to be wrap()?",
    ),
    "command: not a function": Mistake("command", "plugin = 1", "expected a function, got an object of int"),
    "command: no parameter": Mistake(
        "command",
        "def plugin(): ...",
        "TypeError: plugin() takes 0 positional arguments but 1 was given. Expected a function with the parameter",
    ),
    "command: exit": Mistake("command", "def plugin(commands): sys.exit(3)", "SystemExit: 3. Expected a function"),
    "command: nothing is added": Mistake(
        "command", "def plugin(commands): ...", "expected a function that adds only the command 'faulty', got none"
    ),
    "command: a name that is taken": Mistake(
        "command",
        "def plugin(commands): commands.add_parser('runs')",
        "expected a function that adds only the command 'faulty', got 'runs'. Add one command, with the name",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_explained_in_one_line(name: str, install: Install) -> None:
    kind, source, message = MISTAKES[name]
    install("faulty-plugin", "faulty_plugin", IMPORTS + source, {KINDS[kind]: {"faulty": "faulty_plugin:plugin"}})
    sys.modules.pop("faulty_plugin", None)
    (plugin,) = [plugin for plugin in list_plugins(kind) if plugin.name == "faulty"]

    with pytest.raises(PluginError) as error:
        check_plugin(plugin)

    text = str(error.value)
    assert f"the {kind} 'faulty' of faulty-plugin 1.2" in text
    assert message in text
    assert "\n" not in text
    with pytest.raises(PluginError):
        load_plugin(kind, "faulty")


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("backend", BACKEND + "plugin = Quiet"),
        ("backend", BACKEND + "class plugin(BackendConfig):\n    def create(self): return Quiet()"),
        ("runtime", RUNTIME + "plugin = Cloud"),
        ("callback", "class plugin(Callback):\n    def __init__(self, url): ..."),
        ("dataset", DATASET + "plugin = Rows"),
        ("policy", "class plugin:\n    def decide(self, failure, history): return True"),
        ("policy", "def plugin(failure, history): return True"),
        ("policy", "class Count:\n    def decide(self, failure, history): return True\nplugin = Count()"),
        ("policy", "import functools\nplugin = functools.partial(lambda limit, failure, history: True, 3)"),
        ("command", "def plugin(commands): commands.add_parser('good')"),
        ("trainer", "plugin = DataParallelTrainer"),
        ("trainable", "def plugin(trainer, *, argument, autoscaling): ..."),
    ],
)
def test_correct_plugin_is_accepted(kind: str, source: str, install: Install) -> None:
    install("good-plugin", "good_plugin", IMPORTS + source, {KINDS[kind]: {"good": "good_plugin:plugin"}})
    sys.modules.pop("good_plugin", None)
    assert load_plugin(kind, "good") is sys.modules["good_plugin"].plugin


@pytest.mark.parametrize("required", [">=99", "<0.0.1", "==0.0.1", "~=12.3", ">=99; python_version >= '3'"])
def test_plugin_for_another_version_is_not_loaded(required: str, install: Install) -> None:
    entry_points = {"drivetrain.backends": {"late": "late_plugin:plugin"}}
    install("late-plugin", "late_plugin", "raise AssertionError", entry_points, requires=[f"drivetrain{required}"])

    with pytest.raises(PluginError, match=r"late-plugin 1\.2 requires drivetrain.*pip install --upgrade") as error:
        load_plugin("backend", "late")

    assert required.partition(";")[0] in str(error.value)


@pytest.mark.parametrize(
    "requires", [["drivetrain>=0.1"], [], ["drivetrain>=99; extra == 'new'", "torch"], ["not valid!"]]
)
def test_plugin_whose_requirements_are_met_is_loaded(requires: list[str], install: Install) -> None:
    source = IMPORTS + BACKEND
    install("met-plugin", "met_plugin", source, {"drivetrain.backends": {"met": "met_plugin:Quiet"}}, requires=requires)
    sys.modules.pop("met_plugin", None)
    assert load_plugin("backend", "met").__name__ == "Quiet"


@pytest.mark.parametrize(
    ("group", "advice"),
    [
        ("drivetrain.backend", "Did you mean 'drivetrain.backends'?"),
        ("drivetrian.callbacks", "Did you mean 'drivetrain.callbacks'?"),
        ("drivetrain_runtimes", "Did you mean 'drivetrain.runtimes'?"),
        ("Drivetrain.Policies", "Did you mean 'drivetrain.policies'?"),
        ("drivetrain.hooks", f"Groups: {', '.join(KINDS.values())}"),
    ],
)
def test_unknown_group_is_shown_with_the_known_ones(
    group: str, advice: str, install: Install, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    assert find_unknown_groups() == []
    install("lost-plugin", "lost_plugin", "", {group: {"lost": "lost_plugin:plugin"}})

    assert find_unknown_groups() == [("lost-plugin", group, ("lost",), advice)]
    assert main(["plugins"]) != 0
    shown = capsys.readouterr().out
    assert f"lost-plugin\n  ! ignored: unknown group {group!r}. {advice}\n" in shown
    with pytest.raises(PluginNotFoundError) as error:
        load_plugin("callback", "lost")
    reason = f"lost-plugin registers 'lost' in the unknown group {group!r}, which is ignored. {advice}"
    assert str(error.value).endswith(f". {reason}")


def test_command_shows_required_versions_and_problems(
    install: Install, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    entry_points = {"drivetrain.runtimes": {"sky": "sky_plugin:plugin"}}
    install("sky-plugin", "sky_plugin", "class plugin: ...", entry_points, requires=["drivetrain<1,>=0.1"])
    sys.modules.pop("sky_plugin", None)

    assert main(["plugins", "--json"]) != 0

    (row,) = [row for row in json.loads(capsys.readouterr().out) if row["name"] == "sky"]
    assert row["requires"] == "<1,>=0.1"
    assert row["status"].startswith("broken: ")
    assert "without validate(), room(), launch()" in row["status"]


def test_misspelled_name_of_a_plugin_causes_a_suggestion() -> None:
    with pytest.raises(PluginNotFoundError, match=r"no callback 'progres' is installed.*Did you mean 'progress'\?"):
        load_plugin("callback", "progres")
