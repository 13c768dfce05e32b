"""The check of the English: idioms that it must find, and plain sentences that it must accept."""

from pathlib import Path

import pytest

from tests.english import Rule, check, search

SOME_RULES = [Rule(r"goes on\b", '"continues"'), Rule(r"anew\b", '"again"'), Rule(r"whoever\b", "the person")]


def phrases(path: str, source: str) -> list[tuple[int, str]]:
    return [(hit.line, hit.phrase) for hit in search(path, source, SOME_RULES)]


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("backend wants a name", "wants"),
        ("expected an int, found 'two'", "expected an int, found"),
        ("the run goes on", "goes on"),
        ("the loader is made anew", "anew"),
        ("fixes what can be mended", "mended"),
        ("the file beside it", "beside"),
        ("the process is no more.", "is no more"),
        ("the worker is gone", "is gone"),
        ("the lock says who holds it", "says who"),
        ("all ranks are told at once", "are told"),
        ("Ray tells nobody", "tells nobody"),
        ("whoever holds the lock", "whoever"),
        ("a metric that is to be reported", "is to be"),
        ("the time is reckoned from it", "reckoned"),
        ("the run ends in order", "ends in order"),
        ("after so many steps", "so many"),
        ("the line to the controller", "line to the controller"),
        ("the upload is tried again", "tried again"),
        ("the run starts again", "starts again"),
        ("a loop of one's own", "of one's own"),
        ("kept all the same", "all the same"),
        ("the greatest value", "greatest"),
        ("it is made again", "made again"),
        ("a callback hears of the end", "hears of"),
        ("the ranks wait for ever", "for ever"),
        ("has the ranks save their state", "has the ranks save"),
    ],
)
def test_idiom_is_found_with_its_replacement(text: str, phrase: str) -> None:
    hit, *_ = search("module.py", f'"""Module."""\n\nMESSAGE = "{text}"\n')
    assert (hit.line, hit.phrase) == (3, phrase)
    assert str(hit).startswith(f"module.py:3: {phrase!r}. Write ")


@pytest.mark.parametrize(
    "text",
    [
        "num_workers: expected an int >= 0, got -1",
        "Add the extra that you want",
        "put the results on a disk",
        "recommend another runtime",
        "besides, an amendment",
        "there are no more results",
        "the events are in order, and in order to read them",
        "so many that memory runs out",
        "the last line of the worker's log",
        "what the function returns, which says nothing about the others",
        "to begin, start the run",
        "the driver has the run directory, and a rank has them all",
    ],
)
def test_plain_english_is_accepted(text: str) -> None:
    assert list(search("module.py", f'MESSAGE = "{text}"\n')) == []


def test_comments_docstrings_strings_and_names_of_tests_are_read() -> None:
    source = '''
def test_run_goes_on(goes_on):
    """Returns what goes
    on."""
    message = f"it goes on"
    # A comment that goes
    # on over two lines.
    return goes_on(message)  # it goes on
'''
    assert phrases("module.py", source) == [
        (2, "goes on"),
        (3, "goes on"),
        (5, "goes on"),
        (6, "goes on"),
        (8, "goes on"),
    ]


def test_openings_count_only_in_docstrings() -> None:
    rule = [Rule("What\\b", "a noun", opens=True)]
    source = '"""What a worker does."""\nTITLE = "What is new"\n# What follows\n"""Says What."""\n'
    assert [(hit.line, hit.phrase) for hit in search("module.py", source, rule)] == [(1, "What")]


def test_code_in_markdown_is_skipped() -> None:
    page = "It goes on.\n\n```python\ngoes_on = 'it goes on'  # goes on\n```\n\nThe option `goes on` is anew.\n"
    assert phrases("page.md", page) == [(1, "goes on"), (7, "anew")]


def test_allowed_phrase_is_accepted_and_an_unused_entry_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("Whoever reads this goes on.\n")
    (tmp_path / "other.md").write_text("It is read anew.\n")
    assert check(["page.md"], {"page.md": ["whoever", "goes on"]}, tmp_path, SOME_RULES) == []
    assert check(["page.md", "other.md"], {"page.md": ["Whoever", "anew"]}, tmp_path, SOME_RULES) == [
        "page.md:1: 'goes on'. Write \"continues\"",
        "page.md: no 'anew'. Remove it from [tool.english]",
        "other.md:1: 'anew'. Write \"again\"",
    ]
