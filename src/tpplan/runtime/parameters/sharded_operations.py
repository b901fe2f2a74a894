"""Operations on sharded tensors: on parts where each element counts by itself, else on the whole.

p.add_(g), torch._foreach_lerp_, fused AdamW     on parts; plain tensors of the whole are cut
norms and sums                                   on what each rank is the first to hold: a plain number
normal_, rand_like                               as the unsharded model draws, of which each rank takes its part
p.t(), p[0]                                      a view, which writes through
p.mean(1), p @ x, p[mask] = 0                    on the whole, which is gathered, and cut where it was written to
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tpplan.compat.dtensors import OwnPlacement, lie_alike, local_of
from tpplan.compat.placements import interleaving
from tpplan.compat.process_groups import over_ranks
from tpplan.compat.schemas import OpOverload, schema_argument_names, schema_mutates
from tpplan.compat.subclasses import without_tensor_classes
from tpplan.plan import TpplanError
from tpplan.runtime.parameters.sharded_tensors import ShardedTensor, forwards, refuse_gathered, shown
from tpplan.runtime.parameters.sharded_views import (
    ShardedView,
    makes_views,
    mapped,
    note_written,
    on_wholes,
    view_of,
    written_to,
)
from tpplan.runtime.ranks.faults import naming_ranks

_ALIASES = {"alias", "lift_fresh", "detach", "detach_"}
_ALIKE = {
    "_to_copy", "copy_", "clone", "zeros_like", "ones_like", "full_like", "empty_like", "fill_", "zero_",
    "masked_fill", "masked_fill_", "abs_", "_conj_physical", "nan_to_num_", "contiguous",
}  # fmt: skip
_MADE = {"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"}
_LISTS = {"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"}
_OTHER_LISTS = {"_foreach_norm", "_foreach_max", "_foreach_mm", "_foreach_powsum"}
_NORMS = {"linalg_vector_norm", "norm", "sum"}
_BY_NAME = "read it by its name, as `module.weight`, not by `parameters()` or `_parameters`"
_NARROW = (torch.bfloat16, torch.float16)


class UnprovedModuleError(TpplanError):
    """A forward left what was proved: whoever watches it proves it anew, as after any error of a body."""


def is_final(error: BaseException) -> bool:
    """Whether an error is tpplan's own word on a call: it isn't a body's, which another proof may explain."""
    return isinstance(error, TpplanError) and not isinstance(error, UnprovedModuleError)


Runner = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]


