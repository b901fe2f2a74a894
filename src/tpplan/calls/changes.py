"""Changes: what was changed in a sharded model after `parallelize`, and what becomes of its proofs.

in:  what was written to the model's modules since the last call, and the stock skeleton
out: the state of what modules hold, by which proofs are kept apart; or a TP130 for what no proof can follow

    model.layers[0].act = gelu_tanh            a function: another state (`held`), whose calls have proofs of their own
    model.layers[0].attn.q = LoraLinear(q)     a module with parameters of its own: refused

A module that only wraps sharded ones (an activation checkpoint) and holds no tensors may take their place.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.prune import BasePruningMethod

from tpplan.calls.call_errors import UnprovedCallError
from tpplan.calls.held import Held, LeanedOn
from tpplan.calls.module_hooks import Hooks
from tpplan.compat.modules import computed_weights, own_buffers, own_modules, own_parameters
from tpplan.compat.tensors import geometry_of
from tpplan.parity.tree import modules_in
from tpplan.runtime.modules import contents
from tpplan.runtime.modules.writes import HOOKS, WRITES, Watched, Writes, stock_class
from tpplan.state.content import Difference
from tpplan.state.flat import Standing
from tpplan.state.parts import PLAIN, UnseenError

_Place = tuple[nn.Module, str]
_FORWARD, _CLASS = "forward", "__class__"
_CALLED = (_FORWARD, "__call__")
_functions = attrgetter(*_CALLED)
_KINDS = ("buffer", "parameter")
_EARLIER = (
    "change the stock model before `parallelize`: apply adapters first, and parallelize the adapted model; "
    "`merge_adapter()` of peft merges in place"
)


@contextmanager
def _tells_unseen() -> Generator[None]:
    """A block in which what can't be compared is a TP130."""
    try:
        yield
    except UnseenError as error:
        raise UnprovedCallError.of(
            "TP130",
            f"{error}, and nobody can tell whether it changes",
            help="keep what steers a forward in attributes of modules: numbers, texts, containers or plain objects",
        ) from None


