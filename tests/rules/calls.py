"""Calls of operators, with numbers: what the samples of torch's operator database come down to, on CPU and on meta.

A capture runs on meta tensors, where torch takes other operators for some functions than on CPU. So each sample is run
on both, and each operator that is dispatched on meta is given the numbers that it would have.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tpplan.ops.registry import TABLE, lookup

# Left out: transforms, of which torch's own crash on some samples, and what no operator of the table is used for.
_OUTSIDE = ("fft.", "sparse.", "torch.ops.", "polygamma.", "mvlgamma.", "special.", "histogram", "jiterator")
OPERATORS = {
    f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}": op
    for op in op_db
    if not f"{op.name}.".startswith(_OUTSIDE) or op.name in ("special.log_ndtr", "special.entr", "special.i1")
}
FOURIER = tuple(f"aten._fft_{kind}.default" for kind in ("c2c", "r2c", "c2r"))
SHAPED: Mapping[str, tuple[tuple[tuple[int, ...], ...], tuple[Any, ...]]] = {
    "aten._int_mm.default": (((4, 8), (8, 6)), ()),
    "aten._scaled_mm.default": (((32, 32), (64, 32), (), ()), (None, None, torch.float32)),
    "aten._scaled_mm_v2.default": (((32, 32), (64, 32), (), ()), ([], None, torch.float32)),
    "aten.view.dtype": (((4, 8, 6),), (torch.int64,)),
    "aten.pixel_shuffle.default": (((4, 8, 2, 3),), (2,)),
    "aten.pixel_unshuffle.default": (((4, 8, 4, 2),), (2,)),
    "aten.im2col.default": (((4, 8, 3, 3),), ([2, 2], [1, 1], [1, 0], [1, 1])),
    "aten.col2im.default": (((4, 32, 4),), ([3, 3], [2, 2], [1, 1], [0, 0], [1, 1])),
    "aten.grid_sampler_2d.default": (((8, 8, 3, 3), (8, 2, 3, 2)), (0, 0, False)),
    "aten.grid_sampler_3d.default": (((8, 8, 2, 2, 2), (8, 1, 2, 2, 3)), (0, 0, False)),
    "aten._softmax_backward_data.default": (((4, 8, 6), (4, 8, 6)), (-1, torch.float64)),
    "aten._log_softmax_backward_data.default": (((4, 8, 6), (4, 8, 6)), (1, torch.float64)),
}  # shapes of the tensors, and what comes after them
_LARGEST = 2048
# At each sample torch looks for a test of unittest on the stack, which takes longer the more is imported.
common_utils.extract_test_fn = core.extract_test_fn = lambda: None  # pyright: ignore[reportPrivateImportUsage]


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
    def is_random(self) -> bool:
        known = lookup(self.name)
        return known is not None and known.random

    @property
    def without_numbers(self) -> bool:
        """Whether two runs of it needn't make the same numbers: what it makes is random, or is never written."""
        return self.is_random or self.name.startswith(("aten.empty", "aten.new_empty"))

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


def calls_of(name: str, samples: int) -> Iterator[Call]:
    """The calls that an entry comes down to, each once: one of the database, or an operator of the table itself."""
    if name in TABLE:
        yield from transforms(name) if name in FOURIER else shaped(name) if name in SHAPED else made_up(name)
        return
    entry, seen = OPERATORS[name], set[str]()
    dtype = next((d for d in (torch.float64, torch.int64, torch.bool) if entry.supports_dtype(d, "cpu")), None)
    if dtype is None:
        return
    torch.manual_seed(0)
    try:
        whole = list(itertools.islice(entry.sample_inputs("cpu", dtype, requires_grad=False), 40))
    except Exception:
        return
    variants = [entry.op, *([entry.inplace_variant] if entry.inplace_variant else [])]
    for sample in _spread([s for s in whole if any(t.dim() and t.numel() > 1 for t in _tensors(s.input))], samples):
        for function, meta in itertools.product(variants, (False, True)):
            for call in _run(function, (sample.input, *sample.args), sample.kwargs, meta):
                if _fits(call) and call.key not in seen:
                    seen.add(call.key)
                    yield call


