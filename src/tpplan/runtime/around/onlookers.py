"""Onlookers: what a user has put around a call of a sharded model may look at it, and is told if it changes it.

in:  a call of the root; function and dispatch modes that are active, hooks of all modules
out: nothing; or a `ChangedByToolError` that names the one which changed what was computed

    with CountsOperations(): model(x)                               runs as it was proved
    with DoublesGelu(): model(x)                                    TP131: no proof knows of that
    register_module_forward_hook(lambda m, a, result: 2 * result)   noticed, and followed in proofs from then on

No proof sees these tools (`ambience.py`), and their types don't say whether they only count. So each call is its own
test. A mode runs between two modes of ours: what the outer one sees must reach the inner one as it is, by the same
function with the same arguments, and the result must come back as it is. What a mode does besides, on tensors of its
own, is its own affair. torch's own modes (counters, profilers, a default device) aren't looked at.

A hook only looks if it returns nothing, writes to no tensor that it is shown, puts no hook on these, and sets nothing
that the module had; before a forward, nothing at all. One that does more becomes part of what proofs follow. A hook of
backwards can't be told before the backward, when the result is gone: one whose code has a `return` is followed at once,
and another is refused when it writes to a gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tpplan.ambience import Onlooker, is_users
from tpplan.compat.hooks import has_hooks_of_all, tables_of_all
from tpplan.compat.modes import (
    TorchDispatchMode,
    dispatch_modes,
    function_modes,
    has_dispatch_modes,
    has_modes,
    under_dispatch_modes,
    under_function_modes,
    without_function_modes,
)
from tpplan.compat.modules import own_buffers, own_modules, own_parameters
from tpplan.compat.schemas import OpOverload, schema_mutates
from tpplan.compat.tensors import storage_key
from tpplan.compiler.ir.pytree import tensors_in
from tpplan.plan import TpplanError

_PLAIN = (int, float, complex, str, slice, torch.dtype, torch.device, torch.layout, torch.memory_format)
_UNPROVED = ", and the call was proved without that"
_AGAIN = "call the model again, and the call is proved with the hook"


class ChangedByToolError(TpplanError):
    """Something around a call changed what it computes, which its proof doesn't know."""


class ChangingHookError(ChangedByToolError):
    """A hook of all modules did so; later proofs follow it."""


class Onlookers:
    """What a model's calls have taught of the hooks of all modules.

    Attributes:
        followed: the hooks that were found to change something.
        expected: whether calls are those of a user, around whom there may be some.
    """

    def __init__(self) -> None:
        """Know of none."""
        self.expected = True
        self.followed: list[object] = []
        self._added: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()

    @contextmanager
    def around(self) -> Generator[None]:
        """A call of the model.

        Raises:
            ChangedByToolError: it isn't what was proved.
        """
        functions, dispatches = function_modes(), dispatch_modes() if has_dispatch_modes() else []
        writes = _Writes() if torch.is_inference_mode_enabled() else None
        pairs = [_Pair(mode, writes) for mode in (*functions, *dispatches) if _changes_freely(mode)]
        with (
            _hooks_watched(self, writes) as changing,
            _modes_watched(functions, dispatches, pairs),
            nullcontext() if writes is None or not (pairs or _users_hooks()) else writes,
        ):
            yield
        for pair in pairs:
            if pair.changed:
                kind = "function" if isinstance(pair.mode, TorchFunctionMode) else "dispatch"
                raise ChangedByToolError.of(
                    "TP131",
                    f"`{type(pair.mode).__qualname__}`, a {kind} mode around the call, changes what `{pair.changed}` "
                    f"gets or returns{_UNPROVED}",
                    help="leave the mode for calls of the model; one that passes each call on as it is may stay",
                )
        if changing:
            self.followed += [hook for hook, _ in changing if hook not in self.followed]
            raise ChangingHookError.of("TP131", f"{changing[0][1]}{_UNPROVED}", help=_AGAIN)

    def are_there(self) -> bool:
        """Whether there is anyone to look at."""
        return self.expected and (has_modes() or has_hooks_of_all())

    def names_added(self, module: nn.Module) -> set[str]:
        """The attributes that hooks have added to a module, which is none of the model's business."""
        return self._added.setdefault(module, set())


