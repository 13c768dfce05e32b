"""Every code block of the documentation is executed, and its output is compared with the page."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.docs.example_plugins import EXAMPLES, included_examples, install_examples
from tests.docs.pages import CODE, DOCS, PAGES, PROGRAMS, Block, Page
from tests.s3 import FaultProxy, S3Server
from tests.support import ROOT
from tests.toml import tomllib

_RAY = "import ray"
# They take minutes on a slow machine.
_LONG_PAGES = ("examples/diffusion", "examples/lora", "examples/search", "examples/small-gpt", "ray-tune")
_S3 = "s3://models/"
_LIGHTNING = "import lightning"
_FABRIC = "from lightning.fabric"
# Lightning warns about its own use of torch, and about data loaders without workers.
_LIGHTNINGS_WARNINGS = "error,ignore::FutureWarning,ignore::UserWarning"
_PEFT = "from peft"
# PEFT reads an attribute of models that Transformers 5.23 deprecates.
_PEFTS_WARNINGS = "error,ignore:`is_gradient_checkpointing`:FutureWarning"
_DIFFUSERS = "from diffusers"
# Convolutions of Diffusers get gradients in another layout of memory.
_DIFFUSERS_WARNINGS = "error,ignore:Grad strides do not match:UserWarning"
_MLFLOW = "import mlflow"
_MLFLOWS_WARNINGS = "error,ignore::DeprecationWarning"  # about its use of SQLAlchemy
# DeepSpeed and Lightning import these in every worker if they are installed, which takes seconds.
_OPTIONAL = ("mlflow", "comet_ml")
_LONGEST_LINE = 88  # the width that a page shows without scrolling


def run_script(script: Path, directory: Path, *, environment: Mapping[str, str] | None = None) -> str:
    """Run a script like a reader, in its own directory, and return its standard output."""
    finished = subprocess.run(
        [sys.executable, str(script)],
        cwd=directory,
        env={
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "DRIVETRAIN_STORAGE_PATH": str(directory / "runs"),
            "PYTHONWARNINGS": "error",  # in the workers as well
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    sys.stderr.write(finished.stderr)  # pytest shows it if the test fails
    assert finished.returncode == 0, f"{script.name} failed:\n{finished.stdout}"
    assert "Warning" not in finished.stderr
    return finished.stdout


def as_script(page: Page) -> str:
    """Return the Python and console blocks of a page as one script, with the line numbers of the page."""
    lines = [""] * page.text.count("\n")
    for block in page.of_kind("python"):
        code = block.content.splitlines()
        lines[block.line - 1 : block.line - 1 + len(code)] = code
    for block in page.of_kind("console"):
        lines[block.line - 1] = (
            f"import subprocess, sys; sys.stdout.flush(); subprocess.run({commands(block)!r}, shell=True)"
        )
    return "\n".join(lines) + "\n"


def commands(block: Block) -> str:
    """Return the commands of a console block, which begin with ``$``. The other lines are their output."""
    return "\n".join(line[2:] for line in block.content.splitlines() if line.startswith("$ "))


def shown_outputs(page: Page) -> Iterator[tuple[int, str]]:
    """Return the outputs that a page shows, each with its line number."""
    for block in page.of_kind("text output"):
        yield block.line, block.content
    for block in page.of_kind("console"):
        for output in re.split(r"^\$ .*\n", block.content, flags=re.MULTILINE):
            if output:
                yield block.line, output


def find_output(expected: str, printed: str) -> bool:
    """Return True if the lines were printed in this order; ``...`` stands for anything within a line."""
    pattern = "\n".join(".*".join(map(re.escape, line.split("..."))) for line in expected.rstrip("\n").split("\n"))
    return re.search(rf"^{pattern}$", printed, re.MULTILINE) is not None


def warnings_of_others(page: Page) -> dict[str, str]:
    """Return the variables that permit warnings of the packages a page imports."""
    script = as_script(page)
    known = {
        _LIGHTNING: _LIGHTNINGS_WARNINGS,
        _FABRIC: _LIGHTNINGS_WARNINGS,
        _PEFT: _PEFTS_WARNINGS,
        _DIFFUSERS: _DIFFUSERS_WARNINGS,
        _MLFLOW: _MLFLOWS_WARNINGS,
    }
    warnings = [filters for line, filters in known.items() if line in script]
    return {"PYTHONWARNINGS": warnings[0]} if warnings else {}


def make_site(page: Page, directory: Path) -> str:
    """Return the value of ``PYTHONPATH`` for a page: its example plugins, and no optional packages it does not name."""
    directory.mkdir()
    hidden = [name for name in _OPTIONAL if name not in page.text.lower()]
    lines = ["import sys", *(f"sys.modules[{name!r}] = None" for name in hidden)]
    (directory / "sitecustomize.py").write_text("\n".join(lines))
    return install_examples(included_examples(page), directory)


def make_database(page: Page, directory: Path) -> None:
    """Create MLflow's database. On a busy machine, this can take longer than a run waits for its trackers."""
    if "mlflow.db" in page.text and not (directory / "mlflow.db").exists():
        code = "from mlflow import MlflowClient; MlflowClient('sqlite:///mlflow.db').search_experiments()"
        subprocess.run([sys.executable, "-c", code], cwd=directory, check=True, capture_output=True, timeout=300)


