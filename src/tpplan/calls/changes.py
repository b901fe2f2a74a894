"""Changes: what was changed in a sharded model after `parallelize`, and what becomes of its proofs.

in:  what was written to the model's modules since the last call, and the stock skeleton
out: a skeleton with the new flags, whose calls are proved anew; or a TP130 for what no proof can follow

    model.layers[0].act = gelu_tanh            a function: the skeleton gets it, and calls are proved anew
    model.layers[0].attn.q = LoraLinear(q)     a module with parameters of its own: refused

A module that only wraps sharded ones (an activation checkpoint) and holds no tensors may take their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from tpplan.calls.arguments import on_meta
from tpplan.calls.errors import UnprovedCallError
from tpplan.calls.hooks import Hooks
from tpplan.calls.settings import Settings
from tpplan.calls.tables import Tables
from tpplan.compiler.ir.objects import fresh_object, without_checkpoint
from tpplan.parity.tree import modules_in
from tpplan.runtime import contents
from tpplan.runtime.contents import MISSING, NOT_ATTRIBUTES, is_same
from tpplan.runtime.writes import HOOKS, WRITES, Writes

_Place = tuple[nn.Module, str]
_FORWARD = "forward"
_CALLED = (_FORWARD, "__call__")
_functions = attrgetter(*_CALLED)
_HELP = (
    "after `parallelize`, so that what was proved isn't what would run\n  help: change the stock model before "
    "`parallelize`: apply adapters first, and parallelize the adapted model; `merge_adapter()` of peft merges in place"
)


class Changes:
    """Follows the changes of one sharded model.

    Attributes:
        modes: the modules that aren't in the mode of the model itself.
    """

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
        skeletons = modules_in(stock)
        self._names = {module: name for name, module in modules_in(model).items()}
        self._stock = {module: skeletons[name] for module, name in self._names.items()}
        self._children = {module: contents.children(module) for module in self._names}
        self._tensors = {module: contents.tensors(module) for module in self._names}
        self._attributes = {module: contents.attributes(module) for module in self._names}
        for module, name in self._writes.local:  # the next program may well have the stock model's number there
            self._attributes[module][name] = contents.kept(getattr(self._stock[module], name, MISSING))
        self._kinds = [*dict.fromkeys(map(type, skeletons.values()))]
        self._functions = [*map(_functions, self._kinds)]
        self._hooks = Hooks(model, self._stock, self._writes)
        self._tables = Tables(self._names)
        self._settings = self._find_settings()
        self._broken: dict[_Place, str] = {}
        self.modes: frozenset[str] = frozenset()
        self._find_modes()

    def look(self) -> bool:
        """Whether something was changed for which calls have to be proved anew.

        Raises:
            UnprovedCallError: what no proof can follow.
        """
        if [*map(_functions, self._kinds)] != self._functions:
            self._refuse_replaced_function()
        writes = self._writes
        noted = [module for module, name in writes.noted if name == HOOKS] if writes.noted else ()
        changed = self._look_at_settings() | self._hooks.look(noted)
        if writes.modes:
            writes.modes = False
            self._find_modes()
        if self._always:
            return self.compare() or changed
        if not writes.forwards:  # inside of one, a functional call has other tensors in place
            writes.noted.update(self._tables.differing())
        if writes.noted or self._broken:
            return self._look_at({*writes.noted, *self._broken}) or changed
        return changed

    def settle(self, forget: bool) -> None:
        """Take what was written to settings since the last look as written by a forward, which its proof follows.

        Args:
            forget: whether forwards go on writing, so that these settings can't be looked at any more.
        """
        self._settings.settle(forget)

    @property
    def followed(self) -> Sequence[object]:
        """The hooks of all modules that proofs follow."""
        return self._writes.onlookers.followed

    def compare(self) -> bool:
        """As `look`, for all that the model holds, however it was changed."""
        self._find_modes()
        hooks = self._hooks.look_at_all()
        found = set(self._differing()) - self._writes.inside
        return self._look_at({*self._writes.noted, *self._broken, *found}) or hooks

    def _refuse_replaced_function(self) -> None:
        for kind, before in zip(self._kinds, self._functions, strict=True):
            for name, held, now in zip(_CALLED, before, _functions(kind), strict=True):
                if now is not held:
                    raise UnprovedCallError(f"TP130 changed-model: `{kind.__name__}.{name}` was replaced {_HELP}")

    # -- one place ------------------------------------------------------------------------------------------------
    def _look_at(self, places: set[_Place]) -> bool:
        self._writes.noted.clear()
        self._broken.clear()
        changed = [self._look_at_one(*place) for place in places if place[0] in self._names]
        if any(changed):
            self._settings = self._find_settings()
        if places and not self._broken:
            self._tables = Tables(self._names)
        if self._broken:
            raise UnprovedCallError(f"TP130 changed-model: {min(self._broken.values())} {_HELP}")
        return any(changed)

    def _look_at_one(self, module: nn.Module, name: str) -> bool:
        """Whether calls have to be proved anew for what is at one place; notes what is `_broken`."""
        shown = f"`{f'{self._names[module]}.{name}'.lstrip('.')}`"
        changed, broken = False, ""
        if name == HOOKS:
            return False
        if name == _FORWARD:  # what it calls of torch shows in the next call; around the root it sees whole tensors
            return module is not self._model
        if (module, name) in self._writes.local:
            if vars(module).get(name) != self._writes.local[module, name]:
                broken = f"{shown}, which counts what this rank holds, was set"
        elif name in self._children[module] or name in contents.children(module):
            changed, broken = self._child(module, name, shown)
        elif name in self._tensors[module] or contents.tensor(module, name) is not None:
            broken = self._tensor(module, name, shown)
        else:
            changed = self._attribute(module, name)
        if broken:
            self._broken[module, name] = broken
        return changed

    def _child(self, module: nn.Module, name: str, shown: str) -> tuple[bool, str]:
        before, now = self._children[module].get(name), contents.children(module).get(name)
        if now is before:
            return False, ""
        if before is None:
            return False, f"{shown}, a `{type(now).__name__}`, was added"
        if now is not None and self._only_wraps(before, now):
            self._children[module][name] = now
            return True, ""
        became = "was removed" if now is None else f"was replaced by a `{type(now).__name__}`"
        return False, f"{shown}, a `{type(before).__name__}`, {became}"

    def _only_wraps(self, before: nn.Module, now: nn.Module) -> bool:
        """Whether all modules with a body that were in `before` are in `now`, beside others that hold no tensors."""
        held = set(now.modules())
        lost = [module for module in self._reached(before) if module not in held]
        new = [module for module in held if module not in self._names]
        if any(not isinstance(module, (nn.ModuleList, nn.ModuleDict)) for module in lost):
            return False
        return not any(map(contents.tensors, (*lost, *new))) and len(new) < len(held)

    def _reached(self, module: nn.Module) -> Iterator[nn.Module]:
        yield module
        for child in self._children.get(module, {}).values():
            if child is not None:
                yield from self._reached(child)

    def _tensor(self, module: nn.Module, name: str, shown: str) -> str:
        before, now = self._tensors[module].get(name), contents.tensor(module, name)
        if before is None:
            return f"{shown} was added"
        if now is None:
            return f"{shown} was removed"
        if contents.form(now) != before:
            return f"{shown} was replaced by a {type(now).__name__} of shape {tuple(now.shape)}"
        return ""

    def _attribute(self, module: nn.Module, name: str) -> bool:
        known, now = self._attributes[module], vars(module).get(name, MISSING)
        if name in NOT_ATTRIBUTES or is_same(known.get(name, MISSING), now):
            return False
        stock = self._stock[module]
        if now is MISSING:
            del known[name]
            vars(stock).pop(name, None)
        else:
            known[name] = contents.kept(now)
            shown = on_meta((), now) if isinstance(now, Tensor) else fresh_object(without_checkpoint(now))
            setattr(stock, name, shown)
        return True

    # -- the whole model ------------------------------------------------------------------------------------------
    def _differing(self) -> Iterator[_Place]:
        """The places at which the model differs from what it was."""
        for module in self._names:
            tables: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
                (self._children[module], contents.children(module)),
                (self._attributes[module], {n: v for n, v in vars(module).items() if n not in NOT_ATTRIBUTES}),
            )
            for before, now in tables:
                names = {n for n in (*before, *now) if self._writes.local.get((module, n), MISSING) != now.get(n)}
                yield from ((module, n) for n in names if not is_same(before.get(n, MISSING), now.get(n, MISSING)))
            before, now = self._tensors[module], contents.tensors(module)
            yield from ((module, name) for name in {*before, *now} if before.get(name) != now.get(name))

    def _find_modes(self) -> None:
        """Let the skeleton's modules be in the modes that the model's are in."""
        for module, stock in self._stock.items():
            stock.training = module.training
        self.modes = modes_of(self._stock[self._model])

    # -- settings -------------------------------------------------------------------------------------------------
    def _find_settings(self) -> Settings:
        local = self._writes.local
        shared = {
            module: {name: held for name, held in attributes.items() if (module, name) not in local}
            for module, attributes in self._attributes.items()
        }
        return Settings(shared, self._stock)

    def _look_at_settings(self) -> bool:
        changed = self._settings.changed()
        for kind, name in changed:
            for module, holder in self._writes.local:
                if type(vars(module).get(holder)) is kind:  # with counts of its own, it wouldn't see the change
                    raise UnprovedCallError(
                        f"TP130 changed-model: `{name}` of the settings in `{self._names[module]}.{holder}` was set "
                        f"{_HELP}"
                    )
        if changed:
            self._settings.follow()
        return bool(changed)


def modes_of(model: nn.Module) -> frozenset[str]:
    """The modules that aren't in the mode of the model itself."""
    return frozenset(name for name, module in modules_in(model).items() if module.training != model.training)


__all__ = ["Changes", "modes_of"]
