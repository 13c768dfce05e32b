"""Test selection by imports, on a small repository made by the test and on this one."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.affected import Graph, as_arguments, changed_files, default_base, list_files
from tests.support import ROOT

FILES = {
    "noxfile.py": "",
    "CHANGELOG.md": "",
    "packages/core/pyproject.toml": """
        [project.scripts]
        shop = "shop.command:main"
        [project.entry-points."shop.carriers"]
        bike = "shop.carriers.bike:Bike"
        """,
    "packages/core/src/shop/__init__.py": """
        from shop.orders import Order
        from shop.prices import price_of
        """,
    "packages/core/src/shop/orders.py": "class Order: pass",
    "packages/core/src/shop/prices.py": """
        from typing import TYPE_CHECKING
        from shop.taxes import tax
        if TYPE_CHECKING:
            from shop.orders import Order
        def price_of(order: "Order") -> int:
            from shop.rebates import rebate
            return tax() - rebate()
        """,
    "packages/core/src/shop/taxes.py": "def tax(): return 2",
    "packages/core/src/shop/rebates.py": "def rebate(): return 1",
    "packages/core/src/shop/command.py": "def main(): pass",
    "packages/core/src/shop/carriers/__init__.py": """
        import importlib
        _MODULES = {"Bike": "bike", "Truck": "truck"}
        def __getattr__(name):
            return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        """,
    "packages/core/src/shop/carriers/bike.py": "class Bike: pass",
    "packages/core/src/shop/carriers/truck.py": "class Truck: pass",
    "packages/core/src/shop/page.py": """
        from pathlib import Path
        ASSETS = Path(__file__).with_name("assets")
        def page(): return (ASSETS / "page.js").read_text()
        """,
    "packages/core/src/shop/assets/page.js": "",
    "tests/conftest.py": "",
    "tests/helpers.py": """
        from pathlib import Path
        ROOT = Path(__file__).parents[1]
        HERE = Path("here")
        HERE = HERE.parent
        """,
    "tests/core/conftest.py": """
        import pytest
        from tests.shared.conftest import cart
        @pytest.fixture
        def carrier():
            from shop.carriers.truck import Truck
            return Truck()
        """,
    "tests/shared/conftest.py": """
        import pytest
        import shop
        @pytest.fixture
        def cart(): return shop.Order()
        """,
    "tests/core/test_orders.py": "import shop\ndef test_order(): assert shop.Order()",
    "tests/core/test_prices.py": "from shop import price_of\ndef test_price(): assert price_of(None)",
    "tests/core/test_fixtures.py": "def test_cart(cart): assert cart",
    "tests/core/test_truck.py": "def test_truck(carrier): assert carrier",
    "tests/core/test_facade.py": "from shop.carriers import Truck\ndef test_it(): assert Truck()",
    "tests/core/test_name.py": 'def test_it(): assert send(by="bike")',
    "tests/core/test_command.py": 'def test_it(): run(["shop", "--help"])',
    "tests/core/test_script.py": '''
        SCRIPT = """
        import shop
        print(shop.price_of(None))
        """
        def test_it(): run(SCRIPT)
        ''',
    "tests/core/test_module.py": 'def test_it(): run([sys.executable, "-m", "shop.orders"])',
    "tests/core/test_page.py": "from shop.page import page\ndef test_it(): assert page()",
    "tests/core/test_example.py": """
        import pytest
        from tests.helpers import ROOT
        @pytest.mark.parametrize("name", ["first"])
        def test_it(name): run(f"examples/{name}.py", cwd=ROOT)
        """,
    "tests/core/test_sources.py": """
        from tests.helpers import ROOT
        def test_it(): assert list((ROOT / "packages").rglob("*.py"))
        """,
    "examples/first.py": "import shop\nprint(shop.Order())",
    "examples/second.py": "import shop\nprint(shop.price_of(None))",
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A small repository, committed."""
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").split("\n")
        indent = len(lines[0]) - len(lines[0].lstrip())
        file.write_text("\n".join(line[indent:] for line in lines) + "\n")
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    commit(tmp_path)
    return tmp_path


