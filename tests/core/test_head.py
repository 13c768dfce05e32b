"""Which imports of a script are made ahead of time, and a server that is forked at the head of the script."""

import json
import os
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drivetrain._base.head import head_imports
from drivetrain._runtimes.ahead import _frameworks_among
from tests.support import PROCESS_LIMIT_S

TRAIN = """
import json
import os
import random
import resource
import sys
from pathlib import Path


def train_func():
    import threadpoolctl

    import drivetrain

    context = drivetrain.get_context()
    facts = {
        "draw": random.random(),
        "seen": sorted(heavy.seen),
        "threads": sorted({pool["num_threads"] for pool in threadpoolctl.threadpool_info()}),
        "main": sys.modules["__main__"].__name__,
        "variable": os.environ.get("SOME_VARIABLE"),
        "limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
    }
    Path(sys.argv[1], f"rank{context.get_world_rank()}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    DataParallelTrainer(
        train_func,
        scaling_config=ScalingConfig(num_workers=2, runtime="local"),
        run_config=RunConfig(storage_path=sys.argv[1], verbose=0, preload=["heavy"]),
    ).fit()
"""
FROM_DRIVETRAIN = "from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import json\nimport os.path, random", [("json",), ("os.path", "random")]),
        ('"""Text."""\nfrom __future__ import annotations\nfrom pytest import mark', [("__future__",), ("pytest",)]),
        ("import json\nimport os\nos.environ['A'] = 'b'\nimport random", [("json",), ("os",)]),
        ("import json\nif TYPE_CHECKING:\n    import a\nimport random", [("json",), ("random",)]),
        ("import json\nif typing.TYPE_CHECKING:\n    import a\nimport random", [("json",), ("random",)]),
        ("import json\nif not TYPE_CHECKING:\n    import a\nimport random", [("json",)]),
        ("import json\nif TYPE_CHECKING:\n    import a\nelse:\n    import b\nimport random", [("json",)]),
        ("import json\nif True:\n    import a\nimport random", [("json",)]),
        ("try:\n    import json\nexcept ImportError:\n    pass", []),
        ("import json\nfrom . import sibling\nimport random", [("json",)]),
        ("import json\nimport a_module_that_does_not_exist\nimport random", [("json",)]),
        ("from drivetrain import (\n    RunConfig,\n)", [("drivetrain",)]),
        ("import json\nthis is no Python", []),
    ],
)
def test_head_ends_at_the_first_other_statement(source: str, expected: list[tuple[str, ...]]) -> None:
    assert [each.modules for each in head_imports(source.encode(), "script.py")] == expected


def test_head_ends_at_a_module_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_module.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert [
        each.modules for each in head_imports(b"import json\nimport my_own_module\nimport random", "script.py")
    ] == [("json",)]


@pytest.fixture
def heavy(tmp_path: Path) -> Path:
    """An installed module that records the processes that import it."""
    site = tmp_path / "site-packages"
    site.mkdir()
    code = "import os, threading\nseen = {os.getpid()}\nwith open(os.environ['IMPORTS'], 'a') as file:\n"
    code += "    file.write(f'{os.getpid()}\\n')\n"
    (site / "heavy.py").write_text(code)
    return site


