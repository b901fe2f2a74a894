"""Steps: the calls of torch that a body's Python makes, in order, by their places in the code.

Two runs of a body with the same steps took the same path through its code. A step is the same on any device: it is
taken where Python calls torch, not where a kernel runs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpplan.compat import OpOverload, OpOverloadPacket
from tpplan.compiler.ir.trace import Location

_TORCH = f"{Path(torch.__file__).parent}/"
# torch's own modules are bodies like any other; of the rest, these only pass a call on to the function mode.
_BODIES = tuple(f"{_TORCH}nn/{folder}/" for folder in ("modules", "utils", "attention"))
_PASSING = frozenset(
    f"{_TORCH}{name}.py"
    for name in ("functional", "nn/functional", "_tensor", "overrides", "_jit_internal", "nn/parameter", "_VF")
)
_CALLS = f"{_TORCH}nn/modules/module.py"
_PACKAGE = Path(__file__).parents[2]
_PASSING_ON = str(_PACKAGE / "runtime" / "class_scope.py")  # a function mode of the runtime's
_OWN = tuple(f"{_PACKAGE}/{layer}/" for layer in ("compiler", "runtime", "calls", "kernels", "parity"))


class Step(NamedTuple):
    """A call of torch.

    Attributes:
        code, offset: where the call stands: a code object, and the instruction in it.
        function: what is called.
        taken: for a branch on a tensor's value, its side.
        form: of what it is given, what decides on layouts: dims by number; of a view, how its groups divide others.
        module: whose call makes it; "" where that isn't asked for.
    """

    code: CodeType
    offset: int
    function: object
    taken: bool | None = None
    form: tuple[object, ...] = ()
    module: str = ""

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
        cached: code that runs only where a `functools.lru_cache` has no result yet; nor are its steps.
    """

    root: Heard
    varying: frozenset[tuple[str, int]] = frozenset()
    cached: frozenset[CodeType] = frozenset()
    _calls: dict[tuple[str, int], Heard] = field(default_factory=dict[tuple[str, int], Heard])

    def __post_init__(self) -> None:
        """Index the calls."""
        self._calls.update({(heard.module, heard.call): heard for heard in _walk(self.root)})

    def flat(self, replaced: frozenset[str], named: bool = False) -> Iterator[Step]:
        """All steps in order, without those of modules whose bodies are replaced at run time, and of all inside.

        Args:
            replaced: these modules.
            named: whether steps are to tell their modules.
        """
        return self._flat(self.root, "", "", replaced, named)

    def _flat(self, heard: Heard, of: str, name: str, replaced: frozenset[str], named: bool) -> Iterator[Step]:
        """The steps of a call; where the call is one inside of `of`, which stands for one inside of `name`."""
        module = renamed(heard.module, of, name)
        if module in replaced:
            return
        if heard.like is not None:
            known = self._calls.get(heard.like)
            if known is not None:
                yield from self._flat(known, known.module, module, replaced, named)
            return
        for step in heard.steps:
            if isinstance(step, Heard):
                yield from self._flat(step, of, name, replaced, named)
            else:
                yield step._replace(module=module) if named else step

    def varying_code(self) -> frozenset[CodeType]:
        """The code whose steps aren't compared."""
        found: set[CodeType] = set(self.cached)
        for key in self.varying:
            if key in self._calls:
                for heard in _walk(self._calls[key]):
                    found.update([step.code for step in heard.steps if isinstance(step, Step)])
        return frozenset(found)


def renamed(module: str, of: str, name: str) -> str:
    """A module's name with `name` in place of its prefix `of`."""
    if of == name or not (module == of or module.startswith(f"{of}.")):
        return module
    return f"{name}{module[len(of) :]}"


