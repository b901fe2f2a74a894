"""torchvision's wheels from PyPI are built for CUDA's torch: beside a CPU build of torch their operators don't load.

The models of the zoo don't call them, but torchvision can't be imported without. So they are declared here.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_declared: list[torch.library.Library] = []


def declare_operators() -> None:
    """Declare what torchvision registers shapes for when it is imported, if its library doesn't load."""
    if _declared or find_spec("torchvision") is None:
        return
    _declared.append(torch.library.Library("torchvision", "FRAGMENT"))
    try:
        from torchvision import extension  # noqa: F401 # pyright: ignore
    except RuntimeError:
        for name, schema in _SCHEMAS.items():
            _declared[0].define(name + schema)
