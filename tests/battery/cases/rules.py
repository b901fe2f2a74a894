"""Operators along split dims, in both spellings of a dim; the sweep over all operators stands elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tests.battery.case import MLP, Mlp, add, call

BODIES: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda h: h.cumsum(-1) / 8,
    "cumsum_by_number": lambda h: h.cumsum(2) / 8,
    "cumprod": lambda h: (h.tanh() + 1).cumprod(-1).clamp(max=9),
    "logcumsumexp": lambda h: h.logcumsumexp(-1),
    "cummax": lambda h: h.cummax(-1).values,
    "kl_div": lambda h: h * functional.kl_div(h.log_softmax(1), h.softmax(1), reduction="batchmean"),
    "roll": lambda h: h.roll(1, -1),
    "flip": lambda h: h.flip(-1),
    "sort": lambda h: h.sort(-1).values,
    "median": lambda h: h - h.median(-1, keepdim=True).values,
    "diff": lambda h: functional.pad(h.diff(dim=-1), (0, 1)),
    "pixel": lambda h: h.unfold(-1, 2, 2).flatten(2),
    "normalize": lambda h: functional.normalize(h, dim=-1),
    "layer_norm": lambda h: functional.layer_norm(h, h.shape[-1:]),
    "glu": lambda h: functional.glu(h, -1).repeat(1, 1, 2),
    "interpolate": lambda h: functional.interpolate(h, scale_factor=2)[..., ::2],
    "avg_pool": lambda h: functional.avg_pool1d(h, 3, 1, 1),
    "std": lambda h: h / h.std(-1, keepdim=True),
    "logsumexp": lambda h: h - h.logsumexp(-1, keepdim=True),
    "searchsorted": lambda h: h * torch.searchsorted(h.detach().sort(-1).values, h.detach()),
    "gather": lambda h: h.gather(-1, h.detach().argsort(-1)),
    "tril": lambda h: h.tril(),
    "cdist": lambda h: torch.cdist(h, h) @ h / 10,
    "batch_max": lambda h: h / h.abs().amax(),
}


class Applies(Mlp):
    """Applies a function to the split features."""

    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body

    def middle(self, h: Tensor) -> Tensor:
        return self.body(h)


for name, body in BODIES.items():
    add(f"rule_{name}", "rules", lambda body=body: Applies(body), MLP, (call(),), "equal_or_refused")
