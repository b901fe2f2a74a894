"""Content: what Python can see of an object, to the bottom, as a value that can be compared, hashed and remembered.

in:  an object
out: its content; between two contents the first place where they differ, with what stands there

    Settings(scale=2), Settings(scale=3)   ->   `settings.scale` was 2 in the proof and is 3 now

An object is its class and what it holds (`parts`). Nothing counts by its identity that can change inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from types import CodeType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from tpplan.state.parts import PLAIN, Bytes, Item, StateMemory, Step, UnseenError, class_data, parts

DEEPEST = 100
_LONGEST = 60
_SMALL = 64
NOTHING = object()


class Identity:
    """An object that counts by its identity; it is held, so that no other object can be given the same one."""

    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        """Stand for `held`."""
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)

    def __deepcopy__(self, memo: object) -> Identity:
        return self

    def __repr__(self) -> str:
        return getattr(self.held, "__qualname__", f"<{type(self.held).__name__}>")


class ContentValue(NamedTuple):
    """Something that has no parts: its type, and what it says."""

    kind: type[Any]
    shown: object


class Node(NamedTuple):
    """Something that has parts, in order; those of a set stand in none."""

    kind: type[Any]
    parts: tuple[tuple[Step, object], ...] | frozenset[tuple[Step, object]]


class TensorGeometry(NamedTuple):
    """What counts of a tensor that a model holds: all but its numbers, unless a capture has them."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    wanted: bool
    number: str | None

    def __repr__(self) -> str:
        return self.number or f"a tensor of shape {self.shape}, {str(self.dtype).removeprefix('torch.')}"


def geometry(held: Tensor) -> ContentValue:
    """What counts of a tensor that a model holds."""
    number = str(held.item()) if is_constant(held) else None
    return ContentValue(type(held), TensorGeometry(held.dtype, tuple(held.shape), held.requires_grad, number))


def numbers(held: Tensor) -> ContentValue:
    """What counts of a tensor that no module has, of which a capture has the numbers: these, if it's small."""
    if not is_small(held):
        return geometry(held)
    told: Any = cast("Any", held).tolist()
    return ContentValue(type(held), TensorGeometry(held.dtype, tuple(held.shape), held.requires_grad, str(told)))


def is_small(held: Tensor) -> bool:
    """Whether code may well go by the numbers of a tensor."""
    plain = type(held) is Tensor and held.layout is torch.strided and not held.is_quantized
    return plain and held.device.type == "cpu" and held.numel() <= _SMALL


def is_constant(held: Tensor) -> bool:
    """Whether a capture has the number of a tensor, as of one without dims on the CPU."""
    return held.dim() == 0 and held.device.type == "cpu" and not isinstance(held, nn.Parameter)


class Reader:
    """Reads contents; what several of them share is read once.

    Objects that refer to each other, a cycle, are read from the one on by which they are entered. One that comes again
    is told by how far up it is being read, or by how many objects ago it was read.
    """

    def __init__(self, modules: Mapping[nn.Module, str], tensor: Callable[[Tensor], object] = geometry) -> None:
        """Read.

        Args:
            modules: those that are looked at by themselves, with their names.
            tensor: what counts of a tensor beside its attributes.
        """
        self._tensor, self._modules = tensor, modules
        self._known: dict[int, tuple[object, object, int]] = {}  # with how many objects were read for it
        self._open: dict[int, int] = {}
        self._again: dict[int, tuple[int, int]] = {}  # read in the cycle that is open: when, and up to where it leads
        self._members: list[int] = []  # the same, in order
        self._cycles: dict[int, int] = {}  # of those in cycles that were read: the one by which theirs was entered
        self._entered: Counter[int] = Counter()
        self._count = 0
        self._lowest = DEEPEST

    def __call__(self, held: Any) -> object:
        """The content of an object.

        Raises:
            UnseenError: it can be neither compared nor counted, or leads too deep.
        """
        kind = cast("type[Any]", type(held))
        if kind in PLAIN:
            return plain(held)
        if issubclass(kind, nn.Module) and held in self._modules:  # a proxy says that it is one
            return ContentValue(kind, f"`{self._modules[held]}`")
        known, cycle = self._known.get(id(held)), self._cycles.get(id(held), 0)
        if known is not None and not self._entered[cycle]:
            self._count += known[2]
            return known[1]
        depth = len(self._open)
        if id(held) in self._open:
            self._lowest = min(self._lowest, self._open[id(held)])
            return ContentValue(kind, depth - self._open[id(held)])
        if id(held) in self._again:
            read, lowest = self._again[id(held)]
            self._lowest = min(self._lowest, lowest)
            return ContentValue(kind, f"{self._count - read} ago")
        if depth == DEEPEST:
            raise UnseenError(f"a `{kind.__name__}`, {DEEPEST} objects deep")
        outer, self._lowest = self._lowest, DEEPEST
        self._open[id(held)] = depth
        self._entered[cycle] += cycle > 0
        self._count += 1
        count, first = self._count, len(self._members)
        try:
            content = self._read(kind, held)
        finally:
            del self._open[id(held)]
            self._entered[cycle] -= cycle > 0
        if self._lowest >= depth:  # it reads so from wherever it is reached
            self._known[id(held)] = (held, content, self._count - count + 1)
            for member in self._members[first:]:
                del self._again[member]
                self._cycles[member] = self._cycles[id(held)] = cycle or id(held)
            del self._members[first:]
        else:
            self._again[id(held)] = count, self._lowest
            self._members.append(id(held))
        self._lowest = min(outer, self._lowest if self._lowest < depth else DEEPEST)
        return content

    def _read(self, kind: type[Any], held: Any) -> object:
        inner = parts(held)
        if inner is None:
            return leaf(held)
        found = [(step, ContentValue(kind, item) if isinstance(step, Bytes) else self(item)) for step, item in inner]
        if isinstance(held, Tensor):
            return Node(kind, (("", self._tensor(held)), *found)) if found else self._tensor(held)
        if isinstance(held, (set, frozenset)):
            if sum(isinstance(item, (nn.Module, Tensor)) for _, item in inner) > 1:
                raise UnseenError("a set of modules or tensors, whose order depends on where they lie in memory")
            return Node(kind, frozenset(found))
        if isinstance(held, type):
            found.append(("", leaf(held)))
        elif not isinstance(held, (dict, list, tuple)):
            found += [
                (step, self(item)) for step, item in class_data(kind) if step not in getattr(held, "__dict__", ())
            ]
        return Node(kind, tuple(found))


