"""Readers: how the features that a module makes are taken apart further on.

in:  a trace, and a value with one of its dims
out: `Taken`: the stretches that splits and slices cut, and into how many heads each is viewed

    qkv(x).split([32, 16, 16], -1), q.view(b, s, 4, 8)   ->  stretches 32|16|16, heads 4|2|2
    qkv(x).view(b, s, 3, 4, 8)                           ->  stretches 32|32|32, heads 4|4|4
    k_proj(x).view(b, s, 2, 8)                           ->  one stretch, 2 heads
    qkv(x).view(b, s, 2, 6, 8), x[..., :-2, :], …        ->  one stretch, 2 groups, each of 32|8|8, heads 4|1|1
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tpplan.compiler.ir.dataflow import DataFlow
from tpplan.compiler.ir.region import picks_of
from tpplan.compiler.ir.trace import Frame, Operation
from tpplan.compiler.rules.folding import folded_into
from tpplan.compiler.rules.packed import picked_stretch
from tpplan.ops.dim_map import dim_map, dim_of, picked_dim
from tpplan.ops.registry import is_entrywise

_DEEPEST = 12
_PICKS = 4  # operations between a bias and where it is added


@dataclass(frozen=True, slots=True)
class Taken:
    """How the features are taken apart.

    Attributes:
        frame, operation: the body and the operation that does it.
        stretches: the sizes of the parts, in order; a single one if the features are only viewed as heads.
        heads: for each stretch into how many heads it is viewed; None where it isn't.
        finer: the same where stretches are taken apart again further on; None if none is.
        group: where a stretch is viewed as groups of heads, how each of the groups is taken apart; None if none is.
    """

    frame: Frame
    operation: Operation
    stretches: tuple[int, ...]
    heads: tuple[int | None, ...]
    finer: Taken | None = None
    group: Taken | None = None

    @property
    def ways(self) -> tuple[Taken, ...]:
        """This, and what is finer."""
        return (self,) if self.finer is None else (self, self.finer)


@dataclass(frozen=True, slots=True)
class _Dim:
    """A dim of a value; one of its entries stands for `unit` features."""

    value: int
    dim: int
    unit: int


class Readers:
    """Follows values to those that read them, through boundaries.

    Attributes:
        trace: of which the values are.
        stored: the values of parameters and buffers, each with its names.
        named: these values by each of their names.
    """

    def __init__(self, flow: DataFlow) -> None:
        """Follow the values of `flow`."""
        self.trace = flow.trace
        self.stored = flow.trace.stored
        self.named = {name: value for value, names in self.stored.items() for name in names}
        self._flow = flow

    def of(self, value: int) -> Iterator[tuple[Frame, Operation, int]]:
        """The operations that read `value`, or an alias of it on the other side of a boundary, and which they read."""
        for frame, operation in self._flow.operations.get(value, ()):
            yield frame, operation, value
        for target in self._flow.targets.get(value, ()):
            yield from self.of(target)

    def maker(self, value: int) -> tuple[int, Operation | None]:
        """The value on the far side of the boundaries that `value` came through, and the operation that made it."""
        while value in self._flow.source:
            value = self._flow.source[value]
        return value, self._flow.made.get(value)

    def is_written(self, value: int) -> bool:
        """Whether an operation writes to `value`, or to what shares its storage."""
        return value in self._flow.written

    def joined(self, value: int, dim: int | None = None) -> tuple[int, ...]:
        """The sizes of what was concatenated along a dim, the last if none is named, to make `value`.

        Empty if it wasn't.
        """
        value, made = self.maker(value)
        shape = self.trace.values[value].shape
        along = len(shape) - 1 if dim is None else dim
        if made is None or not made.inputs:
            return ()
        if made.is_a("join"):
            joined = [self.trace.values[i].shape for i in made.inputs]
            sizes = tuple(each[along] for each in joined if len(each) == len(shape))  # torch skips a vector of nothing
            return sizes if dim_of(made.target, made.arguments, len(shape)) == along else ()
        before = self.trace.values[made.inputs[0]].shape
        kept = dim_map(made.target, made.arguments, before, shape)
        if kept is None:
            alike = shape == before and len(made.inputs) == 1 and (is_entrywise(made.name) or made.is_a("reshape"))
            return self.joined(made.inputs[0], along) if alike else ()
        source = kept[along]
        return () if source is None else self.joined(made.inputs[0], source)

    def made_of_heads(self, value: int) -> tuple[Frame, int] | None:
        """The body that viewed heads as the last dim of `value`, and of how many heads; None if none did.

        What is done with the features afterwards is done entry by entry.
        """
        return self._made_of_heads(value, 0)

    def _made_of_heads(self, value: int, depth: int) -> tuple[Frame, int] | None:
        while value in self._flow.source:
            value = self._flow.source[value]
        made, shape = self._flow.made.get(value), self.trace.values[value].shape
        if made is None or not made.inputs or not shape or depth > _DEEPEST:
            return None
        before = self.trace.values[made.inputs[0]].shape
        if made.is_a("reshape") and before[-1:] != shape[-1:]:
            split = _split_into(shape, before, len(shape) - 1)
            frame = next(f for f, operation in self._flow.operations[made.inputs[0]] if operation is made)
            return (frame, before[split[0][0]]) if len(split) == 2 else None
        if not made.is_a("reshape") and not is_entrywise(made.name):
            return None
        alike = (i for i in made.inputs if made.is_a("reshape") or self.trace.values[i].shape == shape)
        return next((found for i in alike if (found := self._made_of_heads(i, depth + 1)) is not None), None)

    def beside_heads(self, value: int, depth: int = 0) -> tuple[Frame, int] | None:
        """The same of a value that `value` is combined with entry by entry, as a gate with what it gates."""
        shape = self.trace.values[value].shape
        for _, operation, seen in self.of(value) if depth < _DEEPEST else ():
            made = operation.outputs[0] if len(operation.outputs) == 1 else None
            if made is None or not is_entrywise(operation.name) or self.trace.values[made].shape != shape:
                continue
            others = (i for i in operation.inputs if i != seen and self.trace.values[i].shape == shape)
            found = next(filter(None, map(self.made_of_heads, others)), None) or self.beside_heads(made, depth + 1)
            if found is not None:
                return found
        return None

    def taken_apart(self, value: int, dim: int = -1) -> Taken | None:
        """How a dim of `value`, the last if none is named, is taken apart, if that is what is done with it."""
        shape = self.trace.values[value].shape
        return self._follow(_Dim(value, dim % len(shape), 1), shape[dim], 0) if shape else None

    def heads_of(self, value: int, dim: int) -> int | None:
        """Into how many heads a dim of `value` is viewed, which may be joined with the batch; None if into none."""
        shape = self.trace.values[value].shape
        return self._heads(_Dim(value, dim % len(shape), 1), shape[dim])

    def _follow(self, at: _Dim, whole: int, depth: int) -> Taken | None:
        shape = self.trace.values[at.value].shape
        slices: dict[int, tuple[int, int | None]] = {}
        for frame, operation, seen in self.of(at.value) if depth < 16 else ():
            at = replace(at, value=seen)
            if operation.is_a("split") and dim_of(operation.target, operation.arguments, len(shape)) == at.dim:
                parts = [o for o in operation.outputs if o is not None]
                sizes = [self.trace.values[o].shape[at.dim] for o in parts]
                if len(parts) > 1:
                    dims = [_Dim(o, at.dim, at.unit) for o in parts]
                    heads = tuple(self._heads(d, n) for d, n in zip(dims, sizes, strict=True))
                    taken = Taken(frame, operation, tuple(n * at.unit for n in sizes), heads)
                    return replace(taken, finer=self._finer(taken, dims, depth))
            elif operation.is_a("gate") and dim_of(operation.target, operation.arguments, len(shape)) == at.dim:
                half, made = shape[at.dim] // 2, next(o for o in operation.outputs if o is not None)
                heads = self._heads(_Dim(made, at.dim, at.unit), half)
                return Taken(frame, operation, (half * at.unit,) * 2, (heads,) * 2)
            elif (stretch := self._stretch(at, operation)) is not None:
                (part,) = (o for o in operation.outputs if o is not None)
                start, length = stretch
                if length < shape[at.dim]:
                    slices[start] = (length, self._heads_picked(at, operation, part, length))
                    if sum(n for n, _ in slices.values()) == shape[at.dim]:
                        held = [slices[key] for key in sorted(slices)]
                        return Taken(frame, operation, tuple(n * at.unit for n, _ in held), tuple(h for _, h in held))
            else:
                found = self._step(at, frame, operation, whole, depth)
                if found is not None:
                    return found
        return None

    def _stretch(self, at: _Dim, operation: Operation) -> tuple[int, int] | None:
        """The stretch of a dim, as start and length, that an operation takes out of it."""
        shape = self.trace.values[at.value].shape
        if operation.inputs[:1] != (at.value,):
            return None
        if operation.is_a("slice") and dim_of(operation.target, operation.arguments, len(shape)) == at.dim:
            start = _argument(operation, 2, 0) or 0
            made = next(o for o in operation.outputs if o is not None)
            length = self.trace.values[made].shape[at.dim]
            start = max(start + shape[at.dim], 0) if start < 0 else start
            return (start, length) if _argument(operation, 4, 1) == 1 else None
        if operation.is_a("select") and operation.arguments[1] % len(shape) == at.dim:
            return (operation.arguments[2] % shape[at.dim], 1)
        if operation.is_a("pick") and picked_dim(operation.arguments, len(shape)) == at.dim:
            return picked_stretch(picks_of(self.trace.values[operation.inputs[1]].numbers), shape[at.dim])
        return None

    def _finer(self, taken: Taken, parts: Sequence[_Dim], depth: int) -> Taken | None:
        """The stretches with those in place of them that are split again."""
        stretches: list[int] = []
        heads: list[int | None] = []
        for at, count, held in zip(parts, taken.stretches, taken.heads, strict=True):
            inner = self._follow(at, count, depth + 1) if at.unit == 1 else None
            again = inner is not None and inner.operation.is_a("split") and sum(inner.stretches) == count
            stretches += inner.ways[-1].stretches if again and inner is not None else (count,)
            heads += inner.ways[-1].heads if again and inner is not None else (held,)
        return replace(taken, stretches=tuple(stretches), heads=tuple(heads)) if len(stretches) > len(parts) else None

    def _step(self, at: _Dim, frame: Frame, operation: Operation, whole: int, depth: int) -> Taken | None:
        channels = folded_into(operation, self.trace.values, at.dim)
        if channels is not None and at.unit == 1 and operation.inputs[0] == at.value:
            return Taken(frame, operation, (whole,), (channels,))
        after = self._after(at, operation)
        if len(after) > 1 and self._picked(after[-1], 0):
            # Pairs of features, as rotary embeddings turn them: no dim of heads tells them apart.
            count = self.trace.values[after[0].value].shape[after[0].dim]
            return Taken(frame, operation, (whole,), (count,)) if len(after) > 2 else None
        if not after:
            return None
        if len(after) > 2:
            count, heads = (self.trace.values[d.value].shape[d.dim] for d in after[:2])
            group = self._group(after[1], whole // count, depth)
            if group is not None:
                return Taken(frame, operation, (whole,), (count,), group=group)
            return Taken(frame, operation, (whole // count,) * count, (heads,) * count)
        if len(after) == 2 and self._picked(after[0], 0):
            # Views such as (…, 3, width), of which q, k and v are then picked one by one.
            count = self.trace.values[after[0].value].shape[after[0].dim]
            return Taken(frame, operation, (whole // count,) * count, (self._heads(after[1], whole // count),) * count)
        if len(after) == 2 and self._drops(after[0], after[1], 0):
            return self._follow(after[1], whole, depth + 1)
        found = self._follow(after[0], whole, depth + 1)
        if found is not None or len(after) == 1:
            return found
        count = self.trace.values[after[0].value].shape[after[0].dim]
        return Taken(frame, operation, (whole,), (count,), group=self._group(after[1], whole // count, depth))

    def _group(self, at: _Dim, whole: int, depth: int) -> Taken | None:
        """How each of several groups of heads is taken apart, such as queries with their key and value.

        A stretch of heads tells it from a head that is cut in two, as for rotary embeddings.
        """
        group = self._follow(at, whole, depth + 1)
        if group is None or sum(group.stretches) != whole or not any(n and n > 1 for n in group.heads):
            return None
        return group

    def _drops(self, one: _Dim, features: _Dim, depth: int) -> bool:
        """Whether a dim of size 1 is dropped again from behind the features, as by an einsum: it is no head then.

        Of a single row, a dim of size 1 may be any of them.
        """
        before = self.trace.values[one.value].shape
        for _, operation, seen in self.of(one.value) if before[one.dim] == 1 and depth < _DEEPEST else ():
            at = (replace(one, value=seen), replace(features, value=seen))
            made = next((o for o in operation.outputs if o is not None), None)
            if made is not None and operation.is_a("reshape"):
                place = len(before) - 1 if math.prod(before) == before[features.dim] else one.dim
                kept = before[:place] + before[place + 1 :]
                return self.trace.values[made].shape == kept and place > features.dim
            moved = [self._after(held, operation) for held in at]
            if all(len(held) == 1 for held in moved):
                return self._drops(moved[0][0], moved[1][0], depth + 1)
        return False

    def _picked(self, at: _Dim, depth: int) -> bool:
        """Whether the entries of a dim are picked one by one."""
        rank = len(self.trace.values[at.value].shape)
        for _, operation, seen in self.of(at.value) if depth < _DEEPEST else ():
            picks = operation.is_a("select", "unbind")
            if picks and dim_of(operation.target, operation.arguments, rank) == at.dim:
                return True
            if operation.is_a("to complex") and at.dim == rank - 1:
                return True
            after = self._after(replace(at, value=seen), operation)
            if len(after) == 1 and self._picked(after[0], depth + 1):
                return True
        return False

    def _heads_picked(self, at: _Dim, operation: Operation, part: int, length: int) -> int | None:
        """Into how many heads a stretch is viewed that `operation` takes out of a dim; a select leaves no such dim."""
        if operation.is_a("select"):
            return length if at.unit > 1 else None
        return self._heads(_Dim(part, at.dim, at.unit), length)

    def _heads(self, at: _Dim, count: int) -> int | None:
        """Into how many heads a stretch is viewed."""
        if at.unit > 1:
            return count
        for _, operation, seen in self.of(at.value):
            if operation.is_a("addition") and self._adds_to_each(at, operation, seen, count):
                return count
            after = self._after(replace(at, value=seen), operation)
            if len(after) > 1:
                return self.trace.values[after[0].value].shape[after[0].dim]
            if not after and operation.is_a("reshape"):
                return self._of_groups(at, operation)
            heads = self._heads(after[0], count) if after else None
            if heads is not None:
                return heads
        return None

    def _of_groups(self, at: _Dim, operation: Operation) -> int | None:
        """Into how many heads a stretch of each group is viewed where the view joins all groups' heads to one dim."""
        before, made = self.trace.values[at.value].shape, next(o for o in operation.outputs if o is not None)
        after, groups = self.trace.values[made].shape, at.dim - 1
        if (
            groups < 0
            or after[:groups] != before[:groups]
            or len(after) <= groups + 1
            or after[groups] % before[groups]
        ):
            return None
        heads = after[groups] // before[groups]
        return heads if heads * after[groups + 1] == before[at.dim] else None

    def _adds_to_each(self, at: _Dim, operation: Operation, seen: int, count: int) -> bool:
        """Whether a vector is added that has a number for each of the features: each is a head."""
        others = [i for i in operation.inputs if i != seen]
        parameter = self.parameter_behind(others[0]) if len(others) == 1 else None
        if parameter is None or self.trace.values[parameter].shape != (count,):
            return False
        shape = self.trace.values[others[0]].shape
        dim = at.dim - len(self.trace.values[seen].shape) + len(shape)
        return dim >= 0 and shape[dim] == count and count not in (*shape[:dim], *shape[dim + 1 :])

    def _after(self, at: _Dim, operation: Operation) -> list[_Dim]:
        """Where the dim is after an operation that keeps or splits it: one dim, or those that it was split into."""
        outputs = [o for o in operation.outputs if o is not None]
        if len(outputs) != 1 and not operation.is_a("norm"):  # which gives statistics too
            return []
        before, after = self.trace.values[at.value].shape, self.trace.values[outputs[0]].shape
        kept = dim_map(operation.target, operation.arguments, before, after)
        if operation.inputs[0] != at.value and not operation.is_a("join"):
            kept = None
        elif operation.is_a("reshape"):
            if self._unfolds(at.value, after):
                return [_Dim(outputs[0], len(after) - 1, at.unit)]
            dims = [_Dim(outputs[0], d, at.unit * unit) for d, unit in _split_into(before, after, at.dim)]
            return dims[1:] if len(dims) > 2 and after[dims[0].dim] == 1 and not self._picked(dims[-1], 0) else dims
        if kept is not None:
            return [_Dim(outputs[0], kept.index(at.dim), at.unit)] if at.dim in kept else []
        return [_Dim(outputs[0], at.dim, at.unit)] if after == before and self._beside(at, operation) else []

    def _unfolds(self, value: int, after: tuple[int, ...]) -> bool:
        """Whether a view to this shape takes the rows of a product apart again, which were flattened before it."""
        shape = self.trace.values[value].shape
        product = self._made_by(value, ("plain product", "two factors"), 0)
        flattened = None if product is None else self._made_by(product.inputs[-2], ("reshape",), 0)
        if flattened is None:
            return False
        before = self.trace.values[flattened.inputs[0]].shape
        return before[:-1] == after[:-1] and after[-1] == shape[-1]

    def _made_by(self, value: int, roles: tuple[str, ...], depth: int) -> Operation | None:
        """The operation of these roles that made a value, which may have been scaled, rounded or cast since then."""
        made = self._flow.made.get(value)
        if made is None or made.is_a(*roles):
            return made
        if not is_entrywise(made.name) or depth > _DEEPEST:
            return None
        shape = self.trace.values[value].shape
        found = (self._made_by(i, roles, depth + 1) for i in made.inputs if self.trace.values[i].shape == shape)
        return next((operation for operation in found if operation is not None), None)

    def _beside(self, at: _Dim, operation: Operation) -> bool:
        """Whether the other operands go along with the dim.

        These are parameters and buffers, what is alike for all entries of the dim, as a mean is, and other products
        that are added to the one that it comes from.
        """
        rank = len(self.trace.values[at.value].shape)
        for i in operation.inputs:
            shape = self.trace.values[i].shape
            dim = at.dim - rank + len(shape)
            if i == at.value or dim < 0 or shape[dim] == 1 or self.parameter_behind(i) is not None:
                continue
            if not operation.is_a("addition") or not (self._is_product(i) and self._is_product(at.value)):
                return False
        return True

    def _is_product(self, value: int) -> bool:
        """Whether a value is a product, or a sum of products, but for factors that change no shape."""
        for _ in range(_DEEPEST):
            value = self._flow.source.get(value, value)
            made = self._flow.made.get(value)
            if made is None:
                continue
            if made.is_a("plain product"):
                return True
            if made.is_a("addition"):
                return all(map(self._is_product, made.inputs))
            if not made.is_a("reshape", "times", "cast", "alias", "copy") or len(made.inputs) != 1:
                return False
            value = made.inputs[0]
        return False

    def parameter_behind(self, value: int) -> int | None:
        """The parameter or buffer that `value` is, or was picked from, such as a bias for each token's expert."""
        for _ in range(_PICKS):
            value = self._flow.source.get(value, value)
            if value in self.trace.parameters or value in self.trace.buffers:
                return value
            made = self._flow.made.get(value)
            if made is None or not made.inputs:
                return None
            value = made.inputs[0]
        return None