class Changes:
    """Follows the changes of one sharded model.

    Attributes:
        modes: the modules that aren't in the mode of the model itself.
    """

    def __init__(
        self, model: nn.Module, stock: nn.Module, always: bool, reads: Iterable[str], leaned_on: LeanedOn
    ) -> None:
        """Remember the model as it is.

        Args:
            model: the sharded model, which notes what is written to it.
            stock: a skeleton of the stock model.
            always: whether to compare the whole model at each call, so that no change is missed.
            reads: the names by which bodies ask their modules for something.
            leaned_on: see `Held`.
        """
        self._model = model
        self._writes: Writes = vars(model)[WRITES]
        self._always = always
        skeletons = modules_in(stock)
        self._names = {module: name for name, module in modules_in(model).items()}
        self._stock = {module: skeletons[name] for module, name in self._names.items()}
        self._children = {module: contents.children(module) for module in self._names}
        self._tensors = {module: contents.tensors(module) for module in self._names}
        self._forwards = {module for module in self._names if _FORWARD in vars(module)}
        self._classes = {module: stock_class(module) for module in self._names}
        self._kinds = [*dict.fromkeys(map(type, skeletons.values()))]
        self._functions = [*map(_functions, self._kinds)]
        self._hooks = Hooks(model, self._stock, self._writes)
        self._remember_tables()
        self._held = Held(self._names, self._stock, self._writes, reads, leaned_on)
        self._broken: dict[_Place, str] = {}
        self.modes: frozenset[str] = frozenset()
        self._find_modes()

    @property
    def state(self) -> int:
        """What of the modules' own state proofs are kept apart by; see `Held`."""
        return self._held.state

    @property
    def is_inside(self) -> bool:
        """Whether a forward of the model is under way."""
        return self._writes.forwards > 0

    @property
    def forwards(self) -> list[str]:
        """The modules inside of which a `forward` was set."""
        found = (module for module in self._names if _FORWARD in vars(module) and module not in self._forwards)
        return [self._names[module] for module in found if module is not self._model]

    @property
    def names(self) -> Mapping[int, str]:
        """The names of the model's modules, by id, whatever wraps them now."""
        return {id(module): name for module, name in self._names.items()}

    @property
    def difference(self) -> Difference | None:
        """Where that differs from the state of the first proofs."""
        return self._held.difference()

    @_tells_unseen()
    def look(self) -> bool:
        """Whether something was changed for which calls have to be proved anew, whatever state modules are in.

        Raises:
            UnprovedCallError: what no proof can follow.
        """
        if [*map(_functions, self._kinds)] != self._functions:
            self._refuse_replaced_function()
        writes = self._writes
        counted = writes.noted & self._held.by_forwards if writes.noted else ()
        if counted:  # also by what is recomputed in a backward
            writes.noted.difference_update(counted)
            writes.inside |= counted
            self._held.settle()
        noted = [module for module, name in writes.noted if name == HOOKS] if writes.noted else ()
        changed = self._hooks.look(noted)
        if writes.modes:
            writes.modes = False
            self._find_modes()
        if self._always:
            return self.compare() or changed
        if not writes.forwards and not self._stands():  # inside of one, a functional call has other tensors in place
            writes.noted.update(self._differing())
        if writes.noted or self._broken:
            return self._look_at({*writes.noted, *self._broken}) or changed
        self._look_at_held(())
        return changed

    @_tells_unseen()
    def settle(self) -> None:
        """Take what was written since the last look as written by a forward, which its proof follows."""
        for module, name in self._writes.inside:
            buffer = own_buffers(module).get(name) if module in self._names else None
            if buffer is not None:
                self._tensors[module][name] = contents.form(buffer, False)
        self._held.settle()

    @_tells_unseen()
    def follow(self, reads: Iterable[str] = ()) -> bool:
        """Let the skeleton be as the model is now; whether a capture that asked for these names was given otherwise."""
        return self._held.follow(reads)

    def expect_writes(self) -> None:
        """Settle after each forward from now on."""
        self._writes.settle = self.settle

    @property
    def followed(self) -> Sequence[object]:
        """The hooks of all modules that proofs follow."""
        return self._writes.onlookers.followed

    @_tells_unseen()
    def compare(self) -> bool:
        """As `look`, for all that the model holds, however it was changed."""
        self._find_modes()
        hooks = self._hooks.look_at_all()
        found = set(self._differing()) - self._writes.inside
        self._held.find()
        self._held.compare()
        return self._look_at({*self._writes.noted, *self._broken, *found}) or hooks

    def _refuse_replaced_function(self) -> None:
        for kind, before in zip(self._kinds, self._functions, strict=True):
            for name, held, now in zip(_CALLED, before, _functions(kind), strict=True):
                if now is not held:
                    raise _changed_late(f"`{kind.__name__}.{name}` was replaced")

    # -- one place ------------------------------------------------------------------------------------------------
    def _look_at(self, places: set[_Place]) -> bool:
        self._writes.noted.clear()
        self._broken.clear()
        known = [place for place in places if place[0] in self._names]
        attributes = [place for place in known if self._is_attribute(*place)]
        changed = [self._look_at_one(*place) for place in known if place not in attributes]
        self._look_at_held(attributes)
        if places and not self._broken:
            self._remember_tables()
        if self._broken:
            message, (module, _) = min(((text, at) for at, text in self._broken.items()), key=lambda held: held[0])
            raise _changed_late(message, _way_out(module))
        return any(changed)

    def _look_at_held(self, written: Iterable[_Place]) -> None:
        self._held.look(written)
        if self._held.hidden is not None and not self.is_inside:  # inside, a rank's parts stand there
            raise _changed_late(f"`{self._held.hidden}` was hidden by something in the `__dict__` of its module")
        if self._held.state and self._writes.local:
            self._refuse_counted()

    def _is_attribute(self, module: nn.Module, name: str) -> bool:
        """Whether it isn't looked at here, but by `Held`."""
        known = (HOOKS, _FORWARD, _CLASS, *self._children[module], *contents.children(module), *self._tensors[module])
        local = (module, name) in self._writes.local
        return not (local or name in known or contents.tensor(module, name) is not None)

    def _remember_tables(self) -> None:
        """Remember the children and parameters of all modules, as they stand in these."""
        self._held_children = [held for module in self._names if (held := own_modules(module)) or _stores(module)]
        self._known_children = [*map(dict, self._held_children)]
        tables = [held for module in self._names if (held := own_parameters(module)) or _stores(module)]
        self._standing = Standing(tables)
        self._sharded = [held for table in tables for held in table.values() if isinstance(held, DTensor)]
        self._geometry = geometry_of(self._sharded)

    def _stands(self) -> bool:
        """Whether the same children and parameters stand there, which lie as before: two tensors may be swapped."""
        if self._held_children != self._known_children or not self._standing.is_same():
            return False
        return geometry_of(self._sharded) == self._geometry

    def _look_at_one(self, module: nn.Module, name: str) -> bool:
        """Whether calls have to be proved anew for what is at one place; notes what is `_broken`."""
        shown = f"`{f'{self._names[module]}.{name}'.lstrip('.')}`"
        changed, broken = False, ""
        if name == _FORWARD:  # what it calls of torch shows in the next call; around the root it sees whole tensors
            return module is not self._model
        if name == _CLASS:  # a class that derives from ours adds to it, as FSDP's do
            now = type(module)
            if issubclass(now, Watched) and stock_class(module) is self._classes[module]:
                return _FORWARD in vars(now)
            broken = f"{shown} was set to `{now.__name__}`"
        elif (module, name) in self._writes.local:
            if vars(module).get(name) != self._writes.local[module, name]:
                broken = f"{shown}, which counts what this rank holds, was set"
        elif name in self._children[module] or name in contents.children(module):
            changed, broken = self._child(module, name, shown)
        elif name != HOOKS:
            broken = self._tensor(module, name, shown)
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
        found = contents.tensors(module)[name]
        if found[-1] is not before[-1]:
            return f"{shown} was a {_KINDS[before[-1]]}, and is a {_KINDS[found[-1]]}"
        if found != before:
            return f"{shown} was replaced by a {type(now).__name__} of shape {tuple(now.shape)}"
        return ""

    # -- the whole model ------------------------------------------------------------------------------------------
    def _differing(self) -> Iterator[_Place]:
        """The places at which the model differs from what it was."""
        for module in self._names:
            before, now = self._children[module], contents.children(module)
            yield from ((module, name) for name in {*before, *now} if before.get(name) is not now.get(name))
            local = [(name, held) for (owner, name), held in self._writes.local.items() if owner is module]
            yield from ((module, name) for name, held in local if vars(module).get(name) is not held)
            before, now = self._tensors[module], contents.tensors(module)
            yield from ((module, name) for name in {*before, *now} if before.get(name) != now.get(name))

    def _find_modes(self) -> None:
        """Let the skeleton's modules be in the modes that the model's are in."""
        for module, stock in self._stock.items():
            stock.training = module.training
        self.modes = modes_of(self._stock[self._model])

    def _refuse_counted(self) -> None:
        """TP130 for changed settings of which a module has its own, with counts: it wouldn't see the change."""
        own: dict[type, _Place] = {type(held): at for at, held in self._writes.local.items() if type(held) not in PLAIN}
        place = next((own[type(held)] for held in self._held.holders() if type(held) in own), None) if own else None
        if place is not None:
            copy = f"`{self._names[place[0]]}.{place[1]}` is a copy that counts what this rank holds"
            raise _changed_late(f"{self.difference}; {copy}")


def _changed_late(message: str, way_out: str = _EARLIER) -> UnprovedCallError:
    message = f"{message} after `parallelize`, so that what was proved isn't what would run"
    return UnprovedCallError.of("TP130", message, help=way_out)


def _way_out(module: nn.Module) -> str:
    """The help for a module to which something was added."""
    pruned = next(
        (leaf for leaf, hook in computed_weights(module).items() if isinstance(hook, BasePruningMethod)), None
    )
    if pruned is not None:
        return (
            "change the stock model before `parallelize`; or let go of the mask, by "
            f'`torch.nn.utils.prune.remove(layer, "{pruned}")`: the pruned entries stay zero until a step changes them'
        )
    return _EARLIER


def _stores(module: nn.Module) -> bool:
    """Whether a module is there to hold others, or parameters."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict))


def modes_of(model: nn.Module) -> frozenset[str]:
    """The modules that aren't in the mode of the model itself."""
    return frozenset(name for name, module in modules_in(model).items() if module.training != model.training)


__all__ = ["Changes", "modes_of"]
