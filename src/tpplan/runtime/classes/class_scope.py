"""Class scopes: where a body calls a function over classes that are split, the one for split classes runs instead.

in:  the calls of such functions that a body makes, in order, as its program has them
out: a context for the body

    with ClassBody(bodies, (SplitClasses("cross_entropy", 32000),), axis, "the model"):
        cross_entropy(logits, labels)          runs over the ranks' parts of the 32000 classes

Only calls of the body itself count: a function mode sees them, which modules that the body calls switch off. It sees
sums as well that a kernel computes together with the norm after them (`fused_sums.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, functional
from torch.overrides import TorchFunctionMode

from tpplan.compat.modes import innermost_function_mode, without_function_modes
from tpplan.compat.schemas import OpOverload
from tpplan.compat.subclasses import without_tensor_classes
from tpplan.compiler.ir.class_functions import (
    CROSS_ENTROPY,
    LOG_SOFTMAX,
    LOGSUMEXP,
    LOSS_FUNCTIONS,
    LOSSES,
    NLL_LOSS,
    ClassCall,
)
from tpplan.compiler.ir.class_reductions import (
    AMAX,
    AMIN,
    ARGMIN,
    CLASS_FUNCTIONS,
    GATHER,
    MAX,
    MEAN,
    MIN,
    REDUCTION_FUNCTIONS,
    REDUCTION_NAMES,
    SOFTMAX,
    SUMS,
    class_call,
    stock_function,
)
from tpplan.compiler.ir.look_ups import LOOK_UP, LOOK_UP_FUNCTIONS, LOOK_UP_NAMES, LOOK_UPS
from tpplan.compiler.ir.program import ClassCalls, SplitClasses
from tpplan.kernels.backend import Choice
from tpplan.plan import Diagnostic, TpplanError
from tpplan.runtime.bodies.fused_sums import ADDITIONS, ResidualNorm
from tpplan.runtime.bodies.open_bodies import OpenBodies
from tpplan.runtime.classes import class_losses as classes
from tpplan.runtime.classes import class_sums as class_reductions
from tpplan.runtime.classes import split_tables as look_ups
from tpplan.runtime.classes.class_losses import ClassPart, Loss
from tpplan.runtime.ranks.communicator import Communicator


class ClassCallError(TpplanError):
    """A body calls a function over split classes that its proof doesn't have."""

    def __init__(self, where: str, call: str, proved: str) -> None:
        """Tell the module, its call, and what was proved."""
        way_out = (
            "let its calls of losses and of sums over classes depend on nothing but the arguments; or write `output: "
            "replicate` for the rule of the head"
        )
        super().__init__([Diagnostic("TP166", f"{where} {call}, where its proof {proved}", help=way_out)])