class _ShownToOnlooker:
    """Tensors that someone is shown, who is not to write to them.

    Attributes:
        touched: whether that was done by an operator that counts no writes in tensors' versions.
    """

    def __init__(self, *held: Any) -> None:
        self.memory = _memory(held)
        self.touched = False

    def note(self, func: OpOverload, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Look at an operation that is run meanwhile."""
        positions = schema_mutates(func)
        if positions:
            written = [*(args[at] for at in positions if at < len(args)), keywords.get("out")]
            self.touched |= not self.memory.isdisjoint(_memory(written))


class _Writes(TorchDispatchMode):
    """In inference mode, where tensors have no versions: sees what is run while someone is shown tensors.

    Attributes:
        shown: to whom, innermost last; None while a call of the model's own runs inside of that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[_ShownToOnlooker | None] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        shown = self.shown[-1] if self.shown else None
        if shown is not None:
            shown.note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextmanager
def _showing(writes: _Writes | None, shown: _ShownToOnlooker | None) -> Generator[None]:
    if writes is None:
        yield
        return
    writes.shown.append(shown)
    try:
        yield
    finally:
        writes.shown.pop()


def _memory(held: Any) -> set[int]:
    with without_function_modes():
        return {storage_key(tensor) for _, tensor in tensors_in(held) if type(tensor) in (Tensor, nn.Parameter)}


# -- modes --------------------------------------------------------------------------------------------------------
def _changes_freely(mode: object) -> bool:
    """Whether what a mode does with a call isn't torch's code nor ours."""
    handler = "__torch_function__" if isinstance(mode, TorchFunctionMode) else "__torch_dispatch__"
    return is_users(getattr(type(mode), handler))


class _Pair:
    """What the two modes around a user's share."""

    def __init__(self, mode: Any, writes: _Writes | None) -> None:
        self.mode = mode
        self.writes = writes if isinstance(mode, TorchFunctionMode) else None
        self.changed = ""
        self.open: list[_SeenByOnlooker] = []


class _SeenByOnlooker(_ShownToOnlooker):
    """A call as it arrives at a user's mode: whether it was passed on as it is, and what came of that."""

    def __init__(self, func: Any, args: Sequence[Any], keywords: dict[str, Any]) -> None:
        super().__init__(args, keywords)
        self.func, self.args, self.keywords = func, args, keywords
        self.versions = _versions((args, keywords))
        self.made: list[tuple[Any, Any]] = []

    def meets(self, func: Any, args: Sequence[Any], keywords: dict[str, Any]) -> bool:
        return (
            func == self.func
            and _same((args, keywords), (self.args, self.keywords))
            and _versions((args, keywords)) == self.versions
        )

    def is_answered_by(self, result: Any) -> bool:
        if self.touched:
            return False
        versions = _versions((self.args, self.keywords, result))
        return any(_same(made, result) and known == versions for made, known in self.made)


def _same(one: Any, other: Any) -> bool:
    """Whether two values are the same objects, or containers and numbers alike."""
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))  # pyright: ignore
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)  # pyright: ignore
    if one.__class__ is not other.__class__:
        return False
    if isinstance(one, torch.ScriptObject):  # a process group or the like, which is wrapped anew each time
        return True
    return isinstance(one, _PLAIN) and bool(one == other or one != one)


def _versions(held: Any) -> list[tuple[int, int]]:
    with without_function_modes():
        return [(id(t), t._version) for _, t in tensors_in(held) if not t.is_inference()]


@contextmanager
def _modes_watched(functions: Sequence[Any], dispatches: Sequence[Any], pairs: Sequence[_Pair]) -> Generator[None]:
    """A block in which each of these modes that `pairs` has runs between two of ours."""
    if not pairs:
        yield
        return
    between = {id(pair.mode): pair for pair in pairs}
    with (
        under_function_modes(_between(functions, between, _BelowFunction, _AboveFunction)),
        under_dispatch_modes(_between(dispatches, between, _BelowDispatch, _AboveDispatch)),
    ):
        yield


def _between(
    modes: Iterable[Any], pairs: dict[int, _Pair], below: Callable[[_Pair], Any], above: Callable[[_Pair], Any]
) -> Iterator[Any]:
    for mode in modes:
        pair = pairs.get(id(mode))
        yield from (mode,) if pair is None else (below(pair), mode, above(pair))


