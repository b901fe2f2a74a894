"""A watched call: run it, and let its result go only if all ranks kept to a proved path.

A call that left the proved paths is proved anew, at its own sizes and by the sides of branches that it took. If the
program that it ran by covers that, its result is right. If it needs another program, it is run again by that one, where
nothing was written that a second run would write again. Otherwise it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from tpplan.ambience import is_seen, unseen
from tpplan.calls.call_errors import UnprovedCallError
from tpplan.calls.decision import DecidedCall, Decision
from tpplan.calls.passed import Passed
from tpplan.calls.proofs import Proof
from tpplan.calls.watch import Departure, Watch, sides
from tpplan.compat.autograd import is_checkpointed
from tpplan.compiler.explain.failed_captures import models_own
from tpplan.compiler.ir.observations import Sides
from tpplan.compiler.ir.steps import Step
from tpplan.compiler.trace.surroundings import generators
from tpplan.plan import TpplanError
from tpplan.runtime.around.onlookers import ChangingHookError
from tpplan.runtime.around.watched import AGAIN
from tpplan.runtime.parameters.sharded_operations import is_final


class Prover(Protocol):
    """What a watched call asks of the guard; see `CallGuard`."""

    def departure(self, decision: Decision, steps: Sequence[Step], replaced: frozenset[str]) -> Departure | None:
        """Where a call left the proved paths of its kind."""
        ...

    def names(self, decision: Decision) -> Mapping[int, str]:
        """The names of modules, by id, if steps of such a call are to tell them."""
        ...

    def as_written(self) -> AbstractContextManager[None]:
        """A block in which functions that bodies call aren't compiled; modules that are, stay so."""
        ...

    def on_any_rank(self, flag: bool) -> bool:
        """Whether `flag` holds on any rank."""
        ...

    def accept(self, decision: Decision) -> None:
        """Take a call as proved."""
        ...

    def prove_path(self, call: DecidedCall, decision: Decision, taken: Sides, branches: bool) -> tuple[Proof, bool]:
        """The proof of a call at its own sizes, by these sides of branches, and whether it changes attributes."""
        ...

    def asks_recording(self) -> bool:
        """Let calls that autograd doesn't record be proved as such from now on; whether that is new."""
        ...

    def set_forwards(self) -> Sequence[str]:
        """The modules inside of which a `forward` was set since the model was sharded."""
        ...

    def buffer_versions(self) -> list[object]:
        """How often each buffer of the model was written to."""
        ...

    def is_repeatable(self, call: DecidedCall) -> bool:
        """Whether a call may run twice: it changes no attribute, calls no hook of single modules, passes no cache."""
        ...

    def kept_buffers(self) -> Callable[[], None]:
        """How to put the model's buffers back to what they hold."""
        ...

    def followed_hooks(self) -> Sequence[object]:
        """The hooks of all modules that proofs follow."""
        ...

    def leaves_nothing(self, decision: Decision) -> bool:
        """Whether a call that was accepted changes no attribute, calls no hook, and needn't be watched again."""
        ...


