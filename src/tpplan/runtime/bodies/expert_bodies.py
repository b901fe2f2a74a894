"""Experts: bodies of which each rank runs whole experts of its own; the ranks' sum is the result.

in:  a `SharedExperts`, and this rank
out: a body that stands in for the module's own

    a stack:   the pairs (token, choice) of this rank's experts are found, and the module's own code gets these, one
               choice for each; what it makes of them is summed by token (of split tokens, see `dispatch`)
    a module:  its own code on the rank that holds it; zeros elsewhere
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.ambience import ambience
from tpplan.compat.autograd import native_apply
from tpplan.compat.fakes import fake_call
from tpplan.compat.modules import own_parameters
from tpplan.compiler.check.shared_experts import Argument, ExpertPart, OtherCounts
from tpplan.compiler.ir.program import ModuleProgram
from tpplan.compiler.ir.replaced_bodies import SharedExperts
from tpplan.compiler.trace.signatures import argument_names
from tpplan.runtime.bodies.kernel_bodies import Stock
from tpplan.runtime.modules.module_runtime import Reader
from tpplan.runtime.modules.writes import stock_class
from tpplan.runtime.parameters.handed_out import HandedOut

_REMEMBERED = 256


class StackBody:
    """The body of a stack of experts, of which each group of ranks has as many, one group after the other."""

    def __init__(
        self,
        spec: ModuleProgram,
        experts: SharedExperts,
        module: nn.Module,
        stock: nn.Module,
        handed_out: HandedOut,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Stand in for a body.

        Args:
            spec, experts: what becomes of the module, and where it takes what.
            module: the module.
            stock: the module without its numbers; in watched calls it tells of other numbers of tokens.
            handed_out: tells the ranks, and whether a call is watched.
            shapes: what the body reads of stacks that are split inside.
        """
        self._experts, self._name, self._handed_out = experts, spec.name, handed_out
        self._names = argument_names(stock_class(module).forward)
        axis = handed_out.axis
        groups = axis.size // experts.ranks
        attributes = tuple((attribute.name, attribute.on(axis.rank)) for attribute in spec.local_attributes)
        self._others = OtherCounts(stock, experts, ExpertPart(groups, attributes, shapes))
        self._count = experts.count // groups
        self._first = axis.rank // experts.ranks * self._count

    def __call__(self, stock: Stock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the stock forward on the pairs (token, choice) of this rank's experts; sum by token."""
        tokens, chosen, weights = self.given(args, kwargs)
        own = chosen - self._first
        token, choice = ((own >= 0) & (own < self._count)).nonzero(as_tuple=True)
        call = (tokens[token], own[token, choice], weights[token, choice])
        made = self.of_pairs(stock, args, kwargs, *call)
        return by_token(made, token * chosen.shape[1] + choice, chosen)

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens, the numbers of the experts chosen for each, and their weights."""
        experts = self._experts
        given: dict[str, Tensor] = dict(zip(self._names, args, strict=False)) | kwargs
        if self._handed_out.watched:
            with ambience():
                # All arguments have a row for each token. A sequence is split evenly.
                times = self._handed_out.axis.size if experts.dispatches else 1
                whole = {name: _argument(tensor, times) for name, tensor in given.items()}
                self._others.ask(whole, given[experts.tokens].device, self._name)
        return given[experts.tokens], given[experts.chosen], given[experts.weights]

    def of_pairs(
        self, stock: Stock, args: tuple[Any, ...], kwargs: dict[str, Any], tokens: Tensor, own: Tensor, weights: Tensor
    ) -> Tensor:
        """What the stock forward makes of pairs: a token, the number of one of this rank's experts, a weight."""
        experts, pairs = self._experts, own.shape[0]
        call = {
            experts.tokens: tokens,
            experts.chosen: own.unsqueeze(-1),
            experts.weights: weights.unsqueeze(-1),
        }
        if pairs == 0:
            # A pair of zeros is made up and dropped, so that there are gradients as on the other ranks.
            call = {name: _padded(rows) for name, rows in call.items()}
        # As they were passed: what the class's forward is wrapped around may have other names for them.
        args = tuple(call[name] for name in self._names[: len(args)])
        return stock(*args, **{name: call[name] for name in kwargs})[:pairs]


def by_token(made: Tensor, places: Tensor, chosen: Tensor) -> Tensor:
    """The sums over each token's choices of what experts made of the pairs at these places; of others it is zero."""
    spread = made.new_zeros(chosen.numel(), *made.shape[1:]).index_copy(0, places, made)
    return spread.view(*chosen.shape, *made.shape[1:]).sum(1)


def _argument(tensor: Tensor, times: int) -> Argument:
    """An argument that is so many times as long as what is here."""
    shape = (tensor.shape[0] * times, *tensor.shape[1:])
    return Argument(shape, tensor.dtype, tensor.requires_grad and torch.is_grad_enabled())


def _padded(rows: Tensor) -> Tensor:
    """With a row of zeros."""
    return torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])


def own_body(stock: Stock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The body of an expert that this rank holds: its own code. As on other ranks, nobody watches its steps."""
    return stock(*args, **kwargs)


class _Nothing(torch.autograd.Function):
    """Zeros, to which tensors have contributed nothing."""

    @staticmethod
    def forward(ctx: Any, shape: Sequence[int], dtype: torch.dtype, *inputs: Tensor) -> Tensor:
        ctx.inputs = [(t.shape, t.dtype, t.device) for t in inputs]
        return inputs[0].new_zeros(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(gradients[0].new_zeros(s, dtype=d, device=at) for s, d, at in ctx.inputs))


_nothing = native_apply(_Nothing)


class ElsewhereBody:
    """The body of an expert that another rank holds: zeros."""

    def __init__(self, stock: nn.Module, held: Sequence[tuple[nn.Module, str, Reader]]) -> None:
        """Stand in for a body.

        Args:
            stock: the expert without its numbers, which tells the shape of its result.
            held: its parameters, of which this rank has nothing, and how to read them: they have a gradient if they
                have one where they are.
        """
        self._stock, self._held = stock, held
        self._shapes: dict[object, tuple[torch.Size, torch.dtype]] = {}

    def __call__(self, stock: Stock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Zeros of the result's shape."""
        given = (*args, *kwargs.values())
        shape, dtype = self._shape(given, args, kwargs)
        tensors = [a for a in given if isinstance(a, Tensor) and a.dtype.is_floating_point]
        read = [read(own_parameters(owner)[name]) for owner, name, read in self._held]  # pyright: ignore
        return _nothing(shape, dtype, *tensors, *read)

    def _shape(
        self, given: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.Size, torch.dtype]:
        device = next((a.device.type for a in given if isinstance(a, Tensor)), "meta")
        cast = device != "meta" and torch.is_autocast_enabled(device)
        key = (tuple(map(_geometry, given)), torch.get_autocast_dtype(device) if cast else None)
        if key not in self._shapes:
            if len(self._shapes) >= _REMEMBERED:
                self._shapes.clear()
            with ambience(), torch.no_grad():
                made = fake_call(self._stock, args, kwargs, device if cast else "meta")
            self._shapes[key] = (made.shape, made.dtype)
        return self._shapes[key]


def _geometry(held: Any) -> object:
    return (held.shape, held.stride(), held.dtype) if isinstance(held, Tensor) else (type(held).__name__, repr(held))


__all__ = ["ElsewhereBody", "StackBody", "by_token", "own_body"]
