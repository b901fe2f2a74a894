"""Writes: which attributes of a sharded model's modules were set since the last call, outside of its forwards.

    model.layers[0].mlp.act = nn.ReLU()        noted; the next call looks at it
    model.eval()                               noted as one change of modes

Every module of the model tells one `Writes`. Those that the program makes nothing of have a class of the stock's name
for that; copies are of that class too, pickles of the stock one.
"""

from __future__ import annotations

import copy
import copyreg
import functools
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from tpplan.compat.data_parallel import fsdp_unit, is_localized, is_localizer, replicas_without_mesh
from tpplan.compat.dtensors import local_of
from tpplan.compat.dynamo import COMPILED_CALL
from tpplan.compat.modules import (
    PARAMETRIZATIONS,
    class_over,
    own_modules,
    own_parameters,
    parametrized_tensors,
    removes_parametrizations,
)
from tpplan.compat.subclasses import takes_apart
from tpplan.compat.tensors import is_gathered, mark_gathered, name_alike
from tpplan.runtime.around.onlookers import Onlookers
from tpplan.runtime.parameters.sharded_tensors import REPLACED, ShardedTensor, StateError

if TYPE_CHECKING:
    from tpplan.compiler.ir.program import Program
    from tpplan.runtime.parameters.handed_out import HandedOut

WRITES = "_tpplan_writes"
HOOKS = "its hooks"
CHECKS = "_tpplan_checks"
_PROTOCOL = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__")


class Outside(NamedTuple):
    """How values lie around a module, in the call that is under way or differentiated.

    Attributes:
        name: the module's.
        program: what that call runs by.
        handed_out: what bodies read in it, which knows the ranks.
    """

    name: str
    program: Program
    handed_out: HandedOut


