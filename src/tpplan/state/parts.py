"""Parts: the one walk over what Python can see of an object, a step at a time.

in:  any object
out: what it is made of, each part by the step that leads there; and what of it can't be taken apart

    LlamaConfig      ->   hidden_size, rope_parameters, …            .hidden_size
    {"causal": True} ->   True                                       ['causal']
    lambda h: h * k  ->   k, and the globals that its code reads     .k

Whatever has no parts is a leaf: numbers, texts, functions of libraries. What hides its state in C is asked how it is
pickled. What can't be compared without using it up, as a generator, is refused.
"""

from __future__ import annotations

import ast
import builtins
import dis
import enum
import functools
import gc
import importlib.util
import io
import itertools
import logging
import os
import struct
import sys
import sysconfig
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from hashlib import blake2b
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple, cast
from weakref import ProxyTypes, ReferenceType

import torch
from torch import Tensor, nn

PLAIN = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice, range}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""Types whose values never change, and say all that they are."""

_ATOMS = PLAIN | {torch.Size, CodeType, type(NotImplemented), MemberDescriptorType, GetSetDescriptorType}
_TOOLS = (
    *(torch.Generator, torch.Stream, torch.Event),
    *(io.IOBase, threading.Thread),
)
# Beside this environment's own: what a venv sees of the system, a user's packages, Debian's.
LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
)
_LONGEST = 60  # a text that names something
OURS = "_tpplan"  # what we note on modules
_FEW = 4096  # bytes that are kept as they are
_POINTER = struct.calcsize("P")
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class was written in Python
_STOCK = frozenset(vars(nn.Module()))
_OF_CLASSES = (FunctionType, classmethod, staticmethod, property, MemberDescriptorType, GetSetDescriptorType)
_OF_EACH = frozenset(
    name
    for names in (
        ("__dict__", "__weakref__", "__module__", "__doc__", "__qualname__", "__annotations__", "__slots__"),
        ("__parameters__", "__orig_bases__", "__match_args__", "__abstractmethods__", "_abc_impl"),
        ("__dataclass_params__", "__dataclass_fields__", "__static_attributes__", "__firstlineno__", "__annotate__"),
    )
    for name in names
)
_STORING = (tuple, list, deque, set, frozenset, OrderedDict, dict)
_CACHED: Any = type(functools.lru_cache(lambda: None))  # functools has no public name for it
_CODE = (FunctionType, BuiltinFunctionType, _CACHED)
_LOADS = frozenset(("LOAD_GLOBAL", "LOAD_NAME"))
_ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"))
_BY_TEXT = frozenset(("getattr", "globals", "vars", "attrgetter", "__dict__", "modules", "import_module", "__import__"))
_OF_LOGGERS = frozenset(vars(logging.Logger("")))
_ENVIRONMENT = frozenset(("environ", "getenv"))


class UnseenError(Exception):
    """Something can neither be compared nor counted.

    Attributes:
        way_out: what to do instead; "" where nothing better is known than to leave it out.
    """

    def __init__(self, what: str, way_out: str = "") -> None:
        """Say what it is."""
        super().__init__(what)
        self.way_out = way_out


class Item(NamedTuple):
    """The step to what stands at a key or a place; `True` is no 1."""

    key: object
    kind: type[Any]


class Bytes(NamedTuple):
    """The step to what lies in an object's memory."""


class StateMemory(NamedTuple):
    """What lies there: its form, its shape, and its bytes, or a digest of many."""

    form: str
    shape: tuple[int, ...] | None
    numbers: bytes


Step = str | Item | Bytes
Parts = list[tuple[Step, Any]]


