"""Reads the pages of the documentation: their code blocks, and the comments about them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markdown_it import MarkdownIt

from tests.support import ROOT

DOCS = ROOT / "docs"
CODE = DOCS / "code"

_NOT_EXECUTED = re.compile(r"<!-- not executed: (?P<reason>\S.*?) -->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        info: the text after the opening fence, such as ``python``.
        content: its lines.
        line: the number of its first line in the page, from 1.
        executed: False if a comment just before the block gives the reason why it is not executed.
    """

    info: str
    content: str
    line: int
    executed: bool


class Page:
    """A page of the documentation, or the README."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def blocks(self) -> list[Block]:
        return list(self._read())

    def of_kind(self, info: str) -> list[Block]:
        """Return the blocks of a kind that are executed or compared."""
        return [block for block in self.blocks if block.info == info and block.executed]

    def _read(self) -> Iterator[Block]:
        comment = ""
        for token in MarkdownIt().parse(self.text):
            if token.type == "fence":
                assert token.map is not None
                executed = not _NOT_EXECUTED.search(comment)
                yield Block(token.info.strip(), token.content, token.map[0] + 2, executed)
            comment = token.content if token.type == "html_block" else ""


PAGES = [
    *(Page(ROOT / "README.md"), *map(Page, sorted(ROOT.glob("packages/*/README.md")))),
    *map(Page, sorted(DOCS.rglob("*.md"))),
]
PROGRAMS = [page for page in PAGES if page.of_kind("python") or page.of_kind("console")]