def run(
    tmp_path: Path, head: str, *, command: str = "python", **variables: str | None
) -> tuple[list[dict[str, Any]], list[int]]:
    """Run a script with these first lines. Return what its two ranks save, and who has imported ``heavy``.

    Args:
        tmp_path: the directory of the script, and of the packages.
        head: the first lines.
        command: ``"python"`` or ``"drivetrain run"``.
        **variables: environment variables; None to leave one out.
    """
    script, imports = tmp_path / "train.py", tmp_path / "imports"
    script.write_text(head + TRAIN)
    launcher = [sys.executable] if command == "python" else [str(Path(sys.executable).with_name("drivetrain")), "run"]
    separator = [] if command == "python" else ["--"]
    site = str(tmp_path / "site-packages")
    environment = {**os.environ, "PYTHONPATH": site, "IMPORTS": str(imports), **variables}
    finished = subprocess.run(
        [*launcher, str(script), *separator, str(tmp_path / "runs")],
        env={name: value for name, value in environment.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert not finished.stdout
    ranks = [json.loads((tmp_path / "runs" / f"rank{rank}.json").read_text()) for rank in range(2)]
    return ranks, [int(line) for line in imports.read_text().split()]


@pytest.mark.parametrize("command", ["python", "drivetrain run"])
@pytest.mark.parametrize(
    "head",
    [
        pytest.param(f"import heavy\n{FROM_DRIVETRAIN}\n", id="before drivetrain"),
        pytest.param(f"{FROM_DRIVETRAIN}\nimport heavy\n", id="after drivetrain"),
    ],
)
def test_module_at_the_head_is_imported_once_for_driver_and_workers(
    tmp_path: Path, heavy: Path, head: str, command: str
) -> None:
    ranks, imports = run(tmp_path, head, command=command)

    assert len(imports) == 1
    assert [each["seen"] for each in ranks] == [imports, imports]
    assert ranks[0]["draw"] != ranks[1]["draw"]
    assert {each["main"] for each in ranks} == {"__main__"}


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (["pandas", "torch", "torch.nn"], ["torch", "torch.nn"]),
        (["pandas", "json", "drivetrain_torch", "lightning.pytorch"], ["lightning.pytorch"]),
        (["pandas", "sets_variables_for_torch", "torch"], []),
        (["tensorflow", "keras"], []),
    ],
)
def test_frameworks_up_to_a_module_that_may_configure_them(modules: list[str], expected: list[str]) -> None:
    assert _frameworks_among(modules) == expected


@pytest.mark.parametrize("command", ["python", "drivetrain run"])
def test_framework_after_a_package_with_threads_is_imported_before_fit(
    tmp_path: Path, heavy: Path, command: str
) -> None:
    (heavy / "heavy_plugin.py").write_text("from drivetrain.plugin import Framework\nclass Heavy(Framework): ...\n")
    info = heavy / "heavy_plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: heavy-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[drivetrain.frameworks]\nheavy = heavy_plugin:Heavy\n")
    head = f"{FROM_DRIVETRAIN}\nimport pandas\nimport heavy\nimport os\nimport time\n"
    wait = "while len(open(os.environ['IMPORTS']).readlines()) < 2:\n    time.sleep(0.01)\n"

    ranks, imports = run(tmp_path, head + wait, command=command)

    assert len(imports) == 2, "in the driver, and in the server"
    assert ranks[0]["seen"] == ranks[1]["seen"]
    assert ranks[0]["seen"][0] in imports


@pytest.mark.parametrize("command", ["python", "drivetrain run"])
def test_variables_that_the_script_sets_before_an_import_act_in_it(tmp_path: Path, heavy: Path, command: str) -> None:
    head = f"import os\nos.environ['SOME_VARIABLE'] = 'value'\nimport heavy\n{FROM_DRIVETRAIN}\n"
    (heavy / "heavy.py").write_text(
        (heavy / "heavy.py").read_text() + "assert os.environ['SOME_VARIABLE'] == 'value'\n"
    )

    ranks, imports = run(tmp_path, head, command=command)

    assert len(imports) == 2, "in the driver, and in the server that fit() has started"
    assert {each["variable"] for each in ranks} == {"value"}


LATER = [
    pytest.param("os.environ['SOME_VARIABLE'] = 'value'", id="variable"),
    pytest.param("os.environ['PYTHONHASHSEED'] = '1'", id="variable of the interpreter"),
    pytest.param("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (777, 777))", id="limit"),
    pytest.param("os.nice(1)", id="priority"),
    pytest.param("import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)", id="ignored signal"),
]