class ClassBody:
    """A context for a body that makes such calls, or that another calls which does."""

    def __init__(
        self,
        bodies: OpenBodies[ClassCounter],
        calls: ClassCalls,
        axis: Communicator,
        where: str,
        backend: Choice = "auto",
        norms: Sequence[ResidualNorm] = (),
    ) -> None:
        """Be the body of the module `where`, with these calls.

        Args:
            bodies: those that are open.
            calls: of functions over split classes.
            axis: the ranks.
            where: the module, in words.
            backend: what losses take.
            norms: those that are computed together with a sum of the body.
        """
        self._bodies = bodies
        self._calls = calls
        self._of = axis, where, backend
        self._norms = norms

    @property
    def makes_calls(self) -> bool:
        """Whether the body itself makes such calls."""
        return bool(self._calls)

    def __enter__(self) -> None:
        """Count from here."""
        for norm in self._norms:
            norm.begin()
        seen = self._calls or self._norms
        self._bodies.enter(ClassCounter(self._calls, *self._of, self._norms) if seen else None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Go on with the body that called this one."""
        self._bodies.leave()
        for norm in self._norms:
            norm.end()


@contextmanager
def unseen() -> Generator[None]:
    """A block whose calls aren't those of the body around it: what torch.compile reads there needs no function mode."""
    counter = innermost_function_mode()
    if not isinstance(counter, ClassCounter):
        yield
        return
    counter.pause()
    try:
        yield
    finally:
        counter.go_on()


class ClassCounter(TorchFunctionMode):
    """Counts a body's calls, and runs those on split classes."""

    def __init__(
        self, calls: ClassCalls, axis: Communicator, where: str, backend: Choice, norms: Sequence[ResidualNorm]
    ) -> None:
        super().__init__()
        self._calls = calls
        self._axis = axis
        self._where = where
        self._backend: Choice = backend
        self._number = 0
        self._norms = {norm.use.sum: norm for norm in norms}
        self._sums = 0
        self._asleep = False
        named = {call.function for call in calls if call is not None}
        self._reducing, self._looking = (not named.isdisjoint(kind) for kind in (REDUCTION_NAMES, LOOK_UP_NAMES))
        self._functions = LOSS_FUNCTIONS
        self._functions |= REDUCTION_FUNCTIONS if self._reducing else frozenset()
        self._functions |= LOOK_UP_FUNCTIONS if self._looking else frozenset()
        self._functions = self._functions if calls else frozenset[Any]()

    def pause(self) -> None:
        """See no calls; one that isn't the innermost mode lets them pass."""
        if innermost_function_mode() is self:
            self.__exit__(None, None, None)
        else:
            self._asleep = True

    def go_on(self) -> None:
        """See calls again."""
        if self._asleep:
            self._asleep = False
        else:
            self.__enter__()

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        keywords: dict[str, Any] = kwargs or {}
        if self._norms and func in ADDITIONS and not self._asleep:
            with without_function_modes():
                norm = None if keywords else self._norm_after(args)
                marked = None if norm is None else _marked(args[0], lambda: norm.add(*args))
            return func(*args, **keywords) if marked is None else func(marked, args[1])
        if self._asleep or func not in self._functions:
            return func(*args, **keywords)
        name = next((n for n, held in keywords.items() if isinstance(held, Tensor)), "")
        with without_function_modes():
            call = class_call(func, args, keywords, self._reducing, self._looking)
            planned = None if call is None else self._next(call)
            operand: Any = args[0] if args else keywords.get(name)
            marked = None if call is None or planned is None else _marked(operand, _splitting(call, *planned))
        if marked is None:
            return func(*args, **keywords)
        return func(marked, *args[1:], **keywords) if args else func(**{**keywords, name: marked})

    def _norm_after(self, args: tuple[Any, ...]) -> ResidualNorm | None:
        """The norm that is computed together with the next sum of the body, if that is one of two such tensors."""
        plain = len(args) == 2 and all(type(held) in (Tensor, Parameter) for held in args)
        if not plain or args[0].shape != args[1].shape:
            return None
        norm = self._norms.get(self._sums)
        self._sums += 1
        return norm if norm is not None and norm.serves(*args) else None

    def _next(self, call: ClassCall) -> tuple[ClassPart, SplitClasses] | None:
        """For the next call, the classes of this rank, and what the program says of it."""
        name, size = call.operation.name().partition("::")[2], call.input.shape[call.dim]
        if self._number >= len(self._calls):
            raise ClassCallError(self._where, f"calls `{name}` once more", f"has {len(self._calls)} such calls")
        planned = self._calls[self._number]
        self._number += 1
        if planned is None:
            return None
        part = ClassPart(self._axis, planned.classes, backend=self._backend)
        if planned.function != name or part.count != size:
            expected = f"calls `{planned.function}` on a rank's {part.count} of {planned.classes}"
            raise ClassCallError(self._where, f"calls `{name}` on {size} classes", expected)
        return part, planned


class _Marked(Tensor):
    """Stands for an operand, so that a call goes its way through all function modes, and then runs over the ranks."""

    run: Callable[[], Any]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in CLASS_FUNCTIONS | ADDITIONS:
            return super().__torch_function__(func, types, args, kwargs or {})  # pyright: ignore
        keywords: dict[str, Any] = kwargs or {}
        operands = (*args, *keywords.values())
        return next(operand.run() for operand in operands if isinstance(operand, _Marked))


def _marked(operand: Tensor, run: Callable[[], Any]) -> _Marked:
    marked = operand.detach().as_subclass(_Marked)
    marked.run = run
    return marked


def _splitting(call: ClassCall, part: ClassPart, planned: SplitClasses) -> Callable[[], Any]:
    return lambda: run_split(call, part, planned.partial_gradient, planned.stays_partial)


def run_split(call: ClassCall, part: ClassPart, partial: bool = False, unsummed: bool = False) -> Any:
    """What a call makes of split classes, in the dtype of the stock function's result.

    Args:
        call, part: the call, and the classes of this rank.
        partial: whether the gradient that arrives is partial.
        unsummed: of a look-up, whether ranks keep their own terms.
    """

    def whole(made: Tensor) -> Tensor:
        return classes.with_partial_gradient(made, part) if partial and made.requires_grad else made

    with without_tensor_classes():
        if call.operation in LOOK_UPS:
            made = (look_ups.rows if call.operation is LOOK_UP else look_ups.bags)(call, part)
            return made if unsummed else whole(class_reductions.summed(made, part))
        if call.operation not in (MAX, MIN):
            return whole(_run_split(call, part))
        value, index = class_reductions.extremes(call.input, part, call.dim, call.keepdim, call.operation is MIN)
        kind = torch.return_types.max if call.operation is MAX else torch.return_types.min  # pyright: ignore
        return kind((whole(value), index))


def _run_split(call: ClassCall, part: ClassPart) -> Tensor:
    input = call.input if call.dtype is None else call.input.to(call.dtype)
    if call.operation not in LOSSES | {LOGSUMEXP, LOG_SOFTMAX}:
        return _reduced(call, input, part)
    dtype = _result_dtype(call.operation, input.dtype, input.device.type, _autocasts(input))
    if call.operation in (CROSS_ENTROPY, NLL_LOSS):
        loss = Loss(call.reduction, call.ignore_index, call.label_smoothing)
        function = classes.nll_loss if call.operation is NLL_LOSS else classes.cross_entropy
        assert call.target is not None
        return function(input, call.target, call.weight, loss, part, call.dim).to(dtype)
    if call.operation is LOG_SOFTMAX:
        return classes.log_softmax(input.to(dtype), part, call.dim)
    return classes.logsumexp(input, part, call.dim, call.keepdim).to(dtype)


def _reduced(call: ClassCall, input: Tensor, part: ClassPart) -> Tensor:
    operation, dim, keepdim = call.operation, call.dim, call.keepdim
    if operation is GATHER:
        assert call.target is not None
        return class_reductions.picked(input, call.target, part, dim)
    if operation in (AMAX, AMIN):
        return class_reductions.shared_extremes(input, part, dim, keepdim, operation is AMIN)
    if operation is not SOFTMAX and operation not in SUMS:
        return class_reductions.extremes(input, part, dim, keepdim, operation is ARGMIN)[1]
    dtype = _result_dtype(operation, input.dtype, input.device.type, _autocasts(input))
    if operation is SOFTMAX:
        return class_reductions.softmax(input, part, dim).to(dtype)
    made = class_reductions.total(input, part, dim, keepdim)
    return (made / part.classes if operation is MEAN else made).to(dtype)


def _autocasts(input: Tensor) -> bool:
    device = input.device.type
    return device != "meta" and torch.is_autocast_enabled(device)


@lru_cache(maxsize=64)
def _result_dtype(operation: OpOverload, dtype: torch.dtype, device: str, autocasts: bool) -> torch.dtype:
    """The dtype of the stock function's result, by asking it."""
    logits = torch.zeros(1, 1, dtype=dtype, device=device)
    if operation is CROSS_ENTROPY:
        return functional.cross_entropy(logits, torch.zeros(1, dtype=torch.int64, device=device)).dtype
    if operation is NLL_LOSS:
        return functional.nll_loss(logits, torch.zeros(1, dtype=torch.int64, device=device)).dtype
    if operation in SUMS:
        return stock_function(operation)(logits, 1, False, None).dtype
    if operation in (LOG_SOFTMAX, SOFTMAX):
        return stock_function(operation)(logits, 1, None).dtype
    return torch.logsumexp(logits, 1).dtype


__all__ = ["ClassBody", "ClassCallError", "ClassCounter", "run_split", "unseen"]
