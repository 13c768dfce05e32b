"""The documentation builds without a warning, and its API reference has every public name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from sphinx.util.inventory import InventoryFile

import drivetrain
from tests.browser import browsing
from tests.docs.pages import DOCS
from tests.names import public_names

# The first test includes the build: 30 s of CPU, several minutes on a busy machine.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages."""
    target = tmp_path_factory.mktemp("docs")
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    finished = subprocess.run(
        [*build, "-d", str(target / "doctrees"), str(DOCS), str(target / "html")],
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return target / "html"


def test_names_that_are_in_two_modules_are_the_same_objects() -> None:
    for name in set(drivetrain.__all__) & set(drivetrain.plugin.__all__):
        assert getattr(drivetrain, name) is getattr(drivetrain.plugin, name)


def test_every_public_name_is_in_the_reference(built: Path) -> None:
    inventory = InventoryFile.loads((built / "objects.inv").read_bytes(), uri="")
    described = {name for domain in inventory.data.values() for name in domain}
    assert not sorted({f"{module}.{name}" for module, name in public_names()} - described)


def test_built_pages_load_nothing_from_elsewhere(built: Path) -> None:
    loaded = re.compile(r"""<(?:script|img|iframe)\b[^>]*\bsrc=["'](?:https?:)?//|<link\b[^>]*stylesheet[^>]*//""")
    pages = list(built.rglob("*.html"))
    assert pages
    assert not [page.name for page in pages if loaded.search(page.read_text())]


def test_built_pages_contain_nothing_about_the_build_machine(built: Path) -> None:
    assert not [page.name for page in built.rglob("*.html") if str(DOCS.parent) in page.read_text()]


def test_pages_need_no_scrolling_to_the_side(built: Path, tmp_path: Path) -> None:
    """On a phone and on a desktop, in light and dark colors; a wide table or listing scrolls by itself."""
    skipped = ("_modules", "genindex.html", "py-modindex.html", "search.html")
    pages = [page for page in sorted(built.rglob("*.html")) if page.relative_to(built).parts[0] not in skipped]
    too_wide, errors = [], []
    with browsing(tmp_path) as browser:
        for width, dark in ((390, False), (1280, True)):
            browser.set_window(width=width, dark=dark)
            for page in pages:
                browser.open(page.as_uri(), "document.readyState === 'complete'")
                if (needed := browser.ask("document.documentElement.scrollWidth")) > width:
                    too_wide.append(f"{page.relative_to(built)}: {needed} of {width} px")
                errors += [f"{page.relative_to(built)}: {message}" for message in browser.messages]
    assert not too_wide
    assert not errors