@pytest.mark.parametrize("setting", LATER)
def test_setting_that_a_process_inherits_requires_a_new_server(tmp_path: Path, heavy: Path, setting: str) -> None:
    ranks, imports = run(tmp_path, f"import heavy\n{FROM_DRIVETRAIN}\nimport os\n{setting}\n")

    assert len(imports) == 2, "in the driver, and in the server that fit() has started"
    assert ranks[0]["variable"] == ("value" if "SOME_VARIABLE" in setting else None)
    assert ranks[0]["limit"] == (777 if "777" in setting else resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    assert ranks[0]["priority"] == os.getpriority(os.PRIO_PROCESS, 0) + ("nice" in setting)


def test_script_for_a_cluster_is_not_forked(tmp_path: Path, heavy: Path) -> None:
    _, imports = run(tmp_path, f"import heavy\n{FROM_DRIVETRAIN}\n", RAY_ADDRESS="127.0.0.1:1")

    assert len(imports) == 2


def test_traced_script_is_not_forked(tmp_path: Path, heavy: Path) -> None:
    (heavy / "heavy.py").write_text((heavy / "heavy.py").read_text() + "import sys; sys.settrace(lambda *_: None)\n")

    _, imports = run(tmp_path, f"import heavy\n{FROM_DRIVETRAIN}\n")

    assert len(imports) == 2


def start(tmp_path: Path, code: str, *, command: str = "python", **variables: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(code, encoding="latin-1")
    site = str(tmp_path / "site-packages")
    launcher = [sys.executable] if command == "python" else [str(Path(sys.executable).with_name("drivetrain")), "run"]
    return subprocess.run(
        [*launcher, str(script)],
        env={**os.environ, "PYTHONPATH": site, "IMPORTS": str(tmp_path / "imports"), **variables},
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize("command", ["python", "drivetrain run"])
def test_failed_import_is_not_repeated(tmp_path: Path, heavy: Path, command: str) -> None:
    (heavy / "heavy.py").write_text((heavy / "heavy.py").read_text() + "raise ImportError('a library is missing')\n")

    finished = start(tmp_path, f"{FROM_DRIVETRAIN}\nimport heavy\n", command=command)

    assert finished.returncode == 1
    assert finished.stderr.endswith("ImportError: a library is missing\n")
    assert len((tmp_path / "imports").read_text().split()) == 1


SCRIPTS = {
    "annotations": "def f(x: int): ...\nprint(f.__annotations__)",
    "encoding": "# -*- coding: latin-1 -*-\nprint('\xe4')",
    "failed import": "import xml.no_such_module",
    "arguments": "import sys\nprint(sys.argv[1:], sys.path[0], __name__, __file__, __spec__, __package__)",
    "error": "def f():\n    raise ValueError('text')\n\n\nf()",
    "exit": "import sys\nsys.exit(7)",
    "interrupt": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)",
    "syntax": "x = (",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_drivetrain_run_executes_a_script_like_python(tmp_path: Path, name: str) -> None:
    first, _, rest = SCRIPTS[name].partition("\n")
    code = f"{first}\n{FROM_DRIVETRAIN}\n{rest}\n" if first.startswith("#") else f"{FROM_DRIVETRAIN}\n{SCRIPTS[name]}\n"
    expected = start(tmp_path, code, DRIVETRAIN_EARLY_FORK="0")
    actual = start(tmp_path, code, command="drivetrain run")

    assert (actual.stdout, actual.stderr) == (expected.stdout, expected.stderr)
    assert actual.returncode == expected.returncode


def test_libraries_that_the_driver_has_loaded_use_the_threads_of_the_worker(tmp_path: Path, heavy: Path) -> None:
    ranks, imports = run(tmp_path, f"import heavy\nimport numpy\n{FROM_DRIVETRAIN}\n", OMP_NUM_THREADS=None)

    assert len(imports) == 1
    assert [each["threads"] for each in ranks] == [[max(1, len(os.sched_getaffinity(0)) // 2)]] * 2


@pytest.mark.parametrize("command", ["python", "drivetrain run"])
def test_process_with_threads_is_not_forked(tmp_path: Path, heavy: Path, command: str) -> None:
    code = (heavy / "heavy.py").read_text() + "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    (heavy / "heavy.py").write_text(code)

    ranks, imports = run(tmp_path, f"import heavy\n{FROM_DRIVETRAIN}\n", command=command)

    # The driver, the server that finds the thread and restarts without the module, and the two workers.
    assert len(imports) == 4
    assert all(len(each["seen"]) == 1 for each in ranks)


def test_server_ends_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"{FROM_DRIVETRAIN}\nfrom drivetrain._runtimes import ahead\nimport time\n"
        "print(ahead.take_server().process.pid, flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        server = os.pidfd_open(int(driver.stdout.readline()))
        driver.send_signal(signal.SIGKILL)
    assert select.select([server], [], [], 30)[0], "the server has not exited"
    os.close(server)
