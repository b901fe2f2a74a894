"""Cover: the sizes for which a proof holds.

in:  the subject of a proof: what was checked, and the call that it was checked for
out: `Cover`: conditions on the sizes of a call

    h / (32 if x.shape[1] <= 8 else h.shape[-1])    of an example of length 8    ->    x.shape[1] <= 8

The stock model is recorded once more with symbols for sizes, and is run on each kind of rank's shapes over the same
symbols: a sequence that n ranks share is n times a rank's. Whatever either run compares is a condition, and so is what
the check compares between them. As both runs do at the example's sizes what was proved, they do so at all sizes that
satisfy the conditions, up to what the layouts of the proof lean on (`_hold_layouts`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from tpplan.compat.symbols import SYMBOLIC, SizeSymbols, as_python, expression_of, given_expression, hint_of
from tpplan.compiler.check import local_run
from tpplan.compiler.check.same_steps import CheckInput, Mismatch
from tpplan.compiler.ir.layout import REPLICATED, Layout
from tpplan.compiler.ir.objects import note_alike
from tpplan.compiler.ir.program import LocalAttribute
from tpplan.compiler.ir.pytree import children, with_tensors
from tpplan.compiler.ir.trace import Frame, Operation, Path, Trace, Value
from tpplan.compiler.trace.capture import BodyError, Capture, record
from tpplan.compiler.trace.signatures import argument_names
from tpplan.compiler.trace.skeleton import make_skeleton
from tpplan.compiler.trace.symbolic import Results, SymbolicRecorder, balanced, fix, symbols
from tpplan.ops.dim_map import is_sized
from tpplan.ops.registry import lookup

LEAST_LENGTH = 6
"""A whole number that an object keeps beside tensors is a length from here on; a smaller one may name a dim."""
_FREE = frozenset(("entrywise", "new", "random"))


@dataclass(frozen=True, slots=True)
class Subject:
    """What was checked when a call was proved.

    Attributes:
        given: model, trace and assignment.
        attributes: integer attributes that are local, by module.
        recorded: modules whose bodies run from their records, which are made anew, by the rules, for each size.
        sequences: for each tensor of the call, the dims that are sequences which ranks share.
    """

    given: CheckInput
    attributes: Mapping[str, tuple[LocalAttribute, ...]]
    recorded: frozenset[str]
    sequences: Mapping[Path, tuple[int, ...]]

    def of(self, model: nn.Module) -> Subject:
        """The same of an equal model: that which was compiled may not stay as it was."""
        return replace(self, given=replace(self.given, model=model))

    def __deepcopy__(self, memo: object) -> Subject:
        """It never changes."""
        return self


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition on sizes.

    Attributes:
        text: the condition, in terms of the call's sizes.
        line: of the code that makes it.
    """

    text: str
    line: str


@dataclass(frozen=True, slots=True)
class Cover:
    """The sizes for which a proof holds.

    Attributes:
        conditions: on sizes, as they are told.
        holds: whether a call is covered, by its sizes in the order in which they were given.
        each: whether each condition holds for these.
    """

    conditions: tuple[Condition, ...]
    holds: Callable[[Sequence[int]], bool]
    each: Callable[[Sequence[int]], Sequence[bool]]

    def broken(self, sizes: Sequence[int]) -> Iterator[str]:
        """The conditions that don't hold, with the lines that make them."""
        for condition, holds in zip(self.conditions, self.each(sizes), strict=True):
            if not holds:
                yield f"`{condition.text}` ({condition.line})" if condition.line else f"`{condition.text}`"


class NotCoveredError(Exception):
    """No more than the sizes of the example are covered; it says why."""


class _UnevenError(Exception):
    """Ranks share sizes unevenly that are made of these: only as they are in the example."""

    def __init__(self, uneven: set[str]) -> None:
        super().__init__()
        self.uneven = uneven


SizesOf = Callable[[tuple[Any, ...], dict[str, Any]], Sequence[Any]]
"""All sizes of a call, in an order that is the same for each call of its kind."""


