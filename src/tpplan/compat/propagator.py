# pyright: reportPrivateUsage=false
"""What DTensor's sharding rules say of an operator, without a mesh or a process group."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, RuntimeSchemaInfo
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.experimental import register_sharding as _register_sharding
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from tpplan.compat.modes import without_dispatch_modes, without_function_modes
from tpplan.compat.placements import interleaved_shard, interleaving
from tpplan.compat.schemas import _VIEWS


@dataclass(frozen=True, slots=True)
class OperatorMeta:
    """A tensor operand of a propagation query: its global geometry and its placement on the one axis.

    For every torch.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    placement: Placement


@functools.cache
def fake_mesh(size: int, rank: int = 0, axis: str = "tp") -> DeviceMesh:
    """A one-axis mesh of `size` ranks, seen from `rank`, that needs no process group; it can't communicate.

    DTensor remembers what it works out for a mesh by the mesh's content, to which the axis's name belongs.
    For every torch.
    """
    with without_dispatch_modes(), without_function_modes():  # such as a caller's default device
        return DeviceMesh("cpu", torch.arange(size), mesh_dim_names=(axis,), _init_backend=False, _rank=rank)


def _to_spec(mesh: DeviceMesh, operand: Any) -> Any:
    if isinstance(operand, OperatorMeta):
        meta = TensorMeta(torch.Size(operand.shape), operand.stride, operand.dtype)
        return DTensorSpec(mesh, (operand.placement,), tensor_meta=meta)
    if isinstance(operand, (list, tuple)):
        return [_to_spec(mesh, item) for item in operand]  # pyright: ignore
    return operand


_Question = tuple[OpOverload, tuple[Any, ...], tuple[tuple[str, Any], ...], int]


class _Same:
    """An object, equal to itself alone; as it is kept, no other one gets its address."""

    __slots__ = ("_kept",)

    def __init__(self, kept: object) -> None:
        self._kept = kept

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._kept is self._kept

    def __hash__(self) -> int:
        return id(self._kept)


class NoRule(Exception):
    """DTensor has no sharding rule for the operator, or its rule refused these placements; the text says which.

    For every torch.
    """


def propagate(
    operator: OpOverload, arguments: Sequence[Any], keywords: Mapping[str, Any], size: int
) -> list[Placement | None] | None:
    """Ask DTensor's sharding propagator what `operator` yields for operands placed as given, without communication.

    Tensor operands are `OperatorMeta`; anything else is passed through. Returns one placement for each tensor result,
    or None where the propagator would first have to move an operand. Raises `NoRule` where it has no answer.
    For every torch.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    rules = tuple(
        _Same(getattr(propagator, table).get(operator))
        for table in ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
    )
    question = (operator, tuple(arguments), tuple(keywords.items()), size)
    try:
        answer = _remembered(question, rules)
    except TypeError:  # an argument that can't be hashed
        answer = _asked(question)
    if isinstance(answer, NoRule):
        raise answer
    return None if answer is None else [*answer]


@functools.lru_cache(maxsize=1 << 14)
def _remembered(question: _Question, rules: tuple[_Same, ...]) -> tuple[Placement | None, ...] | NoRule | None:
    """As `_asked`, which takes ten milliseconds; `rules` are those that the operator has now."""
    return _asked(question)


def _asked(question: _Question) -> tuple[Placement | None, ...] | NoRule | None:
    operator, arguments, keywords, size = question
    mesh = fake_mesh(size)
    propagator = DTensor._op_dispatcher.sharding_propagator
    single_dim = propagator.op_to_schema_info_for_single_dim_strategy
    schema = OpSchema(
        operator,
        tuple(_to_spec(mesh, a) for a in arguments),
        {name: _to_spec(mesh, a) for name, a in keywords},
        schema_info=propagator.op_to_schema_info.get(operator) or single_dim.get(operator),
    )
    try:
        sharding = _MetaPropagator(propagator).propagate_op_sharding_non_cached(schema)
    except Exception as error:  # the propagator raises bare RuntimeErrors, NotImplementedErrors and assertions alike
        viewed = _view_placement(operator, arguments, size)
        if viewed is not None:
            return (viewed,)
        return NoRule(str(error).splitlines()[0] if str(error) else type(error).__name__)
    if sharding.needs_redistribute and sharding.redistribute_schema is not None:
        # The flag is also set where only *size arguments* must become local; a changed operand is communication.
        suggested = _specs(sharding.redistribute_schema)
        for given, wanted in zip(_specs(schema), suggested, strict=True):
            if given.placements != wanted.placements:
                return None
    output: Any = sharding.output_spec
    if output is None:
        return ()
    outputs: list[DTensorSpec | None] = [*output] if isinstance(output, (list, tuple)) else [output]  # pyright: ignore
    return tuple([None if spec is None else spec.placements[0] for spec in outputs])


class _MetaPropagator(ShardingPropagator):
    """A propagator that asks meta tensors for the geometry of results: torch's asks fake ones, which takes longest."""

    def __init__(self, propagator: ShardingPropagator) -> None:
        self.__dict__ = propagator.__dict__  # its tables, as they are

    def _propagate_tensor_meta_non_cached(self, op_schema: OpSchema) -> Any:
        arguments = (op_schema.args_schema, op_schema.kwargs_schema)
        tensors: list[Tensor] = []
        try:
            with without_dispatch_modes(), without_function_modes():  # which would take it for the model's
                on_meta: Any = _on_meta(arguments, tensors)
                if not tensors:
                    raise _NotOnMetaError
                made: Any = op_schema.op(*on_meta[0], **on_meta[1])
                return _geometry(made)
        except Exception:  # whatever an operator can't do there
            return super()._propagate_tensor_meta_non_cached(op_schema)


