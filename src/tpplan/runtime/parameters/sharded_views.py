"""Views of sharded tensors: they show the whole, and what is written to them reaches each rank's part.

    up.weight.diagonal().fill_(0.)        up.weight.grad[20].zero_()        for row in up.weight: row.div_(row.norm())

A view keeps the tensor that it is of and the operations that lead to it. An operation on it gathers the whole and takes
the view of that; where it writes, the whole is cut again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpplan.compat.dtensors import as_in_mode_of, local_of
from tpplan.compat.dynamo import skip_frame
from tpplan.compat.process_groups import wait_for
from tpplan.compat.schemas import OpOverload, schema_argument_names, schema_mutates, schema_returns_view
from tpplan.compat.subclasses import OFF, wrapper_like
from tpplan.compat.tensors import storage_key
from tpplan.runtime.parameters.sharded_tensors import (
    ShardedTensor,
    WholeMethods,
    gathered_for,
    refusal,
    refuse_gathered,
    shown,
    whole_of,
)

Step = Callable[[Tensor], Tensor]


class ShardedView(WholeMethods, Tensor):
    """A view of a sharded tensor, over which nothing is split.

    Attributes:
        base: the sharded tensor.
        steps: the operations that make the view of the whole.
        form: the same view on `meta`.
    """

    base: ShardedTensor
    steps: tuple[Step, ...]
    form: Tensor

    __torch_function__ = OFF  # pyright: ignore

    @classmethod
    def __torch_dispatch__(
        cls, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return on_wholes(func, args, kwargs or {})

    def whole(self) -> Tensor:
        """Its numbers, in memory of their own; a collective."""
        return _taken(self, _gathered(self.base)).clone()

    def plain(self) -> Tensor:
        """See `WholeMethods`."""
        return self.detach().whole()  # pyright: ignore

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.plain()
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.detach().whole()  # pyright: ignore

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"ShardedView(shape={list(self.shape)}, of {shown(self.base)})"


skip_frame(ShardedView.__torch_dispatch__, called=True)


def view_of(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation makes that returns views of its first argument, a sharded tensor or a view of one."""
    source = args[0]
    known = isinstance(source, ShardedView)
    base, steps = (source.base, source.steps) if known else (source, ())
    form = source.form if known else torch.empty(tuple(source.shape), dtype=source.dtype, device="meta")
    made: Any = operator(form, *args[1:], **kwargs)

    def viewed(place: int | None, shown: Tensor) -> ShardedView:
        step = functools.partial(_stepped, operator, args[1:], kwargs, place)
        with as_in_mode_of(source):
            view = wrapper_like(ShardedView, shown, source.device)
        view.base, view.steps, view.form = base, (*steps, step), shown
        return view

    if isinstance(made, Tensor):
        return viewed(None, made)
    return type(made)(viewed(place, shown) for place, shown in enumerate(made))


def _stepped(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], place: int | None, tensor: Tensor
) -> Tensor:
    made: Any = operator(tensor, *args, **kwargs)
    return made if place is None else made[place]


def _gathered(base: ShardedTensor) -> Tensor:
    with torch.no_grad():
        return whole_of(base).contiguous()


def _taken(view: ShardedView, whole: Tensor) -> Tensor:
    return functools.reduce(lambda held, step: step(held), view.steps, whole)


def makes_views(operator: OpOverload) -> bool:
    """Whether what an operation returns is written through to its first argument."""
    name = operator.name().partition(".")[0]
    if name in PHYSICAL:
        return False
    return name in _UNSAFE or (schema_returns_view(operator) and not schema_mutates(operator))


PHYSICAL: dict[str, Any] = {
    "aten::_conj": torch.ops.aten._conj_physical.default,
    "aten::_neg_view": torch.ops.aten.neg.default,
}
"""Operations that flip a bit of a view: those that compute its numbers."""
_UNSAFE = frozenset(f"aten::unsafe_{name}" for name in ("split", "split_with_sizes", "chunk"))


