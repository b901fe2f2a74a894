"""Linear layers that share an input: one autograd node, so that what travels does so beside their products.

    x (…, s / size, in)   this rank's part of a sequence, or x (…, in) whole
    W (out / size, in)    of each layer

    forward    gather_linear     parts of x are multiplied by W while others travel
    backward   gather_linear     dX = Σ dY W is summed and split over the ranks while dW = dYᵀ x is computed
               weight_gradient   dX is summed over the ranks while dW is computed
               recompute_gather  x was kept as a part: it is gathered again while dX is computed

The products are made where their input enters, and found by their layers when these are called with that very tensor.
Whoever else reads it, finds it whole, and its gradient counts: nothing is assumed of the body in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpplan.compat.autograd import native_apply
from tpplan.compat.modes import without_function_modes
from tpplan.compat.modules import own_parameters
from tpplan.compiler.ir.layout import Collective
from tpplan.plan import OverlapUnit
from tpplan.runtime.bodies.layer_bodies import product
from tpplan.runtime.overlap.pairwise import Waiting, begin, gather_with, runs_as_written
from tpplan.runtime.parameters.handed_out import HandedOut
from tpplan.runtime.ranks.communicator import Communicator, fuses, of_backward
from tpplan.runtime.ranks.profiled import at_place, told_place
from tpplan.runtime.ranks.reshard import Move, SecondDerivativeError

Reader = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class JointLayer:
    """A layer that multiplies by its weight, and may add a bias.

    Attributes:
        module: the layer.
        weight, bias: how to read these.
        transposed: whether the weight is (inputs, outputs).
    """

    module: nn.Module
    weight: Reader
    bias: Reader | None
    transposed: bool

    def read(self) -> tuple[object, Tensor, Tensor | None] | None:
        """The weight, and this rank's parts of it and of the bias; None if FSDP holds the weight cut until the call."""
        own: dict[str, Any] = own_parameters(self.module)
        weight = own["weight"]
        if isinstance(weight, DTensor) and len(weight.placements) > 1:
            return None
        return weight, self.weight(weight), None if self.bias is None else self.bias(own["bias"])


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """The layers that share what enters a module, by a reshard whose collectives run beside their products.

    Attributes:
        axis: the ranks.
        dim: along which a sequence is gathered; None for an input that is whole.
        members: the layers.
        units: what is to be overlapped.
        recomputes: whether the backward gathers the input again, and the forward keeps this rank's part.
        least: how many rows the whole input has to have, so that it pays.
        groups: how many parts are multiplied at a time, in order.
        grouped: by how many of the layers; the others multiply the whole.
        handed_out: the call under way, which keeps the products until they are fetched.
    """

    axis: Communicator
    dim: int | None
    members: tuple[JointLayer, ...]
    units: frozenset[OverlapUnit]
    recomputes: bool
    least: int
    groups: tuple[int, ...]
    grouped: int
    handed_out: HandedOut
    back: Communicator = field(init=False)

    def __post_init__(self) -> None:
        """Take the same ranks for the backward."""
        object.__setattr__(self, "back", of_backward(self.axis))

    def __call__(self, tensor: Tensor, step: Move) -> Tensor:
        """The reshard of `tensor`, and the products of its result; by `step` alone where nothing is to be hidden."""
        records, hides = torch.is_grad_enabled(), self._hides(tensor)
        if not (hides and (records or self.dim is not None)) and not (records and self.recomputes):
            return step(tensor)
        if tensor.dim() < 2 or tensor.is_complex() or not runs_as_written():
            return step(tensor)
        parameters: list[object] = []
        flat: list[Tensor | None] = []
        for member in self.members:
            held = member.read()
            if held is None or held[1].dtype is not tensor.dtype:
                return step(tensor)
            parameters.append(held[0])
            flat += held[1:]
        apply = _apply_joint if records else _JointProducts.compute
        with without_function_modes():
            whole, *products = apply(self, hides, tensor, *flat)
            read, products_of = _version(whole), self.handed_out.made
            for member, parameter, weight, made in zip(self.members, parameters, flat[::2], products, strict=True):
                products_of[member.module] = (whole, read, parameter, _version(weight), made)
        return whole

    def product_of(self, module: nn.Module, input: Tensor, weight: Tensor | None) -> Tensor | None:
        """What a layer makes of `input`, if it is made already: of that very tensor and weight, as they are."""
        found = self.handed_out.made.pop(module, None)
        if found is None or weight is None or input is not found[0]:
            return None
        whole, read, parameter, written, made = found
        if own_parameters(module)["weight"] is not parameter:
            return None
        with without_function_modes():
            return made if _version(whole) == read and _version(weight) == written else None

    def _hides(self, tensor: Tensor) -> bool:
        """Whether a call's input has enough rows."""
        rows = tensor.numel() // max(tensor.shape[-1], 1) * (1 if self.dim is None else self.axis.size)
        return bool(self.units) and rows >= max(self.least, 1)


