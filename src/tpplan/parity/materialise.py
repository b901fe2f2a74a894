"""Numbers for a verification: a copy of the user's model on the CPU, and example inputs, in one dtype.

in:  a model and an example call, materialised or on `meta`; they are only read
out: a copy in evaluation mode, and a call, whose numbers show mistakes

A program is right whatever the weights are, but some weights hide mistakes: a bias of zeros can be added any number of
times. So parameters that hold one number throughout, as fresh biases and norm weights do, get a little noise in the
copy. Parameters on `meta` are drawn from a normal distribution, of deviation 1/√fan-in for matrices, so that
activations neither fade nor grow; weights of norms are drawn around 1.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Generator, Tensor, nn

from tpplan.parity.parity_errors import VerifyError, describe
from tpplan.parity.tree import modules_in

_NOISE = 0.02


def copy_with_numbers(model: nn.Module, dtype: torch.dtype, seed: int) -> nn.Module:
    """A deep copy of `model` in evaluation mode, on the CPU, its floating tensors in `dtype`, tied parameters tied."""
    generator = torch.Generator().manual_seed(seed)
    memo: dict[int, object] = {}
    stock = _stock_buffers(model)
    for name, module in modules_in(model).items():
        norm = "norm" in type(module).__name__.lower()
        parameters: dict[str, nn.Parameter] = dict(module.named_parameters(recurse=False))
        for leaf, parameter in parameters.items():
            if id(parameter) not in memo:
                numbers = _parameter(parameter, norm and leaf == "weight", generator).to(dtype=_cast(parameter, dtype))
                memo[id(parameter)] = nn.Parameter(numbers, requires_grad=parameter.requires_grad)
        for path, tensor in _held_tensors(name, module).items():
            if id(tensor) not in memo:
                memo[id(tensor)] = _buffer(stock.get(path, tensor), generator).to(dtype=_cast(tensor, dtype))
    try:
        return copy.deepcopy(model, memo).eval()
    except Exception as error:  # a module's own __deepcopy__ or __reduce__ may raise anything
        raise VerifyError.of(
            "TP194",
            f"`{type(model).__name__}` can't be copied: {describe(error)}",
            help="see to it that `copy.deepcopy` of the model works",
        ) from error


def copy_structure(model: nn.Module) -> nn.Module:
    """A deep copy of `model` that shares its parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def _held_tensors(name: str, module: nn.Module) -> dict[str, Tensor]:
    """A module's buffers, and the tensors that are its plain attributes, by qualified name."""
    held: dict[str, Tensor] = dict(module.named_buffers(recurse=False))
    attributes: dict[str, object] = vars(module)
    for leaf, attribute in attributes.items():
        if isinstance(attribute, Tensor) and not isinstance(attribute, nn.Parameter):
            held[leaf] = attribute
    return {f"{name}.{leaf}" if name else leaf: tensor for leaf, tensor in held.items()}


def _cast(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """One-byte floats are codes, as integers are: what is computed of them is in `dtype`."""
    return dtype if tensor.is_floating_point() and tensor.itemsize > 1 else tensor.dtype


def _parameter(stock: Tensor, norm_weight: bool, generator: Generator) -> Tensor:
    if stock.is_meta:
        if not stock.is_floating_point():
            return torch.zeros(stock.shape, dtype=stock.dtype)
        drawn = _normal(stock, generator)
        if stock.dim() > 1:
            return drawn / max(1, stock.shape[-1]) ** 0.5
        return 1 + drawn / 10 if norm_weight else drawn / 10
    numbers = stock.detach().to("cpu", copy=True)
    constant = numbers.is_floating_point() and numbers.numel() > 1 and bool((numbers == numbers.flatten()[0]).all())
    return numbers.double() + _NOISE * _normal(stock, generator) if constant else numbers


def _buffer(stock: Tensor, generator: Generator) -> Tensor:
    """The buffer's own numbers; for one on `meta` numbers that suit most uses: scales, positions, causal masks."""
    if not stock.is_meta:
        return stock.detach().to("cpu", copy=True)
    if stock.is_floating_point():
        return torch.rand(stock.shape, generator=generator, dtype=torch.float64) + 0.5
    if stock.is_complex():
        return torch.randn(stock.shape, generator=generator, dtype=torch.complex128)
    if stock.dtype is torch.bool:
        allowed = torch.ones(stock.shape, dtype=torch.bool)
        return allowed.tril() if stock.dim() > 1 else allowed
    last = stock.shape[-1] if stock.dim() else 1
    return torch.arange(last, dtype=stock.dtype).expand(stock.shape).clone()


def _normal(like: Tensor, generator: Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=torch.float32)


def _stock_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of a transformers model on `meta`, such as rotary tables, as building it anew computes them."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict") or not any(buffer.is_meta for buffer in model.buffers()):
        return {}
    build: Any = type(model)
    try:
        with torch.device("cpu"), torch.random.fork_rng([]):
            fresh = build(copy.deepcopy(config))
    except Exception:  # no matter why: then they are made up
        return {}
    found: dict[str, Tensor] = {}
    for name, module in modules_in(fresh).items():
        found |= _held_tensors(name, module)
    return found
