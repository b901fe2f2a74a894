"""Taken apart: weights of classes of their own, such as quantised ones, whose inner tensors are parameters instead.

    up.weight: Int8(codes, scales)   ->   up._weight_codes, up._weight_scales, and `weight`, which is made of them

So they are bound, proved, split and loaded as any parameters are, and the class's own code runs on a rank's parts. To
everyone outside of a forward `up.weight` is a DTensor with the rank's part, of that class, as its local tensor, and
goes by its name in a state_dict.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tpplan.compat.dtensors import local_of, made_dtensor, new_distributed_tensor
from tpplan.compat.modules import named_modules, own_parameters
from tpplan.compat.subclasses import computes_otherwise
from tpplan.compiler.ir.assembly import ASSEMBLIES, Assembly, assemblies_of
from tpplan.compiler.ir.kept_tensors import WrapperError, is_wrapper
from tpplan.compiler.trace.stock_again import Table, fill, put_together
from tpplan.ops.issued import CLONE
from tpplan.runtime.parameters.sharded_tensors import ShardedTensor, refusal, whole_of


class AssembledTensor(ShardedTensor):
    """A DTensor whose local tensor is of a class of its own, put together of a rank's parts; it can't be written to."""

    assembly: Assembly
    parts: Mapping[str, DTensor]

    @classmethod
    def of(cls, assembly: Assembly, parts: Mapping[str, DTensor]) -> AssembledTensor:
        """That of the sharded parts."""
        local = assembly.made({name: local_of(part) for name, part in parts.items()})
        shape, some = assembly.example.shape, next(iter(parts.values()))
        dim = next((d for d, count in enumerate(local.shape) if count != shape[d]), None)
        own = some.placements if some.device_mesh.ndim > 1 else [Replicate() if dim is None else Shard(dim)]
        placements = next((part.placements for part in parts.values() if part.shape == shape), own)
        made: AssembledTensor = made_dtensor(cls, local, some.device_mesh, placements, shape)
        made.assembly, made.parts = assembly, parts
        return made

    @classmethod
    def dispatched(cls, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Copy it; refuse all else: its class may know no operation on a part that is one on the whole."""
        if operator is CLONE and not kwargs:
            return cls.of(args[0].assembly, {name: part.clone() for name, part in args[0].parts.items()})
        raise refusal(
            f"`{operator.name()}` was asked of a sharded weight of a class of its own",
            "take `weight.to_local()` for this rank's part, `weight.full_tensor()` for the whole, or load numbers by "
            "`load_state_dict`",
        )

    def like(self, local: Tensor) -> Any:
        """See `OwnTensor`."""
        if type(local) is not type(self.assembly.example):
            raise refusal(
                f"the numbers of a sharded weight of a class of its own were set, to a `{type(local).__name__}`",
                "load them by `load_state_dict`",
            )
        return self.of(self.assembly, {name: part.like(getattr(local, name)) for name, part in self.parts.items()})  # pyright: ignore

    def to_local(self, **_: Any) -> Tensor:
        """This rank's part, of its class; there is no gradient for it."""
        return local_of(self)

    def requires_grad_(self, requires_grad: bool = True) -> AssembledTensor:  # pyright: ignore -- as torch calls it
        """Refuse: it is made anew whenever it is read, of parts that are frozen."""
        if requires_grad:
            raise refusal(
                "a sharded weight of a class of its own was asked to require grad", "train other parameters beside it"
            )
        return self

    def full_tensor(self, **_: Any) -> Tensor:
        """The whole, of its class; a collective for each part of which a rank hasn't all."""
        return self.assembly.made({name: whole_of(part) for name, part in self.parts.items()})

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = new_distributed_tensor(local_of(self), self)
        return plain.__reduce_ex__(protocol)


def take_apart(model: nn.Module) -> list[tuple[nn.Module, type[nn.Module], Table, Table]]:
    """Put the inner tensors of weights of classes of their own in their places.

    Weights that can't be taken apart stay as they are.

    Returns:
        The modules that were changed, each with its class and its parameters before, and its parameters now.
    """
    changed: list[tuple[nn.Module, type[nn.Module], Table, Table]] = []
    parts: dict[int, nn.Parameter] = {}
    for _, module in named_modules(model):
        table, stock = own_parameters(module), type(module)
        found = {leaf: held for leaf, held in table.items() if held is not None and is_wrapper(held)}
        assemblies = {leaf: made for leaf, held in found.items() if (made := _assembly(held, leaf)) is not None}
        assemblies = {leaf: held for leaf, held in assemblies.items() if not _taken(module, held.parts.values())}
        if not assemblies:
            continue
        try:
            module.__class__ = _apart_class(stock, assemblies)
        except TypeError:  # no class can be derived from its own
            continue
        entries: Table = {}
        for leaf, held in table.items():
            if leaf not in assemblies:
                entries[leaf] = held
                continue
            for name, part in assemblies[leaf].parts.items():
                inner: Tensor = getattr(held, name)
                entries[part] = parts.setdefault(id(inner), nn.Parameter(inner, requires_grad=False))
        changed.append((module, stock, dict(table), entries))
        fill(table, entries)
    return changed


