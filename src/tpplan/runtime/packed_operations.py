"""Operations on packed tensors: on parts where each element counts by itself, else on the whole, or refused.

p.add_(g), torch._foreach_lerp_, fused AdamW     on parts
norms and sums                                   on what each rank is the first to hold
p.mean(), p @ x                                  on the whole, which is gathered first
p.t(), p[0] = 1                                  refused: what is written to it would be lost
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from tpplan.compat import (
    OpOverload,
    local_of,
    made_dtensor,
    replicates_implicitly,
    schema_argument_names,
    schema_mutates,
    schema_returns_view,
)
from tpplan.runtime.packed import Chunk, PackedShard, PackedTensor, refusal

_ALIASES = {"alias", "lift_fresh", "detach", "detach_"}
_ALIKE = {
    "_to_copy", "copy_", "clone", "zeros_like", "ones_like", "full_like", "empty_like", "fill_", "zero_",
    "masked_fill", "masked_fill_", "abs_", "_conj_physical", "nan_to_num_", "contiguous",
}  # fmt: skip
_LISTS = {"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"}
_OTHER_LISTS = {"_foreach_norm", "_foreach_max", "_foreach_mm", "_foreach_powsum"}
_NORMS = {"linalg_vector_norm", "norm", "sum"}

Runner = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]


def run(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that has a packed tensor among its arguments."""
    args, kwargs = _mapped(args, PackedTensor.adopted), _mapped(kwargs, PackedTensor.adopted)
    return _runner(operator)(operator, args, kwargs)


@functools.cache
def _runner(operator: OpOverload) -> Runner:
    space, _, name = operator.name().partition(".")[0].partition("::")
    if space != "aten":
        return _on_the_whole
    if name in _ALIASES:
        return _alias
    if name in _LISTS or (name.startswith("_foreach_") and name not in _OTHER_LISTS):
        return _on_lists
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return _drawn
    if torch.Tag.pointwise in operator.tags or name in _ALIKE:
        return _by_element
    if name in _NORMS or name == "_foreach_norm":
        return _counted_once
    return _rescaled if name == "_amp_foreach_non_finite_check_and_unscale_" else _on_the_whole


def _alias(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].like(operator(local_of(args[0]), *args[1:], **kwargs))


