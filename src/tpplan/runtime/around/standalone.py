"""Alone: modules that are called by themselves, outside of any forward of the root.

Their callers have whole tensors, and want whole ones. In the model, what a module is given and makes may be split or
partial; so there is a reshard at its boundary then, before and after those of the program.

    model.layers[0].mlp.up(x)   with up: colwise   ->   x: R -> R·∂P, the result: S(2) -> R
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tpplan.compiler.ir.layout import REPLICATED, reshard_between
from tpplan.compiler.ir.program import Boundary
from tpplan.plan import TpplanError
from tpplan.runtime.parameters.handed_out import HandedOut
from tpplan.runtime.ranks.communicator import Communicator
from tpplan.runtime.ranks.reshard import CallContext, Move, make_reshard


class AloneError(TpplanError):
    """A module can't be called by itself."""


def starts_alone(handed_out: HandedOut) -> bool:
    """Whether a call of a module, outside of any forward of the root, isn't inside of another such call."""
    return not handed_out.within


def _move(module: str, boundary: Boundary, axis: Communicator, context: CallContext) -> Move:
    """What makes a whole tensor into what the module is given, or what it makes into a whole tensor."""
    source, target = (REPLICATED, boundary.layout) if boundary.inward else (boundary.layout, REPLICATED)
    ways = reshard_between(source, target)
    what = f"its argument `{'.'.join(map(str, boundary.path))}`" if boundary.inward else "its result"
    if ways is None or boundary.layout.tail:
        return _refuse(module, f"{what} is {boundary.layout} there, which one rank can't make whole")
    move = make_reshard(source, target, ways.forward, ways.backward, axis, False, context, boundary.shape)
    if boundary.differentiable or not boundary.inward:
        return move
    refuse = _refuse(module, f"{what} doesn't require grad there, and does here")
    return lambda tensor: refuse(tensor) if tensor.requires_grad and torch.is_grad_enabled() else move(tensor)


def _refuse(module: str, reason: str) -> Move:
    def move(_: Tensor) -> Tensor:
        raise AloneError.of(
            "TP117",
            f"`{module}` is called by itself in another way than in the model: {reason}",
            help="call the whole model, or a module further out",
        )

    return move


def _of_any_dims(module: str, linear: bool, boundary: Boundary, axis: Communicator, context: CallContext) -> Move:
    """As `_move`; a linear layer also takes a batch of another number of dims, as its features are the last."""
    moves: dict[int, Move] = {len(boundary.shape): _move(module, boundary, axis, context)}
    layout, last = boundary.layout, len(boundary.shape) - 1

    def move(tensor: Tensor) -> Tensor:
        found = moves.get(tensor.dim())
        if found is None:
            if layout.dim is None:
                found = moves[last + 1]
            elif linear and layout.dim == last and tensor.dim():
                moved = replace(layout, dim=tensor.dim() - 1)
                shape = (*([1] * (tensor.dim() - 1)), boundary.shape[-1])
                found = _move(module, replace(boundary, layout=moved, shape=shape), axis, context)
            else:
                reason = f"a tensor of {tensor.dim()} dims is passed or returned, and of {last + 1} there"
                found = _refuse(module, reason)
            moves[tensor.dim()] = found
        return found(tensor)

    return move


def alone_moves(
    module: str, linear: bool, boundaries: Sequence[Boundary], axis: Communicator, context: CallContext
) -> list[tuple[Boundary, Move]]:
    """The reshards at the boundary of a module that is called by itself; `AloneError` where there is none.

    Args:
        module: its name.
        linear: whether it is a linear layer.
        boundaries: what it is given and makes in the model.
        axis, context: see `make_reshard`.
    """
    return [(held, _of_any_dims(module, linear, held, axis, context)) for held in boundaries]


__all__ = ["AloneError", "alone_moves", "starts_alone"]