def cover(subject: Subject, sizes_of: SizesOf, rank: int = 0) -> Cover:
    """The sizes for which a proof holds.

    Args:
        subject: of the proof.
        sizes_of: tells the sizes of a call.
        rank: whose calls are told of: it has its part of what earlier calls have left.

    Raises:
        NotCoveredError: those of the example alone.
    """
    fixed = frozenset[_Alike]()
    while True:
        with symbols() as sizes:
            named = _Named(sizes, fixed)
            try:
                return _cover(subject, named, sizes, sizes_of, rank)
            except NotCoveredError:
                raise
            except _UnevenError as error:
                uneven = named.alike(error.uneven) - fixed
                if not uneven:
                    raise NotCoveredError("ranks share a size that isn't even") from error
                fixed |= uneven
            except Exception as error:  # whatever can't be run on symbols
                raised = error.__cause__ if isinstance(error, BodyError) and error.__cause__ else error
                raise NotCoveredError(f"{type(raised).__name__}: {raised}") from error


def _cover(subject: Subject, named: _Named, sizes: SizeSymbols, sizes_of: SizesOf, own: int) -> Cover:
    given = subject.given
    arguments, keywords = _symbolic_call(subject, named)
    results: Results = {}
    state = Capture(SymbolicRecorder(results, given.trace.settings))
    whole = record(make_skeleton(given.model), arguments, keywords, state)
    _require_same(given.trace, whole)
    layouts = given.assignment.layouts
    _require_even(given, whole)
    _hold_layouts(whole, layouts, sizes)
    symbolic = replace(
        given,
        trace=whole,
        arguments=arguments,
        keywords=keywords,
        results=state.results,
        recorder=functools.partial(SymbolicRecorder, results),
        symbolic=True,
    )
    for rank in local_run.different_ranks(given):
        found, _ = local_run.run_rank(
            replace(symbolic, rank=rank), subject.attributes, subject.recorded, subject.recorded
        )
        if isinstance(found, Mismatch):
            raise NotCoveredError(found.reason)
    return named.cover(sizes_of(*local_run.local_call(replace(symbolic, rank=own))))


# -- the call ---------------------------------------------------------------------------------------------------------
_Alike = tuple[str, int, int]  # a name of any item of a list, the example's size, and the number of parts


