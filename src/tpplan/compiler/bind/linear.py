"""Linear: whether a module makes one product with its weight, x Wᵀ or x W, whatever its class, seen from what it does.

It may scale and add besides. Whether it does is for the trace to say, see `rewrite/lemmas`; such a body runs as it is.

in:  a module
out: `LinearForm`: its sizes and the side on which its weight has the inputs; None if it computes something else

    nn.Linear(8, 24)                 ->  weight (24, 8): rows are outputs
    transformers' Conv1D(24, 8)      ->  weight (8, 24): columns are outputs
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.compat.modes import RecordingMode
from tpplan.compat.modules import own_buffers, own_parameters
from tpplan.compat.schemas import OpOverload
from tpplan.compiler.trace.skeleton import make_skeleton
from tpplan.ops.registry import has_role

_KEEPS = ("alias", "copy", "detach", "cast", "times", "quotient")


@dataclass(frozen=True, slots=True)
class LinearForm:
    """A linear layer.

    Attributes:
        inputs, outputs: the number of features.
        transposed: whether the weight is (inputs, outputs), as Conv1D has it, and not (outputs, inputs).
    """

    inputs: int
    outputs: int
    transposed: bool

    @property
    def output_dim(self) -> int:
        """The weight's dim that counts outputs."""
        return 1 if self.transposed else 0

    @property
    def input_dim(self) -> int:
        """The weight's dim that counts inputs."""
        return 0 if self.transposed else 1


@dataclass(frozen=True, slots=True)
class Product:
    """How a body multiplies by a parameter.

    Attributes:
        outputs, inputs: the number of features that it makes and contracts.
        output_dim, input_dim: the parameter's dims that count these.
        made: the product's value; `made_dim` is its dim that counts the outputs.
        given: the other factor; `given_dim` is its dim that is contracted, where it isn't one of the last two.
        alike: the further products that are like this one, as by each matrix of a stack.
        times: how often the outputs come in the dim that counts them, where they are joined with what stands before.
        unit: a rank has so many features or a multiple of them, as rows of grouped products start aligned.
        following: where the body takes the parameter apart first, the products of the further parts of its outputs.
    """

    outputs: int
    inputs: int
    output_dim: int
    input_dim: int
    made: int
    made_dim: int
    given: int
    following: tuple[Product, ...] = ()
    given_dim: int | None = None
    alike: tuple[Product, ...] = ()
    times: int = 1
    unit: int = 1

    @property
    def parts(self) -> tuple[Product, ...]:
        """The products of all parts of the outputs, in order."""
        return (replace(self, following=(), alike=()), *self.following)


@dataclass(frozen=True, slots=True)
class Addend:
    """A parameter that is added to a product, such as a bias, or that stands beside features, entry by entry.

    Attributes:
        outputs, output_dim: the number of features, and the parameter's dim that counts them.
        made, made_dim: the sum, or the result of a convolution, and its dim that counts the features; None if it is
            neither.
        following: see `Product`.
        is_added: whether it is added to a product, also to a partial one; otherwise it goes with features alone.
    """

    outputs: int
    output_dim: int
    made: int | None
    made_dim: int
    following: tuple[Addend, ...] = ()
    is_added: bool = True

    @property
    def parts(self) -> tuple[Addend, ...]:
        """The additions of all parts, in order, where the body takes the parameter apart first."""
        return (replace(self, following=()), *self.following)


def linear_form(module: nn.Module) -> LinearForm | None:
    """What linear layer `module` is: `weight`, perhaps `bias`, and one product with the weight; None if it is none."""
    stored = own_parameters(module).get("weight") is not None
    if stored and isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return LinearForm(module.in_features, module.out_features, transposed=False)
    held = {name: tensor for name, tensor in own_parameters(module).items() if tensor is not None}
    weight = held.get("weight")
    plain = set(held) <= {"weight", "bias"} and not any(True for _ in module.children()) and not own_buffers(module)
    if not plain or weight is None or weight.dim() != 2:
        return None
    for transposed in (False, True):
        form = LinearForm(weight.shape[1 - transposed], weight.shape[0 + transposed], transposed)
        bias = held.get("bias")
        if (bias is None or tuple(bias.shape) == (form.outputs,)) and _is_product(module, form):
            return form
    return None


def is_convolution(module: nn.Module) -> bool:
    """Whether `module` is a convolution that makes each channel of all of its input's."""
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    return isinstance(module, kinds) and module.groups == 1


def is_grouped_convolution(module: nn.Module) -> bool:
    """Whether `module` is a convolution in groups, such as a depthwise one."""
    return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and module.groups > 1


class _Products(RecordingMode):
    """Sees whether the only product is with the weight, and whether that was transposed before."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.sides: list[bool] = []
        self.other = False
        self._sides: list[tuple[Tensor, bool]] = [(weight, True)]  # what was made of the weight, and how it stands

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name = str(func)
        side = self._side(args[0]) if args else None
        if has_role(name, "plain product"):
            self.sides.append(bool(self._side(args[-1])))
            self.other = self.other or self._side(args[-1]) is None
        elif not has_role(name, *_KEEPS, "reshape", "transposition", "plain arithmetic"):
            self.other = True
        elif side is not None and has_role(name, *_KEEPS, "transposition"):
            turns = has_role(name, "transposition") and made.stride() != args[0].stride()
            self._sides.append((made, side ^ turns))
        return made

    def _side(self, operand: Any) -> bool | None:
        """Whether an operand is the weight as it is stored; None for what isn't made of the weight."""
        return next((side for held, side in self._sides if held is operand), None)


def _is_product(module: nn.Module, form: LinearForm) -> bool:
    copied = make_skeleton(module).model
    weight = own_parameters(copied)["weight"]
    assert weight is not None
    x = torch.empty(2, 3, form.inputs, dtype=weight.dtype, device="meta")
    mode = _Products(weight)
    try:
        with torch.no_grad(), mode:
            made = copied(x)
    except Exception:  # whatever it raises: not a linear layer of these sizes
        return False
    right = isinstance(made, Tensor) and tuple(made.shape) == (2, 3, form.outputs)
    return right and not mode.other and mode.sides == [form.transposed]


__all__ = ["Addend", "LinearForm", "Product", "is_convolution", "is_grouped_convolution", "linear_form"]
