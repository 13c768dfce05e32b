"""The gallery of examples: each has a picture and a card. ``test_pages.py`` executes their code."""

import pytest

from docs.example_pictures import DRAWINGS, PICTURES
from tests.docs.pages import DOCS

FOLDER = DOCS / "examples"
EXAMPLES = sorted(page.stem for page in FOLDER.glob("*.md") if page.stem != "index")
_LARGEST_PICTURE = 60 * 1024  # bytes: the gallery loads all of them


def test_every_example_has_a_drawing() -> None:
    assert sorted(DRAWINGS) == EXAMPLES


def test_every_picture_belongs_to_an_example() -> None:
    assert sorted(file.stem for file in PICTURES.iterdir()) == EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_small_picture_is_on_the_page_and_on_the_card_of_an_example(name: str) -> None:
    file = f"{name}.{DRAWINGS[name][1]}"
    assert (PICTURES / file).stat().st_size <= _LARGEST_PICTURE
    assert f"](../_static/examples/{file})" in (FOLDER / f"{name}.md").read_text()
    gallery = (FOLDER / "index.md").read_text()
    assert f":img-top: ../_static/examples/{file}\n:link: {name}\n" in gallery
    assert f"\n{name}\n" in gallery.partition("{toctree}")[2]
