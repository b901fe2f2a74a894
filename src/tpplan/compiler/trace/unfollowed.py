"""Unfollowed: what a body does that a capture can't follow."""

from __future__ import annotations

import torch
from torch import Tensor

from tpplan.plan.wording import with_article


class UnfollowedError(Exception):
    """A body does what shows neither in its operations nor in their backward.

    Attributes:
        way_out: what to do instead; "" where only leaving it out helps.
    """

    def __init__(self, what: str, way_out: str = "") -> None:
        """Say what it does."""
        super().__init__(what)
        self.way_out = way_out


def unlike_dense(tensor: Tensor) -> tuple[str, str] | None:
    """What a tensor is whose numbers don't lie in strides, which no proof takes as an argument, and what to pass."""
    if tensor.is_nested:
        return (
            "a nested tensor, whose items have sizes of their own",
            "pass a padded tensor with a mask, or all items in one tensor with their offsets",
        )
    if tensor.is_quantized or tensor.layout is not torch.strided:
        kind = tensor.dtype if tensor.is_quantized else tensor.layout
        return f"{with_article(str(kind))} tensor", "pass dense numbers, or keep the tensor in a buffer of the model"
    return None


class PackedSequencesError(UnfollowedError):
    """An encoder of torch packs padded sequences; the argument is its name."""


class DataDependentError(Exception):
    """The model asked for the number inside a tensor, which a capture on meta tensors doesn't have.

    Attributes:
        absent: the input of the example that has no numbers, from which it would follow; "" if it follows from others.
        counts: whether it is of those by which rows are split, and was asked for something else.
        among: of how many numbers it is one of the places where these aren't zero; 0 if it is none.
        drawn: whether it is a random number, or made of these alone.
    """

    absent: str = ""
    counts: bool = False
    among: int = 0
    drawn: bool = False


__all__ = ["DataDependentError", "PackedSequencesError", "UnfollowedError", "unlike_dense"]