@contextmanager
def serve_bucket(pages: Iterable[Page], directory: Path) -> Iterator[dict[str, str]]:
    """Yield the variables that point the bucket of these pages, if they have one, to a server on this machine."""
    if not any(_S3 in as_script(page) for page in pages):
        yield {}
        return
    with S3Server(directory) as server, FaultProxy(server, markers=True) as proxy:
        server.make_bucket("models")
        yield {**server.environment, "AWS_ENDPOINT_URL": proxy.endpoint}


def check_page(page: Page, directory: Path, site: Path, bucket: Mapping[str, str]) -> None:
    """Run the code of a page in a directory, and compare its output with the page."""
    make_database(page, directory)
    script = directory / f"page_{page.path.stem}.py"  # a name that hides no package of the page's name
    script.write_text(as_script(page))

    environment = {**bucket, **warnings_of_others(page), "PYTHONPATH": make_site(page, site)}
    printed = run_script(script, directory, environment=environment)

    for line, output in shown_outputs(page):
        assert find_output(output, printed), f"{page}:{line} shows\n{output}\nbut the script printed\n{printed}"


def marks_of(page: Page) -> Iterator[pytest.MarkDecorator]:
    if _RAY in as_script(page):
        yield pytest.mark.ray
    if str(page).removeprefix("docs/").removesuffix(".md") in _LONG_PAGES:
        yield pytest.mark.campaign


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=str(page), marks=list(marks_of(page))) for page in PROGRAMS],
)
def test_blocks_of_a_page_run_and_print_the_shown_output(page: Page, tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    with serve_bucket([page], tmp_path / "served") as bucket:
        check_page(page, tmp_path, tmp_path / "site-packages", bucket)


def pages_of_the_sidebar() -> list[Page]:
    """Return the pages with code in the order in which a reader finds them."""
    (index,) = [page for page in PAGES if page.path == DOCS / "index.md"]
    trees = [block for block in index.blocks if block.info.startswith("{toctree}")]
    names = [line for tree in trees for line in tree.content.splitlines() if line and not line.startswith(":")]
    pages = {str(page.path.relative_to(DOCS)): page for page in PROGRAMS if page.path.is_relative_to(DOCS)}
    return [pages[f"{name}.md"] for name in names if f"{name}.md" in pages]


@pytest.mark.campaign
@pytest.mark.ray
@pytest.mark.timeout(6000)
def test_pages_can_be_read_in_order_and_again(tmp_path: Path) -> None:
    """A reader follows the pages one after the other, with one storage path, in one directory, and repeats them."""
    pages = pages_of_the_sidebar()
    (tmp_path / "served").mkdir()
    with serve_bucket(pages, tmp_path / "served") as bucket:
        for time in ("first", "second"):
            for page in pages:
                check_page(page, tmp_path, tmp_path / f"{time}-{page.path.stem}", bucket)


def test_every_block_has_a_kind_that_is_checked() -> None:
    kinds = {"python", "console", "shell", "none figure", "text output", "toml", "yaml", "dockerfile"}
    known_directives = re.compile(r"\{(toctree|eval-rst|image|include|literalinclude)\}")
    unknown = [
        f"{page}:{block.line} {block.info!r}"
        for page in PAGES
        for block in page.blocks
        if block.info not in kinds and not known_directives.match(block.info)
    ]
    assert not unknown


def test_manifests_are_yaml() -> None:
    manifests = [yaml.safe_load(block.content) for page in PAGES for block in page.of_kind("yaml")]
    assert manifests
    assert all({"apiVersion", "kind", "spec"} <= manifest.keys() for manifest in manifests)


def test_dockerfiles_copy_packages_that_exist() -> None:
    files = [block.content for page in PAGES for block in page.of_kind("dockerfile")]
    installed = [path for file in files for path in re.findall(r"/src/(packages/\w+)", file)]
    assert "packages/core" in installed
    assert all((ROOT / path / "pyproject.toml").exists() for path in installed)


def exists(name: str) -> bool:
    """Return True if a file is in the repository, or in the core."""
    return (ROOT / name).exists() or (ROOT / "packages/core/src/drivetrain" / name).exists()


def test_files_in_figures_exist() -> None:
    figures = [block.content for page in PAGES for block in page.of_kind("none figure")]
    named = {name for figure in figures for name in re.findall(r"\w+/(?:\w+\.py)?|\w+\.py", figure)}
    assert "_driver/attempt.py" in named
    assert not [name for name in sorted(named) if not exists(name.removeprefix("drivetrain/"))]


def test_files_in_the_table_of_changes_exist() -> None:
    rows = re.findall(r"^\|.*\|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w/]+(?:\.py|\.md|\.toml|/))`", row)}
    assert "_wire/events.py" in named
    assert not [name for name in sorted(named) if not exists(name)]


