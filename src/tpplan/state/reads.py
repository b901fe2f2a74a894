"""Reads: by what names a model's Python asks for something.

in:  a block in which modules run; code
out: the names by which it asks modules, `ANYTHING` if a body looks at all that its module has; those of functions

    self.scale * self.up(x)      ->   "scale", "up"
    F.linear(x, self.weight)     ->   "torch.nn.functional:linear"

What is never read is no premise: `generate` may note what it likes on a model.
"""

from __future__ import annotations

import builtins
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Set
from contextlib import contextmanager
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.compat.subclasses import takes_apart
from tpplan.state.ambient import without_noting
from tpplan.state.content import ContentValue, Identity, Reader
from tpplan.state.parts import PLAIN, UnseenError, functions_in, is_library, is_premise, names_in

ANYTHING = "__dict__"
View = Callable[[nn.Module, dict[str, Any]], Any]
_OF_DTENSORS = frozenset(("_local_tensor", "_spec"))
_TORCH: tuple[ModuleType | type, ...] = (torch, torch.nn.functional, torch.Tensor)
_lock = threading.Lock()
_blocks = Counter[type]()
_known_files: tuple[object, dict[str, list[str]]] = (None, {})


class _Noting(threading.local):
    """The names that are being collected in this thread."""

    names: set[str] | None = None
    kinds: frozenset[type] = frozenset()
    view: View | None = None


_noting = _Noting()


@contextmanager
def reads() -> Generator[set[str]]:
    """A block; the names that `note_reads` has modules tell in it are in the set."""
    before, kinds, view = _noting.names, _noting.kinds, _noting.view
    _noting.names = set()
    try:
        yield _noting.names
    finally:
        _count(_noting.kinds - kinds, -1)
        if before is not None:
            before |= _noting.names
        _noting.names, _noting.kinds, _noting.view = before, kinds, view


def note_reads(modules: Iterable[nn.Module], view: View | None = None) -> None:
    """In a block of `reads`, have modules of these classes tell what they are asked for.

    Args:
        modules: of these classes.
        view: makes what the model's code is shown as the `__dict__` of a module; None for that itself.
    """
    if _noting.names is not None:
        _noting.view = view
        new = {_that_tells(type(module)) for module in modules} - _noting.kinds
        _count(new, 1)
        _noting.kinds |= new


def _that_tells(kind: type) -> type:
    """The class to be changed: Python looks through all that derive from it, which of `nn.Module` are thousands."""
    return kind if kind.__getattribute__ in (object.__getattribute__, _noted) else nn.Module


def _count(kinds: Iterable[type], more: int) -> None:
    """Let modules tell while there is a block in any thread."""
    with _lock:
        for kind in kinds:
            before = _blocks[kind]
            _blocks[kind] += more
            if not before:
                type.__setattr__(kind, "__getattribute__", _noted)  # whatever its own class refuses
            elif not _blocks[kind]:
                type.__delattr__(kind, "__getattribute__")
                del _blocks[kind]


def _noted(module: nn.Module, name: str) -> Any:
    names, view = _noting.names, None
    if names is not None and (name != ANYTHING or not is_library(_caller())):
        names.add(name)
        view = _noting.view if name == ANYTHING else None
    held = object.__getattribute__(module, name)
    return held if view is None else view(module, held)


def reached(code: Iterable[CodeType], kinds: Iterable[type[Any]]) -> dict[CodeType, tuple[str, ...]]:
    """Code, and that of forwards, and of the functions that these name; with the modules of Python it belongs to.

    Args:
        code: that of bodies. What torch's calls isn't looked for.
        kinds: the classes of the modules that run, and of what they hold; their functions it may name, and those of
            the user's classes in the files that it belongs to.
    """
    known, code = {*kinds}, [*code]
    while True:
        found = _reached(code, known)
        files = {name for spaces in found.values() for name in spaces if not is_library(name)}
        named = {held for name in files for held in vars(sys.modules[name]).values() if isinstance(held, type)}
        if known >= (own := {kind for kind in named if not is_library(kind.__module__)}):
            return found
        known |= own


def _reached(code: Iterable[CodeType], kinds: Iterable[type[Any]]) -> dict[CodeType, tuple[str, ...]]:
    files = _files()
    methods: dict[str, list[FunctionType]] = {}
    unnamed: list[FunctionType] = []  # what Python calls itself, such as `__call__`
    for base in dict.fromkeys(base for kind in kinds for base in kind.__mro__ if not _is_torchs(base.__module__)):
        for name, held in vars(base).items():
            functions = functions_in(held)
            methods.setdefault(name, []).extend(functions)
            made = name == "__init__" and issubclass(base, nn.Module)
            if name.startswith("__") and not (made or is_library(base.__module__)):
                unnamed += functions
    found: dict[CodeType, tuple[str, ...]] = {}
    waiting = [*code, *(function.__code__ for function in (*methods.get("forward", ()), *unnamed))]
    while waiting:
        each = waiting.pop()
        if each in found:
            continue
        found[each] = spaces = tuple(files.get(each.co_filename, ()))
        names = names_in(each)
        for space in spaces:
            own = vars(sys.modules[space])
            functions = [function for name in names.globals for function in functions_in(own.get(name))]
            waiting += [function.__code__ for function in functions if not _is_torchs(function.__module__)]
        if not any(map(_is_torchs, spaces)):
            waiting += [function.__code__ for name in names.attributes for function in methods.get(name, ())]
    return found


