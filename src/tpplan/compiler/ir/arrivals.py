"""Arrivals: tensors of which a rank is passed its part.

in:  a stage of a pipeline whose first block has the rule `input: sequence`
out: a call of it as a rank gets it: `x (4, 512, 64)` whole in the example, `(4, 128, 64)` on each of four ranks

The stage before has handed its result on as it lay. What Python and operators do with it is proved of the whole, as
everywhere; so an example has it whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tpplan.compiler.ir.kept_tensors import is_wrapper, wrapper_on_meta
from tpplan.compiler.ir.layout import Layout
from tpplan.compiler.ir.program import Program
from tpplan.compiler.ir.pytree import with_tensors
from tpplan.compiler.ir.trace import Path


def call_on_rank(
    program: Program, rank: int, arguments: Sequence[Any], keywords: Mapping[str, Any], names: Sequence[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with whole tensors, as `rank` gets it; `names` are those of its positional arguments."""
    arriving = program.arriving
    if not arriving:
        return tuple(arguments), dict(keywords)

    def part(path: Path, tensor: Tensor) -> Tensor:
        held = arriving.get(path)
        if held is None or held.layout.dim is None:
            return tensor
        dim, whole = held.layout.dim, tensor.detach()
        ((start, length),) = held.layout.intervals(whole.shape[dim], program.size, rank)
        return whole.narrow(dim, start, length).contiguous().requires_grad_(tensor.requires_grad)

    return with_tensors(arguments, keywords, names, part)


def with_parts(
    parts: Mapping[Path, Layout],
    size: int,
    rank: int,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    names: Sequence[str],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with whole tensors, as a rank gets it that has its own parts of some, such as of a cache's; on `meta`."""

    def local(path: Path, tensor: Tensor) -> Tensor:
        if path not in parts:
            return tensor
        shape = parts[path].local_shape(tuple(tensor.shape), size, rank)
        if is_wrapper(tensor):
            return wrapper_on_meta(tensor, shape)
        return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)

    return with_tensors(arguments, keywords, names, local)


__all__ = ["call_on_rank", "with_parts"]