def on_wholes(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on whole tensors and views of them; of what was written to, each rank takes its part."""
    if makes_views(operator) and isinstance(args[0], ShardedView):
        return view_of(operator, args, kwargs)
    if operator.name().startswith("aten::set_") and not isinstance(args[0], nn.Parameter):
        raise refusal(
            f"`set_` gives {_shown(args[0])} other memory than the parameter's",
            "write `copy_` for other numbers, or call `set_` on the parameter itself",
        )
    operator = PHYSICAL.get(operator.name(), operator)
    bases: list[ShardedTensor] = []
    mapped((args, kwargs), lambda held: bases.append(held.base) if isinstance(held, ShardedView) else None)
    refuse_gathered(bases, [t.base for t in written_to(operator, args, kwargs) if isinstance(t, ShardedView)])
    wholes: dict[object, Tensor] = {}  # one for all that have their parts in the same memory
    plain: dict[int, tuple[Any, Tensor]] = {}

    def taken(held: Any) -> Any:
        if not isinstance(held, (ShardedView, DTensor)):
            return held
        if isinstance(held, DTensor) and not isinstance(held, ShardedTensor):
            return held.full_tensor()
        if id(held) not in plain:
            key = _memory(held)
            if key not in wholes:
                wholes[key] = gathered_for(operator.name(), _base(held)).contiguous()
            plain[id(held)] = held, _taken(held, wholes[key]) if isinstance(held, ShardedView) else wholes[key]
        return plain[id(held)][1]

    local = mapped(args, taken), mapped(kwargs, taken)
    shapes = {key: shown.shape for key, (_, shown) in plain.items()}
    result: Any = operator(*local[0], **local[1])
    written = [held for held in written_to(operator, args, kwargs) if id(held) in plain]
    if operator.namespace == "c10d":  # whose schemas don't tell what they write to
        wait_for(result)
        written = [held for held, _ in plain.values()]
    for held in written:
        if plain[id(held)][1].shape != shapes[id(held)]:
            raise refusal(
                f"`{operator.name()}` changes the shape of {_shown(held)} in place",
                "write `tensor.t()` and the like for another view; a parameter keeps its shape",
            )
        base = _base(held)
        local_of(base).copy_(base.part.of(wholes[_memory(held)]))
    note_written(map(_base, written))
    back = {id(made): held for held, made in plain.values()}
    return mapped(result, lambda held: back.get(id(held), held))


def _base(held: Any) -> ShardedTensor:
    return held.base if isinstance(held, ShardedView) else held


def _memory(held: Any) -> object:
    base, local = _base(held), local_of(_base(held))
    return storage_key(local), local.storage_offset(), tuple(base.shape), base.dtype  # FSDP's gradients share memory


def _shown(held: Any) -> str:
    return repr(held) if isinstance(held, ShardedView) else shown(held)


def note_written(tensors: Iterable[ShardedTensor]) -> None:
    """Let autograd know what was written to, in a tensor and in this rank's part, which forwards have saved."""
    held = [t for tensor in tensors for t in (tensor, local_of(tensor)) if not t.is_inference()]
    if held:
        torch.autograd.graph.increment_version(held)


def written_to(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors among its arguments that an operation writes to."""
    names = schema_argument_names(operator)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    held = [given.get(names[position]) for position in schema_mutates(operator)]
    return [t for item in held for t in (item if isinstance(item, (list, tuple)) else [item]) if isinstance(t, Tensor)]  # pyright: ignore


def mapped(held: Any, change: Callable[[Any], Any]) -> Any:
    """Arguments or results with every tensor changed, in lists too."""
    if isinstance(held, dict):
        return {name: mapped(item, change) for name, item in cast("dict[str, Any]", held).items()}
    if isinstance(held, (list, tuple)):
        made = [mapped(item, change) for item in cast("Sequence[Any]", held)]
        return tuple(made) if isinstance(held, tuple) else made
    return change(held) if isinstance(held, Tensor) else held


__all__ = ["ShardedView", "makes_views", "mapped", "note_written", "on_wholes", "view_of", "written_to"]
