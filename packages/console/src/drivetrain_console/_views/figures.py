"""Draws curves as a matplotlib figure, for notebooks, PNG and SVG."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.plugin.storage import Storage
from drivetrain.runs import Curve, RunReader

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_figure", "plot"]

_WIDTH_IN, _HEIGHT_IN = 7.0, 2.8


def plot(
    storage: Storage, metrics: Sequence[str] = (), *, ranks: Sequence[int] | None = None, log: bool = False
) -> Figure:
    """Plot metrics of a run; see :meth:`drivetrain.Result.plot`.

    Args:
        storage: the run directory.
        metrics: the names of metrics; empty for all metrics that are numbers.
        ranks: the ranks to plot; None for all ranks.
        log: use a logarithmic value axis.

    Raises:
        ValueError: none of the ranks reported one of the metrics as a number.
        ModuleNotFoundError: matplotlib is not installed.
    """
    return draw_figure(RunReader(storage).curves(metrics, ranks), log=log)


def draw_figure(panels: Mapping[str, Mapping[str, Curve]], *, log: bool = False) -> Figure:
    """Draw curves, with a panel for each metric.

    Args:
        panels: the curves, by metric and then by label.
        log: use a logarithmic value axis, and leave out points whose mean is not positive.

    Returns:
        A figure that notebooks display. It is not registered with pyplot, so it need not be closed.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'plots require matplotlib, which is not installed. Run: pip install "drivetrain[plot]"', name=error.name
        ) from error

    class ShownFigure(Figure):
        """A figure that notebooks display even if no pyplot backend is active."""

        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png")
            return picture.getvalue()

    figure = ShownFigure(figsize=(_WIDTH_IN, _HEIGHT_IN * max(1, len(panels))), layout="constrained", dpi=120)
    axes: list[Any] = list(figure.subplots(max(1, len(panels)), 1, squeeze=False)[:, 0])
    for axis, (metric, curves) in zip(axes, panels.items(), strict=False):
        for name, curve in curves.items():
            points = [point for point in curve.points() if not log or point[2] > 0]
            if not points:
                continue
            x, low, mean, high = zip(*points, strict=True)
            (line,) = axis.plot(x, mean, label=name, linewidth=1.3, marker="." if len(points) < 3 else None)
            if curve.width > 1:
                axis.fill_between(x, low, high, color=line.get_color(), alpha=0.25, linewidth=0)
        if log:
            axis.set_yscale("log")
        axis.set_ylabel(metric)
        axis.grid(alpha=0.3)
        if len(curves) > 1 and axis.get_lines():
            axis.legend(fontsize="small", ncols=math.ceil(len(curves) / 8))
    axes[-1].set_xlabel("report")
    return figure