def step_of(
    function: object,
    taken: bool | None = None,
    depth: int = 0,
    form: tuple[object, ...] = (),
    names: Mapping[int, str] = MappingProxyType({}),
) -> Step | None:
    """The step that a function mode sees; None if no body makes it: torch itself, a hook or the runtime does.

    To be called from the mode's `__torch_function__`, or from `depth` calls below. `names` are those of modules, by id,
    where a step is to tell its own.
    """
    frame: FrameType | None = sys._getframe(2 + depth)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        code = frame.f_code
        kind = _kinds.get(code)
        if kind is None:
            kind = _kinds[code] = _kind_of(code)
        if kind == "body":
            module = _module_of(frame, names) if names else ""
            return None if _is_hook(frame) else Step(code, frame.f_lasti, function, taken, form, module)
        if kind == "other":
            return None
        frame = frame.f_back
    return None


def _module_of(frame: FrameType | None, names: Mapping[int, str]) -> str:
    """The module that the code is of which is running."""
    while frame is not None:
        name = names.get(id(frame.f_locals.get("self")))
        if name is not None:
            return name
        frame = frame.f_back
    return ""


def _is_hook(frame: FrameType) -> bool:
    """Whether the code that is running was called by a module besides its forward."""
    caller = frame.f_back
    while caller is not None and _kinds.get(caller.f_code) in ("body", "passing"):
        frame, caller = caller, caller.f_back
    if caller is None or caller.f_code.co_filename != _CALLS:
        return False
    module = caller.f_locals.get("self")
    return getattr(getattr(module, "forward", None), "__code__", frame.f_code) is not frame.f_code


_kinds: dict[CodeType, str] = {}


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


_BRANCHES = frozenset((Tensor.__bool__, Tensor.__contains__, Tensor.item))


def side_of(function: object, result: object) -> bool | None:
    """The side of a branch on a tensor's value, of a call of torch that says it; None of any other."""
    return result if function in _BRANCHES and type(result) is bool else None


_VIEWS = frozenset((Tensor.reshape, Tensor.reshape_as, Tensor.view, Tensor.view_as, torch.reshape))
_ALONG = frozenset(("all", "amax", "amin", "any", "max", "mean", "min", "prod", "softmax", "std", "sum", "var"))


def form_of(function: Any, args: Sequence[Any], keywords: Mapping[str, Any], result: object) -> tuple[object, ...]:
    """What of a call's arguments decides on layouts, and may follow from a size in the body's Python.

    Dims that are named. Of a view, or another's operator, whether its groups divide the entries of the last dims: those
    of (heads, length, 6) as (-1, 4) lie inside of heads at even lengths alone. Where dims are but joined, or one is
    split, there is nothing to tell.
    """
    if function in _VIEWS:
        if not isinstance(result, Tensor) or result.numel() != args[0].numel():
            return ()
        source, target = _without_ends([*args[0].shape], [*result.shape])
        return tuple(n % group == 0 for n in _runs(source) for group in _runs(target) if group)
    if isinstance(function, (OpOverload, OpOverloadPacket)) and not str(function).startswith("aten."):  # pyright: ignore
        passed = (*args, *keywords.values())
        numbers = [held for held in passed if type(held) is int and held > 1]
        tensors = [held for held in passed if isinstance(held, Tensor)]
        return tuple(n % group == 0 for held in tensors for n in _runs([*held.shape]) for group in numbers)
    dim = keywords.get("dim", keywords.get("axis")) if keywords else None
    if dim is None and len(args) > 1 and function.__name__ in _ALONG:
        dim = args[1]
    if type(dim) is int:
        return (dim,)
    return (*dim,) if isinstance(dim, (tuple, list)) and all(type(d) is int for d in dim) else ()  # pyright: ignore


def _without_ends(source: list[int], target: list[int]) -> tuple[list[int], list[int]]:
    """Two shapes without the dims that both begin with, and both end with."""
    while source and target and source[-1] == target[-1]:
        source, target = source[:-1], target[:-1]
    while source and target and source[0] == target[0]:
        source, target = source[1:], target[1:]
    return source, target


def _runs(shape: list[int]) -> list[int]:
    """How many entries the last dims have together, for any number of them but all."""
    return [math.prod(shape[dim:]) for dim in range(len(shape) - 1, 0, -1)]


__all__ = ["Heard", "Step", "Stream", "form_of", "renamed", "side_of", "step_of"]
