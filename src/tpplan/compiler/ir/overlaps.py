"""Overlaps: which collectives of a program run beside matrix products, and which don't and why."""

from __future__ import annotations

from dataclasses import dataclass

from tpplan.plan import OverlapUnit


@dataclass(frozen=True, slots=True)
class Overlap:
    """A reshard whose collectives run beside the products of linear layers.

    Attributes:
        module: at whose boundary it stands.
        inward: whether it is an argument's.
        path: where the tensor sits, as of the `Reshard`.
        linears: the layers; of a result, the module itself.
        units: what is hidden behind what; nothing where the tensor is only gathered again.
        groups: how many parts each product is of, in order: of a pairwise exchange, there is one for each rank; of an
            all-reduce, each product's rows are summed by themselves, as far as there are rows.
        grouped: of how many of the layers; the others multiply the whole.
        least: how many rows of the whole tensor a call has to have, so that it pays; 0 for all calls.
    """

    module: str
    inward: bool
    path: tuple[str | int, ...]
    linears: tuple[str, ...]
    units: tuple[OverlapUnit, ...] = ()
    groups: tuple[int, ...] = ()
    grouped: int = 0
    least: int = 0


__all__ = ["Overlap"]
