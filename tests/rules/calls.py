"""Calls of operators, with numbers: what the samples of torch's own operator database come down to, on CPU and on meta.

A capture runs on meta tensors, where torch takes other operators for some functions than on CPU. So each sample is run on
both, and each operator that is dispatched on meta is given the numbers that it would have.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

OPERATORS = {f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}": op for op in op_db}
_LARGEST = 2048


@dataclass(frozen=True)
class Call:
    """A call of an operator: tensors in the arguments hold its numbers."""

    operator: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.operator)

    @property
    def key(self) -> str:
        def shown(held: Any) -> str:
            if isinstance(held, Tensor):
                return f"{tuple(held.shape)}{tuple(held.stride())}{held.dtype}"
            if isinstance(held, (list, tuple)):
                return f"[{','.join(map(shown, held))}]"
            return repr(held)

        return f"{self.name}({shown(self.arguments)},{shown(list(self.keywords.items()))})"


class _Numbers(TorchDispatchMode):
    """Records calls; beside each tensor of the run stands one on CPU with its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._numbers: dict[int, Tensor] = {}
        self._alive: list[Tensor] = []

    def beside(self, tensor: Tensor, numbers: Tensor) -> Tensor:
        self._numbers[id(tensor)] = numbers
        self._alive.append(tensor)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: held for name, held in (kwargs or {}).items() if name not in ("device", "pin_memory")}
        real_args, real_kwargs = tree_map_only(Tensor, self._real, (tuple(args), kwargs))
        copied = tree_map_only(Tensor, lambda t: t.detach().clone(), (real_args, real_kwargs))
        self.calls.append(Call(func, copied[0], copied[1]))
        made = func(*args, **kwargs, **({"device": "meta"} if self._makes(func, args) else {}))
        real = func(*real_args, **real_kwargs)
        for ours, theirs in zip(_tensors(made), _tensors(real), strict=True):
            if ours is not theirs and id(ours) not in self._numbers:
                self.beside(ours, theirs)
        return made

    def _real(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._numbers:
            if tensor.is_meta:
                raise LookupError("a tensor without numbers")
            return tensor
        return self._numbers[id(tensor)]

    @staticmethod
    def _makes(func: Any, args: Any) -> bool:
        return not _tensors(args) and any(a.name == "device" for a in func._schema.arguments)


def _tensors(held: Any) -> list[Tensor]:
    if isinstance(held, Tensor):
        return [held]
    if isinstance(held, dict):
        return [t for item in held.values() for t in _tensors(item)]
    return [t for item in held for t in _tensors(item)] if isinstance(held, (list, tuple)) else []


def calls_of(name: str, samples: int, dtype: torch.dtype = torch.float64) -> Iterator[Call]:
    """The calls that one entry of the database comes down to, each once."""
    entry, seen = OPERATORS[name], set[str]()
    if not entry.supports_dtype(dtype, "cpu"):
        return
    torch.manual_seed(0)
    try:
        given = list(itertools.islice(entry.sample_inputs("cpu", dtype, requires_grad=False), samples))
    except Exception:
        return
    variants = [entry.op, *([entry.inplace_variant] if entry.inplace_variant else [])]
    for sample in given:
        for function, meta in itertools.product(variants, (False, True)):
            for call in _run(function, (sample.input, *sample.args), sample.kwargs, meta):
                if _fits(call) and call.key not in seen:
                    seen.add(call.key)
                    yield call


def _run(function: Any, args: Any, kwargs: Any, meta: bool) -> list[Call]:
    mode = _Numbers()

    def prepare(tensor: Tensor) -> Tensor:
        real = tensor.detach().clone()
        if not meta:
            made = real
        else:
            made = mode.beside(torch.empty_like(real, device="meta"), real)
        if made.is_floating_point() or made.is_complex():
            made.requires_grad_()
        return made

    try:
        args, kwargs = tree_map_only(Tensor, prepare, (args, kwargs))
        if str(getattr(function, "__name__", "")).endswith("_"):
            with torch.no_grad(), mode:
                function(*args, **kwargs)
        else:
            with mode:
                function(*args, **kwargs)
    except Exception:
        pass  # what torch can't do on meta, or in place, is no call
    return mode.calls


def _fits(call: Call) -> bool:
    tensors = _tensors([*call.arguments, *call.keywords.values()])
    if not all(t.layout is torch.strided for t in tensors):
        return False
    sizes = [t.numel() for t in tensors]
    return (
        call.name.startswith("aten.")
        and bool(tensors)
        and len(tensors) <= 5
        and max(sizes) <= _LARGEST
        and max(sizes) > 1
        and 0 not in sizes
        and not any(a.name == "out" for a in call.operator._schema.arguments)
    )
