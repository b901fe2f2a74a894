"""Rows of logits of which each rank has some classes: their sums over all classes, and the gradient of the part.

in:  a chunk of rows, this rank's classes; how the loss weighs labels and classes
out: the numbers that ranks exchange; of those of all ranks, the loss of each row; the gradient of a chunk

See `tpplan.runtime.classes.class_losses` for the formulas.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tpplan.compiler.ir.layout import Pack
from tpplan.kernels.backend import Choice
from tpplan.kernels.cross_entropy_ops import BACKWARD, PARTS
from tpplan.runtime.ranks.communicator import Communicator

CHUNK = 1 << 22
"""How many logits of a rank are worked on at once."""
_IGNORED = -1


@dataclass(frozen=True, slots=True)
class ClassPart:
    """The classes of this rank, of all.

    Attributes:
        axis: the ranks.
        classes: how many there are on all ranks; they are shared out as `torch.chunk` does.
        chunk: how many rows are worked on at once; None for as many as have `CHUNK` logits.
        backend: which implementation losses take, as of `tpplan.kernels`.
    """

    axis: Communicator
    classes: int
    chunk: int | None = None
    backend: Choice = "auto"

    @property
    def first(self) -> int:
        """The first class of this rank."""
        return Pack(self.classes).part(self.axis.size, self.axis.rank)[0]

    @property
    def count(self) -> int:
        """How many classes this rank has."""
        return Pack(self.classes).part(self.axis.size, self.axis.rank)[1]

    def chunks(self, rows: int) -> Iterator[slice]:
        """Rows, some at a time."""
        step = self.chunk or max(1, CHUNK // max(self.count, 1))
        return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what logits are summed up: float32, or float64 for these."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def of_labels(weight: Tensor, labels: Tensor, kept: Tensor) -> Tensor:
    """The weight of each row's label; 0 for a row that doesn't count."""
    return torch.where(kept, weight[torch.where(kept, labels, 0)], 0)


def local_labels(labels: Tensor, kept: Tensor, part: ClassPart) -> tuple[Tensor, Tensor]:
    """The labels by this rank's classes, and which rows have one of these."""
    local = labels - part.first
    own = kept & (local >= 0) & (local < part.count)
    return torch.where(own, local, 0), own


