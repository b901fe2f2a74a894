"""Dispatch: tokens that are split go to the ranks that hold the experts chosen for them, and come back as results.

in:  this rank's tokens, the numbers of the experts chosen for each, and weights
out: for each of these tokens the sum of what its experts make of it

    rank 0: tokens 0, 1 choose experts 3, 0     sizes: 1 for rank 0, 1 for rank 1
            sends token 0 to rank 1, and gets what expert 3 makes of it

Ranks first tell each other how many pairs (token, choice) each expert gets from them: these numbers must be known to
Python, for which a GPU is waited for once. Pairs are sent in the order of their experts, so that the sizes tell each
pair's. The module's own code then gets the pairs that have arrived, one choice for each. In the backward the gradients
go the same ways with the same sizes. A rank to which nobody sends anything takes part in all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from tpplan.compat.autograd import native_apply
from tpplan.compat.modes import has_dispatch_modes, without_keeping_modes
from tpplan.compiler.ir.program import ModuleProgram
from tpplan.compiler.ir.replaced_bodies import SharedExperts
from tpplan.runtime.bodies.expert_bodies import StackBody, by_token
from tpplan.runtime.bodies.kernel_bodies import Stock
from tpplan.runtime.parameters.handed_out import HandedOut
from tpplan.runtime.ranks.communicator import Communicator, of_backward, placed
from tpplan.runtime.ranks.reshard import SecondDerivativeError


class DispatchBody(StackBody):
    """The body of a stack of experts whose tokens are split."""

    def __init__(
        self,
        spec: ModuleProgram,
        experts: SharedExperts,
        module: nn.Module,
        stock: nn.Module,
        handed_out: HandedOut,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Stand in for a body; see `StackBody`."""
        super().__init__(spec, experts, module, stock, handed_out, shapes)
        self._ranks = placed(handed_out.axis, f"the experts of `{spec.name}`")

    def __call__(self, stock: Stock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Exchange the pairs, run the stock forward on those of this rank's experts, exchange what it makes."""
        tokens, chosen, weights = self.given(args, kwargs)
        ranks, every = self._ranks, self._count * self._ranks.size
        numbers = chosen.reshape(-1)
        numbers = torch.where((numbers >= 0) & (numbers < every), numbers, every)  # the others go to nobody
        numbers, order = numbers.sort(stable=True)
        starts = torch.searchsorted(numbers, torch.arange(every + 1, dtype=numbers.dtype, device=numbers.device))
        sizes = starts.diff().view(ranks.size, self._count)
        arrived, sent, received = _sizes(ranks, sizes, numbers.shape[0])
        places = order[: sum(sent)]
        there = _Exchange(ranks, sent, received)
        rows, held = there(
            tokens[places.div(chosen.shape[1], rounding_mode="floor")], weights.reshape(-1)[places].unsqueeze(-1)
        )
        own = torch.arange(self._count, dtype=chosen.dtype, device=chosen.device).repeat(ranks.size)
        own = own.repeat_interleave(arrived.view(-1), output_size=sum(received))
        made = self.of_pairs(stock, args, kwargs, rows, own, held.squeeze(-1))
        (made,) = _Exchange(ranks, received, sent)(made)
        return by_token(made, places, chosen)


def _sizes(ranks: Communicator, sizes: Tensor, most: int) -> tuple[Tensor, list[int], list[int]]:
    if not has_dispatch_modes():
        return ranks.all_to_all_sizes(sizes, most)
    with without_keeping_modes():
        return ranks.all_to_all_sizes(sizes, most)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Rows of tensors that go to other ranks; differentiable.

    Attributes:
        ranks: the ranks.
        sent, received: how many rows go to each, and come from each.
    """

    ranks: Communicator
    sent: Sequence[int]
    received: Sequence[int]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """What arrives, in the order of the ranks."""
        if has_dispatch_modes():
            with without_keeping_modes():  # collectives write to tensors that operations have returned
                return self._moved(tensors)
        return self._moved(tensors)

    def _moved(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return _exchange(self, *tensors)
        return self.move(tensors)

    def move(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """In one collective, of bytes where there are several tensors."""
        if len(tensors) == 1:
            return (self.ranks.all_to_all_rows(tensors[0], self.sent, self.received),)
        flat = [tensor.flatten(1).contiguous().view(torch.uint8) for tensor in tensors]
        arrived = self.ranks.all_to_all_rows(torch.cat(flat, 1), self.sent, self.received)
        parts = cast("tuple[Tensor, ...]", arrived.split([held.shape[1] for held in flat], 1))
        return tuple(
            part.contiguous().view(tensor.dtype).view(part.shape[0], *tensor.shape[1:])
            for part, tensor in zip(parts, tensors, strict=True)
        )

    def adjoint(self) -> _Exchange:
        """The way back, for gradients."""
        return _Exchange(of_backward(self.ranks), self.received, self.sent)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return exchange.move(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise SecondDerivativeError
        wanted = ctx.needs_input_grad[1:]
        moved = iter(
            ctx.exchange.adjoint().move([held for held, asked in zip(gradients, wanted, strict=True) if asked])
        )
        return (None, *(next(moved) if asked else None for asked in wanted))


_exchange = native_apply(_Exchanged)


__all__ = ["DispatchBody"]