def _files() -> dict[str, list[str]]:
    """The modules of Python by the files that they were read from."""
    global _known_files
    latest = len(sys.modules), next(reversed(sys.modules))
    if _known_files[0] != latest:
        files: dict[str, list[str]] = {}
        for name, module in {**sys.modules}.items():
            files.setdefault(getattr(module, "__file__", None) or "", []).append(name)
        _known_files = latest, files
    return _known_files[1]


def _is_torchs(name: str | None) -> bool:
    return name is None or name.partition(".")[0] in ("torch", "tpplan")


def functions_read(code: Iterable[CodeType], kinds: Iterable[type[Any]]) -> frozenset[str]:
    """What code reads of torch, and of its own file: functions and numbers; of a user's file, all that may change.

    Each by the name of a module of Python, or of `Tensor`, and its own: a user may replace what stands there. And what
    it reads of any object, as `.name`: see `marks_on`.

    Args:
        code, kinds: see `reached`.
    """
    found: set[str] = set()
    for each, spaces in reached(code, kinds).items():
        names = names_in(each)
        for space in _TORCH:
            functions = (leaf for leaf in names.attributes if is_function(getattr(space, leaf, None)))
            found.update(f"{shown(space)}:{leaf}" for leaf in functions)
        found.update(f".{leaf}" for leaf in names.attributes if leaf.isidentifier())
        for name in spaces:
            module = sys.modules[name]
            own = ((leaf, vars(module)[leaf]) for leaf in names.globals & vars(module).keys())
            found.update(f"{name}:{leaf}" for leaf, held in own if _is_premise(held, is_library(name)))
            others = names.globals & vars(builtins).keys() - vars(module).keys()
            found.update(f"builtins:{leaf}" for leaf in others if is_premise(vars(builtins)[leaf]))
    return frozenset(found)


def read_of_classes(kinds: Iterable[type[Any]], reads: Set[str]) -> list[tuple[type[Any], str]]:
    """What bodies read of their modules' classes: by what names, and what functions there load.

    Args:
        kinds: the classes.
        reads: the names by which bodies ask their modules for something.
    """
    held = [(kind, *item) for kind in kinds for item in vars(kind).items()]
    found: dict[tuple[type[Any], str], None] = {}
    loaded = frozenset(reads)
    while new := [each for each in held if each[:2] not in found and (each[1] in loaded or ANYTHING in reads)]:
        found |= dict.fromkeys((kind, name) for kind, name, _ in new)
        called = [function for _, _, item in new for function in functions_in(item)]
        loaded = loaded.union(*(names_in(function.__code__).attributes for function in called))
    return [*found]


def _is_premise(held: object, of_library: bool) -> bool:
    if isinstance(held, ModuleType):
        return not (of_library or is_library(held.__name__))
    return is_function(held) or (type(held) in PLAIN if of_library else is_premise(held))


def marks_on(tensor: Tensor, reads: Set[str]) -> dict[str, Any]:
    """What was set on a tensor, and code that may run reads of anything.

    Objects of one that torch can take apart are what its class made it of.

    Raises:
        UnseenError: an object, which a rank's tensor or a copy without numbers doesn't have.
    """
    found = {name: held for name, held in vars(tensor).items() if f".{name}" in reads and name not in _OF_DTENSORS}
    if found and takes_apart(tensor):
        return {name: held for name, held in found.items() if type(held) in PLAIN}
    for name, held in found.items():
        if type(held) not in PLAIN:
            raise UnseenError(f"a tensor on which an object, `{name}`, was set, that no copy of the tensor has")
    return found


def is_function(held: object) -> bool:
    """Whether it can be called, and is neither a class nor an object of one of the user's."""
    return callable(held) and not isinstance(held, type) and is_library(type(held).__module__)


def kinds_of(modules: Iterable[nn.Module]) -> set[type[Any]]:
    """The classes of modules, and the user's of what they hold."""
    kinds: set[type[Any]] = {type(module) for module in modules}
    held: set[type[Any]] = {type(item) for module in modules for item in vars(module).values()}
    return kinds | {kind for kind in held if not is_library(kind.__module__)}


def shown(space: ModuleType | type) -> str:
    """The name of a module of Python, or of a class."""
    return space.__name__ if isinstance(space, ModuleType) else f"{space.__module__}.{space.__qualname__}"


def space_of(name: str) -> ModuleType | type:
    """The module of Python or class of one of `functions_read`."""
    module = name.partition(":")[0]
    return next((space for space in _TORCH if shown(space) == module), None) or sys.modules[module]


def global_content(space: ModuleType | type, held: Any, reader: Reader) -> object:
    """The content of a global: of a library's functions and modules which one it is, of all else what it is.

    Raises:
        UnseenError: it can be neither compared nor counted, or is a method of `Tensor` that was replaced, which torch
            calls once more under a function mode.
    """
    held = without_noting(held)
    of_user = isinstance(held, (FunctionType, MethodType)) and not is_library(held.__module__)
    if of_user and space is torch.Tensor:
        raise UnseenError("a function in place of torch's, which torch's function modes call twice")
    if not of_user and (is_function(held) or isinstance(held, ModuleType)):
        return ContentValue(type(held), Identity(held))
    return reader(held)


def _caller() -> str | None:
    """The module of Python whose code asks for an attribute, or for `dir` of a module."""
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    asks = frame.f_back if frame.f_code is nn.Module.__dir__.__code__ else frame
    return None if asks is None else asks.f_globals.get("__name__")


__all__ = [
    "ANYTHING",
    "functions_read",
    "global_content",
    "is_function",
    "kinds_of",
    "marks_on",
    "note_reads",
    "reached",
    "read_of_classes",
    "reads",
    "shown",
    "space_of",
]
