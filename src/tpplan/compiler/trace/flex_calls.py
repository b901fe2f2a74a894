"""Flex attention: a call of torch's higher-order operator, recorded as one operation with a rule.

in:  the call, as the function mode of a run sees it
out: its results, and an operation in the frame that is open

Its functions are run beside the record, on one score and its indices. What they compute is part of the operation, the
tensors that they read are operands, and by which index each dim of these is told says how it may be split.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tpplan.compat.flex_attention import FLEX_ATTENTION, flex_function
from tpplan.compat.modes import Unwatched
from tpplan.compat.schemas import schema_mutates
from tpplan.compiler.ir.trace import Operation, Reference
from tpplan.compiler.trace.random_draws import is_draw
from tpplan.compiler.trace.recorder import Recorder
from tpplan.compiler.trace.tape import Aside
from tpplan.compiler.trace.unfollowed import UnfollowedError
from tpplan.ops.flex import BATCH, HEAD, FlexCall, flex_attention

_INDICES = (BATCH, HEAD, "q", "k")
_SPLIT = frozenset((BATCH, HEAD))  # the dims of which a rank may have a part
_COUNTS = frozenset((torch.int32, torch.int64))  # dtypes in which an index is still the same one
_Part = tuple[int, tuple[int, ...]]  # of which value, and which of its dims are left


def record_flex_attention(
    recorder: Recorder, mode: TorchFunctionMode, args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Any:
    """Record a call of the operator, and return what it makes: the attention, log-sum-exps and largest scores.

    Args:
        recorder: the record.
        mode: what answers the functions of the call as it answers bodies.
        args, keywords: the call.
    """
    if not recorder.frames or not args[0].is_meta:
        return FLEX_ATTENTION(*args, **keywords)
    given = inspect.signature(type(FLEX_ATTENTION).__call__).bind(FLEX_ATTENTION, *args, **keywords)
    given.apply_defaults()
    call = given.arguments
    query, mask = call["query"], [*call["block_mask"]]
    with Unwatched():
        score = query.new_empty((), dtype=torch.promote_types(query.dtype, torch.float32))
        indices = [torch.empty((), dtype=torch.int32, device=query.device) for _ in _INDICES]
        scalars = [recorder.new_value(held, False) for held in (score, *indices)]
    read = _Read(recorder, mode, dict(zip(scalars, ("score", *_INDICES), strict=True)))
    texts = [
        read.follow("score_mod", call["score_mod"], (score, *indices, *call["score_mod_other_buffers"])),
        read.follow("mask_mod", mask.pop(), (*indices, *call["mask_mod_other_buffers"])),
    ]
    listed = [held for held in mask if isinstance(held, Tensor)]
    shown = ["tensor" if isinstance(held, Tensor) else repr(held) for held in mask]
    options: Mapping[str, Any] = call["kernel_options"] or {}
    plain = (*shown, repr(call["scale"]), repr(sorted(options.items(), key=str)))
    own = [_dims_of_mask(held, query.shape) for held in listed]
    return flex_attention(
        FlexCall(
            query,
            call["key"],
            call["value"],
            (*listed, *read.tensors()),
            (*own, *(tuple(dims) for dims in read.dims.values())),
            read.counted,
            "\n".join(texts),
            "\n".join(plain),
        )
    )


def _dims_of_mask(listed: Tensor, shape: Sequence[int]) -> tuple[str, ...]:
    """By which index the dims of what a block mask lists are told: one of size 1 is for all of the batch, or heads."""
    known = zip((BATCH, HEAD), listed.shape, shape, strict=False)
    names = [name if size != 1 or size == count else "" for name, size, count in known]
    return (*names, *("" for _ in listed.shape[2:]))[: listed.dim()]


@dataclass(slots=True)
class _Read:
    """What the functions of one call read.

    Attributes:
        scalars: the score and the indices, by value.
        dims: of each tensor that is read, by value: which index tells each of its dims; "" for all of it.
        counted: the indices of which a function reads the number, with that function.
    """

    recorder: Recorder
    mode: TorchFunctionMode
    scalars: dict[int, str]
    dims: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    counted: dict[str, str] = field(default_factory=dict[str, str])
    _name_of: str = ""
    _made: dict[int, _Part | None] = field(default_factory=dict[int, "_Part | None"])
    _told: dict[_Part, str] = field(default_factory=dict["_Part", str])

    def follow(self, name: str, function: Callable[..., Tensor], given: Sequence[Tensor]) -> str:
        """Run a function, and say in words what it computes."""
        self._name_of = name
        with self.recorder.aside() as aside, self.mode, torch.no_grad():
            result = flex_function(function, given)
        fault = self._fault(aside)
        if fault:
            raise UnfollowedError(
                f"the `{name}` of a `flex_attention` {fault}", "compute what it needs before the call, and index that"
            )
        names, lines = {**self.scalars}, list[str]()
        for node in aside.body:
            assert isinstance(node, Operation)
            self._note(node)
            arguments = self._shown((*node.arguments, *node.keywords.items()), names)
            names.update((output, f"%{len(names)}") for output in node.outputs if output is not None)
            lines.append(f"{node.name}{arguments}")
        with Unwatched():
            made = self.recorder.value_of(result)
        self._read([made])
        return "\n".join([*lines, self._name(made, names)])

    def _fault(self, aside: Aside) -> str:
        """What no operation on one score can stand for; "" for nothing."""
        nodes = [node for node in aside.body if isinstance(node, Operation)]
        if aside.calls:
            return "calls a module"
        if aside.branches:
            return "branches on a number"
        if any(is_draw(node.target, node.arguments, node.keywords) for node in nodes):
            return "draws random numbers"
        made = {output for node in nodes for output in node.outputs}
        written = (node for node in nodes if schema_mutates(node.target))
        if any(not made.issuperset(node.inputs[:1]) and node.inputs[0] not in self.scalars for node in written):
            return "writes to a tensor that it doesn't make"
        return ""

    def tensors(self) -> list[Tensor]:
        """The tensors that are read, in the order in which they are named."""
        held = {value: tensor for tensor, value in self.recorder.tensors() if value in self.dims}
        return [held[value] for value in self.dims]

    def _shown(self, held: Any, names: Mapping[int, str]) -> str:
        if isinstance(held, tuple):
            return f"({', '.join(self._shown(item, names) for item in held)})"  # pyright: ignore
        return self._name(held.identifier, names) if isinstance(held, Reference) else repr(held)

    def _name(self, value: int, names: Mapping[int, str]) -> str:
        if value in names:
            return names[value]
        self.dims.setdefault(value, ["" for _ in self.recorder.values[value].shape])
        return f"tensor {[*self.dims].index(value)}"

    def _part(self, value: int) -> _Part | None:
        """The part of a tensor from outside that a value is; None if it is something computed."""
        if value in self.scalars or value in self._made:
            return self._made.get(value)
        return value, tuple(range(len(self.recorder.values[value].shape)))

    def _note(self, node: Operation) -> None:
        """Follow the indices into the tensors that are read."""
        part = self._part(node.inputs[0]) if node.inputs else None
        made: _Part | None = None
        if node.is_a("alias", "detach", "copy", "cast"):
            made = part
            if node.inputs[0] in self.scalars:
                output = node.outputs[0] or 0
                if self.recorder.values[output].dtype in _COUNTS:
                    self.scalars[output] = self.scalars[node.inputs[0]]
                    return
                self._read(node.inputs)
        elif part is not None and node.is_a("index") and self._picks(node.arguments[1]):
            owner, left = part
            given = [None if held is None else held.identifier for held in node.arguments[1]]
            for dim, value in zip(left, given, strict=False):
                if value is not None:
                    self._tell(owner, dim, self.scalars.get(value, ""))
            self._read([value for value in given if value is not None and self._part(value) is not None])
            rest = [dim for dim, value in zip(left, given, strict=False) if value is None]
            made = owner, (*rest, *left[len(given) :])
        elif part is not None and node.is_a("select"):
            owner, left = part
            place: int = node.arguments[1] % len(left)
            self._tell(owner, left[place], "")
            made = owner, (*left[:place], *left[place + 1 :])
        else:
            self._read(node.inputs)
        self._made.update((output, made) for output in node.outputs if output is not None)

    def _picks(self, indices: Sequence[Reference | None]) -> bool:
        picked = [self.recorder.values[held.identifier] for held in indices if held is not None]
        return not any(value.shape or value.dtype is torch.bool for value in picked)

    def _read(self, values: Sequence[int]) -> None:
        """Note that the numbers of some values are read: of indices, and of what is left of tensors."""
        self._note_counted(self.scalars.get(value, "") for value in values)
        for part in map(self._part, values):
            for dim in () if part is None else part[1]:
                assert part is not None
                self._tell(part[0], dim, "")

    def _note_counted(self, indices: Iterable[str]) -> None:
        for index in _SPLIT.intersection(indices):
            self.counted.setdefault(index, self._name_of)

    def _tell(self, owner: int, dim: int, index: str) -> None:
        """Note by which index a dim is told; where another told it, or a number, all of it is read."""
        index = index if index in _SPLIT else ""
        dims = self.dims.setdefault(owner, ["" for _ in self.recorder.values[owner].shape])
        if index and index in (*dims[:dim], *dims[dim + 1 :]):  # a rank would need a part by both dims
            self._note_counted((index,))
            index = ""
        known = self._told.setdefault((owner, (dim,)), index)
        if known != index:
            self._note_counted((known, index))
        dims[dim] = index if known == index else ""


__all__ = ["record_flex_attention"]