class GuardedCall:
    """One watched call of the root."""

    def __init__(
        self, prover: Prover, call: DecidedCall, decision: Decision, passed: Passed, replaced: frozenset[str]
    ) -> None:
        """Watch a call.

        Args:
            prover: the guard.
            call, decision: the call, and the proof that it runs by.
            passed: what the caller's arguments hold.
            replaced: modules whose bodies the program replaces.
        """
        self._prover = prover
        self._call = call
        self._decision = decision
        self._passed = passed
        self._replaced = replaced
        self._versions: list[object] = []
        self._generators: list[Callable[[], object]] = []

    def run(self, forward: Callable[[], Any]) -> Any:
        """See `WatchedCall`.

        What looks at calls, such as a counter, is to see one forward: where the call may turn out to need another
        program, it runs unseen before.
        """
        on_any_rank = self._prover.on_any_rank
        if not on_any_rank(is_seen()) or on_any_rank(not self._may_run_twice()):
            return self._run(forward)
        restore = self._prover.kept_buffers()
        with unseen(self._prover.followed_hooks()):
            result = self._run(forward)
        restore()
        if result is AGAIN:
            return result
        if on_any_rank(not self._passed.is_restorable):
            raise UnprovedCallError.of(
                "TP131",
                "the call writes to a tensor that it is passed and that requires grad, so it can't be run for its "
                "program before it is shown to what looks at calls",
                help="make the first such call without modes, profilers, and hooks of all modules or on saved tensors; "
                "or don't write to arguments",
            )
        self._restore()
        return self._run(forward)

    def _may_run_twice(self) -> bool:
        if is_checkpointed() or not self._prover.is_repeatable(self._call):
            return False
        self._passed.keep_numbers()
        return self._passed.is_restorable

    def _run(self, forward: Callable[[], Any]) -> Any:
        self._versions, self._generators = self._prover.buffer_versions(), generators()
        watch, result, error, changed = Watch(self._prover.names(self._decision)), None, None, None
        try:
            with self._prover.as_written(), watch:
                result = forward()
        except ChangingHookError as raised:
            changed = raised
        except Exception as raised:  # of the model itself, or since it left the path that was proved
            if is_final(raised):
                raise
            error = raised
        departed = self._departure(watch.steps)
        if error is not None and departed is not None and departed.real is None:
            departed = None  # it kept to the path until it raised
        if not self._prover.on_any_rank(departed is not None or error is not None or changed is not None):
            self._prover.accept(self._decision)
            return result
        if self._prover.on_any_rank(changed is not None):
            return self._once_more(changed)
        return self._settled(result, error, watch.steps, departed)

    def repeat(self) -> bool:
        """See `WatchedCall`."""
        if self._prover.on_any_rank(not self._can_repeat() or not self._prover.leaves_nothing(self._decision)):
            return False
        self._restore()
        return True

    def _departure(self, steps: Sequence[Step]) -> Departure | None:
        return self._prover.departure(self._decision, steps, self._replaced)

    def _settled(self, result: Any, error: Exception | None, steps: Sequence[Step], departed: Departure | None) -> Any:
        """The result, if the path that was taken can be proved for the program that ran; or the model's own error."""
        forwards = self._prover.set_forwards()
        if self._prover.on_any_rank(len(forwards) > 0):
            raise _refused_forward(forwards, departed, error) from error
        branches = self._prover.on_any_rank(departed is not None and departed.is_branch)
        otherwise = self._prover.on_any_rank(departed is not None and not departed.by_numbers)
        if otherwise and not branches and self._prover.asks_recording():
            return self._again(departed)
        after = generators()
        for restore in self._generators:  # what Python drew, it draws again in the proof
            restore()
        try:
            proof, writes = self._prover.prove_path(self._call, self._decision, sides(steps), branches)
        except TpplanError as unproved:
            own = models_own(unproved)
            if error is not None and (own is not None or departed is None):
                raised = error if own is None or type(own) is not type(error) else own  # which tells of whole sizes
                raise raised from raised.__cause__
            raise _refused(departed, "which can't be proved", unproved) from unproved
        finally:
            for restore in after:
                restore()
        if proof is self._decision.proof:
            if error is not None:
                raise error
            left = self._departure(steps)
            if self._prover.on_any_rank(left is not None):
                raise _refused(left, "which its proof doesn't cover")
            self._prover.accept(self._decision)
            return result
        return self._again(departed, writes)

    def _again(self, departed: Departure | None, writes: bool = False) -> Any:
        """Have a call run again, by another program."""
        if self._prover.on_any_rank(writes or not self._can_repeat()):
            raise _refused(departed, "which needs another program; call the model again, and it will run by that one")
        self._restore()
        return AGAIN

    def _once_more(self, changed: ChangingHookError | None) -> Any:
        """Have a call run again that a hook has changed, by a proof that follows the hook."""
        if self._prover.on_any_rank(changed is None or not self._can_repeat()):
            raise changed or _refused(None, "where a hook of all modules changes something")
        self._restore()
        return AGAIN

    def _can_repeat(self) -> bool:
        unwritten = self._passed.is_restorable and self._versions == self._prover.buffer_versions()
        return unwritten and not is_checkpointed()

    def _restore(self) -> None:
        """Put back what the call was passed, and random numbers."""
        self._passed.restore()
        for restore in self._generators:
            restore()


def _refused(departed: Departure | None, way: str, cause: TpplanError | None = None) -> UnprovedCallError:
    where = "another rank of the axis left the proved path" if departed is None else str(departed)
    return UnprovedCallError.of(
        "TP131",
        f"the call left the path that was proved: {where}, {way}",
        help="pass `inputs=` like this call to `parallelize`; what steers the model must be visible in its arguments "
        "or its modules' attributes",
        cause=cause,
    )


def _refused_forward(names: Sequence[str], departed: Departure | None, error: Exception | None) -> UnprovedCallError:
    where = f"`{names[0]}.forward` was set" if names else "a module's `forward` was set on another rank"
    shown = str(departed) if error is None else f"{type(error).__name__}: {error}"
    return UnprovedCallError.of(
        "TP130",
        f"{where} after `parallelize`, and it computes otherwise than what was proved: {shown}",
        help="set it before `parallelize`, or register a hook: a `forward` set later may only call the one that was "
        "there",
    )


__all__ = ["GuardedCall"]
