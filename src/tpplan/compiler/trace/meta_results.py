"""Results of operators on meta tensors: by torch's own shapes, by ours where it has none, or as they were before.

in:  an operator, and what it is called with
out: its result, with the geometry of each tensor in it

Meta kernels that are written in Python are slower than everything else in a capture. So the results of functional
operators are memoised by the geometry of their operands, for all records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from tpplan.compat.schemas import OpOverload
from tpplan.compiler.ir.heads import ROW_BYTES
from tpplan.compiler.ir.trace import Geometry
from tpplan.compiler.trace.tape import geometry_of

META = torch.device("meta")
Made = tuple[Any, list[tuple[Any, Geometry | None]]]
"""The result, and each item of it with its geometry, where it is a tensor."""

_PLAIN = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
_ORDINARY: object = cast("Any", Tensor).__torch_dispatch__
_MOST_KNOWN = 1 << 16
_known_results: dict[object, tuple[object, list[Geometry]]] = {}
_default_dtype = torch.get_default_dtype


class AlignmentError(RuntimeError):
    """An operator of torch doesn't take sizes like a rank's."""


def run_on_meta(func: OpOverload, args: tuple[Any, ...], keywords: dict[str, Any], memoise: bool) -> Made:
    """Run an operator; `memoise`: it makes new tensors, and writes to none."""
    if not memoise:
        return _with_geometry(func(*args, **keywords))
    if func in _SHAPES:
        return _with_geometry(_SHAPES[func](*args, **keywords))
    try:
        key = (func, _default_dtype(), *map(_geometry, args), *[(n, _geometry(a)) for n, a in keywords.items()])
        known = _known_results.get(key)
    except TypeError:
        return _with_geometry(func(*args, **keywords))
    if known is None:
        result, made = _with_geometry(func(*args, **keywords))
        if made and all(geometry is not None and item.is_meta for item, geometry in made):
            if len(_known_results) >= _MOST_KNOWN:
                _known_results.clear()
            _known_results[key] = (type(result), [geometry for _, geometry in made if geometry is not None])
        return result, made
    container, geometries = known
    items = [torch.empty_strided(g[0], g[1], dtype=g[2], device=META) for g in geometries]
    whole = container(items) if container is tuple or container is list else items[0]  # pyright: ignore
    return whole, list(zip(items, geometries, strict=True))  # pyright: ignore[reportUnknownVariableType]


def results_in(result: Any) -> list[Any]:
    """The items of a result, of which an operator may make several."""
    return list(result) if isinstance(result, (tuple, list)) else [result]  # pyright: ignore[reportUnknownArgumentType]


def _with_geometry(result: Any) -> Made:
    return result, [(item, geometry_of(item) if isinstance(item, Tensor) else None) for item in results_in(result)]


def _geometry(argument: Any) -> object:
    """What shapes of results depend on; TypeError for objects, and for tensors that say it themselves."""
    if isinstance(argument, Tensor):
        if cast("Any", type(argument)).__torch_dispatch__ is not _ORDINARY:
            raise TypeError
        return (tuple(argument.shape), argument.stride(), argument.dtype)
    if isinstance(argument, (list, tuple)):
        return tuple(map(_geometry, argument))  # pyright: ignore[reportUnknownArgumentType]
    if type(argument) not in _PLAIN:
        raise TypeError
    return (type(argument).__name__, argument)


def _grouped_product(*args: Any, **keywords: Any) -> Tensor:
    """The product of grouped rows. On meta tensors torch takes bfloat16 alone, elsewhere float32 as well."""
    rows, matrices = args[:2]
    ends = keywords.get("offs", args[2] if len(args) > 2 else None)
    if rows.dim() == 2 and rows.dtype != torch.bfloat16 and not keywords.get("out_dtype"):
        for tensor in (rows, matrices):
            _check_alignment(tensor)
        groups = () if matrices.dim() == 3 or ends is None else (ends.shape[0],)  # of what both are contracted by
        return torch.empty(*groups, rows.shape[0], matrices.shape[-1], dtype=rows.dtype, device="meta")
    coarse = tuple(a.to(torch.bfloat16) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
    made = torch.ops.aten._grouped_mm.default(*coarse, **keywords)
    return torch.empty_strided(made.shape, made.stride(), dtype=rows.dtype, device="meta")


def _check_alignment(tensor: Tensor) -> None:
    """What torch asks of the factors: the one of the last two dims whose entries don't lie together starts aligned."""
    stride = max(tensor.stride()[-2:])
    if stride * tensor.itemsize % ROW_BYTES:
        raise AlignmentError(
            f"torch's product of grouped rows takes rows of a multiple of {ROW_BYTES} bytes, not of "
            f"{stride * tensor.itemsize}"
        )


def _aligned_losses(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """A loss for each sequence, and what its backward reads, of which the last dim is twice the longest target."""
    length, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, length, 2 * targets.shape[-1] + 1)


def _aligned_losses_gradient(gradient: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(log_probs)


# Operators of which torch has no shapes, or not for all dtypes.
_SHAPES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._grouped_mm.default: _grouped_product,
    torch.ops.aten._ctc_loss.default: _aligned_losses,
    torch.ops.aten._ctc_loss.Tensor: _aligned_losses,
    torch.ops.aten._ctc_loss_backward.default: _aligned_losses_gradient,
    torch.ops.aten._ctc_loss_backward.Tensor: _aligned_losses_gradient,
}

__all__ = ["META", "AlignmentError", "Made", "results_in", "run_on_meta"]
