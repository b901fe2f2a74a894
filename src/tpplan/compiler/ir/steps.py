"""Steps: the calls of torch that a body's Python makes, in order, by their places in the code.

Two runs of a body with the same steps took the same path through its code. A step is the same on any device: it is
taken where Python calls torch, not where a kernel runs.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from pathlib import Path
from types import CodeType, FrameType, MappingProxyType, NoneType
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tpplan.compat.modes import without_function_modes
from tpplan.compiler.ir.locations import Location
from tpplan.state.parts import functions_in

_TORCH = f"{Path(torch.__file__).parent}/"
# torch's own modules are bodies like any other; of the rest, these only pass a call on to the function mode.
_BODIES = tuple(f"{_TORCH}nn/{folder}/" for folder in ("modules", "utils", "attention"))
_PASSING = frozenset(
    f"{_TORCH}{name}.py"
    for name in ("functional", "nn/functional", "_tensor", "overrides", "_jit_internal", "nn/parameter", "_VF")
)
_CALLS = f"{_TORCH}nn/modules/module.py"
_PACKAGE = Path(__file__).parents[2]
_PASSING_ON = str(_PACKAGE / "runtime" / "classes" / "class_scope.py")  # a function mode of the runtime's
_LOOKERS = (  # they call hooks of all modules, or are such hooks
    str(_PACKAGE / "runtime" / "around" / "onlookers.py"),
    *(f"{_TORCH}{name}" for name in ("distributed/_tools/", "distributed/tensor/debug/", "utils/module_tracker.py")),
)
_OWN = tuple(f"{_PACKAGE}/{layer}/" for layer in ("compiler", "runtime", "rehearsal", "calls", "kernels", "parity"))


_PRECALL = dis.opmap.get("PRECALL")
_instructions: dict[CodeType, bytes] = {}
_codes: WeakKeyDictionary[type[Any], frozenset[CodeType]] = WeakKeyDictionary()


class Step(NamedTuple):
    """A call of torch.

    Attributes:
        code, offset: where the call stands: a code object, and the instruction in it.
        function: what is called.
        taken: for a branch on a tensor's value, its side.
        module: whose code makes it; "" where that isn't asked for.
        passed: the numbers, texts and the like that it is called with; None where these aren't asked for.
    """

    code: CodeType
    offset: int
    function: object
    taken: bool | None = None
    module: str = ""
    passed: object = None

    @property
    def location(self) -> Location:
        """The line of the call."""
        positions = list(self.code.co_positions())
        line = positions[self.offset // 2][0] if self.offset // 2 < len(positions) else None
        return Location(self.code.co_filename, line or self.code.co_firstlineno)

    @property
    def name(self) -> str:
        """The name of what is called."""
        return getattr(self.function, "__name__", str(self.function))


@dataclass(frozen=True, slots=True)
class Heard:
    """The steps of one call of a module.

    Attributes:
        module, call: which call it is.
        steps: its own steps, and the calls inside of it.
        like: the call whose steps these are, where an equal one was run in its place.
    """

    module: str
    call: int
    steps: tuple[Step | Heard, ...]
    like: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Stream:
    """The steps of a run on local shapes.

    Attributes:
        root: the call of the whole model.
        varying: calls, as (module, call), whose steps depend on what is found in a tensor; they aren't compared.
        leaving_out: those of them whose code asks which parts have no rows.
        cached: code that runs only where a `functools.lru_cache` has no result yet; nor are its steps.
        returned: what the model returned beside tensors.
    """

    root: Heard
    varying: frozenset[tuple[str, int]] = frozenset()
    cached: frozenset[CodeType] = frozenset()
    leaving_out: frozenset[tuple[str, int]] = frozenset()
    returned: object = None
    _calls: dict[tuple[str, int], Heard] = field(default_factory=dict[tuple[str, int], Heard])

    def __post_init__(self) -> None:
        """Index the calls."""
        self._calls.update({(heard.module, heard.call): heard for heard in _walk(self.root)})

    def flat(self, replaced: frozenset[str], names: Mapping[str, str] | None = None) -> Iterator[Step]:
        """All steps in order, without those of modules whose bodies are replaced at run time, and of all inside.

        Args:
            replaced: these modules.
            names: each module's first name, by its names; None if steps aren't to tell their modules.
        """
        return self._flat(self.root, "", "", replaced, names)

    def _flat(
        self, heard: Heard, of: str, name: str, replaced: frozenset[str], names: Mapping[str, str] | None
    ) -> Iterator[Step]:
        """The steps of a call; where the call is one inside of `of`, which stands for one inside of `name`."""
        module = renamed(heard.module, of, name)
        if module in replaced:
            return
        if heard.like is not None:
            known = self._calls.get(heard.like)
            if known is not None:
                yield from self._flat(known, known.module, module, replaced, names)
            return
        for step in heard.steps:
            if isinstance(step, Heard):
                yield from self._flat(step, of, name, replaced, names)
            else:
                own = "" if names is None else renamed(step.module, of, name)
                yield step._replace(module=own if names is None else names.get(own, own), passed=None)

    def run(self, replaced: frozenset[str]) -> Iterator[Step]:
        """The steps that were taken, with what they passed, outside of equal calls that were left out.

        Args:
            replaced: modules whose steps don't count, nor those of all inside.
        """
        return _run(self.root, replaced)

    def code(self) -> frozenset[CodeType]:
        """All code that calls torch."""
        return frozenset(step.code for heard in self._calls.values() for step in heard.steps if isinstance(step, Step))

    def varying_code(self) -> frozenset[CodeType]:
        """The code whose steps aren't compared."""
        return self.cached | self._code_of(self.varying)

    def leaving_code(self) -> frozenset[CodeType]:
        """The code in which another run may leave parts out."""
        return self._code_of(self.leaving_out)

    def _code_of(self, calls: Iterable[tuple[str, int]]) -> frozenset[CodeType]:
        """The code of some calls, and of all inside."""
        found: set[CodeType] = set()
        for key in calls:
            if key in self._calls:
                for heard in _walk(self._calls[key]):
                    found.update([step.code for step in heard.steps if isinstance(step, Step)])
        return frozenset(found)