def test_code_and_figures_fit_on_the_page() -> None:
    kinds = ("python", "console", "shell", "none figure")
    long = [
        f"{page}:{block.line}"
        for page in PAGES
        if page.path.is_relative_to(DOCS)
        for block in page.blocks
        if block.info in kinds and max(map(len, block.content.splitlines())) > _LONGEST_LINE
    ]
    assert not long


def test_files_of_example_plugins_fit_on_the_page() -> None:
    files = [file for example in EXAMPLES for file in example.glob("*.py")]
    assert not [file.name for file in files if max(map(len, file.read_text().splitlines())) > _LONGEST_LINE]


def test_included_files_are_executed_by_some_test() -> None:
    included = {
        (page.path.parent / name).resolve()
        for page in PAGES
        for block in page.blocks
        for name in re.findall(r"^\{literalinclude\} (\S+)", block.info)
    }
    executed_elsewhere = {
        # test_porting.py
        *(CODE / name for name in ("digits_before.py", "digits_after.py", "digits.diff")),
        # test_distributed.py
        *(CODE / "distributed").glob("*.diff"),
        # test_example_plugins.py, and the blocks of the pages
        *(path for example in EXAMPLES for path in (*example.glob("*.py"), example / "pyproject.toml")),
        # tests/jax/test_training.py
        ROOT / "examples/jax_digits.py",
        # text: the exception tree
        ROOT / "packages/core/src/drivetrain/errors.py",
    }
    assert included == executed_elsewhere


def shell_commands() -> Iterator[tuple[str, list[str]]]:
    for page in PAGES:
        for block in page.of_kind("shell"):
            lines = block.content.replace("\\\n", " ").splitlines()
            for command in [part for line in lines for part in line.split("&&")]:
                yield f"{page}:{block.line}", shlex.split(command)


@pytest.mark.parametrize(
    ("place", "words"), [pytest.param(*found, id=shlex.join(found[1])) for found in shell_commands()]
)
def test_command_and_its_arguments_exist(place: str, words: list[str]) -> None:
    program = Path(words[0]).name
    if words[0].startswith(".venv/bin/"):
        assert program in ("nox", "pip", "python"), f"{place}: the page's own environment has no {program}"
    else:
        scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        assert shutil.which(program, path=scripts), f"{place}: there is no command {program}"
    if program == "nox" and "-s" in words:
        session = words[words.index("-s") + 1]
        assert re.search(rf"^def {session}\(", (ROOT / "noxfile.py").read_text(), re.MULTILINE), place
    for word in words[1:]:
        if word.startswith(("./packages/", "docs/", "examples/", "tests/")):
            assert (ROOT / word.partition("[")[0]).exists(), f"{place}: there is no {word}"
        if (extra := re.search(r"\[(\w+)\]$", word)) is not None:
            extras = (ROOT / "packages/drivetrain/pyproject.toml").read_text()
            assert re.search(rf"^{extra[1]} = ", extras, re.MULTILINE), f"{place}: there is no extra {extra[1]}"


def test_readme_has_the_ci_command() -> None:
    *_, command = (ROOT / ".ci" / "run").read_text().splitlines()
    shown = [block.content.strip() for block in PAGES[0].of_kind("shell")]
    assert command in shown
    assert f"{command} -s demo" in shown


def test_example_of_the_readme_is_the_file_that_mypy_checks() -> None:
    (example,) = PAGES[0].of_kind("python")
    assert example.content == (CODE / "readme.py").read_text(), "copy the README's example to docs/code/readme.py"
    mypy = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert "docs/code/readme.py" in mypy["files"]


def test_links_between_files_are_valid() -> None:
    broken = [
        f"{page}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.text)
        if "://" not in target and not (page.path.parent / target).exists()
    ]
    assert not broken