def plain(held: Any) -> ContentValue:
    """The content of a number, a text or the like."""
    kind = cast("type[Any]", type(held))
    if kind is float or kind is complex:
        return ContentValue(kind, repr(held))  # tells 0.0 from -0.0, and finds nan again
    if kind is slice:
        return ContentValue(kind, (plain(held.start), plain(held.stop), plain(held.step)))
    return ContentValue(kind, held)


def leaf(held: Any) -> ContentValue:
    """The content of what has no parts: as it says if nothing can change of it, else which one it is."""
    kind = cast("type[Any]", type(held))
    if kind in PLAIN:
        return plain(held)
    if isinstance(held, PurePath):
        return ContentValue(kind, str(held))
    return ContentValue(kind, held if kind is CodeType or kind is torch.Size else Identity(held))


class Difference(NamedTuple):
    """Where two contents differ, and what stands there in each."""

    place: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"`{self.place}` was {self.before} in the proof and is {self.now} now"


def difference(place: str, before: object, now: object) -> Difference:
    """The first place at which two contents differ that aren't equal."""
    if isinstance(now, Node) and not isinstance(before, (Node, ContentValue)):
        before = Node(now.kind, ())
    if isinstance(before, Node) and isinstance(now, Node) and before.kind is now.kind:
        if isinstance(before.parts, frozenset) or isinstance(now.parts, frozenset):
            lost, added = set(before.parts) - set(now.parts), set(now.parts) - set(before.parts)
            texts = [", ".join(sorted(shown(item) for _, item in held)) or "not there" for held in (lost, added)]
            return Difference(place, *texts)
        old, new = dict(before.parts), dict(now.parts)
        for step in (*new, *(step for step in old if step not in new)):
            if old.get(step, NOTHING) != new.get(step, NOTHING):
                return difference(place_of(place, step), old.get(step, NOTHING), new.get(step, NOTHING))
    return Difference(place, shown(before), shown(now))


def differing(place: str, before: object, now: object) -> Iterator[tuple[str, object, object]]:
    """All places at which two contents differ, with what stands there in each."""
    if not (isinstance(before, Node) and isinstance(now, Node) and before.kind is now.kind):
        yield place, before, now
        return
    if not (isinstance(before.parts, tuple) and isinstance(now.parts, tuple)):
        yield place, before, now
        return
    old, new = dict(before.parts), dict(now.parts)
    for step in dict.fromkeys((*old, *new)):
        if old.get(step, NOTHING) != new.get(step, NOTHING):
            yield from differing(place_of(place, step), old.get(step, NOTHING), new.get(step, NOTHING))


def place_of(place: str, step: Step) -> str:
    """The place that a step leads to."""
    if isinstance(step, Item):
        return f"{place}[{step.key!r}]"
    return place if isinstance(step, Bytes) or step.startswith("__") else f"{place}.{step}".lstrip(".")


def shown(content: object) -> str:
    """A content in words."""
    if not isinstance(content, (Node, ContentValue)):
        return "not there"
    if isinstance(content, Node):
        return f"a `{content.kind.__name__}`"
    text = content.shown if content.kind in (float, complex) else _text(content.shown)
    return str(text) if 0 < len(str(text)) < _LONGEST else f"a `{content.kind.__name__}`"


def _text(held: object) -> str:
    if isinstance(held, Identity):
        return f"`{held!r}`" if hasattr(held.held, "__qualname__") else ""
    if isinstance(held, CodeType):
        return f"a function in line {held.co_firstlineno} of {held.co_filename.rpartition('/')[2]}"
    if isinstance(held, StateMemory):
        try:
            return str(memoryview(held.numbers).cast(held.form).tolist())  # pyright: ignore
        except ValueError:
            return ""
    return held if isinstance(held, str) and held.startswith("`") else repr(held)


__all__ = [
    "DEEPEST",
    "NOTHING",
    "ContentValue",
    "Difference",
    "Identity",
    "Node",
    "Reader",
    "difference",
    "differing",
    "geometry",
    "is_constant",
    "is_small",
    "leaf",
    "numbers",
    "plain",
]