def _split_into(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> list[tuple[int, int]]:
    """The dims, each with the entries of `dim` that one of its entries stands for, into which a view splits `dim`."""
    if 0 in before:
        return []
    outer = math.prod(before[:dim])
    covered, found = 1, list[tuple[int, int]]()
    inner = before[dim]
    # Dims of size 1 that were there before, such as the one token of a step.
    ones = next((n for n, size in enumerate(reversed(before[:dim])) if size != 1), dim)
    for position, size in enumerate(after):
        if covered == outer and size == 1 and ones:
            ones -= 1
        elif covered >= outer and covered < outer * before[dim]:
            inner //= size
            found.append((position, inner))
        covered *= size
    exact = math.prod(after[d] for d, _ in found) == before[dim] and found
    starts = math.prod(after[: found[0][0]]) == outer if found else False
    if not (exact and starts):
        return []
    # A dim of size 1 right before the features, or before pairs of them, is a single head; elsewhere it says nothing.
    first, *rest = (after[d] for d, _ in found)
    single = first == 1 and (len(rest) == 1 or (len(rest) == 2 and 1 not in rest))
    return found if single else [d for d in found if after[d[0]] > 1] or found[:1]


def _argument(operation: Operation, position: int, default: int) -> int:
    return operation.arguments[position] if len(operation.arguments) > position else default


__all__ = ["Readers", "Taken"]
