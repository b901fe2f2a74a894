"""Choices among classes that are split over the ranks: the largest, the k largest, a draw; none needs all numbers.

in:  this rank's numbers, (…, its classes)
out: what the stock function makes of the numbers of all classes, alike on all ranks

    argmax   each rank's largest number and its class                 two numbers a row
    top_k    each rank's k largest, of which the k largest are taken  2k numbers a row
    softmax  each rank's largest number and its sum of exponentials   two numbers a row; this rank's part of the result
    drawn    torch draws one class as argmax(p / q), q ~ Exp(1): every rank draws the same q, and that is an argmax

Each is one all-gather. Of equal numbers, that of the lowest class counts, as for `torch.argmax`; NaN is the largest.
Numbers go between ranks in float64, which has room for those of all dtypes of logits and for classes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tpplan.compiler.ir.layout import Pack
from tpplan.runtime.classes.class_rows import ClassPart, maxima, wide_dtype


def argmax(local: Tensor, part: ClassPart) -> Tensor:
    """The class of the largest number of each row, (…); no gradient flows back, as from `torch.argmax`."""
    local = local.detach()
    if part.count:
        own = local.argmax(-1, keepdim=True)
        values = local.gather(-1, own)
    else:
        own = local.new_zeros((*local.shape[:-1], 1), dtype=torch.int64)
        values = local.new_full(own.shape, -torch.inf)
    every = _exchanged(values, own + part.first, part)
    return every[1].gather(-1, every[0].argmax(-1, keepdim=True))[..., 0].long()


def top_k(local: Tensor, k: int, part: ClassPart) -> tuple[Tensor, Tensor]:
    """The k largest numbers of each row, from the largest on, and their classes; (…, k) each."""
    if not 0 <= k <= part.classes:
        raise RuntimeError(f"selected index k out of range: {k} of {part.classes} classes")
    longest = min(k, Pack(part.classes).part(part.axis.size, 0)[1])
    own_values, own = _largest(local, min(k, part.count))
    missing = longest - own.shape[-1]
    values = torch.nn.functional.pad(own_values, (0, missing), value=-torch.inf)
    # What a shorter rank lacks comes after all classes, so that it is never taken for one of these.
    classes = torch.nn.functional.pad(own + part.first, (0, missing), value=part.classes)
    every_value, every_class = _exchanged(values, classes, part)
    order = every_class.argsort(dim=-1, stable=True)
    every_value, every_class = every_value.gather(-1, order), every_class.gather(-1, order)
    best = every_value.sort(dim=-1, descending=True, stable=True)
    return best.values[..., :k].to(local.dtype), every_class.gather(-1, best.indices[..., :k]).long()


def softmax(local: Tensor, part: ClassPart, dtype: torch.dtype | None = None) -> Tensor:
    """This rank's part of `torch.softmax` along the classes."""
    made = dtype or local.dtype
    wide = local.to(wide_dtype(made) if dtype is None else made)
    rows = wide.reshape(math.prod(wide.shape[:-1]), wide.shape[-1])
    highest, sums = maxima(rows)
    every = part.axis.all_gather(torch.stack([highest, sums]), 0).reshape(part.axis.size, 2, len(rows))
    overall = every[:, 0].amax(0)
    total = (every[:, 1] * (every[:, 0] - overall).exp()).sum(0)
    return ((rows - overall[:, None]).exp_() / total[:, None]).reshape(wide.shape).to(made)


def drawn(local: Tensor, part: ClassPart, generator: torch.Generator | None = None) -> Tensor:
    """A class of each row with these probabilities, (rows, 1): the one that `torch.multinomial` draws."""
    shape = (*local.shape[:-1], part.classes)
    noise = torch.empty(shape, dtype=local.dtype, device=local.device).exponential_(1, generator=generator)
    return argmax(local / noise[..., part.first : part.first + part.count], part)[..., None]


def gathered(local: Tensor, part: ClassPart) -> Tensor:
    """The numbers of all classes."""
    longest = Pack(part.classes).part(part.axis.size, 0)[1]
    padded = torch.nn.functional.pad(local, (0, longest - part.count))
    every = part.axis.all_gather(padded[None], 0)
    return every.movedim(0, -2).flatten(-2)[..., : part.classes]


def _largest(local: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of a rank's numbers; of equal ones those of the lowest classes."""
    if k == local.shape[-1]:
        found = local.sort(dim=-1, descending=True, stable=True)
        return found.values, found.indices
    values, own = local.topk(k, -1)
    if k and bool(((local >= values[..., -1:]).sum(-1) != k).any()):
        # Which of several that equal the last one are taken is up to torch.
        found = local.sort(dim=-1, descending=True, stable=True)
        return found.values[..., :k], found.indices[..., :k]
    return values, own


def _exchanged(values: Tensor, classes: Tensor, part: ClassPart) -> Tensor:
    """All ranks' numbers and classes, (2, …, ranks · each), from the first rank on."""
    own = torch.stack([values.double(), classes.double()])
    return part.axis.all_gather(own[None], 0).movedim(0, -2).flatten(-2)


__all__ = ["argmax", "drawn", "gathered", "softmax", "top_k"]
