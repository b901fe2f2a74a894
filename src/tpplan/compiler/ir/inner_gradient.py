"""The operation that stands in a trace for `torch.autograd.grad` in a forward. It is never run.

gradient((e,), (x,), None)   ->   (the gradient of e by x,)
"""

from __future__ import annotations

import torch

from tpplan.compat.schemas import OpOverload

_LIBRARY = torch.library.Library("tpplan_trace", "DEF")
_LIBRARY.define("gradient(Tensor[] outputs, Tensor[] inputs, Tensor[]? grad_outputs) -> Tensor[]")
GRADIENT: OpOverload = torch.ops.tpplan_trace.gradient.default

__all__ = ["GRADIENT"]
