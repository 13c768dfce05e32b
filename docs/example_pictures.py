"""Draws the pictures of the examples, from the results of their code.

Usage, from the repository root::

    python -m docs.example_pictures                # all examples
    python -m docs.example_pictures small-gpt      # one of them

Each example is executed like a script, and its picture is drawn from the variables of that script. The pictures are
transparent, with colors that are readable on a light and on a dark page.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tests.docs.pages import DOCS, Page

PICTURES = DOCS / "_static" / "examples"

GRAY, LIGHT = "#7d8590", "#7d859066"
BLUE, ORANGE, GREEN, RED = "#2f81f7", "#e8871e", "#2da44e", "#e5534b"

STYLE = {
    "axes.edgecolor": GRAY,
    "axes.labelcolor": GRAY,
    "axes.prop_cycle": mpl.cycler(color=[BLUE, ORANGE, GREEN, RED]),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": GRAY,
    "axes.titlesize": 11,
    "figure.constrained_layout.use": True,
    "figure.dpi": 130,
    "font.size": 10,
    "grid.color": LIGHT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.labelcolor": GRAY,
    "lines.linewidth": 2,
    "savefig.transparent": True,
    "svg.hashsalt": "drivetrain",  # the same names of elements in each run
    "text.color": GRAY,
    "xtick.color": GRAY,
    "ytick.color": GRAY,
}


def run(page: Page, directory: Path) -> dict[str, Any]:
    """Execute the code of a page in a directory, and return its variables."""
    script = directory / f"{page.path.stem.replace('-', '_')}_page.py"
    script.write_text("\n".join(block.content for block in page.of_kind("python")))
    os.environ["DRIVETRAIN_STORAGE_PATH"] = str(directory / "runs")
    os.chdir(directory)
    return runpy.run_path(str(script), run_name="__main__")


def axes_of_curves(figure: Figure, columns: int = 1) -> list[Axes]:
    """Return axes with a grid, and with whole numbers below."""
    axes = list(np.ravel(figure.subplots(1, columns)))
    for each in axes:
        each.grid(axis="y")
        each.xaxis.set_major_locator(MaxNLocator(integer=True))
    return axes


def show_digit(axes: Axes, image: Any) -> None:
    """Draw a scan of 8 x 8 pixels, from 0 to 1."""
    axes.imshow(np.reshape(image, (8, 8)), cmap="gray_r", vmin=0, vmax=1)
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)


def image_classification(page: dict[str, Any]) -> Figure:
    """Show test digits with their predictions, the wrong ones first, and the accuracy by epoch."""
    figure = plt.figure(figsize=(7.2, 3))
    left, right = figure.subfigures(1, 2)
    is_wrong = (page["predictions"] != page["labels"]).numpy()
    shown = np.argsort(~is_wrong, kind="stable")[:3].tolist()
    shown += [row for row in range(60) if not is_wrong[row]][: 18 - len(shown)]
    for axes, row in zip(left.subplots(3, 6).flat, shown, strict=True):
        show_digit(axes, page["images"][row])
        color = RED if is_wrong[row] else GREEN
        axes.set_title(str(page["predictions"][row].item()), color=color, pad=2)
    (axes,) = axes_of_curves(right)
    history = page["history"]
    axes.plot(history["epoch"] + 1, history["correct"] / history["rows"], marker="o", markersize=4)
    axes.set(xlabel="epoch", title="test accuracy")
    return figure


def small_gpt(page: dict[str, Any]) -> Figure:
    """Show the loss by step."""
    figure = plt.figure(figsize=(6.4, 3))
    (axes,) = axes_of_curves(figure)
    history = page["result"].metrics_dataframe.dropna(subset=["loss"])
    axes.plot(history["step"], history["loss"])
    axes.set(xlabel="step", title="training loss", ylim=(0, None))
    return figure


def lora(page: dict[str, Any]) -> Figure:
    """Show the loss of the adapter on held-out sentences by epoch, and that of the base model."""
    figure = plt.figure(figsize=(6.4, 3))
    (axes,) = axes_of_curves(figure)
    history = page["adapted"].metrics_dataframe.dropna(subset=["eval_loss"]).drop_duplicates("epoch")
    axes.axhline(page["before"][0], color=ORANGE, linestyle="--", label="frozen base model")
    axes.plot([0, *history["epoch"]], [page["before"][0], *history["eval_loss"]], marker="o", markersize=4)
    axes.lines[-1].set_label("with the adapter")
    axes.set(xlabel="epoch", title="loss on held-out pirate sentences", ylim=(0, None))
    axes.legend(loc="center right")
    return figure


def diffusion(page: dict[str, Any]) -> Figure:
    """Show the digits that the model draws before and after the fine-tuning."""
    figure = plt.figure(figsize=(7.2, 2.6))
    parts = figure.subfigures(1, 2, wspace=0.06)
    for part, name, title in zip(
        parts, ("before", "after"), ("trained on all digits", "fine-tuned to the 3"), strict=True
    ):
        part.suptitle(title, color=GRAY, fontsize=11)
        for axes, image in zip(part.subplots(4, 8).flat, page[name], strict=True):
            show_digit(axes, image)
    return figure


def boosting(page: dict[str, Any]) -> Figure:
    """Show the losses of both models by round, and their best rounds."""
    figure = plt.figure(figsize=(7.2, 3))
    titles = "XGBoost: log loss", "LightGBM: squared error"
    best = page["best_rounds"], page["booster"].num_trees()
    tables = page["losses"], page["errors"]
    for axes, table, rounds, title in zip(axes_of_curves(figure, 2), tables, best, titles, strict=True):
        for column, label in zip(table.columns, ("training", "validation"), strict=True):
            axes.plot(range(1, 1 + len(table)), table[column], label=label)
        axes.axvline(rounds, color=GRAY, linestyle=":", label="best round")
        axes.set(xlabel="round", title=title, ylim=(0, None))
        axes.legend()
    return figure


def search(page: dict[str, Any]) -> Figure:
    """Show the accuracy of the trials of both searches."""
    figure = plt.figure(figsize=(7.2, 3))
    halving, population = axes_of_curves(figure, 2)
    for trial in sorted(page["halved"], key=lambda trial: trial.state == "completed"):
        history = trial.metrics_dataframe
        completed = trial.state == "completed"
        color = BLUE if completed else LIGHT
        halving.plot(history["epoch"] + 1, history["accuracy"], color=color, marker="" if completed else ".")
        halving.plot(history["epoch"].iloc[-1:] + 1, history["accuracy"].iloc[-1:], color=color, marker="o")
    halving.set(xlabel="epoch", title="successive halving: accuracy", ylim=(0, 1))
    for trial in page["population"]:
        history = trial.metrics_dataframe
        population.plot(history["training_iteration"], history["accuracy"], marker=".")
    population.set(xlabel="epoch", title="population-based: accuracy", ylim=(0, 1))
    return figure


DRAWINGS: dict[str, tuple[Callable[[dict[str, Any]], Figure], str]] = {
    "image-classification": (image_classification, "png"),
    "small-gpt": (small_gpt, "svg"),
    "lora": (lora, "svg"),
    "diffusion": (diffusion, "png"),
    "boosting": (boosting, "svg"),
    "search": (search, "svg"),
}


def main(names: Sequence[str]) -> None:
    """Draw the pictures of these examples, or of all."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    mpl.rcParams.update(STYLE)
    for name in names or DRAWINGS:
        draw, suffix = DRAWINGS[name]
        with tempfile.TemporaryDirectory() as directory:
            figure = draw(run(Page(DOCS / "examples" / f"{name}.md"), Path(directory)))
        file = PICTURES / f"{name}.{suffix}"
        figure.savefig(file, metadata={"Date": None} if suffix == "svg" else None)
        plt.close(figure)
        print(f"{file.relative_to(DOCS)}: {file.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main(sys.argv[1:])