def parts(held: Any) -> Parts | None:
    """What an object is made of; None of a leaf.

    Raises:
        UnseenError: nobody can tell.
    """
    kind = cast("type[Any]", type(held))
    if kind in _ATOMS or isinstance(held, PurePath) or _is_compilers(kind, held):
        return None
    if kind is itertools.count:
        return [("__next__", counted(held))]
    if kind in ProxyTypes:  # which says that it is of the class of what it refers to
        return [("__dir__", held.__dir__.__self__)]
    if isinstance(held, _TOOLS):  # of a user's class what that, or the user, has set on it
        return None if is_library(kind.__module__) else [*vars(held).items()]
    if isinstance(held, Tensor):
        return [*vars(held).items()]
    if isinstance(held, ModuleType):
        return None if is_library(held.__name__) else [item for item in vars(held).items() if _is_setting(*item)]
    if isinstance(held, type):
        return class_parts(held)
    known = next((taken for base, taken in _KNOWN.items() if isinstance(held, base)), None)
    if known is not None:
        own = attributes(held)
        if isinstance(held, FunctionType):  # at its first call torch notes on it what its compiler made
            own = [(name, item) for name, item in own if not _is_compilers(cast("Any", type(item)), item)]
        return [*known(held), *own]
    if isinstance(held, enum.Enum):
        return [(name, item) for name, item in attributes(held) if name != "__objclass__"]
    if isinstance(held, nn.Module):
        return [(n, item) for n, item in attributes(held) if (item or n not in _STOCK) and OURS not in str(n)]
    memory = _memory(held)
    if memory is not None:
        return [*memory, *attributes(held)]
    if is_written_in_python(kind) or isinstance(held, SimpleNamespace):
        return [*attributes(held)]
    return _hidden(held)


def counted(held: Any) -> tuple[Any, ...]:
    """Where an `itertools.count` stands, and its step; nothing is taken from it."""
    apart = [item for item in gc.get_referents(held) if not isinstance(item, (type, dict))]
    if len(apart) > 1:  # it counts something else than whole numbers
        return (*apart,)
    shown = itertools.count.__repr__(held)
    state: Any = ast.literal_eval(shown[shown.index("(") :])
    return (*state,) if isinstance(state, tuple) else (state,)  # pyright: ignore


def _is_setting(name: str, held: object) -> bool:
    """Whether what a user's file has by a name is what it says, and no code."""
    return not (name.startswith("__") or isinstance(held, (ModuleType, type, *_CODE)))


def has_attributes(held: object) -> bool:
    """Whether an object has a `__dict__` of its own: that of `list[int]` is its class's."""
    return attributes_of(held) is not None


def attributes_of(held: Any) -> dict[str, Any] | None:
    """An object's `__dict__`, for which no method of its class is asked; None if it has none."""
    try:
        own: object = (threading.local if isinstance(held, threading.local) else object).__getattribute__(
            held, "__dict__"
        )
    except AttributeError:
        return None
    return cast("dict[str, Any]", own) if isinstance(own, dict) else None


def attributes(held: Any) -> list[tuple[str, Any]]:
    """What stands in an object's `__dict__` and slots, by name."""
    own = attributes_of(held)
    found: list[tuple[str, Any]] = [*own.items()] if own and own is not held else []
    if isinstance(held, logging.Logger):
        found = [(name, item) for name, item in found if name not in _OF_LOGGERS]
    kind = cast("type[Any]", type(held))
    slots = slots_of(kind)
    if issubclass(kind, defaultdict):
        found.append(("default_factory", FACTORY.__get__(held)))
    return [*found, *((slot.name, slot.get(held)) for slot in slots if slot.is_set(held))]


def _is_compilers(kind: type[Any], held: Any) -> bool:
    """Whether it is torch's compiler's, or what that has made: a tool, which holds all that it has seen."""
    made = str(getattr(held, "__module__", "") if isinstance(held, FunctionType) else kind.__module__)
    return made.startswith(("torch._dynamo", "torch._inductor", "torch._functorch"))


class MemberSlot(NamedTuple):
    """One of a class's `__slots__`, whatever a class that derives from it has by the same name."""

    name: str
    place: Any

    def get(self, held: object) -> Any:
        """What an object has there."""
        return self.place.__get__(held)

    def is_set(self, held: object) -> bool:
        """Whether it has something there."""
        try:
            return (self.place.__get__(held), True)[1]
        except AttributeError:
            return False

    def put(self, held: object, value: object) -> None:
        """Put something there."""
        self.place.__set__(held, value)

    def remove(self, held: object) -> None:
        """Have nothing there."""
        if self.is_set(held):
            self.place.__delete__(held)


FACTORY: Any = vars(defaultdict)["default_factory"]


