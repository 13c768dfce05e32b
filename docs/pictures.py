"""Makes the pictures of the documentation from real runs: ``nox -s pictures``.

A terminal recording is an SVG with one style animation, so that it also moves within a README. Screenshots of pages
need a Chromium; each is made with a light and a dark color scheme.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import pyte
from PIL import Image

from drivetrain import runs
from tests.browser import Browser, browsing
from tests.terminal import Terminal

ROOT = Path(__file__).parent.parent
STATIC = ROOT / "docs" / "_static"

COLUMNS, ROWS = 100, 12
CELL_WIDTH, LINE_HEIGHT, PADDING, TITLE_HEIGHT = 8.0, 18, 14, 32
FRAME_S = 0.12
LAST_FRAME_S = 5.0
MARK_S = 2.5
BEFORE_MARK_S = 3.0
DEADLINE_S = 120
KILLED_AFTER_REPORTS = 7
PAGE_WIDTH, PAGE_HEIGHT = 1000, 680

BACKGROUND, FOREGROUND, MUTED, ALARM = "#16181d", "#d8dee9", "#7b8494", "#ff6b6b"
COLORS = {
    "default": FOREGROUND,
    "black": "#5c6370",
    "red": ALARM,
    "green": "#98c379",
    "brown": "#e5c07b",
    "blue": "#61afef",
    "magenta": "#c678dd",
    "cyan": "#56b6c2",
    "white": FOREGROUND,
    "brightblack": MUTED,
}

Line = tuple[tuple[int, str, str, bool], ...]
"""The runs of equal style of a line: column, text, color, and whether it is bold."""


@dataclass
class Recording:
    """The frames of a terminal, each with the time at which it appeared, and one remark.

    Attributes:
        frames: the seconds since the start, and the lines on the screen.
        mark: the seconds since the start, and the remark that the title shows from then on.
    """

    frames: list[tuple[float, tuple[Line, ...]]] = field(default_factory=list)
    mark: tuple[float, str] = (0.0, "")


def record(command: list[str], prompt: str, on_frame: Callable[[Recording, float], None]) -> Recording:
    """Run a command in a terminal, and return what its screen showed.

    Args:
        command: the command.
        prompt: the line above its output.
        on_frame: is called about eight times a second, with the recording so far and the seconds since the start.
    """
    terminal = Terminal(COLUMNS, ROWS)
    terminal.show(f"$ {prompt}\r\n".encode())
    environment = {**os.environ, "TERM": "xterm-256color"}
    streams = {"stdin": terminal.device, "stdout": terminal.device, "stderr": terminal.device}
    process = subprocess.Popen(command, **streams, env=environment, cwd=ROOT)
    os.close(terminal.device)
    recording, began, is_open = Recording(), time.monotonic(), True
    while is_open:
        now = time.monotonic() - began
        assert now < DEADLINE_S, "the command takes too long"
        on_frame(recording, now)
        lines = tuple(read_lines(terminal.screen))
        if not recording.frames or lines != recording.frames[-1][1]:
            recording.frames.append((now, lines))
        while is_open and (left_s := began + now + FRAME_S - time.monotonic()) > 0:
            is_open = terminal.take(left_s)
    recording.frames.append((time.monotonic() - began, tuple(read_lines(terminal.screen))))
    terminal.close()
    assert process.wait(DEADLINE_S) == 0
    return recording


def read_lines(screen: pyte.Screen) -> Iterator[Line]:
    """Return the lines of a screen."""
    for row in range(screen.lines):
        cells = [(column, screen.buffer[row][column]) for column in range(screen.columns)]
        styled = groupby(cells, key=lambda cell: (cell[1].fg, cell[1].bold))
        line = []
        for (color, bold), group in styled:
            found = list(group)
            text = "".join(cell.data for _, cell in found)
            if text.strip():
                line.append((found[0][0], text.rstrip(), color, bold))
        yield tuple(line)


def draw(recording: Recording, *, title: str) -> str:
    """Return a recording as an SVG. Without animations, it shows the last frame.

    Each frame is drawn once, next to the frame before; the animation moves the visible part from one to the next.
    """
    width = round(COLUMNS * CELL_WIDTH + 2 * PADDING)
    height = ROWS * LINE_HEIGHT + 2 * PADDING + TITLE_HEIGHT
    times = [when for when, _ in recording.frames]
    total = times[-1] + LAST_FRAME_S
    steps = "".join(f"{when / total:.3%}{{transform:translateX({-n * width}px)}}" for n, when in enumerate(times))
    last = -(len(times) - 1) * width
    known: dict[Line, int] = {}
    for line in (line for _, lines in recording.frames for line in lines if line):
        known.setdefault(line, len(known))
    definitions = "".join(f'<g id="l{number}">{"".join(map(draw_run, line))}</g>' for line, number in known.items())
    baseline = TITLE_HEIGHT + PADDING + LINE_HEIGHT - 5
    uses = "".join(
        f'<use href="#l{known[line]}" x="{n * width + PADDING}" y="{baseline + row * LINE_HEIGHT}"/>'
        for n, (_, lines) in enumerate(recording.frames)
        for row, line in enumerate(lines)
        if line
    )
    when, remark = recording.mark
    begin = -max(0.0, when - BEFORE_MARK_S)  # the first thing that a reader sees
    shown = (when / total, min(1.0, (when + MARK_S) / total))
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">
<title>{escape(title)}</title>
<style>
text{{font:13.3px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre}}
.f{{transform:translateX({last}px);animation:f {total:.2f}s step-end {begin:.2f}s infinite}}
.m{{opacity:0;animation:m {total:.2f}s step-end {begin:.2f}s infinite}}
@keyframes f{{{steps}100%{{transform:translateX({last}px)}}}}
@keyframes m{{0%{{opacity:0}}{shown[0]:.3%}{{opacity:1}}{shown[1]:.3%}{{opacity:0}}}}
@media (prefers-reduced-motion:reduce){{.f,.m{{animation:none}}}}
</style>
<defs>{definitions}</defs>
<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>
<circle cx="20" cy="17" r="5" fill="#ff5f57"/><circle cx="38" cy="17" r="5" fill="#febc2e"/>
<circle cx="56" cy="17" r="5" fill="#28c840"/>
<text class="m" x="{width / 2}" y="22" text-anchor="middle" fill="{ALARM}" font-weight="bold">{escape(remark)}</text>
<g class="f">{uses}</g>
</svg>
"""