class _NotOnMetaError(Exception):
    """An operation would make a real tensor."""


def _on_meta(held: Any, tensors: list[Tensor]) -> Any:
    """Arguments of an operation with tensors on `meta` in place of specs, which are noted."""
    if isinstance(held, DTensorSpec):
        meta = held.tensor_meta
        assert meta is not None
        tensors.append(torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta"))
        return tensors[-1]
    if isinstance(held, (list, tuple)):
        return type(held)(_on_meta(item, tensors) for item in held)  # pyright: ignore
    if isinstance(held, dict):
        return {name: _on_meta(item, tensors) for name, item in held.items()}  # pyright: ignore
    if isinstance(held, torch.device):
        raise _NotOnMetaError
    return held


def _geometry(made: Any) -> Any:
    """What the propagator is told of results."""
    if isinstance(made, Tensor):
        return TensorMeta(made.shape, made.stride(), made.dtype)
    if isinstance(made, (list, tuple)):
        found = [_geometry(item) if isinstance(item, Tensor) else None for item in made]  # pyright: ignore
        return tuple(found) if isinstance(made, tuple) else found
    return None


def register_sharding(operator: OpOverload, rule: Callable[..., Any]) -> None:
    """As torch's `register_sharding`, with every argument but the first counted when results are looked up again.

    By itself torch remembers a rule's answer by the tensors and by what follows the first integer: which of several
    optional tensors was None is forgotten. For every torch.
    """
    _register_sharding(operator)(rule)
    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[operator] = RuntimeSchemaInfo(static_argnum=1)


def given_sharding(operator: OpOverload) -> Callable[..., Any] | None:
    """The function that somebody gave to torch's `register_sharding` for an operator; None if nobody did.

    For every torch.
    """
    strategy: Any = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs.get(operator)
    of_torch = isinstance(strategy, functools.partial) and strategy.func.__qualname__.startswith("register_sharding.")
    return strategy.args[0] if of_torch else None


def acceptable_shardings(
    sharding: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any], size: int
) -> list[tuple[list[Placement | None], list[Placement | None]]]:
    """Ask a function for `register_sharding` as torch does: the placements of results and of operands, way by way.

    Tensor operands are `OperatorMeta`; anything else is passed through. For every torch.
    """

    def spec(operand: Any) -> Any:
        return (*map(spec, operand),) if type(operand) is tuple else _to_spec(fake_mesh(size), operand)  # pyright: ignore

    made = sharding(*map(spec, arguments), **{name: spec(held) for name, held in keywords.items()})
    return [([*results], [*operands]) for results, operands in made]


def _view_placement(operator: OpOverload, arguments: Sequence[Any], size: int) -> Placement | None:
    """The placement after a view, for torch before 2.12, whose rules know no interleaved shards.

    A group of dims of the one shape covers the same elements as a group of the other. With the elements of the group
    that precede the sharded dim counted as `outer`, the new dim that begins at `outer` is sharded; one that contains it
    is interleaved.
    """
    if operator.name() not in _VIEWS or not isinstance(arguments[0], OperatorMeta):
        return None
    source, split = arguments[0].shape, interleaving(arguments[0].placement)
    target = _without_minus_one(tuple(arguments[1]), math.prod(source))
    if split is None or 0 in source:
        return None
    dim, factor = split
    start, first = _group_of(source, target, dim)
    outer = math.prod(source[start:dim]) * factor
    covered = 1
    for position in range(first, len(target)):
        if covered == outer and (target[position] != 1 or size == 1):
            return Shard(position) if target[position] % size == 0 else None
        if covered * target[position] > outer:
            inner = outer // covered
            fits = outer % covered == 0 and target[position] % (inner * size) == 0
            return interleaved_shard(position, inner) if fits else None
        covered *= target[position]
    return None


def _without_minus_one(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    known = math.prod(n for n in shape if n != -1)
    return tuple(count // max(known, 1) if n == -1 else n for n in shape)


def _group_of(source: tuple[int, ...], target: tuple[int, ...], dim: int) -> tuple[int, int]:
    """The first dims, in both shapes, of the smallest groups of equal size of which the one contains `dim`."""
    i = j = 0
    while True:
        start, first = i, j
        ours, theirs = source[i], target[j]
        i, j = i + 1, j + 1
        while ours != theirs:
            if ours < theirs:
                ours, i = ours * source[i], i + 1
            else:
                theirs, j = theirs * target[j], j + 1
        if start <= dim < i:
            return start, first


def _specs(schema: OpSchema) -> list[DTensorSpec]:
    leaves = pytree.tree_leaves(
        (schema.args_schema, schema.kwargs_schema), is_leaf=lambda x: isinstance(x, DTensorSpec)
    )
    return [leaf for leaf in leaves if isinstance(leaf, DTensorSpec)]