def _arrive(pair: _Pair, func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Run a call that arrives at a user's mode."""
    seen = _SeenByOnlooker(func, args, keywords)
    pair.open.append(seen)
    try:
        with _showing(pair.writes, seen):
            result = func(*args, **keywords)
    finally:
        pair.open.pop()
    if not pair.changed and not seen.is_answered_by(result):
        pair.changed = getattr(func, "__name__", str(func))
    return result


def _go_on(pair: _Pair, func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Run a call that a user's mode makes."""
    seen = pair.open[-1] if pair.open else None
    if seen is None or not seen.meets(func, args, keywords):
        if seen is not None and isinstance(func, OpOverload):  # below autograd, where versions don't count
            seen.note(cast("OpOverload", func), args, keywords)
        return cast("Any", func)(*args, **keywords)
    with _showing(pair.writes, None):
        result = func(*args, **keywords)
    seen.made.append((result, _versions((seen.args, seen.keywords, result))))
    seen.memory |= _memory(result)
    return result


class _AboveFunction(TorchFunctionMode):
    def __init__(self, pair: _Pair) -> None:
        super().__init__()
        self._pair = pair

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _arrive(self._pair, func, args, kwargs or {})


class _BelowFunction(TorchFunctionMode):
    def __init__(self, pair: _Pair) -> None:
        super().__init__()
        self._pair = pair

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _go_on(self._pair, func, args, kwargs or {})


class _AboveDispatch(TorchDispatchMode):
    def __init__(self, pair: _Pair) -> None:
        super().__init__()
        self._pair = pair

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _arrive(self._pair, func, args, kwargs or {})


class _BelowDispatch(TorchDispatchMode):
    def __init__(self, pair: _Pair) -> None:
        super().__init__()
        self._pair = pair

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _go_on(self._pair, func, args, kwargs or {})


# -- hooks of all modules -----------------------------------------------------------------------------------------
_threads = threading.local()
_lock = threading.Lock()
_calls = [0]


@contextmanager
def _hooks_watched(onlookers: Onlookers, writes: _Writes | None) -> Generator[list[tuple[object, str]]]:
    """A block in which hooks that change something are found, each with that in words."""
    changing: list[tuple[object, str]] = []
    if not has_hooks_of_all():
        yield changing
        return
    with _lock:
        _calls[0] += 1
        for kind, table in tables_of_all().items():
            for key, hook in list(table.items()):
                if is_users(hook) and not isinstance(hook, Onlooker):
                    table[key] = _Hook(kind, hook)
    before = getattr(_threads, "call", None)
    _threads.call = (onlookers, changing, writes)
    try:
        yield changing
    finally:
        _threads.call = before
        with _lock:
            _calls[0] -= 1
            for table in tables_of_all().values() if not _calls[0] else ():
                for key, hook in list(table.items()):
                    if isinstance(hook, _Hook):
                        table[key] = hook.hook


def _users_hooks() -> bool:
    """Whether there are hooks of all modules that are looked at."""
    return any(isinstance(hook, _Hook) for table in tables_of_all().values() for hook in table.values())


class _Hook(Onlooker):
    """A hook of all modules that is looked at."""

    def __init__(self, kind: str, hook: Any) -> None:
        self.hook = hook
        self._kind = kind

    def __call__(self, module: nn.Module, *args: Any, **keywords: Any) -> Any:
        backward = self._kind.startswith("backward")
        call: tuple[Onlookers, list[tuple[object, str]], _Writes | None] | None = getattr(_threads, "call", None)
        if backward:
            return self._on_gradients(module, *args)
        if call is None or self.hook in call[0].followed:
            return self.hook(module, *args, **keywords)
        onlookers, changing, writes = call
        added = onlookers.names_added(module)
        before = _shown(module, args, added)
        shown = _ShownToOnlooker(args)
        with _showing(writes, shown):
            result = self.hook(module, *args, **keywords)
        if self._kind == "forward":
            added.update(vars(module).keys() - before[0].keys() - added)
        if result is not None or shown.touched or _shown(module, args, added) != before:
            does = "returns something" if result is not None else "changes what it is shown"
            changing.append((self.hook, f"`{_name(self.hook)}`, a hook of all modules, {does}"))
        return result

    def _on_gradients(self, module: nn.Module, *args: Any) -> Any:
        before = _versions(args)
        result = self.hook(module, *args)
        if _versions(args) != before:
            raise ChangedByToolError.of(
                "TP131",
                f"`{_name(self.hook)}`, a hook of all modules, writes to a gradient{_UNPROVED}",
                help="return another gradient instead; a hook that returns one is followed in proofs",
            )
        return result


def _shown(module: nn.Module, args: Sequence[Any], added: set[str]) -> tuple[dict[str, int], list[object]]:
    """What a hook could change: what the module has, but for what hooks added, and the tensors that it is shown."""
    held = {name: id(item) for name, item in vars(module).items() if name not in added}
    tables = (own_parameters(module), own_buffers(module), own_modules(module))
    with without_function_modes():
        own = [(name, id(item), _state(item)) for table in tables for name, item in table.items()]
        return held, [*own, *((path, id(item), _state(item)) for path, item in tensors_in(args))]


def _state(item: Any) -> object:
    if not isinstance(item, Tensor):
        return None
    hooks: Any = item._backward_hooks
    return item.requires_grad, len(hooks or ()), None if item.is_inference() else item._version


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__)).replace("<locals>.", "")


__all__ = ["ChangedByToolError", "ChangingHookError", "Onlookers"]