def draw_run(run: tuple[int, str, str, bool]) -> str:
    """Return text of one style as an element of an SVG, with the width of its cells."""
    column, text, name, bold = run
    color = COLORS.get(name, f"#{name}" if len(name) == 6 else FOREGROUND)
    indent = len(text) - len(text.lstrip())
    text = text.lstrip()
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{(column + indent) * CELL_WIDTH:g}" textLength="{len(text) * CELL_WIDTH:g}" '
        f'lengthAdjust="spacingAndGlyphs" fill="{color}"{weight}>{escape(text)}</text>'
    )


def record_failure(storage: str) -> Recording:
    """Record the example with the digits, whose rank 1 is killed in the middle."""

    def kill_once(recording: Recording, now: float) -> None:
        if recording.mark[1]:
            return
        for run in runs.list_runs(storage):
            reports = list(run.reports(0))
            if len(reports) >= KILLED_AFTER_REPORTS:
                workers = run.record().history.attempts[0].workers
                os.kill(workers[1]["pid"], signal.SIGKILL)
                recording.mark = (now, "kill -9 (rank 1)")

    command = [sys.executable, "examples/digits.py", "--storage-path", storage]
    return record(command, "python examples/digits.py", kill_once)


def photograph_pages(storage: str, directory: Path) -> None:
    """Take pictures of the page of the run in ``storage``."""
    (run,) = runs.list_runs(storage)
    page = directory / "run.html"
    subprocess.run(
        ["drivetrain", "runs", "report", str(Path(storage, run.directory_name)), "-o", str(page)], check=True
    )
    with browsing(directory / "browser") as browser:
        for scheme in ("light", "dark"):
            browser.set_window(width=PAGE_WIDTH, height=PAGE_HEIGHT, dark=scheme == "dark")
            browser.open(page.as_uri())
            photograph(browser, STATIC / f"run-{scheme}.png")


def photograph(browser: Browser, path: Path) -> None:
    """Write a PNG of the upper part of the page, with as few colors as it needs."""
    browser.picture(path)
    with Image.open(path) as picture:
        upper = picture.crop((0, 0, PAGE_WIDTH, PAGE_HEIGHT)).convert("RGB")
    upper.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    """Make all pictures."""
    with TemporaryDirectory(prefix="digits-") as directory:
        storage = str(Path(directory, "runs"))
        recording = record_failure(storage)
        title = "A terminal: one of two workers is killed, and the run resumes from its last checkpoint"
        (STATIC / "recording.svg").write_text(draw(recording, title=title))
        photograph_pages(storage, Path(directory))


if __name__ == "__main__":
    main()
