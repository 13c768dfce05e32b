"""Finds idioms that this project avoids in its texts, and names the plain English to write instead.

Usage, from the repository root::

    python -m tests.english             # all tracked Python and Markdown files
    python -m tests.english FILE ...    # only these

It reads comments, strings, docstrings and names of tests in Python files, and the prose of Markdown files. ``RULES``
lists the idioms. Where one of them is correct English, ``[tool.english]`` in pyproject.toml allows the phrase in that
file; an entry that allows nothing is an error, so the list stays short.
"""

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tests.toml import tomllib

ROOT = Path(__file__).parents[1]

# From Python 3.12 on, the text of an f-string has a token of its own type.
_STRINGS = (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))

# These quote the idioms.
_EXCLUDED = ("tests/english.py", "tests/core/test_english.py")


@dataclass(frozen=True)
class Rule:
    """An idiom, and its replacement.

    Attributes:
        pattern: a regular expression, ignoring case; a space matches any white space.
        advice: the replacement to show.
        opens: the pattern only counts at the beginning of a docstring, with its case.
    """

    pattern: str
    advice: str
    opens: bool = False

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """The compiled pattern."""
        pattern = self.pattern.replace(" ", r"\s+")
        return re.compile(rf"\b(?:{pattern})", 0 if self.opens else re.IGNORECASE)

    @cached_property
    def quick(self) -> re.Pattern[str]:
        """The pattern for lower-case text, which may also match inside a word; `re` finds it several times as fast."""
        start = '"""' if self.opens else ""
        return re.compile(start + "(?:" + self.pattern.lower().replace(" ", r"\s+") + ")")


RULES = [
    Rule(r"wants\b|want (?:a|an|the|its|their)\b", '"expects", "requires" or "needs"'),
    Rule(r"expected\b[^.;]*, found\b", '"expected X, got Y"'),
    Rule(r"(?:go|goes|went|going|gone) on\b(?! (?:a|an|the|to a|to the)\b)", '"continues", "resumes" or "is running"'),
    Rule(r"anew\b", '"again"; "recreate" for "make anew"'),
    Rule(r"mend(?:s|ed|ing)?\b", '"fix"'),
    Rule(r"beside\b", '"next to", "in addition to" or "compared with"'),
    Rule(r"(?:is|are|was|were) no more(?=\s?[.,;:)]|$)", '"exited", "was lost" or "no longer exists"'),
    Rule(r"(?:is|are|was|were|be) gone\b", '"exited", "was lost", "was deleted" or "no longer exists"'),
    Rule(r"says? (?:no|yes|who|whose)\b", '"returns False", or "names"'),
    Rule(r"(?:is|are|was|were|be|been) told\b", '"is notified", "receives", "is reported" or "is distinguished from"'),
    Rule(r"tells? (?:nobody|nothing|of|apart)\b", '"reports" or "notifies"'),
    Rule(r"(?:nobody|somebody|anybody|everybody|whoever)\b", "the process or person that is meant"),
    Rule(r"(?:is|are|was|were) to be\b", '"must be", "should be" or "will be"'),
    Rule(r"reckon(?:s|ed|ing)?\b", '"count", "estimate" or "consider"'),
    Rule(r"(?:end|exit|stop|leave|return|finish|shut down)(?:s|e?d|p?ed|p?ing)? in order\b(?! to)", '"gracefully"'),
    Rule(r"so many\b(?! that)", '"this number of", "N" or the name of the variable'),
    Rule(r"lines? to (?:the|a|its|their|each|every) (?:controller|worker|driver|rank)s?\b", '"connection"'),
    Rule(r"(?:tries|tried) (?:it |this |that )?again\b", '"retry"'),
    Rule(r"(?:start|begin)(?:s|ed|ning)? again\b|(?:begun|began) again\b", '"restart" or "resume"'),
    Rule(r"of (?:one's|ones) own\b", '"a separate", "a custom" or "your own"'),
    Rule(r"all the same\b", '"still" or "anyway"'),
    Rule(r"(?:in vain|without a word|word of (?:a|the|its))\b", "the event or message that is meant"),
    Rule(r"greatest\b", '"largest" or "maximum"'),
    Rule(r"made again\b", '"recreated", "repeated" or "rebuilt"'),
    Rule(r"(?:with|for|than|beyond) what\b", "the noun instead of the clause"),
    Rule(r"(?:is|are|was|were) none (?:of|that)\b", '"is not a"'),
    Rule(r"hears? of\b", '"receives" or "is notified of"'),
    Rule(r"for ever\b", '"forever"'),
    Rule(
        r"(?:has|have|having) (?:it|them|each|every \w+|the \w+|all \w+) "
        r"(?:be|do|end|fail|go|make|raise|read|report|run|save|stop|take|use|wait|write)\b",
        '"makes X do Y", "lets X do Y", or the imperative',
    ),
    Rule(r"What\b", "the thing that it returns or describes", opens=True),
    Rule(r"Has (?:a|an|the|each|every|all|one|its|\w+s?) ", '"Make X do Y", or the imperative', opens=True),
    Rule(r"(?:Those|The ones?|Who|Whose)\b", "a noun, or an imperative verb", opens=True),
]