def _run(heard: Heard, replaced: frozenset[str]) -> Iterator[Step]:
    if heard.module in replaced or heard.like is not None:
        return
    for step in heard.steps:
        if isinstance(step, Heard):
            yield from _run(step, replaced)
        else:
            yield step._replace(module="")


def passed_numbers(passed: object) -> object:
    """What arguments hold beside tensors, to be compared."""
    if isinstance(passed, (Tensor, nn.Module)):
        return Tensor if isinstance(passed, Tensor) else nn.Module
    if isinstance(passed, (tuple, list, range)):
        return tuple([passed_numbers(item) for item in cast("Sequence[object]", passed)])
    if isinstance(passed, dict):
        held = cast("dict[object, object]", passed)
        return tuple([(name, passed_numbers(item)) for name, item in held.items()])
    if isinstance(passed, slice):
        return passed_numbers(passed.__reduce__()[1])  # its three numbers
    if isinstance(passed, Number) and not isinstance(passed, int):
        return repr(passed)  # such that NaN is NaN
    return passed if isinstance(passed, (bool, int, str, torch.dtype, NoneType)) else type(passed)


def renamed(module: str, of: str, name: str) -> str:
    """A module's name with `name` in place of its prefix `of`."""
    if of == name or not (module == of or module.startswith(f"{of}.")):
        return module
    return f"{name}{module[len(of) :]}"


def step_of(
    function: object,
    taken: bool | None = None,
    depth: int = 0,
    names: Mapping[int, str] = MappingProxyType({}),
) -> Step | None:
    """The step that a function mode sees; None if no body makes it: torch itself, a hook or the runtime does.

    To be called from the mode's `__torch_function__`, or from `depth` calls below. `names` are those of modules, by id,
    where a step is to tell its own.
    """
    frame: FrameType | None = sys._getframe(2 + depth)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        code = frame.f_code
        kind = _kind(code)
        if kind == "body":
            module = _module_of(frame, names) if names else ""
            return None if _is_hook(frame) else Step(code, _offset(code, frame.f_lasti), function, taken, module)
        if kind == "other":
            return None
        frame = frame.f_back
    return None