def run(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that has a sharded tensor among its arguments."""
    args, kwargs = mapped(args, ShardedTensor.adopted), mapped(kwargs, ShardedTensor.adopted)
    if forwards.count:
        _refuse_activations(operator, (args, kwargs))
    else:
        refuse_gathered(_sharded_among((args, kwargs)), written_to(operator, args, kwargs))
    if _has_views((args, kwargs)):
        return on_wholes(operator, args, kwargs)
    return _runner(operator)(operator, args, kwargs)


def _sharded_among(held: Any) -> list[DTensor]:
    found: list[DTensor] = []
    mapped(held, lambda tensor: found.append(tensor) if isinstance(tensor, ShardedTensor) else None)
    return found


def _refuse_activations(operator: OpOverload, held: Any) -> None:
    """Refuse plain tensors in a forward: they may be a rank's part; and parameters whose gradients are summed."""
    summed = frozenset[int]().union(*forwards.summed)
    past = [tensor for tensor in _sharded_among(held) if id(tensor) in summed] if summed else []
    if past and torch.is_grad_enabled() and operator.name() != "aten::detach":
        raise UnprovedModuleError.of(
            "TP140",
            f"a forward computes `{operator.name()}` with {shown(past[0])} itself, where nobody sums its gradient",
            help=f"{_BY_NAME}; or compute this outside of the forward",
        )
    plain: list[Tensor] = []
    mapped(held, lambda tensor: plain.append(tensor) if not isinstance(tensor, (DTensor, ShardedView)) else None)
    if any(tensor.dim() for tensor in plain):
        raise UnprovedModuleError.of(
            "TP140",
            f"a forward computes `{operator.name()}` with a parameter of a module that isn't called in its proof",
            help=f"{_BY_NAME}; and pass `inputs=` with which every module is called to `parallelize`",
        )


def _has_views(held: Any) -> bool:
    if isinstance(held, dict):
        return any(map(_has_views, cast("dict[str, Any]", held).values()))
    if isinstance(held, (list, tuple)):
        return any(map(_has_views, cast("Sequence[Any]", held)))
    return isinstance(held, ShardedView)


@functools.cache
def _runner(operator: OpOverload) -> Runner:
    space, _, name = operator.name().partition(".")[0].partition("::")
    if space != "aten":  # such as a user's own
        return _by_element if torch.Tag.pointwise in operator.tags else on_wholes
    if name in _ALIASES:
        return _alias
    if name in _LISTS or (name.startswith("_foreach_") and name not in _OTHER_LISTS):
        return _on_lists
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return _drawn
    if torch.Tag.pointwise in operator.tags or name in _ALIKE:
        return _by_element
    if name in _MADE:
        return _made_anew
    if name in _NORMS or name == "_foreach_norm":
        return _counted_once
    if makes_views(operator):
        return _viewed
    return _rescaled if name == "_amp_foreach_non_finite_check_and_unscale_" else on_wholes


def _alias(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].like(operator(local_of(args[0]), *args[1:], **kwargs))


def _made_anew(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return operator(local_of(args[0]), *args[1:], **kwargs)


def _viewed(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], ShardedTensor):  # a plain tensor, viewed by one that is sharded
        return on_wholes(operator, args, kwargs)
    return view_of(operator, args, kwargs)


def _by_element(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    written = written_to(operator, args, kwargs)
    results = [held for held in kwargs.values() if any(held is other for other in written)]
    operands = [held for held in (*args, *kwargs.values()) if isinstance(held, Tensor)]
    operands = [held for held in operands if not any(held is other for other in results)]
    if any(not isinstance(held, ShardedTensor) for held in written):
        return on_wholes(operator, args, kwargs)
    shape: Any = cast("Any", torch).broadcast_shapes(*(held.shape for held in operands))
    owner = next((t for t in (*written, *operands) if isinstance(t, ShardedTensor) and t.shape == shape), None)
    if owner is None or any(held.shape != shape for held in written):
        return on_wholes(operator, args, kwargs)
    local = functools.partial(_part_like, owner)
    result = operator(*mapped(args, local), **mapped(kwargs, local))
    note_written(written)
    if written:
        return written[0] if len(written) == 1 else tuple(written)
    return mapped(result, lambda held: owner.like(held))


def _on_lists(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On lists of tensors, of which those at one place belong together."""
    owners: Sequence[Any] = args[0]
    try:
        local_args = [_list_of_parts(held, owners) for held in args]
        local_kwargs = {name: _list_of_parts(held, owners) for name, held in kwargs.items()}
    except _LargerError:
        return on_wholes(operator, args, kwargs)
    results: Any = operator(*local_args, **local_kwargs)
    note_written(held for held in written_to(operator, args, kwargs) if isinstance(held, ShardedTensor))
    if schema_mutates(operator) or results is None:
        return results
    return [
        owner.like(result) if isinstance(owner, ShardedTensor) else result
        for result, owner in zip(results, owners, strict=True)
    ]


class _LargerError(Exception):
    """An operand doesn't fit a tensor, so that the result is larger."""


def _list_of_parts(held: Any, owners: Sequence[Any]) -> Any:
    if isinstance(held, DTensor):
        return held.full_tensor()  # a factor for all of them
    if not isinstance(held, (list, tuple)):
        return held
    listed = cast("Sequence[Any]", held)
    if len(listed) != len(owners):
        return listed
    pairs = zip(owners, listed, strict=True)
    return [_part_like(owner, t) if isinstance(owner, ShardedTensor) else _whole(t) for owner, t in pairs]


def _part_like(owner: ShardedTensor, operand: Any) -> Any:
    """What this rank needs of an operand to compute its part of `owner`."""
    if operand is owner:
        return local_of(owner)
    if not isinstance(operand, Tensor):
        return operand
    if isinstance(operand, DTensor):
        if lie_alike(operand, owner):
            return local_of(operand)
        operand = operand.full_tensor()
    if operand.dim() == 0:
        return operand
    dims = zip(reversed(operand.shape), reversed(owner.shape), strict=False)
    if operand.dim() > owner.dim() or any(mine not in (1, its) for mine, its in dims):
        raise _LargerError
    return owner.part.of(operand.expand(owner.shape))


def _drawn(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Random numbers as the unsharded model draws them: those of the whole, of which each rank takes its part."""
    target, name = args[0], operator.name().partition(".")[0]
    written = bool(schema_mutates(operator))
    others = any(isinstance(held, DTensor) for held in (*args[1:], *kwargs.values()))
    if not isinstance(target, ShardedTensor) or others or not (written or name.endswith("_like")):
        return on_wholes(operator, args, kwargs)
    whole = local_of(target).new_empty(tuple(target.shape))
    part = target.part.of(operator(whole, *args[1:], **kwargs))
    if not written:
        return target.like(part.clone(memory_format=torch.contiguous_format))
    local_of(target).copy_(part)
    note_written([target])
    return target


def _counted_once(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A norm or a sum over all elements: of those of which this rank is the first holder."""
    names = schema_argument_names(operator)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("dim") not in (None, [], ()) or given.get("keepdim") or "out" in given:
        return on_wholes(operator, args, kwargs)
    of_list = isinstance(args[0], (list, tuple))
    tensors: Sequence[Any] = args[0] if of_list else [args[0]]
    kind = operator.name().partition(".")[0].removeprefix("aten::")
    order = 1.0 if kind == "sum" else given.get("ord", given.get("p", 2))
    order = 2.0 if order is None else float(order)
    local = [_owned(held, None if kind == "sum" else order) for held in tensors]
    results = operator(local if of_list else local[0], *args[1:], **kwargs)
    found = _over_ranks(tensors, [*results] if of_list else [results], order, kind == "sum")
    dtype = given.get("dtype")
    found = [n.to(t.dtype) if dtype is None and t.dtype in _NARROW else n for n, t in zip(found, tensors, strict=True)]
    if not torch.is_grad_enabled():
        found = [number.as_subclass(WholeNumber) if type(number) is Tensor else number for number in found]
    return found if of_list else found[0]


class WholeNumber(Tensor):
    """A plain number, and what is computed of it, with what DTensors have: loops ask a norm for `full_tensor()`."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with without_tensor_classes():
            made = func(*args, **(kwargs or {}))
        is_new = type(made) is Tensor and not any(made is held for held in args)
        return made.as_subclass(cls) if is_new else made

    def full_tensor(self) -> Tensor:
        """The same, as a tensor like any other."""
        return self.as_subclass(Tensor)

    def __format__(self, specification: str) -> str:
        return format(self.full_tensor(), specification)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return repr(self.full_tensor())

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.full_tensor()
        return plain.__reduce_ex__(protocol)


def _owned(tensor: Any, order: float | None) -> Tensor:
    """The elements of which each rank is the first holder, in some order; of none, what a norm of `order` ignores."""
    if not isinstance(tensor, ShardedTensor):
        return tensor
    local = owned_elements(tensor)
    if local.dtype in _NARROW:
        local = local.float()  # what the ranks have is added up before it is rounded
    if local.numel() or order is None:
        return local
    return local.new_full((1,), float("inf") if order < 0 else 0.0)  # norms of nothing raise, on this rank alone


def owned_elements(tensor: ShardedTensor) -> Tensor:
    """The local elements of which this rank is the first holder, in some order."""
    local, part = local_of(tensor), tensor.part
    owned = part.owned
    if len(owned) == len(part.boxes):
        return local
    return torch.cat([box.of_part(local).reshape(-1) for box in owned] or [local.new_zeros(0)])


def _over_ranks(tensors: Sequence[Any], found: list[Tensor], order: float, sums: bool) -> list[Tensor]:
    """What the ranks have found together; one all-reduce for each group, dtype and device."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for place, tensor in enumerate(tensors):
        if isinstance(tensor, ShardedTensor):
            for axis in split_axes(tensor):
                group = tensor.device_mesh.get_group(axis)
                groups.setdefault((group, found[place].dtype, found[place].device), []).append(place)
    for (group, _, _), places in groups.items():
        with naming_ranks(f"a {'sum' if sums else 'norm'} over {shown(tensors[places[0]])}", group):
            held = _reduced(torch.stack([found[place] for place in places]), order, sums, group)
        for place, number in zip(places, held.unbind(), strict=True):
            found[place] = number
    return found


def _reduced(held: Tensor, order: float, sums: bool, group: Any) -> Tensor:
    if order in (float("inf"), float("-inf")):
        sign = 1 if order > 0 else -1
        sent = torch.stack([(held * sign).masked_fill(held.isnan(), float("-inf")), held.isnan().to(held.dtype)])
        sent = over_ranks(sent, group, "max")
        return (sent[0] * sign).masked_fill(sent[1] > 0, float("nan"))
    powers = held if sums or order in (0, 1) else held.pow(order)
    powers = over_ranks(powers, group)
    return powers if sums or order in (0, 1) else powers.pow(1 / order)


def split_axes(tensor: DTensor) -> list[int]:
    """The axes of its mesh, of more than one rank, over which a tensor is split."""
    mesh = tensor.device_mesh
    split = (isinstance(p, OwnPlacement) or interleaving(p) is not None for p in tensor.placements)
    return [axis for axis, is_split in enumerate(split) if is_split and mesh.size(axis) > 1]


def _rescaled(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gradients divided by a scale, in place; whether one isn't finite is asked of all ranks."""
    gradients, found, scale = args
    operator([local_of(held) for held in gradients], _whole(found), _whole(scale), **kwargs)
    seen: set[Any] = set()
    for gradient in gradients:
        for axis in split_axes(gradient) if isinstance(gradient, ShardedTensor) else ():
            group = gradient.device_mesh.get_group(axis)
            if group not in seen:
                seen.add(group)
                with naming_ranks("the search for gradients that aren't finite", group):
                    dist.all_reduce(_whole(found), dist.ReduceOp.MAX, group)
    return None


def _whole(held: Any) -> Any:
    return held.full_tensor() if isinstance(held, DTensor) else held


__all__ = ["UnprovedModuleError", "is_final", "owned_elements", "run", "split_axes"]
