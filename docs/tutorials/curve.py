"""Loss curves as a picture and in a line, on the first rank."""

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


def tell(curves: Mapping[str, Sequence[float]]) -> None:
    """Print each run's last loss, and by how much two runs differ at most."""
    if dist.is_initialized() and dist.get_rank():
        return
    steps = max(map(len, curves.values()))
    print(f"loss after {steps} steps: " + ", ".join(f"{name} {losses[-1]:.4f}" for name, losses in curves.items()))
    if len(curves) == 2:
        apart = max(abs(a - b) for a, b in zip(*curves.values(), strict=True))
        print(f"the two losses differ by {apart:.1e} at most")
