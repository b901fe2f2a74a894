"""Flex attention: torch's attention with functions of the user's, an operator whose rule follows from what they read.

in:  the tensors of a call, and which dims of what its functions read they index by the batch entry and by the head
out: its results on tensors without numbers, and an operator with a rule in the trace

    score + slopes[h] * (k - q)     ->   b h s! d!, b h t! d!, b h t! e!, h -> b h s! e!, b h s!, b h s!
    score + 0.1 * h                 ->   b h! s! d!, …: each rank's heads are counted from 0

Equations: https://pytorch.org/blog/flexattention/. What a block mask lists is for heads of its own, or for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import Any

import torch
from torch import Tensor

from tpplan.compat.flex_attention import flex_strides
from tpplan.ops.dims import dims_of, sizes_of
from tpplan.ops.functions import DeclaredFunction
from tpplan.plan import InternalError
from tpplan.plan.operator_rule import OperatorRule, read_rule

BATCH, HEAD = "b", "h"
_NAMES = {BATCH: ("b",), HEAD: ("k", "g")}  # of a rule
_SHOWN = {BATCH: "entry of the batch", HEAD: "head"}


@dataclass(frozen=True, slots=True)
class FlexCall:
    """A call of `flex_attention`.

    Attributes:
        query, key, value: (b, query heads, s, d), (b or 1, heads, t, d), (b or 1, heads, t, e).
        read: the tensors that its functions and its block mask read.
        indexed: of each of these, by which index each of its dims is told: `BATCH`, `HEAD`, or "" for all of it.
        counted: the indices that the functions read as numbers, with the function that does.
        functions: what the functions compute.
        settings: all else that isn't a tensor.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    read: tuple[Tensor, ...]
    indexed: tuple[tuple[str, ...], ...]
    counted: Mapping[str, str]
    functions: str
    settings: str


def flex_attention(call: FlexCall) -> tuple[Tensor, Tensor, Tensor]:
    """The attention (b, query heads, s, e), its log-sum-exps and largest scores (b, query heads, s)."""
    tensors = [call.query, call.key, call.value, *call.read]
    made = _operator_of(call).defined(len(tensors))(tensors, f"{call.functions}\n{call.settings}")
    return made[0], made[1], made[2]


class _FlexAttention(DeclaredFunction):
    """The operator for calls of one rule."""

    def _run(self, tensors: Sequence[Tensor], call: str) -> list[Tensor]:
        if not tensors[0].is_meta:
            raise InternalError("`flex_attention` is run by an operator that has none of its functions")
        query, _, value = tensors[:3]
        precision = torch.promote_types(query.dtype, torch.float32)
        made = query.new_empty((*query.shape[:3], value.shape[-1]))
        statistics = [query.new_empty(query.shape[:3], dtype=precision) for _ in range(2)]
        return [flex_strides(made, query), *statistics]


_names: set[str] = set()
_known: dict[tuple[str, int], list[_FlexAttention]] = {}


def _operator_of(call: FlexCall) -> _FlexAttention:
    """The operator for a call: on a rank's part of a call it is the one of the whole."""
    known = _known.setdefault((call.functions, len(call.read)), [])
    tensors = [call.query, call.key, call.value, *call.read]
    found = next((held for held in known if _fits(held.rule, tensors)), None)
    if found is None:
        reasons = {name: why for index, why in _reasons(call) for name in _NAMES[index]}
        rule = with_fields(read_rule(_rule_text(call)), derived=True, reasons=tuple(reasons.items()))
        found = _FlexAttention(_named, rule, None)
        _names.add(str(found.defined(len(tensors))))
    else:
        known.remove(found)
    known.insert(0, found)  # the last one first: a rank's part comes after the whole
    return found


def _named(*_: Any) -> Any:
    """What messages call the operator by."""


_named.__name__ = "flex_attention"


def is_flex(name: str) -> bool:
    """Whether an operator, by its full name, stands for a call of `flex_attention`: it computes shapes alone."""
    return name.partition(".default")[0] in _names


def _reasons(call: FlexCall) -> Iterator[tuple[str, str]]:
    """Why an index can't be split, in words."""
    for index, name in _SHOWN.items():
        function = call.counted.get(index)
        text = "reads a tensor of another size by it" if function is None else f"its `{function}` reads its number"
        yield index, f"needs each {name}, as {text if function is not None else f'it {text}'}"


def _fits(rule: OperatorRule, tensors: Sequence[Tensor]) -> bool:
    try:
        sizes_of([(dims_of(term, t.dim()), tuple(t.shape)) for term, t in zip(rule.operands, tensors, strict=True)])
    except ValueError:
        return False
    return True


def _rule_text(call: FlexCall) -> str:
    """The rule, in which a name is whole where a function reads the index as a number, or by other sizes."""
    queries, keys = call.query.shape[1], call.key.shape[1]
    sizes = {BATCH: call.query.shape[0], HEAD: queries, "": -1}
    read = zip(call.read, call.indexed, strict=True)
    told = [[(i, sizes[i] == n) for i, n in zip(dims, t.shape, strict=True)] for t, dims in read]
    whole = {i for dims in told for i, fits in dims if i and not fits} | call.counted.keys()
    batch = "b!" if BATCH in whole else "b"
    key, group = ("k!", "g!") if HEAD in whole else ("k", "g")
    head = key if queries == keys else f"({key} {group})"
    names = {BATCH: batch, HEAD: head}
    shared = batch if call.key.shape[0] == sizes[BATCH] else "o!"
    terms = [f"{batch} {head} s! d!", f"{shared} {key} t! d!", f"{shared} {key} t! e!"]
    for number, dims in enumerate(told):
        terms.append(" ".join(names[i] if fits else f"c{number}x{d}!" for d, (i, fits) in enumerate(dims)) or "()")
    return f"{', '.join(terms)} -> {batch} {head} s! e!, {batch} {head} s!, {batch} {head} s!"


__all__ = ["BATCH", "HEAD", "FlexCall", "flex_attention", "is_flex"]
