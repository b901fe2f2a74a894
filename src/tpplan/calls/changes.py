"""Changes: what was changed in a sharded model after `parallelize`, and what becomes of its proofs.

in:  what was written to the model's modules since the last call, and the stock skeleton
out: a skeleton with the new flags, whose calls are proved anew; or a TP130 for what no proof can follow

    model.layers[0].act = gelu_tanh            a function: the skeleton gets it, and calls are proved anew
    model.layers[0].attn.q = LoraLinear(q)     a module with parameters of its own: refused

A module that only wraps sharded ones (an activation checkpoint) and has no parameters may take their place.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpplan.calls.arguments import on_meta
from tpplan.calls.errors import UnprovedCallError
from tpplan.compiler.ir.objects import PLAIN, fresh_object, is_opaque
from tpplan.compiler.trace.preconditions import MARK
from tpplan.runtime.writes import WRITES, Writes

_TABLES = frozenset(vars(nn.Module())) | {WRITES, MARK, "forward"}
_MISSING = object()
_Place = tuple[nn.Module, str]


class Changes:
    """Follows the changes of one sharded model."""

    def __init__(self, model: nn.Module, stock: nn.Module, always: bool) -> None:
        """Remember the model as it is.

        Args:
            model: the sharded model, which notes what is written to it.
            stock: a skeleton of the stock model.
            always: whether to compare the whole model at each call, so that no change is missed.
        """
        self._model = model
        self._writes: Writes = vars(model)[WRITES]
        self._always = always
        self._stock = dict(stock.named_modules())
        self._names = {module: name for name, module in model.named_modules()}
        self._children = {module: _children(module) for module in self._names}
        self._shapes = {module: _shapes(module) for module in self._names}
        self._attributes = {module: _attributes(module) for module in self._names}
        self._settings = list(self._settings_of())
        self._hooks = {module: _hooks(module) for module in self._names}
        self._broken: dict[_Place, str] = {}
        self.modes: frozenset[str] = frozenset()
        self._find_modes()

    def look(self) -> bool:
        """Whether something was changed that calls have to be proved anew for.

        Raises:
            UnprovedCallError: what no proof can follow.
        """
        writes = self._writes
        changed = self._settings_changed() if self._settings else False
        if writes.modes:
            writes.modes = False
            self._find_modes()
        if self._always:
            changed |= self.compare()
        elif writes.noted or self._broken:
            changed |= self._look_at({*writes.noted, *self._broken})
        return changed

    def compare(self) -> bool:
        """As `look`, for all that the model holds, however it was changed."""
        self._find_modes()
        found = set(self._differing()) - self._writes.inside
        if self._always:
            self._tell_of_hooks()
        return self._look_at({*self._writes.noted, *self._broken, *found})

    def _look_at(self, places: set[_Place]) -> bool:
        self._writes.noted.clear()
        self._broken.clear()
        changed = [self._look_at_one(*place) for place in places]
        if self._broken:
            raise UnprovedCallError(
                f"TP130 changed-model: {min(self._broken.values())} after `parallelize`, so that what was proved isn't "
                "what would run\n  help: change the stock model before `parallelize`: apply adapters first, and "
                "parallelize the adapted model"
            )
        return any(changed)

    def _look_at_one(self, module: nn.Module, name: str) -> bool:
        """Look at one place, and note it if it's `_broken`; whether calls have to be proved anew for it."""
        shown = f"{self._names[module]}.{name}".lstrip(".") if module in self._names else name
        if module not in self._names:
            return False
        message = ""
        if (module, name) in self._writes.local:
            if vars(module).get(name) != self._writes.local[module, name]:
                message = f"`{shown}`, which counts what this rank holds, was set"
            changed = False
        elif name in self._children[module] or name in module._modules:
            message, changed = self._child(module, name, shown)
        elif name in self._shapes[module] or name in module._parameters or name in module._buffers:
            message, changed = self._tensor(module, name, shown)
        else:
            changed = self._attribute(module, name)
        if message:
            self._broken[module, name] = message
        return changed

    def _child(self, module: nn.Module, name: str, shown: str) -> tuple[str, bool]:
        before, now = self._children[module].get(name), module._modules.get(name)
        if now is before:
            return "", False
        if before is not None and now is not None and self._only_wraps(before, now):
            self._children[module][name] = now
            return "", True
        if before is None:
            return f"`{shown}`, a `{_kind(now)}`, was added", False
        became = "was removed" if now is None else f"was replaced by a `{_kind(now)}`"
        return f"`{shown}`, a `{_kind(before)}`, {became}", False

    def _only_wraps(self, before: nn.Module, now: nn.Module) -> bool:
        """Whether all modules that were `before` are in `now`, beside others that hold no tensors."""
        held = set(now.modules())
        lost = [m for m in self._reached(before) if m not in held and self._shapes.get(m)]
        calls = [m for m in self._reached(before) if m not in held and type(m).forward is not nn.Module.forward]
        new = [m for m in held if m not in self._names]
        containers = (nn.ModuleList, nn.ModuleDict)
        return (
            not lost
            and not [m for m in calls if not isinstance(m, containers)]
            and not [m for m in new if _shapes(m)]
            and bool(self._names.keys() & held)
        )

    def _reached(self, module: nn.Module) -> Iterator[nn.Module]:
        yield module
        for child in self._children.get(module, {}).values():
            if child is not None:
                yield from self._reached(child)

    def _tensor(self, module: nn.Module, name: str, shown: str) -> tuple[str, bool]:
        before = self._shapes[module].get(name)
        now = module._parameters.get(name)
        if now is None:
            now = module._buffers.get(name)
        if before is None and now is None:
            return "", False
        if before is None:
            return f"`{shown}` was added", False
        if now is None:
            return f"`{shown}` was removed", False
        shape, distributed = before
        if isinstance(now, DTensor) != distributed or tuple(now.shape) != shape:
            return f"`{shown}` was replaced by a {type(now).__name__} of shape {tuple(now.shape)}", False
        return "", False

    def _attribute(self, module: nn.Module, name: str) -> bool:
        known, now = self._attributes[module], vars(module).get(name, _MISSING)
        before = known.get(name, _MISSING)
        if name in _TABLES or _is_same(before, now):
            return False
        stock = self._stock[self._names[module]]
        if now is _MISSING:
            known.pop(name, None)
            vars(stock).pop(name, None)
            return True
        known[name] = _kept(now)
        setattr(stock, name, on_meta((), now) if isinstance(now, Tensor) else fresh_object(now))
        self._settings = list(self._settings_of())
        return True

    def _differing(self) -> Iterator[_Place]:
        """The places at which the model differs from what it was."""
        for module in self._names:
            for table, known in ((module._modules, self._children[module]), (vars(module), self._attributes[module])):
                for name in {*table, *known} - (_TABLES if known is self._attributes[module] else set()):
                    if not _is_same(known.get(name, _MISSING), table.get(name, _MISSING)):
                        yield module, name
            tensors = _shapes(module)
            known = self._shapes[module]
            yield from ((module, name) for name in {*tensors, *known} if tensors.get(name) != known.get(name))

    def _tell_of_hooks(self) -> None:
        """Warn once of each module inside that has got a hook, which sees what a rank has."""
        for module, before in self._hooks.items():
            if module is not self._model and _hooks(module) > before:
                self._hooks[module] = _hooks(module)
                warnings.warn(
                    f"a forward hook was registered on `{self._names[module]}` after `parallelize`: it sees local "
                    "tensors, and what it changes isn't proved",
                    stacklevel=2,
                )

    def _find_modes(self) -> None:
        """Let the skeleton's modules be in the modes that the model's are in."""
        for module, name in self._names.items():
            self._stock[name].training = module.training
        self.modes = modes_of(self._stock[""])

    # -- settings -------------------------------------------------------------------------------------------------
    def _settings_of(self) -> Iterator[tuple[Any, dict[str, Any], Any]]:
        """The objects with flags that modules hold, with what they hold now, and the skeleton's copies."""
        seen: set[int] = set()
        for module, known in self._attributes.items():
            for name, held in known.items():
                if (module, name) in self._writes.local or id(held) in seen or not _is_settings(held):
                    continue
                seen.add(id(held))
                yield held, dict(vars(held)), vars(self._stock[self._names[module]]).get(name)

    def _settings_changed(self) -> bool:
        changed = False
        for held, before, copied in self._settings:
            if _equal(vars(held), before):
                continue
            for name in {*before, *vars(held)}:
                if not _is_same(before.get(name, _MISSING), vars(held).get(name, _MISSING)) and copied is not None:
                    self._refuse_counted(held, name)
                    vars(copied).pop(name, None)
                    if name in vars(held):
                        vars(copied)[name] = fresh_object(vars(held)[name])
            before.clear()
            before.update(vars(held))
            changed = True
        return changed

    def _refuse_counted(self, held: object, name: str) -> None:
        """A module that has a copy of settings of its own, with a local count, wouldn't see the change."""
        for module, holder in self._writes.local:
            if type(vars(module).get(holder)) is type(held):
                raise UnprovedCallError(
                    f"TP130 changed-model: `{name}` of a `{type(held).__name__}` was set after `parallelize`, of which "
                    f"`{self._names[module]}` has a copy with counts of its own\n  help: set it before `parallelize`"
                )