@functools.cache
def slots_of(kind: type[Any]) -> tuple[MemberSlot, ...]:
    """The `__slots__` of a class that is written in Python."""
    found: list[MemberSlot] = []
    for base in kind.__mro__:
        names: Any = vars(base).get("__slots__", ())
        private = f"_{base.__name__.lstrip('_')}"
        for name in [names] if isinstance(names, str) else names:
            own = private + name if name.startswith("__") and not name.endswith("__") else name
            if isinstance(place := vars(base).get(own), MemberDescriptorType):
                found.append(MemberSlot(own, place))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def is_written_in_python(kind: type[Any]) -> bool:
    """Whether all that an object of this class is stands in its attributes and slots."""
    return all(base.__flags__ & _HEAP_TYPE and not _stores_more(base) for base in kind.__mro__[:-1])


def _stores_more(kind: type[Any]) -> bool:
    """Whether objects of a class have room for more than what it says."""
    own: Any = vars(kind).get("__slots__", ())
    names = {own} if isinstance(own, str) else set(own)
    room = len(names - {"__dict__", "__weakref__"}) + ("__dict__" in vars(kind)) + ("__weakref__" in vars(kind))
    return kind.__base__ is None or kind.__basicsize__ - kind.__base__.__basicsize__ > _POINTER * room


# -- containers -------------------------------------------------------------------------------------------------------
def _sequence(held: Any) -> Parts:
    return [(Item(i, int), item) for i, item in enumerate(stored_in(held)[1])]


@functools.lru_cache(maxsize=4096)
def stored_as(kind: type[Any]) -> Any:
    """The container of C's that a class derives from, which stores as if there were no class; None if there is none."""
    return next((base for base in _STORING if issubclass(kind, base)), None)


def stored_in(held: Any) -> tuple[list[Any] | None, list[Any]]:
    """The keys of a container, if it has some, and its items, as C stores them, whatever its class makes of them."""
    stored = stored_as(cast("type[Any]", type(held)))
    return (
        ([*stored.keys(held)], [*stored.values(held)]) if hasattr(stored, "keys") else (None, [*stored.__iter__(held)])
    )


def _unordered(held: Any) -> Parts:
    return [(Item(None, set), item) for item in stored_in(held)[1]]


def _mapping(held: dict[Any, Any]) -> Parts:
    keys, items = stored_in(held)
    return [(Item(key, type(key)), item) for key, item in zip(keys or (), items, strict=True)]


# -- functions and classes --------------------------------------------------------------------------------------------
def _function(held: FunctionType) -> Parts:
    """A function's code, what it closes over, its defaults, and the globals that it reads."""
    found: Parts = [("__code__", held.__code__)]
    if is_library(held.__module__):
        return [*found, *_closure(held)]
    found += _closure(held)
    if held.__defaults__:
        found.append(("__defaults__", held.__defaults__))
    if held.__kwdefaults__:
        found.append(("__kwdefaults__", held.__kwdefaults__))
    environment: Parts = [(f"environ[{name!r}]", os.environ.get(name)) for name in environment_of(held.__code__)]
    return [*found, *globals_of(held), *environment]


def _closure(held: FunctionType) -> Parts:
    found: Parts = []
    for name, cell in zip(held.__code__.co_freevars, held.__closure__ or (), strict=True):
        try:
            found.append((name, cell.cell_contents))
        except ValueError:  # the variable isn't set yet
            continue
    return found


def globals_of(function: FunctionType) -> list[tuple[str, Any]]:
    """What a function reads of its module, and of the user's modules that it names, and that may change."""
    return [(f"{name}.{leaf}" if leaf else name, space[leaf or name]) for name, leaf, space in spaces_of(function)]


def spaces_of(function: FunctionType) -> list[tuple[str, str, dict[str, Any]]]:
    """The same by the names in its code: of a global, and of what it reads of that if it's a module of Python."""
    own, names = function.__globals__, names_in(function.__code__)
    found: list[tuple[str, str, dict[str, Any]]] = [(name, "", own) for name in names.globals & own.keys()]
    spaces = [*_imported(names, own), *((name, own[name]) for name, _, _ in found)]
    others: dict[str, Any] = builtins.__dict__
    found += [(name, "", others) for name in names.globals & others.keys() - own.keys()]
    waiting = {name: held for name, held in spaces if isinstance(held, ModuleType) and not is_library(held.__name__)}
    seen: dict[str, ModuleType] = {}
    while waiting:
        name, module = waiting.popitem()
        if module in seen.values():
            continue
        seen[name], inner = module, vars(module)
        for leaf in names.attributes & inner.keys():
            found.append((name, leaf, inner))
            if isinstance(inner[leaf], ModuleType) and not is_library(inner[leaf].__name__):
                waiting[f"{name}.{leaf}"] = inner[leaf]
    found = [(name, leaf, space) for name, leaf, space in found if is_premise(space[leaf or name])]
    return sorted(found, key=lambda place: place[:2])