def git(directory: Path, *arguments: str) -> None:
    author = ("-c", "user.name=Someone", "-c", "user.email=someone@example.com", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *author, *arguments], cwd=directory, check=True)


def commit(directory: Path) -> None:
    git(directory, "add", "--all")
    git(directory, "commit", "--quiet", "--message", "A change")


def selected(root: Path, *changed: str) -> list[str]:
    graph = Graph(root, list_files(root), changed)
    return as_arguments(graph.select(), graph)


SOURCES = "tests/core/test_sources.py"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        pytest.param("tests/core/test_orders.py", ["test_orders"], id="a test selects itself"),
        pytest.param(
            "packages/core/src/shop/orders.py",
            ["test_example", "test_fixtures", "test_module", "test_orders", "test_sources"],
            id="a name of the facade does not select the users of its other names",
        ),
        pytest.param(
            "packages/core/src/shop/rebates.py",
            ["test_prices", "test_script", "test_sources"],
            id="imports in functions, and scripts in strings",
        ),
        pytest.param(
            "packages/core/src/shop/carriers/truck.py",
            ["test_facade", "test_sources", "test_truck"],
            id="a name of a lazy facade, and a fixture",
        ),
        pytest.param("packages/core/src/shop/carriers/bike.py", ["test_name", "test_sources"], id="an entry point"),
        pytest.param("packages/core/src/shop/command.py", ["test_command", "test_sources"], id="a command"),
        pytest.param("packages/core/src/shop/assets/page.js", ["test_page", "test_sources"], id="a data file"),
        pytest.param("examples/first.py", ["test_example"], id="an example by its path"),
        pytest.param("examples/second.py", [], id="an example that no test runs"),
        pytest.param("tests/shared/conftest.py", ["test_fixtures"], id="a fixture from another folder"),
        pytest.param("CHANGELOG.md", [], id="text that no test reads"),
    ],
)
def test_change_selects_the_tests_that_depend_on_it(repository: Path, changed: str, expected: list[str]) -> None:
    assert selected(repository, changed) == [f"tests/core/{name}.py" for name in expected]


@pytest.mark.parametrize(
    "changed",
    ["noxfile.py", "pyproject.toml", "packages/core/pyproject.toml", "tests/conftest.py", "unheard-of.cfg"],
)
def test_change_that_cannot_be_analysed_selects_everything(repository: Path, changed: str) -> None:
    everything = [name for name in FILES if name.startswith("tests/core/test_")]
    assert selected(repository, changed) == sorted(everything)


def test_deleted_module_selects_the_tests_that_still_import_it(repository: Path) -> None:
    (repository / "packages/core/src/shop/rebates.py").unlink()
    changed = changed_files(repository, "HEAD")
    assert changed == {"packages/core/src/shop/rebates.py"}
    assert "tests/core/test_prices.py" in selected(repository, *changed)


def test_changes_of_a_branch_include_commits_and_uncommitted_files(repository: Path) -> None:
    assert changed_files(repository, default_base(repository)) == set()

    git(repository, "switch", "--quiet", "--create", "branch")
    (repository / "examples/first.py").write_text("")
    commit(repository)
    (repository / "examples/second.py").write_text("")
    (repository / "tests/core/test_new.py").write_text("")

    changed = {"examples/first.py", "examples/second.py", "tests/core/test_new.py"}
    assert changed_files(repository, default_base(repository)) == changed
    assert changed_files(repository, "HEAD") == changed - {"examples/first.py"}


@pytest.fixture(scope="module")
def here() -> Graph:
    return Graph(ROOT, list_files(ROOT))


def files_selected_here(graph: Graph, changed: str) -> set[str]:
    """Return the selected files except this one, whose file names are test data."""
    graph.changed = {changed}
    return {test.partition("::")[0] for test in graph.select()} - {"tests/core/test_affected.py"}


def pages_selected_here(graph: Graph, changed: str) -> set[str]:
    graph.changed = {changed}
    return {test.partition("[")[2][:-1] for test in graph.select() if test.endswith("]")}