def _hooks(module: nn.Module) -> int:
    return len(module._forward_hooks) + len(module._forward_pre_hooks)


def modes_of(model: nn.Module) -> frozenset[str]:
    """The modules that aren't in the mode of the model itself."""
    return frozenset(name for name, module in model.named_modules() if module.training != model.training)


def _children(module: nn.Module) -> dict[str, nn.Module | None]:
    return dict(module._modules)


def _shapes(module: nn.Module) -> dict[str, tuple[tuple[int, ...], bool]]:
    """A module's own parameters and buffers: their shapes, and whether they are DTensors."""
    tensors = {**module._parameters, **module._buffers}
    return {name: (tuple(t.shape), isinstance(t, DTensor)) for name, t in tensors.items() if t is not None}


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: _kept(held) for name, held in vars(module).items() if name not in _TABLES}


def _kept(held: Any) -> Any:
    """What to remember of an attribute: not a tensor, whose memory may be wanted."""
    return (Tensor, tuple(held.shape), held.dtype) if isinstance(held, Tensor) else held


def _is_same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if isinstance(now, Tensor):
        return bool(before == _kept(now)) if isinstance(before, tuple) else False  # pyright: ignore
    return type(before) is type(now) and type(now) in PLAIN and before == now


def _equal(now: dict[str, Any], before: dict[str, Any]) -> bool:
    try:
        return now == before
    except Exception:  # of what holds arrays nobody can tell
        return False


def _is_settings(held: Any) -> bool:
    kind = type(held)
    plain = kind in PLAIN or isinstance(held, (tuple, list, dict, set, frozenset, type)) or callable(held)
    return not plain and bool(getattr(held, "__dict__", None)) and not is_opaque(held)


def _kind(module: nn.Module | None) -> str:
    return type(module).__name__


__all__ = ["Changes", "modes_of"]
