"""The demo's figure: the losses over the steps."""

from collections.abc import Sequence
from pathlib import Path


def save_curve(
    path: Path,
    *,
    title: str,
    train: Sequence[float],
    alone: Sequence[float],
    held_out: Sequence[tuple[int, float]],
) -> None:
    """Draw the losses of a run and of its check into a PNG file.

    Args:
        path: the file to write.
        title: the text above the axes.
        train: the loss of each step of the sharded run in nats per byte, the mean over ranks.
        alone: the same for the single process; empty if there was none.
        held_out: pairs (steps done, loss) of the sharded run.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    steps = range(len(train))  # done before that loss was taken
    axes.plot(steps, train, color="#1f77b4", linewidth=4, alpha=0.45, label="train, sharded")
    if alone:
        axes.plot(steps, alone, "--", color="black", linewidth=1.2, label="train, one process")
    at, losses = zip(*held_out, strict=True)
    axes.plot(at, losses, "o-", color="#d62728", markersize=4, label="held out, sharded")
    axes.set_xlabel("optimizer steps done")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(title, fontsize=11)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    FigureCanvasAgg(figure).print_png(str(path))