def maxima(wide: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of each row and the sum of exponentials over it; -inf and 0 of no numbers."""
    if not wide.shape[1]:
        return wide.new_full((len(wide),), -torch.inf), wide.new_zeros(len(wide))
    highest = wide.amax(1)
    base = torch.where(highest == -torch.inf, 0, highest)
    return highest, (wide - base[:, None]).exp_().sum(1)


def joined(highest: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Of the ranks' maxima and sums, (ranks, rows): the maximum, and the logarithm of the sum over it."""
    overall = highest.amax(0)
    overall = torch.where(overall == -torch.inf, 0, overall)
    return overall, (sums * (highest - overall).exp()).sum(0).log()


def at_labels(wide: Tensor, labels: Tensor, kept: Tensor, part: ClassPart) -> Tensor:
    """Each row's number at its label; 0 where another rank has it."""
    if not part.count:
        return wide.new_zeros(len(wide))
    local, own = local_labels(labels, kept, part)
    return torch.where(own, wide.gather(1, local[:, None])[:, 0], 0)


@dataclass(frozen=True, slots=True)
class Sums:
    """Of each row: the largest logit, the logarithm of the sum of exponentials over it, and of the sum itself."""

    highest: Tensor
    above: Tensor

    @property
    def logsum(self) -> Tensor:
        """The logarithm of the sum itself."""
        return self.highest + self.above


@dataclass(frozen=True, slots=True)
class Shares:
    """The factors of a row's gradient: of its softmax, of its label where this rank has it, and of all classes."""

    softmax: Tensor
    label: Tensor | None = None
    all: Tensor | None = None
    local: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What is known of all rows.

    Attributes:
        part: this rank's classes.
        labels: the rows' class numbers; None if only their sums are wanted.
        kept: which of them count.
        weight: of each class, all of them; None for ones.
        smoothing: the share of a label that is spread over all classes.
        kernel: whether the kernel of `tpplan.kernels` computes them, which doesn't know weights.
    """

    part: ClassPart
    labels: Tensor | None = None
    kept: Tensor | None = None
    weight: Tensor | None = None
    smoothing: float = 0.0
    kernel: bool = False

    @property
    def _total(self) -> Tensor | int:
        return self.part.classes if self.weight is None else self.weight.sum()

    @property
    def _own(self) -> Tensor | None:
        first, count = self.part.first, self.part.count
        return None if self.weight is None else self.weight[first : first + count]

    def numbers(self, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for what this rank tells of each row: its largest logit, its sum, its label's logit, and the total."""
        count = 2 if self.labels is None else 4 if self.smoothing else 3
        return torch.empty((count, rows), dtype=dtype, device=device)

    def note(self, numbers: Tensor, rows: slice, logits: Tensor) -> None:
        """Fill in these for some rows."""
        if self.kernel:
            return self._note_by_kernel(numbers, rows, logits)
        wide = logits.to(numbers.dtype)
        numbers[0, rows], numbers[1, rows] = maxima(wide)
        if self.labels is not None and self.kept is not None:
            numbers[2, rows] = at_labels(wide, self.labels[rows], self.kept[rows], self.part)
            if self.smoothing:
                weights = self._own
                numbers[3, rows] = (wide if weights is None else wide * weights).sum(1)

    def _note_by_kernel(self, numbers: Tensor, rows: slice, logits: Tensor) -> None:
        part, smooth = self.part, self.smoothing > 0
        highest, logsum, picked, total = PARTS(logits, self._known(rows), part.first, part.classes, _IGNORED, smooth)
        numbers[0, rows] = torch.where(logsum == -torch.inf, -torch.inf, highest)
        numbers[1, rows], numbers[2, rows] = logsum.exp(), picked
        if smooth:
            numbers[3, rows] = total

    def _known(self, rows: slice) -> Tensor:
        """The labels of some rows, one number for all that don't count."""
        assert self.labels is not None and self.kept is not None
        return torch.where(self.kept[rows], self.labels[rows].long(), _IGNORED)

    def chunks(self, rows: int) -> Iterator[slice]:
        """Rows, some at a time; the kernel needs no memory for them, and takes all."""
        return iter((slice(0, rows),)) if self.kernel else self.part.chunks(rows)

    def losses(self, numbers: Tensor) -> tuple[Tensor, Sums]:
        """The rows' losses, 0 for those that don't count, and their sums, from what all ranks tell; a collective."""
        axis = self.part.axis
        every = axis.all_gather(numbers, 0).reshape(axis.size, *numbers.shape)
        sums = Sums(*joined(every[:, 0], every[:, 1]))
        if self.labels is None or self.kept is None:
            return numbers.new_zeros(()), sums
        # The maximum is taken from the logit first: the difference of two large numbers would have few digits.
        loss = sums.above - (every[:, 2].sum(0) - sums.highest)
        if self.weight is not None:
            loss = loss * of_labels(self.weight, self.labels, self.kept)
        if self.smoothing:
            share = self.smoothing / self.part.classes
            spread = self._total * sums.above - (every[:, 3].sum(0) - self._total * sums.highest)
            loss = (1 - self.smoothing) * loss + share * spread
        if self.labels.device.type != "cpu":
            loss = torch.where((self.labels < 0) | (self.labels >= self.part.classes), torch.nan, loss)
        return torch.where(self.kept, loss, 0), sums

    def shares(self, dloss: Tensor, dlogsum: Tensor) -> Shares:
        """The factors of the rows' gradients, from those of their losses and of their sums."""
        if self.labels is None or self.kept is None:
            return Shares(dlogsum)
        dloss = torch.where(self.kept, dloss, 0)
        label = dloss * (1 - self.smoothing)
        if self.weight is not None:
            label = label * of_labels(self.weight, self.labels, self.kept)
        spread = dloss * (self.smoothing / self.part.classes)
        local, own = local_labels(self.labels, self.kept, self.part)
        softmax = dlogsum + label + spread * self._total
        return Shares(softmax, torch.where(own, -label, 0), spread if self.smoothing else None, local)

    def gradient(self, logits: Tensor, sums: Sums, shares: Shares, rows: slice) -> Tensor:
        """The gradient of a chunk of logits."""
        if self.kernel and shares.label is not None:
            spread = torch.zeros_like(shares.softmax) if shares.all is None else -shares.all
            given = (shares.softmax[rows], shares.label[rows], spread[rows], logits, self._known(rows))
            part, smooth = self.part, self.smoothing > 0
            return BACKWARD(*given, sums.highest[rows], sums.above[rows], part.first, _IGNORED, smooth)
        wide = logits.to(sums.above.dtype) - sums.highest[rows, None]
        if not self.part.count:
            return wide
        wide = wide.sub_(sums.above[rows, None]).exp_().mul_(shares.softmax[rows, None])
        if shares.all is not None:
            weights, spread = self._own, shares.all[rows, None]
            wide -= spread if weights is None else spread * weights
        if shares.label is not None and shares.local is not None:
            wide.scatter_add_(1, shares.local[rows, None], shares.label[rows, None])
        return wide


__all__ = [
    "CHUNK",
    "ClassPart",
    "Rows",
    "Sums",
    "at_labels",
    "joined",
    "local_labels",
    "maxima",
    "of_labels",
    "wide_dtype",
]