class Writes:
    """What was written to the modules of one model.

    Attributes:
        noted: modules with the names that were set in them outside of forwards.
        modes: whether a module's `training` was.
        inside: the same of forwards: what a body writes is a matter of its proof.
        outside: how values lie around a module, for those who look at them.
        local: the attributes that hold what this rank counts, with that.
        cut: the parameters that FSDP cuts further, by module and name; each with those that it handles together.
        dropped: the parameter that was deleted last, with its module and name.
        compiled: whether a compiler was given one of the modules.
        onlookers: what is known of hooks of all modules.
        settle: called when a forward ends that may have written to what modules hold.
    """

    _paused = True  # until there is more of it: a copy of a model is set attribute by attribute

    def __init__(self) -> None:
        """Nothing was written."""
        self.noted: set[tuple[nn.Module, str]] = set()
        self.modes = False
        self.inside: set[tuple[nn.Module, str]] = set()
        self.local: dict[tuple[nn.Module, str], Any] = {}
        self.cut: dict[tuple[nn.Module, str], list[tuple[nn.Module, str]]] = {}
        self.dropped: tuple[nn.Module | None, str, nn.Parameter | None] = (None, "", None)
        self.forwards = 0
        self.compiled = False
        self.onlookers = Onlookers()
        self.outside: Callable[[nn.Module], Outside] | None = None
        self.settle: Callable[[], None] | None = None
        self._units: WeakKeyDictionary[Any, list[tuple[nn.Module, str]]] = WeakKeyDictionary()
        self._paused = False

    def note_cut(self, module: nn.Module, name: str) -> None:
        """Remember that FSDP, which sets a parameter for the first time, will cut it."""
        if (module, name) not in self.cut:
            unit = fsdp_unit()
            together = [] if unit is None else self._units.setdefault(unit, [])
            together.append((module, name))
            self.cut[module, name] = together

    def refuse(self, module: nn.Module, name: str, what: str, way_out: str) -> NoReturn:
        """Refuse what is to be set as `name` of a module, before it is: the model is as it was.

        Raises:
            StateError: with a TP130.
        """
        owner = self.outside(module).name if self.outside is not None else ""
        notes = ("nothing was replaced: the model runs as before",)
        raise StateError.of("TP130", f"`{f'{owner}.{name}'.lstrip('.')}` {what}", help=way_out, notes=notes)

    def note(self, module: nn.Module, name: str) -> None:
        """Remember that `name` was set in, added to or deleted from `module`."""
        if self._paused:
            return
        self.compiled |= name == COMPILED_CALL
        if self.forwards and name != HOOKS:
            self.inside.add((module, name))
        elif name == "training":
            self.modes = True
        else:
            self.noted.add((module, name))

    @contextmanager
    def paused(self) -> Generator[None]:
        """A block in which tpplan itself writes."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before


class Watched(nn.Module):
    """A module that tells what is written to it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and _assigned(self, name, value):
            return
        if isinstance(value, nn.Parameter):
            value = _own_parameter(self, name, value)
        super().__setattr__(name, value)
        _note(self, name)
        if name == "__class__":
            replicas_without_mesh(self)

    def __delattr__(self, name: str) -> None:
        writes: Writes | None = self.__dict__.get(WRITES)
        if writes is not None:
            writes.dropped = self, name, own_parameters(self).get(name)
        super().__delattr__(name)
        _note(self, name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a child, as by an assignment."""
        super().add_module(name, module)
        _note(self, name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter, as by an assignment."""
        super().register_parameter(name, param)
        _note(self, name)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Add a buffer."""
        super().register_buffer(name, tensor, persistent)
        _note(self, name)

    def register_forward_hook(self, hook: Callable[..., Any], **options: Any) -> RemovableHandle:  # pyright: ignore
        """Register a hook, and note it."""
        if is_localizer(hook):
            return RemovableHandle(OrderedDict())
        return _noted(self, super().register_forward_hook(hook, **options))

    def register_forward_pre_hook(self, hook: Callable[..., Any], **options: Any) -> RemovableHandle:  # pyright: ignore
        """Register a hook, and note it."""
        if is_localizer(hook):
            return RemovableHandle(OrderedDict())
        return _noted(self, super().register_forward_pre_hook(hook, **options))

    def register_full_backward_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        """Register a hook, and note it."""
        return _noted(self, super().register_full_backward_hook(hook, prepend))

    def register_full_backward_pre_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        """Register a hook, and note it."""
        return _noted(self, super().register_full_backward_pre_hook(hook, prepend))

    def register_backward_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a hook, and note it."""
        return _noted(self, super().register_backward_hook(hook))


def _contains(modules: nn.ModuleDict, name: str) -> bool:
    """Whether a table of modules has one of this name; it is what torch asks before it removes parametrizations."""
    if removes_parametrizations(2):
        raise StateError.of(
            "TP130",
            f"the parametrization of `{name}` was to be removed after `parallelize`, so that what was proved wouldn't "
            "be what runs",
            help="remove it from the stock model, before `parallelize`",
            notes=("nothing was removed: the model runs as before",),
        )
    return name in own_modules(modules)


def _assigned(module: nn.Module, name: str, value: Tensor) -> bool:
    """Write whole numbers into what a parametrization computes a tensor of, as torch does; whether there is one."""
    writes: Writes | None = module.__dict__.get(WRITES)
    steps = parametrized_tensors(module).get(name) if PARAMETRIZATIONS in own_modules(module) else None
    if writes is None or steps is None or isinstance(value, nn.Parameter):
        return False
    originals = [held for held in own_parameters(cast("nn.Module", steps)).values() if held is not None]
    if not originals or not all(hasattr(step, "right_inverse") for step in steps):
        return False  # torch's own way, or its message
    made: Any = value
    with torch.no_grad():
        for step in reversed([*steps]):
            made = cast("Any", step).right_inverse(made)
        parts: list[Tensor] = [made] if isinstance(made, Tensor) else [*made]
        forms = [(held.shape, held.dtype) for held in originals]
        if [(held.shape, held.dtype) for held in parts] != forms:
            what = "was assigned numbers of another shape or dtype than those that its parametrization computes it of"
            writes.refuse(module, name, what, "assign a whole tensor of the same shape and dtype")
        for original, held in zip(originals, parts, strict=True):
            original.copy_(held)
    return True


def _own_parameter(module: nn.Module, name: str, value: nn.Parameter) -> nn.Parameter:
    """What is to be a module's parameter `name`, of what torch's data parallelism sets."""
    writes: Writes | None = module.__dict__.get(WRITES)
    if writes is not None and takes_apart(value):
        what = (
            f"was to be replaced by a `{type(value).__name__}` after `parallelize`: what was proved is the product of "
            "plain numbers, and the class has a product of its own"
        )
        way_out = "quantise the stock model, before `parallelize`, which then cuts what the class keeps"
        writes.refuse(module, name, what, way_out)
    before, value = own_parameters(module).get(name), ShardedTensor.adopted(value)  # FSDP makes plain DTensors
    if isinstance(value, DTensor) and isinstance(before, DTensor) and before is not value:
        name_alike(value, before)
        if before.device_mesh.ndim > value.device_mesh.ndim:
            mark_gathered(value)
        elif before.device_mesh.ndim < value.device_mesh.ndim and not is_gathered(before):
            vars(before)[REPLACED] = True
    if writes is None:
        return value
    if isinstance(value, DTensor):
        if value.device_mesh.ndim > 1:
            writes.note_cut(module, name)
    elif is_localized(value):  # around a sharded model, it needn't take DTensors apart
        *place, before = writes.dropped
        if before is not None and place == [module, name]:
            local_of(before).requires_grad_(False)
            value = before
    writes.dropped = None, "", None
    return value


def _noted(module: nn.Module, handle: RemovableHandle) -> RemovableHandle:
    """The handle of a module's new hook, once that is noted."""
    writes: Writes | None = module.__dict__.get(WRITES)
    if writes is not None:
        writes.note(module, HOOKS)
    return handle


def _note(module: nn.Module, name: str) -> None:
    writes: Writes | None = module.__dict__.get(WRITES)
    if writes is not None:
        writes.note(module, name)


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class that the user wrote, of a module that was swapped or wasn't."""
    kinds = (kind for kind in type(module).__mro__ if issubclass(kind, nn.Module))
    return next(kind for kind in kinds if not issubclass(kind, Watched))


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def watched_class(stock: type[nn.Module], members: Mapping[str, Any] | None = None) -> type[nn.Module]:
    """A class like `stock`, of its name, whose modules tell what is written to them; with `members` as well."""
    if members is None and stock in _classes:
        return _classes[stock]
    own: dict[str, Any] = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
    if all(getattr(stock, name, None) is getattr(object, name, None) for name in _PROTOCOL):
        own |= {"__deepcopy__": _copied, "__reduce_ex__": functools.partialmethod(_as_stock, stock)}
    if stock is nn.ModuleDict:
        own["__contains__"] = _contains
    made = class_over(stock.__name__, Watched, stock, own | dict(members or {}))
    if members is None:
        _classes[stock] = made
    return made


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    made: nn.Module = type(module).__new__(type(module))
    memo[id(module)] = made
    made.__setstate__(copy.deepcopy(module.__getstate__(), memo))
    return made


def _as_stock(module: nn.Module, stock: type[nn.Module], protocol: Any) -> tuple[Any, ...]:
    """How to pickle a module: as one of the stock class."""
    state: dict[str, Any] = module.__getstate__()  # pyright: ignore[reportAssignmentType]
    return (
        copyreg.__newobj_ex__,  # pyright: ignore
        (stock, (), {}),
        {name: held for name, held in state.items() if name != WRITES},
    )


__all__ = ["CHECKS", "HOOKS", "WRITES", "Watched", "Writes", "stock_class", "watched_class"]