def _by_element(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    operands = [held for held in (*args, *kwargs.values()) if isinstance(held, Tensor)]
    written = _written(operator, args, kwargs)
    owner = next(held for held in (*written, *operands) if isinstance(held, PackedTensor))
    shape: Any = cast("Any", torch).broadcast_shapes(*(held.shape for held in operands))
    filled = operator.name().startswith("aten::copy_")
    if filled and not isinstance(args[0], DTensor):  # a stock model loads a sharded one's state
        return operator(args[0], args[1].full_tensor(), *args[2:], **kwargs)
    if shape != owner.shape or any(not isinstance(held, PackedTensor) for held in written):
        return _on_the_whole(operator, args, kwargs)
    local = functools.partial(_part_like, owner, plain=filled)
    result = operator(*_mapped(args, local), **_mapped(kwargs, local))
    return written[0] if written else _wrapped(result, owner)


def _on_lists(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On lists of tensors, of which those at one place belong together."""
    owners: Sequence[Any] = args[0]
    local_args = [_list_of_parts(held, owners) for held in args]
    local_kwargs = {name: _list_of_parts(held, owners) for name, held in kwargs.items()}
    results: Any = operator(*local_args, **local_kwargs)
    if schema_mutates(operator) or results is None:
        return results
    return [_wrapped(result, owner) for result, owner in zip(results, owners, strict=True)]


def _list_of_parts(held: Any, owners: Sequence[Any]) -> Any:
    if isinstance(held, DTensor):
        return held.full_tensor()  # a factor for all of them
    if not isinstance(held, (list, tuple)):
        return held
    listed = cast("Sequence[Any]", held)
    if len(listed) != len(owners):
        return listed
    return [
        local_of(t) if t is o and type(t) is PackedTensor else _part_like(o, t) if isinstance(o, DTensor) else t
        for o, t in zip(owners, listed, strict=True)
    ]


def _part_like(owner: DTensor, operand: Any, plain: bool = False) -> Any:
    """What this rank needs of an operand to compute its part of `owner`."""
    if not isinstance(operand, Tensor):
        return operand
    if isinstance(operand, DTensor):
        ours, theirs = operand.placements, owner.placements
        if (ours is theirs or ours == theirs) and operand.shape == owner.shape and not _is_partial(operand):
            return local_of(operand)
        if not isinstance(owner, PackedTensor):
            return local_of(operand.redistribute(owner.device_mesh, owner.placements))
        operand = operand.full_tensor()
    elif operand.dim() == 0:
        return operand
    elif not plain and not replicates_implicitly():
        raise refusal(
            "a plain tensor meets a sharded parameter, its gradient or its state",
            "make both plain with `full_tensor()`, or both DTensors",
        )
    if operand.dim() == 0 or not isinstance(owner, PackedTensor):
        return operand
    return owner.part.of(operand.expand(owner.shape))


def _is_partial(tensor: DTensor) -> bool:
    return type(tensor) is not PackedTensor and any([p.is_partial() for p in tensor.placements])


def _wrapped(result: Any, owner: DTensor) -> Any:
    if not isinstance(result, Tensor):
        return result
    if result.shape != local_of(owner).shape:
        raise refusal("the parts of the result don't lie as those of the parameter", _WHOLE)
    if isinstance(owner, PackedTensor):
        return owner.like(result)
    return made_dtensor(DTensor, result, owner.device_mesh, owner.placements, owner.shape)


def _drawn(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Random numbers as the unsharded model draws them: those of the whole, of which each rank takes its part."""
    target = args[0]
    if not isinstance(target, PackedTensor) or any(isinstance(held, DTensor) for held in args[1:]):
        return _on_the_whole(operator, args, kwargs)
    whole = local_of(target).new_empty(tuple(target.shape))
    written = bool(schema_mutates(operator))
    drawn = operator(whole, *args[1:], **kwargs)
    if not isinstance(drawn, Tensor) or drawn.shape != target.shape:
        return _on_the_whole(operator, args, kwargs)
    part = target.part.of(drawn)
    if not written:
        return target.like(part.contiguous())
    local_of(target).copy_(part)
    return target


def _counted_once(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A norm or a sum over all elements: of those of which this rank is the first holder."""
    names = schema_argument_names(operator)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("dim") not in (None, [], ()):
        return _on_the_whole(operator, args, kwargs)
    of_list = isinstance(args[0], (list, tuple))
    tensors = [_owned(held) for held in (args[0] if of_list else [args[0]])]
    return operator(tensors if of_list else tensors[0], *args[1:], **kwargs)


def _owned(tensor: Tensor) -> Tensor:
    """A plain DTensor of the elements of which each rank is the first holder, in some order."""
    if not isinstance(tensor, PackedTensor):
        return tensor
    local = owned_elements(tensor)
    if not local.numel():
        local = local.new_zeros(1)  # norms of nothing raise, on this rank alone
    return _in_shards(tensor, local)


def owned_elements(tensor: PackedTensor) -> Tensor:
    """The local elements of which this rank is the first holder, in some order."""
    local = local_of(tensor)
    boxes = tensor.part.owned
    if len(boxes) == len(tensor.part.boxes):
        return local
    return torch.cat([box.of_part(local).reshape(-1) for box in boxes] or [local.new_zeros(0)])


def _in_shards(tensor: PackedTensor, local: Tensor) -> Tensor:
    dim = tensor.packing.layout.dim or 0
    placements = [Shard(dim) if isinstance(p, (PackedShard, Chunk)) else p for p in tensor.placements]
    return made_dtensor(DTensor, local, tensor.device_mesh, placements, tensor.shape)


def _rescaled(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gradients divided by a scale, in place; whether one isn't finite is asked of all ranks."""
    shards = [_in_shards(t, local_of(t)) if isinstance(t, PackedTensor) else t for t in args[0]]
    return operator(split_first(shards), *args[1:], **kwargs)


def split_first(gradients: Sequence[Tensor]) -> list[Tensor]:
    """In an order in which DTensor asks all ranks whether one isn't finite: it looks at the first one's placements."""
    return sorted(
        gradients, key=lambda held: isinstance(held, DTensor) and all(p.is_replicate() for p in held.placements)
    )


def _on_the_whole(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if schema_returns_view(operator) and not schema_mutates(operator):
        raise refusal(f"`{operator.name()}` makes a view of parts of a sharded parameter", _WHOLE)
    if any(isinstance(held, PackedTensor) for held in _written(operator, args, kwargs)):
        raise refusal(f"`{operator.name()}` writes to parts of a sharded parameter by their place in the whole", _WHOLE)
    return operator(*_mapped(args, _replicated), **_mapped(kwargs, _replicated))


def _replicated(held: Any) -> Any:
    if not isinstance(held, PackedTensor):
        return held
    mesh = held.device_mesh
    return made_dtensor(DTensor, held.full_tensor(), mesh, [Replicate()] * mesh.ndim, held.shape)


def _written(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    names = schema_argument_names(operator)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    held = [given.get(names[position]) for position in schema_mutates(operator)]
    return [t for item in held for t in (item if isinstance(item, (list, tuple)) else [item]) if isinstance(t, Tensor)]  # pyright: ignore


def _mapped(held: Any, change: Callable[[Any], Any]) -> Any:
    """Arguments with every tensor changed, in lists too."""
    if isinstance(held, dict):
        return {name: _mapped(item, change) for name, item in held.items()}  # pyright: ignore
    if isinstance(held, (list, tuple)):
        return type(held)([_mapped(item, change) for item in held])  # pyright: ignore
    return change(held) if isinstance(held, Tensor) else held


_WHOLE = "take the whole with `full_tensor()`, change that, and load it with `load_state_dict`"

__all__ = ["owned_elements", "run", "split_first"]