def _spread(items: list[Any], count: int) -> list[Any]:
    """Some of the items, from the first to the last."""
    return items if len(items) <= count else [items[i * len(items) // count] for i in range(count)]


def made_up(name: str) -> Iterator[Call]:
    """Calls of an operator that works entry by entry, with arguments by their types."""
    operator = resolve(name)
    for shapes in (((4, 6), (4, 6), (4, 6)), ((4, 6), (6,), (4, 1)), ((4, 1), (4, 6), (6,))):
        for dtype in (torch.float64, torch.int64, torch.bool, torch.complex128):
            call = _with_arguments(operator, shapes, dtype)
            try:
                call.operator(*_copy(call.arguments), **_copy(call.keywords))
            except (RuntimeError, NotImplementedError, ValueError):
                continue
            yield call
            break


def transforms(name: str) -> Iterator[Call]:
    """Calls of a Fourier transform along some dims of three."""
    operator, kind = resolve(name), name.split("_fft_")[1][:3]
    for dims in ([2], [1], [0], [0, 1], [1, 2]):
        numbers = torch.rand(4, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        given = numbers if kind == "r2c" else torch.complex(numbers, numbers.flip(0))
        last: dict[str, Any] = {"c2c": True, "r2c": True, "c2r": 2 * (numbers.shape[dims[-1]] - 1)}
        yield Call(operator, (given, dims, 0, last[kind]), {})


def shaped(name: str) -> Iterator[Call]:
    """A call with tensors of these shapes of an operator that the database has no such samples of."""
    shapes, rest = SHAPED[name]
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.rand(shape, dtype=torch.float64, generator=generator) * 1.8 - 0.9 for shape in shapes]
    if name == "aten._int_mm.default":
        tensors = [(tensor * 100).to(torch.int8) for tensor in tensors]
    if name.startswith("aten._scaled_mm"):
        one, other, *scales = tensors
        tensors = [one.to(torch.float8_e4m3fn), other.to(torch.float8_e4m3fn).t(), *(scale.float() for scale in scales)]
    if name == "aten._scaled_mm_v2.default":
        yield Call(resolve(name), (*tensors[:2], [tensors[2]], [0], [], [tensors[3]], [0], *rest), {})
        return
    yield Call(resolve(name), (*tensors, *rest), {})


def resolve(name: str) -> Any:
    """The operator of a name such as `aten.mul.Tensor`."""
    _, base, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, base), overload)


def _copy(held: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.detach().clone(), held)


def _with_arguments(operator: Any, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> Call:
    generator, given, keywords = torch.Generator().manual_seed(3), list[Any](), dict[str, Any]()
    remaining = list(shapes)

    def value(argument: Any) -> Any:
        kind = str(argument.type)
        if kind in ("Tensor", "Optional[Tensor]"):
            numbers = torch.rand(remaining.pop(0), dtype=torch.float64, generator=generator) * 0.9 + 0.05
            if argument.name in ("condition", "mask"):
                return numbers > 0.5
            if argument.name == "value":
                return numbers.flatten()[0].to(dtype)
            if dtype is torch.complex128:
                return torch.complex(numbers, numbers.flip(0))
            return numbers if dtype is torch.float64 else (numbers * (9 if dtype is torch.int64 else 1.5)).to(dtype)
        if "number" in kind:
            return 0.5 if dtype is torch.float64 else 3
        if kind == "int":
            return 1
        return "floor" if argument.name == "rounding_mode" else None

    for argument in operator._schema.arguments:
        made = value(argument)
        if made is None:
            continue
        if argument.kwarg_only:
            keywords[argument.name] = made
        else:
            given.append(made)
    return Call(operator, tuple(given), keywords)


def _run(function: Any, args: Any, kwargs: Any, meta: bool) -> list[Call]:
    mode = _Numbers()

    def prepare(tensor: Tensor) -> Tensor:
        real = tensor.detach().clone()
        made = mode.beside(torch.empty_like(real, device="meta"), real) if meta else real
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
        lookup(call.name) is not None
        and bool(tensors)
        and len(tensors) <= 5
        and max(sizes) <= _LARGEST
        and max(sizes) > 1
        and 0 not in sizes
        and not any(a.name == "out" for a in call.operator._schema.arguments)
    )
