"""Loss curves as a picture, on the first rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist


def draw(curves: Mapping[str, Sequence[float]], path: Path, title: str) -> None:
    """Write loss over steps, a line for each run; the first is drawn broad, so that one upon it shows both."""
    if dist.is_initialized() and dist.get_rank():
        return
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for place, (name, losses) in enumerate(curves.items()):
        axes.plot(losses, label=name, linewidth=4 if place == 0 else 1.2, alpha=0.4 if place == 0 else 1)
    axes.set(title=title, xlabel="step", ylabel="loss (nats a byte)")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