def _offset(code: CodeType, last: int) -> int:
    """The instruction that is running: in Python 3.11, of code that ran often, some calls begin one earlier."""
    if _PRECALL is None:
        return last
    instructions = _instructions.get(code)
    if instructions is None:
        instructions = _instructions[code] = code.co_code
    return last + 4 if instructions[last] == _PRECALL else last


def _module_of(frame: FrameType | None, names: Mapping[int, str]) -> str:
    """The module that the code is of which is running."""
    while frame is not None:
        code = frame.f_code
        called = code.co_filename == _CALLS  # by whom a hook is called, which is none of the module's code
        first: Any = None if called or not code.co_varnames else frame.f_locals.get(code.co_varnames[0])
        owner = cast("object", first[0] if type(first) is tuple and first else first)
        name = names.get(id(owner))
        if name is not None and (code.co_varnames[0] == "self" or code in _methods(type(owner))):
            return name
        frame = frame.f_back
    return ""


def _methods(kind: type[Any]) -> frozenset[CodeType]:
    """The code of a class's functions, by which it's told from that of hooks, which are passed a module as well."""
    if kind not in _codes:
        held = (item for base in kind.__mro__ for item in vars(base).values())
        _codes[kind] = frozenset(function.__code__ for item in held for function in functions_in(item))
    return _codes[kind]


def _is_hook(frame: FrameType) -> bool:
    """Whether the code that is running was called by a module besides its forward."""
    caller = frame.f_back
    while caller is not None and _kind(caller.f_code) != "other":
        frame, caller = caller, caller.f_back
    if caller is None or caller.f_code.co_filename != _CALLS:
        return caller is not None and caller.f_code.co_filename.startswith(_LOOKERS)
    module = caller.f_locals.get("self")
    return getattr(getattr(module, "forward", None), "__code__", frame.f_code) is not frame.f_code


_kinds: dict[CodeType, str] = {}


def _kind(code: CodeType) -> str:
    kind = _kinds.get(code)
    if kind is None:
        kind = _kinds[code] = _kind_of(code)
    return kind


def _kind_of(code: CodeType) -> str:
    """Whether code is a body's, passes a call of one on, or calls torch for a reason of its own, as a checkpoint."""
    name = code.co_filename
    if not name.startswith(_TORCH):
        if name == _PASSING_ON:
            return "passing"
        return "other" if name.startswith(_OWN) else "body"
    if name in _PASSING:
        return "passing"
    return "body" if name.startswith(_BODIES) and name != _CALLS else "other"


def _walk(heard: Heard) -> Iterator[Heard]:
    yield heard
    for step in heard.steps:
        if isinstance(step, Heard):
            yield from _walk(step)


_BRANCHES = frozenset(
    (
        Tensor.__bool__, Tensor.__complex__, Tensor.__contains__, Tensor.__float__, Tensor.__index__, Tensor.__int__,
        Tensor.allclose, Tensor.equal, Tensor.is_nonzero, Tensor.item, torch.allclose, torch.equal, torch.is_nonzero,
    )
)  # fmt: skip


def side_of(function: object, result: object, args: Sequence[Any]) -> bool | None:
    """The side of a branch on a tensor's value, of a call of torch that says it; None of any other.

    A number that Python makes of a flag, as `int(x.max() > 1)` does, says it as well.
    """
    if function not in _BRANCHES or type(result) is bool:
        return result if function in _BRANCHES and type(result) is bool else None
    with without_function_modes():  # the caller's see the call, and not what is asked of it
        return bool(result) if isinstance(args[0], Tensor) and args[0].dtype is torch.bool else None


__all__ = ["Heard", "Step", "Stream", "passed_numbers", "renamed", "side_of", "step_of"]