# These tests read or execute the sources of all packages.
TESTS_OF_ALL_PACKAGES = {
    "tests/core/test_import.py",
    "tests/core/test_packaging.py",
    "tests/docs/test_docstrings.py",
    "tests/docs/test_reference.py",
    "tests/gpu/test_command.py",
}


def test_plugin_for_boosted_trees_selects_only_its_own_tests_and_pages(here: Graph) -> None:
    module = "packages/gbdt/src/drivetrain_gbdt/_data.py"
    own = {file for file in here.by_path if file.startswith("tests/gbdt/test_")} | {"tests/isolation/check_gbdt.py"}
    own.add("tests/isolation/check_core.py")  # uses a word that is also the name of a trainer
    own.add("tests/ports/test_ports.py")  # two of the ports train with XGBoost and LightGBM
    assert files_selected_here(here, module) == own | TESTS_OF_ALL_PACKAGES | {"tests/docs/test_pages.py"}
    assert pages_selected_here(here, module) == {"docs/xgboost-lightgbm.md", "docs/ray-tune.md"}


@pytest.mark.parametrize("plugin", ["horovod", "gbdt", "lightning", "hf", "jax"])
def test_plugin_selects_no_test_of_another_plugin(here: Graph, plugin: str) -> None:
    plugins = {"horovod", "gbdt", "lightning", "hf", "tf", "jax"}
    sources = [file for file in here.by_path if file.startswith(f"packages/{plugin}/src/")]
    assert sources
    for source in sources:
        folders = {file.split("/")[1] for file in files_selected_here(here, source)}
        assert folders & plugins <= {plugin}, source


def test_tracker_selects_no_training_tests_of_frameworks(here: Graph) -> None:
    files = files_selected_here(here, "packages/track/src/drivetrain_track/wandb.py")
    assert "tests/track/test_services.py" in files
    assert not [file for file in files if file.endswith(("test_training.py", "test_conformance.py"))]
    assert pages_selected_here(here, "packages/track/src/drivetrain_track/wandb.py") == {
        "docs/tracking.md",
        "docs/plugins/callbacks.md",  # its example is a tracker
    }


def test_engine_selects_every_test_that_trains(here: Graph) -> None:
    files = files_selected_here(here, "packages/core/src/drivetrain/_driver/controller.py")
    for folder in ("contract", "crash", "faults", "torch", "tf", "gbdt", "hf", "horovod", "lightning", "tune", "jax"):
        assert [file for file in files if file.startswith(f"tests/{folder}/")], folder


def test_page_selects_only_its_own_execution(here: Graph) -> None:
    assert pages_selected_here(here, "docs/storage.md") == {"docs/storage.md"}


def test_example_plugin_selects_its_pages_and_its_kit(here: Graph) -> None:
    plugin = "docs/code/plugins/patient/drivetrain_patient.py"
    assert pages_selected_here(here, plugin) == {"docs/plugins/index.md", "docs/plugins/policies.md"}
    assert "tests/docs/test_example_plugins.py" in files_selected_here(here, plugin)


def test_test_file_selects_only_itself(here: Graph) -> None:
    assert files_selected_here(here, "tests/tf/test_keras.py") == {"tests/tf/test_keras.py"}


def test_pages_with_code_match_the_pages_executed_by_the_documentation_tests(here: Graph) -> None:
    pytest.importorskip("markdown_it")
    from tests.docs.pages import PROGRAMS

    assert set(here.pages) == {str(page) for page in PROGRAMS}


def test_command_prints_pytest_arguments_and_explains_a_selection() -> None:
    command = [sys.executable, "-m", "tests.affected", "--changed", "tests/tf/jobs.py"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed
    assert all((ROOT / line).is_file() for line in printed)

    why = subprocess.run([*command, "--why", printed[0]], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert why.startswith(f"test {printed[0]}\n")
    assert why.splitlines()[-1].strip().startswith(("-> tests.tf.jobs:", "-> file tests/tf/jobs.py"))