@dataclass(frozen=True)
class Text:
    """A piece of prose.

    Attributes:
        line: the number of its first line in the file.
        content: its text.
        is_docstring: it is a docstring, whose first word is the first of the content.
    """

    line: int
    content: str
    is_docstring: bool = False


@dataclass(frozen=True)
class Hit:
    """An occurrence of an idiom."""

    path: str
    line: int
    phrase: str
    rule: Rule = field(repr=False)

    def __str__(self) -> str:
        """The message for the terminal."""
        return f"{self.path}:{self.line}: {self.phrase!r}. Write {self.rule.advice}"


def texts_of_python(source: str) -> Iterator[Text]:
    """Yield the comments, strings, docstrings and names of tests of a module."""
    statement_starts = {tokenize.ENCODING, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    before = tokenize.ENCODING
    comment: list[str] = []
    first_line = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            # Consecutive lines of a comment are one text.
            if not comment or token.start[0] != first_line + len(comment):
                if comment:
                    yield Text(first_line, "\n".join(comment))
                comment, first_line = [], token.start[0]
            comment.append(token.string.lstrip("# "))
        elif token.type in _STRINGS:
            content = token.string.lstrip("rbfuRBFU").strip("\"'")
            yield Text(token.start[0], content, is_docstring=before in statement_starts)
        elif token.type == tokenize.NAME and token.string.startswith("test_"):
            yield Text(token.start[0], token.string.replace("_", " "))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
    if comment:
        yield Text(first_line, "\n".join(comment))


def texts_of_markdown(source: str) -> Iterator[Text]:
    """Yield the prose of a page, without its code."""
    fence = re.compile(r"^ *(?P<fence>```+|~~~+|:::+)[^\n]*\n.*?^ *(?P=fence) *$", re.DOTALL | re.MULTILINE)
    without_blocks = fence.sub(_blank_code, source)
    yield Text(1, re.sub(r"`[^`\n]*`", "`code`", without_blocks))


def _blank_code(block: re.Match[str]) -> str:
    if block["fence"].startswith(":"):  # an admonition, whose content is prose
        return block[0]
    return "\n" * block[0].count("\n")


def search(path: str, source: str, rules: Sequence[Rule] = RULES) -> Iterator[Hit]:
    """Yield every idiom in a file's texts."""
    # Most rules match nowhere in a file, its code included. Only the others need its texts, which take longer to find.
    raw = source.replace("_", " ").replace("#", " ").lower()
    rules = [rule for rule in rules if rule.quick.search(raw)]
    texts: Iterable[Text] = ()
    if rules:
        texts = texts_of_python(source) if path.endswith(".py") else texts_of_markdown(source)
    for text in texts:
        for rule in rules:
            if rule.opens:
                found = [rule.regex.match(text.content.lstrip())] if text.is_docstring else []
            else:
                found = list(rule.regex.finditer(text.content))
            for match in filter(None, found):
                line = text.line + text.content.count("\n", 0, match.start())
                yield Hit(path, line, " ".join(match[0].split()), rule)


def check(
    paths: Iterable[str], allowed: Mapping[str, Sequence[str]], root: Path = ROOT, rules: Sequence[Rule] = RULES
) -> list[str]:
    """Return the messages for all hits that are not allowed, and for entries of ``allowed`` without a hit.

    Args:
        paths: files, from the repository root.
        allowed: correct phrases by file.
        root: the repository.
        rules: the idioms.
    """
    messages = []
    for path in paths:
        unused = {phrase.lower() for phrase in allowed.get(path, ())}
        permitted = set(unused)
        for hit in search(path, (root / path).read_text(encoding="utf-8"), rules):
            unused.discard(hit.phrase.lower())
            if hit.phrase.lower() not in permitted:
                messages.append(str(hit))
        messages += [f"{path}: no {phrase!r}. Remove it from [tool.english]" for phrase in sorted(unused)]
    return messages


def list_files(root: Path = ROOT) -> list[str]:
    """Return the files of a repository with prose: tracked, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.md"]
    files = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    return [file for file in files if file not in _EXCLUDED and (root / file).is_file()]


def main() -> None:
    """Print the messages for the given files, or for all; exit with 1 if there are any."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    messages = check(sys.argv[1:] or list_files(), settings["tool"].get("english", {}))
    print(*messages, sep="\n", end="\n" if messages else "")
    sys.exit(1 if messages else 0)


if __name__ == "__main__":
    main()