def _imported(names: Names, space: dict[str, Any]) -> Iterator[tuple[str, ModuleType]]:
    """The modules of Python that code imports when it runs, or names by texts."""
    package: str = space.get("__package__") or ""
    for level, name in names.imports:
        with suppress(ImportError):
            full = importlib.util.resolve_name("." * level + name, package) if level else name
            if full in sys.modules:
                yield full, sys.modules[full]


def environment_of(code: CodeType) -> frozenset[str]:
    """The variables of the environment that code may read: its texts, if it reads any."""
    names = names_in(code)
    return frozenset() if _ENVIRONMENT.isdisjoint(names.globals | names.attributes) else names.texts


def is_premise(held: object) -> bool:
    """Whether a global may change, as no library's does."""
    if isinstance(held, (ModuleType, BuiltinFunctionType)):
        return False
    if isinstance(held, (type, FunctionType)):
        return not is_library(held.__module__)
    return True


class Names(NamedTuple):
    """What a function's code says of names.

    Attributes:
        globals: those that it reads as globals.
        attributes: those that it reads as attributes.
        imports: the modules of Python that it imports, each with the level of a relative import.
        texts: short texts in it.
    """

    globals: frozenset[str]
    attributes: frozenset[str]
    imports: frozenset[tuple[int, str]]
    texts: frozenset[str]


@functools.lru_cache(maxsize=1 << 16)
def names_in(code: CodeType) -> Names:
    """What a function's code says of names, and that of functions in it."""
    found = [(i.opname, i.argval) for i in dis.get_instructions(code)]
    inner = [names_in(held) for held in code.co_consts if isinstance(held, CodeType)]

    def of(kinds: frozenset[str], field: str) -> frozenset[str]:
        own = frozenset(str(name) for kind, name in found if kind in kinds)
        return own.union(*(getattr(names, field) for names in inner))

    loaded, attributes = of(_LOADS, "globals"), of(_ATTRIBUTES, "attributes")
    texts = frozenset(held for held in code.co_consts if isinstance(held, str) and len(held) <= _LONGEST)
    texts = texts.union(*(names.texts for names in inner))
    imports = frozenset(
        (int(found[at - 2][1] or 0), str(name)) for at, (kind, name) in enumerate(found) if kind == "IMPORT_NAME"
    ).union(*(names.imports for names in inner))
    if not _BY_TEXT.isdisjoint(loaded | attributes):
        loaded, attributes, imports = loaded | texts, attributes | texts, imports | {(0, text) for text in texts}
    return Names(loaded, attributes, imports, texts)


def class_parts(kind: type[Any]) -> Parts | None:
    """What a class of the user's has of its own and from its bases, of functions what they are; None of a library's."""
    if is_library(kind.__module__):
        return None
    found: dict[str, Any] = {}
    for base in reversed(own_bases(kind)):
        found |= {name: _of_class(item) for name, item in vars(base).items() if name not in _OF_EACH}
    return [*found.items()]


def class_data(kind: type[Any]) -> Parts:
    """What objects find in their class beside functions, if it is one of the user's."""
    return [
        (name, item)
        for base in own_bases(kind)
        for name, item in vars(base).items()
        if not (name.startswith("__") or isinstance(item, _OF_CLASSES))
    ]


@functools.lru_cache(maxsize=4096)
def own_bases(kind: type[Any]) -> tuple[type[Any], ...]:
    """A class and those that it derives from, but for those of libraries."""
    return tuple(base for base in kind.__mro__ if not is_library(base.__module__))


def _of_class(item: Any) -> Any:
    """A function of a class without the globals that it reads: most of them aren't called."""
    functions = functions_in(item)
    if not functions:
        return item
    made = [(f.__code__, f.__defaults__, f.__kwdefaults__, *(held for _, held in _closure(f))) for f in functions]
    return (type(item), *made)


