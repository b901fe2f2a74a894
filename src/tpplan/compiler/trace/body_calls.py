"""Calls of torch by bodies: the steps that they take, and what they ask of tensors beside sizes, dtypes and numbers.

in:  each call of torch by the model's own code, as the function mode of a run sees it
out: steps in the frame that is open; what was asked, or an error where a rank's answer would be another one

    x.is_contiguous()   ->   Asked(memory={"is_contiguous"})
    x.grad_fn           ->   UnfollowedError
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from tpplan.compat.tensors import MEMORY_OF_OTHERS, READ_VERSION
from tpplan.compiler.ir.observations import Asked
from tpplan.compiler.ir.steps import Heard, passed_numbers, side_of, step_of
from tpplan.compiler.trace.gradient_flow import HOOKS
from tpplan.compiler.trace.tape import OpenFrame, RunTape
from tpplan.compiler.trace.unfollowed import UnfollowedError
from tpplan.state.ambient import RECORDING

_SET_DATA: Any = Tensor.data.__set__  # pyright: ignore
_GRADIENT_FUNCTION: Any = Tensor.grad_fn.__get__  # pyright: ignore
_REQUIRES_GRAD: Any = Tensor.requires_grad.__get__  # pyright: ignore
# Of a tensor on the way to its gradient, and of its memory: what a rank's part says of these is no use to a body.
_AUTOGRADS_OWN: dict[Any, str] = {Tensor.grad.__get__: "grad", Tensor.is_leaf.__get__: "is_leaf"}  # pyright: ignore
_MEMORYS_OWN: dict[Any, str] = {
    READ_VERSION: "_version",
    Tensor.storage_offset: "storage_offset()",
    **MEMORY_OF_OTHERS,
}
_NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})
_STRIDES = frozenset((Tensor.is_contiguous, Tensor.stride))


class StepObserver:
    """Notes the steps of bodies, if anybody `listens`; `modules` are the first names of modules, by id."""

    def __init__(self, tape: RunTape) -> None:
        """Nobody listens yet."""
        self.listens = False
        self.modules: dict[int, str] = {}
        self._tape = tape

    def called(
        self, func: Callable[..., Any], result: Any, args: tuple[Any, ...], keywords: Mapping[str, Any] = _NO_KEYWORDS
    ) -> None:
        """Note the call of a function of torch."""
        if self.listens and func.__name__ != "__get__":
            step = step_of(func, side_of(func, result, args), depth=1, names=self.modules)
            if step is not None and self._tape.frames:
                passed = passed_numbers((args, {**keywords}))
                self._tape.frames[-1].steps.append(step._replace(passed=passed))

    def left(self, frame: OpenFrame) -> None:
        """Note that a call is over."""
        if self.listens:
            self._tape.frames[-1].steps.append(Heard(frame.module, frame.call, tuple(frame.steps)))


class AskedObserver:
    """Notes what bodies ask for; `settings` are those of torch."""

    def __init__(self, tape: RunTape) -> None:
        """They have asked nothing yet."""
        self.settings: set[str] = set()
        self._tape = tape
        self._memory: set[str] = set()
        self._flags: set[int] = set()

    def calling(self, func: Any, args: tuple[Any, ...]) -> None:
        """Note what a call asks, before it is made; refuse what a rank would answer otherwise."""
        if func == _SET_DATA and isinstance(args[0], nn.Parameter) and step_of(func, depth=1):
            raise UnfollowedError(
                "it assigns to a parameter's `.data`", "write to the parameter under `torch.no_grad()` instead"
            )
        if func in HOOKS and isinstance(args[0], nn.Parameter) and step_of(func, depth=1):
            raise UnfollowedError(
                "it registers a hook on a parameter, which stays: the gradient would pass one more after each call",
                "register it once, on the parameter of the sharded model",
            )
        if func is Tensor.is_inference and step_of(func, depth=1):
            raise UnfollowedError(
                "it reads `is_inference()` of a tensor, of which a proof knows nothing",
                "ask for `torch.is_inference_mode_enabled()` instead",
            )
        if func in _AUTOGRADS_OWN or func in _MEMORYS_OWN:
            name = _MEMORYS_OWN.get(func) or (_AUTOGRADS_OWN[func] if args[0].requires_grad else "")
            step = step_of(func, depth=1) if name else None
            if step is not None and step.code.co_name != "__new__":  # a class of tensors makes one alike
                raise UnfollowedError(
                    f"it reads `{name}`, which is another one on a rank's part",
                    "let the caller tell what it needs to know",
                )
        elif func in _STRIDES:
            self._memory.add(func.__name__)
        elif func == _REQUIRES_GRAD and isinstance(args[0], nn.Parameter):
            self._flags.add(self._tape.value_of(args[0]))
        elif func == _REQUIRES_GRAD and step_of(func, depth=1):
            self.settings.add(RECORDING)

    def told(self, func: Any, result: Any) -> None:
        """Refuse what a call has told."""
        if func == _GRADIENT_FUNCTION and result is not None and step_of(func, depth=1):
            raise UnfollowedError(
                "it reads `grad_fn`, which is another one on a rank's part", "ask for `requires_grad` instead"
            )

    def result(self, parameters: Mapping[int, tuple[str, ...]]) -> Asked:
        """What they have asked; `parameters` are the names of parameters by value."""
        flags = frozenset(name for value in self._flags for name in parameters.get(value, ())[:1])
        return Asked(frozenset(self._memory), flags, frozenset(self.settings))


__all__ = ["AskedObserver", "StepObserver"]