@contextmanager
def taken_apart(model: nn.Module, *, keep: bool = False) -> Generator[Callable[[], None]]:
    """A block in which weights of classes of their own are taken apart; `keep` leaves them so, if nothing is raised.

    Gives what forgets the whole weights, whose memory is wanted; if something is raised after that, others like them
    are put in their places.
    """
    changed = take_apart(model)
    apart = [module for module, *_ in changed]
    handles: list[Any] = []
    for module in apart if keep else ():
        handles.append(module.register_state_dict_post_hook(_joined))
        handles.append(module.register_load_state_dict_pre_hook(_split))  # before what cuts whole parts
    done = False
    try:
        yield changed.clear
        done = True
    finally:
        if not (done and keep):
            for handle in handles:
                handle.remove()
            for module, stock, table, entries in changed:
                now = own_parameters(module)
                if all(now.get(leaf) is held for leaf, held in entries.items()):
                    fill(now, table)
                    module.__class__ = stock
            put_together(apart)  # what is still apart, as what was on `meta` and was loaded


def by_parts(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The items of a state_dict, in which weights of classes of their own are their parts, which a file can hold."""
    for name, held in state.items():
        if not isinstance(held, AssembledTensor):
            yield name, held
            continue
        prefix = name.removesuffix(held.assembly.leaf)
        yield from ((prefix + part, held.parts[inner]) for inner, part in held.assembly.parts.items())


def refuse_conversion(modules: Iterable[nn.Module], convert: Callable[[Tensor], Tensor]) -> None:
    """Refuse to convert weights of classes of their own to another dtype: what is made of that isn't proved."""
    for module in modules:
        for leaf, assembly in assemblies_of(module).items():
            for held in (assembly.example, *(getattr(assembly.example, name) for name in assembly.names)):
                dtype = convert(torch.empty(0, dtype=held.dtype, device=_device_of(module, assembly))).dtype
                if dtype != held.dtype:
                    raise refusal(
                        f"`{leaf}`, a sharded weight of a class of its own, was to be converted to {dtype}, of which "
                        f"its `{type(assembly.example).__name__}` may make other numbers than are proved",
                        "convert the stock model, before `parallelize`",
                    )


def _device_of(module: nn.Module, assembly: Assembly) -> torch.device:
    return getattr(module, next(iter(assembly.parts.values()))).device


def joined(assembly: Assembly, inner: Mapping[str, Tensor]) -> Tensor:
    """The weight that is made of these: parts that are sharded, or what a body reads of them."""
    sharded = {name: part for name, part in inner.items() if isinstance(part, DTensor)}
    return AssembledTensor.of(assembly, sharded) if sharded else assembly.made(inner)


def _assembly(tensor: Tensor, leaf: str) -> Assembly | None:
    if not computes_otherwise(type(tensor)):
        return None
    try:
        return Assembly.of(tensor, leaf)
    except WrapperError:
        return None


def _taken(module: nn.Module, names: Iterable[str]) -> bool:
    return any(hasattr(module, name) for name in names)


def _apart_class(stock: type[nn.Module], assemblies: Mapping[str, Assembly]) -> type[nn.Module]:
    """A class like `stock`, of a module that makes these weights of their parts whenever they are read."""

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        if name in assemblies:
            raise refusal(
                f"`{name}` of a `{stock.__name__}` was set, a weight that is made of parts since `parallelize`",
                "load its numbers by `load_state_dict`, or set it in the stock model, before `parallelize`",
            )
        stock.__setattr__(self, name, value)

    own: dict[str, Any] = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
    own |= {"__setattr__": set_attribute, ASSEMBLIES: assemblies}
    return type(stock.__name__, (stock,), own | {leaf: _Made(held) for leaf, held in assemblies.items()})


class _Made:
    """A weight that a module makes of its parts."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly

    def __get__(self, module: nn.Module | None, kind: type[nn.Module]) -> Any:
        if module is None:
            raise AttributeError(f"'{kind.__name__}' object has no attribute '{self._assembly.leaf}'")
        inner = {name: getattr(module, part) for name, part in self._assembly.parts.items()}
        weight = joined(self._assembly, inner)
        weight._is_param = True  # pyright: ignore -- as that of the stock module, which bodies may ask for
        return weight


def _joined(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """After a module's `state_dict`: its weights in the places of their parts."""
    for leaf, assembly in assemblies_of(module).items():
        parts = {prefix + part: name for name, part in assembly.parts.items()}
        if not parts.keys() <= state.keys():
            continue
        inner = {name: state[part] for part, name in parts.items()}
        entries = dict(state)
        state.clear()
        for name, held in entries.items():
            if name not in parts:
                state[name] = held
            elif prefix + leaf not in state:
                state[prefix + leaf] = joined(assembly, inner)


def _split(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a module's `load_state_dict`: of its weights their parts."""
    for leaf, assembly in assemblies_of(module).items():
        held = state.get(prefix + leaf)
        if not isinstance(held, Tensor):
            continue
        local = local_of(held)
        if type(local) is not type(assembly.example):
            continue
        whole = held.shape == assembly.example.shape  # otherwise torch tells which shapes don't fit
        if whole and assembly.other_context(local):
            raise refusal(
                f"`{prefix}{leaf}` that is loaded is a `{type(local).__name__}` that keeps something else beside its "
                f"numbers than the model's: {local.__tensor_flatten__()[1]}, not {assembly.context}",  # pyright: ignore
                "quantise the stock model in the way of what is loaded, before `parallelize`",
            )
        del state[prefix + leaf]
        for name, part in assembly.parts.items():
            inner: Tensor = getattr(local, name)
            own = getattr(module, part)
            if isinstance(held, DTensor) and isinstance(own, DTensor):
                inner = own.like(inner)  # pyright: ignore
            state[prefix + part] = inner


__all__ = ["AssembledTensor", "by_parts", "refuse_conversion", "take_apart", "taken_apart"]
