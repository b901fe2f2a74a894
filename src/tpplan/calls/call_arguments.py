"""Arguments: a call as a proof takes it, and what of its tensors is a rank's part.

What a call leaves in lists and dicts among its arguments, such as keys and values, is a rank's part of them, and the
program says which. A later call is proved with these parts as they lie; by its size each is told from a whole tensor.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from tpplan.compiler.ir.kept_tensors import is_wrapper, wrapper_on_meta
from tpplan.compiler.ir.layout import Layout, Pack, packed, sharded
from tpplan.compiler.ir.objects import PLAIN, is_object, is_opaque, note_alike
from tpplan.compiler.ir.program import LeftTensor, Program
from tpplan.compiler.ir.pytree import children, has_own_state, tensors_in, tensors_of, with_items
from tpplan.parity.tree import Path

_FEW = 1 << 16


def on_meta(_: Path, tensor: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """A tensor without numbers; it wants a gradient if `tensor` does and one would be recorded."""
    wanted = tensor.requires_grad and torch.is_grad_enabled()
    if is_wrapper(tensor):
        return wrapper_on_meta(tensor, shape).requires_grad_(wanted)
    if shape is None:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    else:
        made = tensor.new_empty(shape, device="meta")
    return note_alike(made.detach().requires_grad_(wanted), tensor)


def with_numbers(path: Path, tensor: Tensor) -> Tensor:
    """A tensor of a call as its proof takes it, which may look at its numbers; those of a cache have none."""
    if type(tensor) is not Tensor or (tensor.is_floating_point() and len(path) > 1):
        return on_meta(path, tensor)
    wanted = tensor.requires_grad and torch.is_grad_enabled()
    return tensor if wanted == tensor.requires_grad else note_alike(tensor.detach(), tensor)


def kept_example(path: Path, tensor: Tensor) -> Tensor:
    """A tensor of the example, to be kept: whole numbers and flags with their numbers, if they are few."""
    if type(tensor) is not Tensor or tensor.is_meta or tensor.is_floating_point() or tensor.numel() > _FEW:
        return on_meta(path, tensor)
    copied = tensor.detach().clone(memory_format=torch.preserve_format)
    return note_alike(copied, tensor) if copied.stride() == tensor.stride() else on_meta(path, tensor)


def without_opaque(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call as a proof takes it: without keywords that are opaque, and with None for what else is."""
    positional = tuple(with_items(argument, _unless_opaque) for argument in arguments)
    kept = {name: held for name, held in keywords.items() if not is_opaque(held)}
    return positional, {name: with_items(held, _unless_opaque) for name, held in kept.items()}


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


class Parts(dict[Path, Layout]):
    """The tensors of a call that are a rank's part, by path.

    Attributes:
        key: the same, quick to hash and to compare.
        wholes: the shapes of the wholes of those that nobody knows but by a guess.
    """

    key: tuple[str, ...] = ()
    wholes: Mapping[Path, tuple[int, ...]] = MappingProxyType({})

    def beside(self, known: Parts) -> Parts:
        """With those that are known."""
        found = Parts({**known, **self})
        found.wholes = self.wholes
        return found


class _Place:
    """Where a call leaves a tensor, and what tells a rank's part of it from the whole.

    Attributes:
        number: of the place, among those of the model.
        known: what the program says of it.
        dim, count: the split dim and what a rank has of it; None of a tensor that is whole on each rank.
        dims: how many dims it has.
        arrives: whether calls are passed parts there, whatever their size.
    """

    __slots__ = ("arrives", "count", "dim", "dims", "known", "number")

    def __init__(self, number: int, known: LeftTensor, size: int, rank: int, arrives: bool) -> None:
        layout = known.layout
        self.number, self.known, self.arrives = number, known, arrives
        self.dim, self.dims = layout.dim, len(known.shape)
        self.count = None if layout.dim is None else layout.local_size(known.shape[layout.dim], size, rank)

    def has_part(self, tensor: Tensor) -> bool:
        """Whether a tensor that stands there is this rank's part."""
        if self.dim is None:  # whole on each rank; only its gradient isn't
            return tensor.dim() == self.dims and tensor.requires_grad and not tensor.is_leaf
        shape = tensor.shape
        return len(shape) == self.dims and (self.arrives or shape[self.dim] == self.count)

    def has_whole(self, tensor: Tensor) -> bool:
        """Whether a tensor is whole where calls leave parts; one that wants a gradient stays whole."""
        if self.dim is None or self.known.layout.within or tensor.requires_grad or tensor.dim() != self.dims:
            return False
        if is_wrapper(tensor):
            return False  # nobody knows how to take a part of it
        return tensor.shape[self.dim] == self.known.shape[self.dim] and not self.has_part(tensor)


