"""Arguments: a call as a proof takes it, and what of its tensors is a rank's part.

What a call leaves in lists and dicts among its arguments, such as keys and values, is a rank's part of them, and the
program says which. A later call is proved with these parts as they lie; by its size each is told from a whole tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tpplan.compiler.ir.layout import Layout
from tpplan.compiler.ir.objects import PLAIN, is_opaque, note_alike
from tpplan.compiler.ir.program import LeftTensor, Program
from tpplan.compiler.ir.pytree import tensors_of, with_items
from tpplan.parity.tree import Path, tensors_in


def on_meta(_: Path, tensor: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """A tensor without numbers; it wants a gradient if `tensor` does and one would be recorded."""
    wanted = tensor.requires_grad and torch.is_grad_enabled()
    if shape is None:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    else:
        made = tensor.new_empty(shape, device="meta")
    return note_alike(made.detach().requires_grad_(wanted), tensor)


def without_opaque(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call as a proof takes it: without keywords that are opaque, and with None for what else is."""
    positional = tuple(with_items(argument, _unless_opaque) for argument in arguments)
    kept = {name: held for name, held in keywords.items() if not is_opaque(held)}
    return positional, {name: with_items(held, _unless_opaque) for name, held in kept.items()}


def sequence_dims(program: Program) -> dict[Path, tuple[int, ...]]:
    """For each tensor of the example, the dims that are sequences; empty if the program splits none."""
    lengths = program.sequence_lengths
    if not lengths:
        return {}
    return {i.path: tuple(d for d, n in enumerate(i.shape) if d and n in lengths) for i in program.inputs}


def shows_odd_sequence(
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    names: Sequence[str],
    sequences: Mapping[Path, tuple[int, ...]],
    size: int,
) -> bool:
    """Whether a tensor of the call has a sequence that `size` ranks can't share evenly.

    Which dims are sequences shows in the example. Of tensors that it doesn't have, it's dim 1 as in all others.
    """

    def is_odd(path: Path, tensor: Tensor) -> bool:
        dims = sequences.get(path)
        if dims is None:
            dims = (1,) if tensor.dim() in (2, 3) else ()
        return any(dim < tensor.dim() and tensor.shape[dim] % size for dim in dims)

    called = [*names, *(f"*{i}" for i in range(len(names), len(arguments)))]
    for name, held in (*zip(called, arguments, strict=False), *keywords.items()):
        if type(held) in PLAIN:
            continue
        if any(is_odd(path, tensor) for path, tensor in tensors_in(held, (name,))):
            return True
    return False


class Left:
    """What the calls of a model have left with their callers."""

    def __init__(self, program: Program, rank: int) -> None:
        """Start with what the example leaves, of which `rank` has its part."""
        self._size = program.size
        self._rank = rank
        self._known: dict[Path, LeftTensor] = {}
        self.note(program, told=True)

    @property
    def layouts(self) -> dict[Path, Layout]:
        """How what was left lies, by path."""
        return {path: held.layout for path, held in self._known.items()}

    def parts_of(
        self, arguments: tuple[Any, ...], keywords: dict[str, Any], names: Sequence[str]
    ) -> dict[Path, Layout]:
        """How those tensors of a call lie that an earlier call has left, or what the caller has made of them since."""
        found: dict[Path, Layout] = {}
        for path, tensor in tensors_of(arguments, keywords, names) if self._known else ():
            known = self._known.get(path)
            if known is not None and tensor.dim() == len(known.shape) and self._is_part(known, tensor):
                found[path] = known.layout
        return found

    def whole_shape(self, path: Path, tensor: Tensor, parts: Mapping[Path, Layout]) -> tuple[int, ...] | None:
        """The shape of the whole of which a call's tensor is a part; None if it is whole."""
        if path not in parts or parts[path].dim is None:
            return None
        dim = parts[path].dim or 0
        return (*tensor.shape[:dim], self._known[path].shape[dim], *tensor.shape[dim + 1 :])

    def note(self, program: Program, told: bool) -> None:
        """Remember what calls leave; if nobody has been told of it, tell the caller once."""
        new = [held for held in program.left if held.path not in self._known]
        told = told or any(held.layout.is_sharded for held in self._known.values())
        self._known |= {held.path: held for held in program.left}
        finding = next((d for d in program.diagnostics if d.code == "TP125"), None)
        if new and not told and finding is not None:
            warnings.warn(finding.text, stacklevel=2)

    def _is_part(self, known: LeftTensor, tensor: Tensor) -> bool:
        layout = known.layout
        if layout.dim is None:  # whole on each rank; only its gradient isn't
            return tensor.requires_grad and not tensor.is_leaf
        return tensor.shape[layout.dim] == layout.local_size(known.shape[layout.dim], self._size, self._rank)


def _unless_opaque(held: object) -> object:
    return None if is_opaque(held) else held


__all__ = ["Left", "on_meta", "sequence_dims", "shows_odd_sequence", "without_opaque"]