def unbound(held: Any) -> Any:
    """What a method calls; all else as it is: it isn't asked, as a user's `__getattr__` may answer anything."""
    return held.__func__ if isinstance(held, (MethodType, classmethod, staticmethod)) else held  # pyright: ignore


def is_users_code(hook: Any) -> bool:
    """Whether what is called, such as a hook, is no library's."""
    while isinstance(hook, (functools.partial, MethodType)):
        hook = hook.func if isinstance(hook, functools.partial) else hook.__func__  # pyright: ignore
    return not is_library(hook.__module__ if isinstance(hook, FunctionType) else type(hook).__module__)  # pyright: ignore


def functions_in(item: Any) -> list[FunctionType]:
    """The functions of an entry in a class or a file: a method, a property, or what keeps the results of one."""
    found = [item.fget, item.fset] if isinstance(item, property) else [unbound(item)]
    found = [cast("Any", item).__wrapped__ if isinstance(item, _CACHED) else item for item in found]
    return [function for function in found if isinstance(function, FunctionType)]


@functools.cache
def is_library(name: str | None) -> bool:
    """Whether a module of Python is part of Python, of torch or of another library, or of tpplan."""
    if name is None or name.partition(".")[0] in ("torch", "tpplan", "builtins"):
        return True
    if name == "__main__":
        return False
    file: str | None = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return name.partition(".")[0] in sys.stdlib_module_names
    return file.startswith(LIBRARIES)


def _bound_to(held: Any) -> Parts:
    """What a function that is written in C belongs to; of most that is a module of Python."""
    return [("__self__", held.__self__)] if held.__self__ is not None else []


def _is_silent(held: logging.Logger) -> object:
    return held.disabled or held.manager.disable


# -- what is written in C ---------------------------------------------------------------------------------------------
def _memory(held: Any) -> Parts | None:
    """What lies in the memory of arrays, of numpy's or not, which say how to be looked at."""
    try:
        view = memoryview(held)
    except (TypeError, ValueError, BufferError):
        return None
    if "O" in view.format:
        return [
            (Item(i, int), item) for i, item in enumerate(held.ravel().tolist() if hasattr(held, "ravel") else held)
        ]
    numbers = view.tobytes()
    return [
        (Bytes(), StateMemory(view.format, view.shape, numbers if len(numbers) <= _FEW else blake2b(numbers).digest()))
    ]


def _hidden(held: Any) -> Parts | None:
    """What an object that is written in C tells when it is pickled; None if it tells nothing."""
    if hasattr(held, "__next__") and not hasattr(held, "fileno"):
        raise UnseenError(f"a `{type(held).__name__}`, which can be read only once")
    try:
        made: Any = held.__reduce_ex__(4)
    except Exception:  # a lock, a stream: it has no state that is anybody's to see
        return [*attributes(held)] if has_attributes(held) else None
    if isinstance(made, str):
        return None  # the name of a global
    function, arguments, *rest = made
    state = [*rest, None, None, None, None]
    inner = [arguments, state[0], [*(state[1] or ())], [*(state[2] or ())]]
    return [(f"__reduce{i}__", item) for i, item in enumerate((function, *inner)) if item is not held]


_KNOWN: dict[type[Any], Callable[[Any], Parts]] = {
    dict: _mapping,
    list: _sequence,
    tuple: _sequence,
    deque: _sequence,
    set: _unordered,
    frozenset: _unordered,
    FunctionType: _function,
    MethodType: lambda held: [("__func__", held.__func__), ("__self__", held.__self__)],
    BuiltinFunctionType: lambda held: [("__name__", held.__name__), *_bound_to(held)],
    MethodWrapperType: lambda held: [("__name__", held.__name__), ("__self__", held.__self__)],
    functools.partial: lambda held: [("func", held.func), ("args", held.args), ("keywords", held.keywords)],
    ContextVar: lambda held: [("name", held.name), ("get()", held.get(None))],
    ReferenceType: lambda held: [("__call__", held())],
    logging.Logger: lambda held: [("getEffectiveLevel()", held.getEffectiveLevel()), ("disabled", _is_silent(held))],
    property: lambda held: [("fget", held.fget)],
    classmethod: lambda held: [("__func__", held.__func__)],
    staticmethod: lambda held: [("__func__", held.__func__)],
    MappingProxyType: lambda held: [(Item(key, type(key)), item) for key, item in held.items()],
}