class LeftParts:
    """What the calls of a model have left with their callers, and the parts that they are passed from the first on."""

    def __init__(self, program: Program, rank: int) -> None:
        """Start with what the example leaves, of which `rank` has its part."""
        self._size = program.size
        self._rank = rank
        self._arriving = frozenset(program.arriving)
        self._known = {path: LeftTensor(path, b.shape, b.layout) for path, b in program.arriving.items()}
        self._places: list[_Place] = []
        self._tree: dict[str | int, Any] = {}  # the places, by the steps of their paths
        self._seen: dict[tuple[int, ...], Parts] = {}
        self.note(program, told=True)

    @property
    def layouts(self) -> dict[Path, Layout]:
        """How what was left lies, by path."""
        return {path: held.layout for path, held in self._known.items()}

    @property
    def left(self) -> dict[Path, Layout]:
        """The same without what arrives."""
        return {path: layout for path, layout in self.layouts.items() if path not in self._arriving}

    def parts_of(self, arguments: tuple[Any, ...], keywords: dict[str, Any], names: Sequence[str]) -> Parts:
        """How those tensors of a call lie that an earlier call has left, or what the caller has made of them since.

        A whole tensor in an object, where calls leave parts, becomes this rank's part: a cache that the caller has made
        or filled elsewhere. This is done at each call, so only the paths that are known are followed.
        """
        found: list[int] = []
        for name, below in self._tree.items():
            held = _argument(name, arguments, keywords, names)
            if held is not None:
                self._follow(held, below, found)
        numbers = tuple(found)
        made = self._seen.get(numbers)
        if made is None:
            known = [self._places[number].known for number in numbers]
            made = self._seen[numbers] = Parts((left.path, left.layout) for left in known)
            made.key = tuple(f"{path} {layout!r}" for path, layout in made.items())
        return made

    def _follow(self, held: Any, below: Any, found: list[int]) -> None:
        """Collect what of `held` is a part; `below` is what is known of it: more steps, or the end of a path."""
        if type(below) is _Place:
            if isinstance(held, Tensor) and below.has_part(held):
                found.append(below.number)
            return
        kind = cast("type[Any]", type(held))
        if kind is list or kind is tuple:
            for step, further in below.items():
                if type(step) is int and step < len(held):
                    self._follow(held[step], further, found)
            return
        own = has_own_state(kind)
        state: dict[Any, Any] = held.__dict__ if own else held if kind is dict else dict(children(held) or ())
        for step, further in below.items():
            item = state.get(step)
            if type(further) is not _Place:
                if item is not None:
                    self._follow(item, further, found)
            elif isinstance(item, Tensor):
                if further.has_part(item):
                    found.append(further.number)
                elif own and further.has_whole(item) and not any(map(is_wrapper, state.values())):
                    item = state[step] = self._cut(further.known, item)
                    self._follow(item, further, found)

    def _cut(self, known: LeftTensor, tensor: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        dim, count = known.layout.dim or 0, known.shape[known.layout.dim or 0]
        with torch.no_grad():
            stretches = known.layout.intervals(count, self._size, self._rank)
            made = torch.cat([tensor.narrow(dim, start, length) for start, length in stretches], dim).contiguous()
        note_alike(made, tensor)
        return made

    def guesses(
        self, arguments: tuple[Any, ...], keywords: dict[str, Any], names: Sequence[str]
    ) -> Iterator[Parts | None]:
        """How tensors in objects may lie of which nothing is known; a proof has to say whether they can.

        They are whole, as a caller made them before any call: a cache for all heads, which stand before or after the
        sequence. Or they are parts, as modules that were called by themselves have left them. There are as many guesses
        on each rank; None stands for one that can't be true of what this rank has.
        """
        called = [*zip(names, arguments, strict=False), *keywords.items()]
        unknown = {
            path: tensor
            for name, held in called
            if is_object(held)
            for path, tensor in tensors_in(held, (name,), objects=True)
            if path not in self._known and tensor.dim() > 2 and tensor.is_floating_point()
        }
        if not unknown:
            return
        plain = not any(map(is_wrapper, unknown.values()))
        for dim in (1, 2):
            divides = plain and all(tensor.shape[dim] >= self._size for tensor in unknown.values())
            yield Parts(dict.fromkeys(unknown, sharded(dim))) if divides else None
        for dim, replicas in itertools.product((1, 2), range(1, self._size)):
            if self._size % replicas == 0:
                yield self._as_parts(unknown, dim, replicas) if plain else None

    def _as_parts(self, tensors: Mapping[Path, Tensor], dim: int, replicas: int) -> Parts:
        """These as parts along a dim, each on so many ranks."""
        found, shapes = Parts(), dict[Path, tuple[int, ...]]()
        for path, tensor in tensors.items():
            count = tensor.shape[dim] * self._size // replicas
            found[path] = sharded(dim) if replicas == 1 else packed(dim, [Pack(count, replicas)])
            shapes[path] = (*tensor.shape[:dim], count, *tensor.shape[dim + 1 :])
        found.wholes = shapes
        return found

    def whole_shape(self, path: Path, tensor: Tensor, parts: Parts) -> tuple[int, ...] | None:
        """The shape of the whole of which a call's tensor is a part; None if it is whole."""
        if path in parts.wholes:
            return parts.wholes[path]
        if path not in parts or parts[path].dim is None or path not in self._known:
            return None
        dim = parts[path].dim or 0
        length = tensor.shape[dim] * self._size if path in self._arriving else self._known[path].shape[dim]
        return (*tensor.shape[:dim], length, *tensor.shape[dim + 1 :])

    def note(self, program: Program, told: bool) -> None:
        """Remember what calls leave; if nobody has been told of it, tell the caller once."""
        new = [held for held in program.left if held.path not in self._known]
        told = told or any(layout.is_sharded for layout in self.left.values())
        self._known |= {held.path: held for held in program.left}
        self._lay_out()
        finding = next((d for d in program.diagnostics if d.code == "TP125"), None)
        if new and not told and finding is not None:
            warnings.warn(finding.text, stacklevel=2)

    def take(self, guess: Parts, arguments: tuple[Any, ...], keywords: dict[str, Any], names: Sequence[str]) -> None:
        """Remember a guess that was proved: the call may only read what it is about, and leave nothing there."""
        shapes = {path: tuple(tensor.shape) for path, tensor in tensors_of(arguments, keywords, names)}
        self._known |= {
            path: LeftTensor(path, guess.wholes.get(path, shapes[path]), layout)
            for path, layout in guess.items()
            if path not in self._known
        }
        self._lay_out()

    def _lay_out(self) -> None:
        """Lay the places out by the steps of their paths."""
        self._seen.clear()
        self._tree.clear()
        self._places = [
            _Place(i, held, self._size, self._rank, path in self._arriving)
            for i, (path, held) in enumerate(self._known.items())
        ]
        for place in self._places:
            below, path = self._tree, place.known.path
            for step in path[:-1]:
                if not isinstance(below.get(step), dict):
                    below[step] = {}
                below = below[step]
            below[path[-1]] = place


def _argument(name: str | int, arguments: tuple[Any, ...], keywords: dict[str, Any], names: Sequence[str]) -> Any:
    """What a call passes by a name, or by a place such as `*0`; None if it doesn't."""
    held = keywords.get(str(name))
    if held is not None:
        return held
    place = str(name).removeprefix("*")
    position = names.index(place) if place in names else int(place) if place.isdecimal() else len(arguments)
    return arguments[position] if position < len(arguments) else None


def _unless_opaque(held: object) -> object:
    return None if is_opaque(held) else held


__all__ = ["LeftParts", "Parts", "on_meta", "shows_odd_sequence", "without_opaque"]