class _Named:
    """Symbols, by the names of what they are sizes of.

    Sizes that stand in one place of each item of a list, as the lengths of all layers' keys, are one symbol where they
    are equal in the example. So equal layers make equal conditions, and results are remembered between them.
    """

    def __init__(self, sizes: SizeSymbols, fixed: frozenset[_Alike]) -> None:
        """Of all sizes but some."""
        self._sizes, self._fixed = sizes, fixed
        self._shown: dict[str, str] = {}
        self._whole: dict[str, str] = {}
        self._alike: dict[_Alike, Any] = {}

    def alike(self, symbols: set[str]) -> set[_Alike]:
        """What symbols stand for."""
        own = {alike: {str(held) for held in expression_of(made).free_symbols} for alike, made in self._alike.items()}
        return {alike for alike, held in own.items() if held & symbols}

    def size(self, name: str, example: int, parts: int = 1) -> Any:
        """A symbolic size, of a dim that so many ranks share; the number itself where that is 0 or 1 on a rank."""
        alike = _of_any_item(name), example, parts
        if example % parts or example // parts < 2 or alike in self._fixed:
            return example
        if alike not in self._alike:
            self._alike[alike] = self._new(name, example, parts)
        return self._alike[alike]

    def _new(self, name: str, example: int, parts: int) -> Any:
        number = len(self._shown)
        made = self._sizes.symbol(f"n{number}", example // parts)
        symbol = str(expression_of(made))
        self._shown[symbol] = name if parts == 1 else f"({name} // {parts})"
        if parts > 1:
            self._whole[f"{parts}*{symbol}"] = name  # which it divides
        return made * parts

    def cover(self, pattern: Sequence[Any]) -> Cover:
        """The cover of calls whose sizes are of a pattern: numbers, symbols, and multiples of symbols."""
        places: dict[str, str] = {}
        checks: list[str] = []
        equal: dict[str, list[str]] = {}
        for place, size in enumerate(pattern):
            expression = given_expression(size)
            symbols = [*getattr(expression, "free_symbols", ())]
            if not symbols:
                checks.append(f"n[{place}] == {int(size)}")
                continue
            (symbol,) = symbols
            factor = int(expression.coeff(symbol))
            if expression != factor * symbol:
                raise NotCoveredError(f"a size of the call is {expression}")
            if str(symbol) in places:
                equal.setdefault(str(symbol), []).append(f"n[{place}] == {as_python(expression)}")
                continue
            places[str(symbol)] = f"n[{place}] // {factor}"
            checks += [f"n[{place}] % {factor} == 0", f"{symbol} >= 2"]
        found = {as_python(expression): (expression, line) for expression, line in self._sizes.conditions()}
        for symbol in {symbol for expression, _ in self._sizes.conditions() for symbol in expression.free_symbols}:
            settled = self._sizes.replace(symbol)  # what a condition has made of it, as of a width that a weight has
            if str(symbol) not in places and not places.keys() >= set(map(str, settled.free_symbols)):
                raise NotCoveredError(f"a condition is about {self._told(str(symbol))}, which isn't a size of the call")
            places.setdefault(str(symbol), as_python(settled))
        bound = "".join(f"\n    {name} = {place}" for name, place in places.items())
        told = [Condition(self._told(as_python(balanced(made))), line) for made, line in found.values()]
        told += [Condition(f"all {_of_any_item(self._shown[symbol])} are equal", "") for symbol in equal]
        tests = [*found, *(" and ".join(held) for held in equal.values())]
        return Cover(
            tuple(told),
            _function(f"{bound}\n    return {' and '.join(f'({test})' for test in (*checks, *tests)) or True}"),
            _function(f"{bound}\n    return [{', '.join(f'({test})' for test in tests)}]"),
        )

    def _told(self, text: str) -> str:
        for shown in (self._whole, self._shown):
            for name, own in shown.items():
                text = re.sub(rf"\({re.escape(name)}\)|(?<!\w){re.escape(name)}(?!\w)", own, text)
        return text


def _of_any_item(name: str) -> str:
    """The name of a size, without places in lists: `keys[*].shape[2]` of `keys[0].shape[2]`."""
    holder, dot, leaf = name.rpartition(".")
    return re.sub(r"\[\d+\]", "[*]", holder) + dot + leaf


def _function(body: str) -> Callable[[Sequence[int]], Any]:
    """A function of the sizes of a call, `n`, by its source."""
    namespace: dict[str, Any] = {"math": math, "torch": torch}
    exec(f"def told(n):{body}", namespace)  # of expressions over sizes, none of which is anybody's text
    return namespace["told"]


def _symbolic_call(subject: Subject, named: _Named) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with symbols for the sizes of its tensors, and for the lengths that objects keep beside these."""
    given = subject.given
    layouts = given.assignment.layouts.values()
    interleaved = any(layout.interleave != 1 for layout in layouts)

    def symbolic(path: Path, tensor: Tensor) -> Tensor:
        if type(tensor) is not Tensor:
            raise NotCoveredError(f"it is passed a `{type(tensor).__name__}`")
        shown = "".join(f".{step}" if isinstance(step, str) else f"[{step}]" for step in path).lstrip(".")
        part = given.parts.get(path, REPLICATED)
        shared = subject.sequences.get(path, ())
        shape: list[Any] = []
        for dim, size in enumerate(tensor.shape):
            plain = dim in (part.dim, part.next_dim if part.within else None) or (
                interleaved and dim == 0 and size == given.batch
            )
            name = f"{shown}.shape[{dim}]"
            shape.append(size if plain else named.size(name, size, given.size if dim in shared else 1))
        stride = _strides(tensor, shape)
        if stride is None:
            shape, stride = [*tensor.shape], tensor.stride()
        made = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")
        return note_alike(made.requires_grad_(tensor.requires_grad), tensor)

    names = argument_names(type(given.model).forward)
    arguments, keywords = with_tensors(given.arguments, given.keywords, names, symbolic)
    seen: set[int] = set()
    called = [*names, *(f"*{i}" for i in range(len(names), len(arguments)))]
    for name, held in (*zip(called, arguments, strict=False), *keywords.items()):
        _symbolic_lengths(held, name, named, seen)
    return arguments, keywords


def _strides(tensor: Tensor, shape: Sequence[Any]) -> Sequence[Any] | None:
    """The strides of a tensor of symbolic sizes whose dims lie in memory in the order of `tensor`'s.

    None if that has gaps, of which nobody knows how they grow.
    """
    made: list[Any] = [0] * len(shape)
    reached: Any = 1
    plain = 1
    for dim in sorted(range(len(shape)), key=lambda dim: (tensor.stride(dim), -dim)):
        if tensor.shape[dim] > 1 and tensor.stride(dim) != plain:
            return None
        made[dim], reached, plain = reached, reached * shape[dim], plain * tensor.shape[dim]
    return made


def _symbolic_lengths(held: Any, name: str, named: _Named, seen: set[int]) -> bool:
    """Put symbols in the place of lengths that objects keep beside tensors; whether there are tensors inside."""
    if isinstance(held, Tensor):
        return True
    items = children(held, objects=True)
    if items is None or id(held) in seen:
        return False
    seen.add(id(held))
    found = any([_symbolic_lengths(item, f"{name}.{key}", named, seen) for key, item in items])
    if found and children(held) is None:
        state = cast("dict[str, Any]", vars(held))
        for key, item in items:
            if type(item) is int and item >= LEAST_LENGTH:
                state[str(key)] = named.size(f"{name}.{key}", item)
    return found


# -- what has to be the same ------------------------------------------------------------------------------------------
def _require_same(trace: Trace, symbolic: Trace) -> None:
    """Raise unless a record at symbolic sizes is, at the example's, the one that was proved."""
    for mine, its in zip(_content(trace.recorded), _content(symbolic.recorded), strict=False):
        if mine != its:
            raise NotCoveredError(f"with symbols it runs {its} in the place of {mine}")
    # Recording what a backward does may take more values, or fewer, behind those of the forward.
    if any(_geometry(mine) != _geometry(its) for mine, its in zip(trace.values, symbolic.values, strict=False)):
        raise NotCoveredError("values made of symbols have other sizes")
    counts = [sum(1 for _ in _content(held.recorded)) for held in (trace, symbolic)]
    if counts[0] != counts[1]:
        raise NotCoveredError("with symbols it runs another number of operations")
    if _decided(trace) != _decided(symbolic):
        raise NotCoveredError("with symbols it leaves or decides something else")


def _decided(trace: Trace) -> object:
    """What a record leaves and decides."""
    left = (sorted(trace.effects.kept.items()), sorted(map(str, trace.effects.left.items())), trace.effects.written)
    return trace.branches.assumptions, trace.inputs, trace.numbers.chosen, left


def _geometry(value: Value) -> object:
    return tuple(map(hint_of, value.shape)), value.dtype, value.differentiable


def _content(frame: Frame) -> Iterator[object]:
    """What a record does, with the example's sizes for symbols."""
    yield frame.module, frame.call, frame.entries
    for node in frame.body:
        if isinstance(node, Frame):
            yield from _content(node)
        else:
            named = tuple((name, _hinted(held)) for name, held in node.keywords.items())
            yield node.name, _hinted(node.arguments), named, node.outputs, node.overwritten
    yield frame.exits, [(held.name, held.inputs, held.outputs) for held in frame.backwards]


def _hinted(held: Any) -> Any:
    if isinstance(held, tuple):
        return tuple(map(_hinted, held))  # pyright: ignore[reportUnknownArgumentType]
    shown = hint_of(held)
    return repr(shown) if isinstance(shown, float) or not isinstance(shown, (int, str)) else shown


def _require_even(given: CheckInput, whole: Trace) -> None:
    """Make it a condition that ranks share all sizes evenly that they share so in the example.

    Raises:
        _UnevenError: they share sizes of symbols in other ways.
    """
    uneven: set[str] = set()
    for value, layout in given.assignment.layouts.items():
        if layout.dim is None or value >= len(whole.values):
            continue
        size = whole.values[value].shape[layout.dim]
        if isinstance(size, SYMBOLIC) and (layout.packs or not bool(size % (given.size * layout.interleave) == 0)):
            uneven |= {str(symbol) for symbol in expression_of(size).free_symbols}
    if uneven:
        raise _UnevenError(uneven)


def _hold_layouts(whole: Trace, layouts: Mapping[int, Layout], sizes: SizeSymbols) -> None:
    """Fix the numbers, among those made of sizes, on which the rules may have leant that gave values their layouts."""
    for frame in whole.recorded.walk():
        for node in frame.body:
            if not isinstance(node, Operation):
                continue
            made = [value for value in (*node.inputs, *node.outputs) if value is not None]
            held = [layouts.get(value, REPLICATED) for value in made]
            if all(layout.is_replicated for layout in held):
                continue  # every rank does what the unsharded model does
            sizes.where = "" if node.location is None else node.location.short
            operator = lookup(node.name)
            if node.is_a("reshape", "strided reshape"):
                _hold_view(whole, layouts, node)
            elif (operator is not None and operator.kind in _FREE) or (
                node.is_a("split")
                or is_sized(node.target)
                or (node.is_a("slice", "slice copy") and _slices_beside(whole, layouts, node))
            ):
                continue
            else:
                fix((*node.arguments, *node.keywords.values()))
    sizes.where = ""


def _slices_beside(whole: Trace, layouts: Mapping[int, Layout], node: Operation) -> bool:
    """Whether a slice is of another dim than the split one."""
    layout = layouts.get(node.inputs[0], REPLICATED)
    dim = node.arguments[1] if len(node.arguments) > 1 else 0
    return layout.dim is not None and not layout.within and dim % len(whole.values[node.inputs[0]].shape) != layout.dim


def _hold_view(whole: Trace, layouts: Mapping[int, Layout], node: Operation) -> None:
    """Let a view take a split dim to the same part of its result at all sizes.

    Of plain parts that is so if as many entries come before the split dim as before that of the result: then each part
    is the same stretch of both. Otherwise the sizes that the view changes are fixed.
    """
    made = next((value for value in node.outputs if value is not None), None)
    if made is None or not node.inputs:
        return
    source, target = layouts.get(node.inputs[0], REPLICATED), layouts.get(made, REPLICATED)
    before, after = [*whole.values[node.inputs[0]].shape], [*whole.values[made].shape]
    if source.dim is None or target.dim is None or _is_same(before, after):
        return
    simple = all(not held.within and held.inner_dim is None for held in (source, target))
    reached = [_product(shape[: held.dim]) * held.interleave for shape, held in ((before, source), (after, target))]
    if simple and _is_equal(*reached):
        return
    for mine, its in _groups(before, after):
        if source.dim in mine or target.dim in its:
            fix([*(before[dim] for dim in mine), *(after[dim] for dim in its)])


def _groups(before: Sequence[Any], after: Sequence[Any]) -> Iterator[tuple[list[int], list[int]]]:
    """The dims of a view's operand and result that have the same entries: as few as can be told at all sizes."""
    dims: tuple[list[int], list[int]] = ([], [])
    shapes, ends = (before, after), [0, 0]
    while ends[0] < len(before) or ends[1] < len(after):
        products = [_product([shape[dim] for dim in held]) for shape, held in zip(shapes, dims, strict=True)]
        first = hint_of(products[0]) <= hint_of(products[1]) and ends[0] < len(before)
        side = 0 if first or ends[1] == len(after) else 1
        dims[side].append(ends[side])
        ends[side] += 1
        products = [_product([shape[dim] for dim in held]) for shape, held in zip(shapes, dims, strict=True)]
        if all(dims) and _is_equal(*products):
            for side, shape in enumerate(shapes):  # dims of one entry that follow
                while ends[side] < len(shape) and isinstance(shape[ends[side]], int) and shape[ends[side]] == 1:
                    dims[side].append(ends[side])
                    ends[side] += 1
            yield dims
            dims = ([], [])
    if any(dims):
        yield dims


def _product(sizes: Sequence[Any]) -> Any:
    found: Any = 1
    for size in sizes:
        found = found * size
    return found


def _is_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(_is_equal, one, other))


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two sizes are equal as expressions; no condition is made of it."""
    return bool(expression_of(one) == expression_of(other))


__all__ = ["LEAST_LENGTH", "Condition", "Cover", "NotCoveredError", "SizesOf", "Subject", "cover"]