def _version(tensor: Any) -> int:
    """How often a tensor was written to; of those that are made for inference nobody knows."""
    return -1 if tensor.is_inference() else tensor._version


class _JointProducts(torch.autograd.Function):
    """See the module's docstring. Results are the whole input, then the product of each layer."""

    @staticmethod
    def forward(ctx: Any, joint: Joint, hides: bool, tensor: Tensor, *held: Tensor | None) -> tuple[Tensor, ...]:
        ctx.joint, ctx.hides, ctx.place = joint, hides, told_place()
        ctx.set_materialize_grads(False)
        whole, *products = _JointProducts.compute(joint, hides, tensor, *held)
        ctx.again, ctx.biases = joint.recomputes, [bias is not None for bias in held[1::2]]
        ctx.save_for_backward(tensor if joint.recomputes else whole, *held[::2])
        return whole, *products

    @staticmethod
    def compute(joint: Joint, hides: bool, tensor: Tensor, *held: Tensor | None) -> tuple[Tensor, ...]:
        """The results, of a tensor, and of weight and bias of each layer."""
        layers: list[Any] = [*zip(held[::2], held[1::2], [member.transposed for member in joint.members], strict=True)]
        if joint.dim is None:
            return tensor.detach(), *[product(tensor, *layer) for layer in layers]
        if not hides:
            whole = joint.axis.all_gather(tensor, joint.dim)
            return whole, *[product(whole, *layer) for layer in layers]
        if fuses(joint.axis):
            matrices = [weight if transposed else weight.t() for weight, _, transposed in layers]
            whole, products = joint.axis.gather_and_multiply(tensor, joint.dim, matrices)
            made = zip(products, held[1::2], strict=True)
            return whole, *[terms if bias is None else terms.add_(bias) for terms, bias in made]
        early, late = layers[: joint.grouped], layers[joint.grouped :]
        whole, products = gather_with(
            joint.axis, tensor, joint.dim, joint.groups, lambda part: [product(part, *layer) for layer in early]
        )
        return whole, *products, *[product(whole, *layer) for layer in late]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise SecondDerivativeError
        with at_place(ctx.place):
            return _JointProducts._back(ctx, *gradients)

    @staticmethod
    def _back(ctx: Any, of_whole: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        joint: Joint = ctx.joint
        kept, *weights = ctx.saved_tensors
        _, _, wants_input, *wanted = ctx.needs_input_grad
        arriving: Waiting | None = None
        if ctx.again and any(wanted[::2]):
            arriving = begin(joint.back, Collective.ALL_GATHER, kept, joint.dim or 0)
        flat = [None if gradient is None else gradient.flatten(0, -2) for gradient in gradients]
        under_way: Waiting | None = None
        if wants_input:
            total: Tensor | None = None
            for made, weight, member in zip(flat, weights, joint.members, strict=True):
                if made is None:
                    continue
                matrix = weight.t() if member.transposed else weight
                if total is not None:
                    total.addmm_(made, matrix)
                elif of_whole is not None:
                    total = torch.addmm(of_whole.flatten(0, -2), made, matrix)
                else:
                    total = torch.mm(made, matrix)
            if total is None and of_whole is not None:
                total = of_whole.flatten(0, -2).clone()
            if total is not None:
                like = next(held for held in (of_whole, *gradients) if held is not None)
                own = total.view(*like.shape[:-1], total.shape[-1])
                way = Collective.ALL_REDUCE if joint.dim is None else Collective.REDUCE_SCATTER
                under_way = begin(joint.back, way, own, joint.dim or 0)
                if not ctx.hides:
                    done = under_way()
                    under_way = lambda: done  # noqa: E731
        whole = kept if arriving is None else arriving()
        rows = whole.flatten(0, -2) if any(wanted[::2]) else None
        found: list[Tensor | None] = []
        for made, member, bias, wants in zip(flat, joint.members, ctx.biases, wanted[::2], strict=True):
            found += [None, None]
            if made is None:
                continue
            if wants and rows is not None:
                found[-2] = torch.mm(rows.t(), made) if member.transposed else torch.mm(made.t(), rows)
            if bias and wanted[len(found) - 1]:
                found[-1] = made.sum(0)
        return None, None, None if under_way is None else under_way(), *found


_apply_joint = native_apply(_JointProducts)


__all__ = ["Joint", "JointLayer"]
