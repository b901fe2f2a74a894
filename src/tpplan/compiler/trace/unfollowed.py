"""Unfollowed: what a body does that a capture can't follow."""

from __future__ import annotations


class UnfollowedError(Exception):
    """A body does what shows neither in its operations nor in their backward.

    Attributes:
        way_out: what to do instead; "" where only leaving it out helps.
    """

    def __init__(self, what: str, way_out: str = "") -> None:
        """Say what it does."""
        super().__init__(what)
        self.way_out = way_out


NESTED = (
    "a nested tensor, whose items have sizes of their own",
    "pass a padded tensor with a mask, or all items in one tensor with their offsets",
)
"""What no proof takes as an argument, and what to pass instead."""


class PackedSequencesError(UnfollowedError):
    """An encoder of torch packs padded sequences; the argument is its name."""


class DataDependentError(Exception):
    """The model asked for the number inside a tensor, which a capture on meta tensors doesn't have.

    Attributes:
        absent: the input of the example that has no numbers, from which it would follow; "" if it follows from others.
        counts: whether it is of those by which rows are split, and was asked for something else.
        among: of how many numbers it is one of the places where these aren't zero; 0 if it is none.
    """

    absent: str = ""
    counts: bool = False
    among: int = 0


__all__ = ["NESTED", "DataDependentError", "PackedSequencesError", "UnfollowedError"]
