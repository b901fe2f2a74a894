"""Guard: hold each call of a sharded model against what was proved, and tell which program it runs by.

A call of another kind than the example (see `key`) may take another path through the model. The first such call is
proved on the spot: compiled like the example, from the same stock skeleton, on all ranks, which compare what came out.
If a program that is there does the same in every module, the call runs by that one. If not, and parameters and caches
lie alike, it gets a program of its own. Otherwise it is refused.

A call with a sequence that the ranks can't share evenly (decoding token by token, a prompt of odd length) can't run by
a sequence-parallel program. It runs by one that is compiled from the same plan with all sequences whole. So do calls
that can be proved only so, and modules that are called by themselves.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.ambience import ambience
from tpplan.calls.alike import RANDOM_STATE, drawn_next, facts_of, refuse_different
from tpplan.calls.assumed import Assumed
from tpplan.calls.call_arguments import (
    LeftParts,
    Parts,
    kept_example,
    on_meta,
    shows_odd_sequence,
    with_numbers,
    without_opaque,
)
from tpplan.calls.call_errors import UnprovedCallError
from tpplan.calls.changes import Changes, modes_of
from tpplan.calls.coverage import Written
from tpplan.calls.decision import DecidedCall, Decision
from tpplan.calls.describe import call_difference, contents
from tpplan.calls.guarded import GuardedCall
from tpplan.calls.key import CallKey, CallKind, KeyReader
from tpplan.calls.passed import Passed
from tpplan.calls.paths import Paths
from tpplan.calls.proofs import Proof, Proofs, cache_difference, covers, left_difference
from tpplan.calls.repeat import Repeats
from tpplan.calls.steering import Steering
from tpplan.calls.watch import Departure
from tpplan.compat.autograd import inside_transform
from tpplan.compat.dynamo import compiles, nothing_compiled
from tpplan.compat.generators import random_state
from tpplan.compat.hooks import hooks_of
from tpplan.compat.modules import kept_buffers, named_modules, own_buffers, own_parameters
from tpplan.compat.pipelines import wants_shapes_alone
from tpplan.compat.tensors import buffer_versions
from tpplan.compiler.cover import Cover, NotCoveredError, Subject, cover
from tpplan.compiler.explain.failed_captures import models_own
from tpplan.compiler.ir.arrivals import call_on_rank
from tpplan.compiler.ir.hidden import hidden_tensors
from tpplan.compiler.ir.kept_tensors import WrapperError, is_wrapper
from tpplan.compiler.ir.locations import Location
from tpplan.compiler.ir.objects import hides_tensors, is_object, is_opaque
from tpplan.compiler.ir.observations import Asked, Sides
from tpplan.compiler.ir.program import Program
from tpplan.compiler.ir.pytree import tensors_in, tensors_of, with_tensors
from tpplan.compiler.ir.steps import Step
from tpplan.compiler.later import placement_difference
from tpplan.compiler.pipeline import Compiled
from tpplan.compiler.request import Request
from tpplan.compiler.trace.capture import BodyError
from tpplan.compiler.trace.preconditions import NO_PARAMETER, WANTS_GRADIENT
from tpplan.compiler.trace.unfollowed import unlike_dense
from tpplan.parity.tree import Path
from tpplan.plan import CompileError, Diagnostic, Plan, TpplanError
from tpplan.rehearsal.prove import prove
from tpplan.runtime.around.results import Results
from tpplan.runtime.around.watched import WatchedCall
from tpplan.runtime.ranks.agreement import agree, any_rank
from tpplan.runtime.ranks.board import exchange, has_left
from tpplan.runtime.ranks.communicator import ProcessGroupCommunicator
from tpplan.runtime.ranks.lockstep import LockstepCommunicator
from tpplan.runtime.ranks.reshard import UnevenShardError
from tpplan.state.ambient import RECORDING, settings_now, told_of_call
from tpplan.state.parts import UnseenError

_NOTHING = Asked()
_MANY = 8
_COMPILED_WATCHED = Diagnostic(
    "TP183",
    "a model is compiled whose calls are watched, by TPPLAN_DEBUG=1 or since a branch on a tensor's value needs "
    "another program on either side; watched calls run without a compiler",
    help="unset TPPLAN_DEBUG, or don't compile",
)
_STEERING_NUMBERS = Diagnostic(
    "TP186",
    "eight calls of one kind were proved anew, each since the model's Python reads other numbers of its inputs, such "
    "as sizes of pictures",
    help="nothing is wrong; batches that are alike in these are proved once",
)
_NEW = "the ranks' comparison of a call of a new kind"
_SIZES = "the ranks' comparison of the sizes that a proof covers"
_DRAWN = "the ranks' comparison of random numbers that steer the model"
_PROMPT = "the ranks' comparison of a prompt for `generate`"
_OF_CALLS = "pass `inputs=` like this call to `parallelize`, so that the program is compiled for it"
_OF_CACHES = (
    "pass a cache that no other model or plan has filled, and that makes its buffers from the keys and values that it "
    "is given, by operations that treat all heads alike; each rank has those of its own heads. Of transformers' "
    "quantised caches, that is `quanto` with a `q_group_size` that divides the size of a head"
)
_UNEVEN = "the ranks can't share the sequence of this call evenly"
_CONTINUED = ("this call goes on from a cache, so that its sequences are whole", "pass all tokens at once")


class CallGuard:
    """Accepts calls that are covered by a proof, makes proofs for others, and raises where there is none."""

    def __init__(
        self,
        stock: nn.Module,
        plan: Plan,
        compiled: Compiled,
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
        axis: ProcessGroupCommunicator | None = None,
        rank: int = 0,
    ) -> None:
        """Start with the example call.

        Args:
            stock: a skeleton of the stock model, on `meta`.
            plan, compiled: what was compiled.
            arguments, keywords: the example call.
            axis: the ranks, which compare what they compile later; None if they needn't.
            rank: this one's number, where there is no `axis`.
        """
        program = compiled.program
        self._stock = stock
        self._read = KeyReader(type(stock).forward)
        self._names = self._read.names
        self._repeats = Repeats(self._read.devices)
        self._example = with_tensors(*without_opaque(arguments, keywords), self._names, kept_example)
        self._contents = contents(arguments, keywords, self._names)
        self._axis = axis
        self._device = torch.device(program.device)
        self._proofs = Proofs(Proof(plan, program, results=Results(compiled.results)), self._cover)
        self._whole: Proof | None = None
        self._alone: dict[int, Proof] = {}
        self._sequence_dims = program.sequence_dims
        self._flattens = _splits_rows(program)
        self._frozen: list[tuple[dict[str, Any], dict[str, Any], str, str]] = []
        self._constants: list[tuple[dict[str, Any], str, str]] = []
        self._thawed = ""
        self._changes: Changes | None = None
        self._model: nn.Module | None = None
        self._compared: set[CallKind] = set()
        self._uncompared: set[CallKind] = set()
        self._modes = modes_of(stock) if stock.training == program.training else frozenset[str]()
        self._changed = ""
        self._reads = compiled.reads
        self._assumed = Assumed(compiled.untried)
        self._wrote = compiled.writes
        self._asked = compiled.asked
        self._members = compiled.members
        self._ran: CallKey | None = None
        self._rank = rank if axis is None else axis.rank
        self._left = LeftParts(program, self._rank)
        own = call_on_rank(program, self._rank, arguments, keywords, self._names)
        always = os.environ.get("TPPLAN_DEBUG") not in (None, "", "0")
        self._lockstep = axis if isinstance(axis, LockstepCommunicator) else None
        first = {id(module): name for name, module in reversed(named_modules(stock, remove_duplicate=False))}
        names = {name: first[id(module)] for name, module in named_modules(stock, remove_duplicate=False)}
        self._paths = Paths(self._rank, always, names)
        self._steering = Steering()
        key = self._key(DecidedCall(program.training, *own, self._left.parts_of(*own, self._names)))
        key = self._steering.note(key, compiled.facts)
        subject = None if compiled.subject is None else compiled.subject.of(stock)
        self._proofs.cover(key, self.main, compiled, subject)
        self._paths.note(key.kind, self.main, compiled)

    @property
    def main(self) -> Proof:
        """The example's proof."""
        return self._proofs.main

    def watch(self, model: nn.Module) -> None:
        """Follow the changes of the sharded model, after `lower`, from its state now.

        Under `TPPLAN_DEBUG=1` the whole model is compared at each call.
        """
        always = os.environ.get("TPPLAN_DEBUG") not in (None, "", "0")
        self._model = model
        self._changes = Changes(model, self._stock, always, self._reads, self._leaned_on)
        if self._wrote:
            self._changes.expect_writes()
        for name, module in named_modules(model):
            stock = self._stock.get_submodule(name)
            for leaf, held in own_parameters(stock).items():
                if held is not None and not held.requires_grad:
                    self._frozen.append((own_parameters(module), own_parameters(stock), leaf, f"{name}.{leaf}"))
            for table in (own_buffers, vars):
                for leaf, held in table(stock).items():
                    if type(held) is Tensor and held.is_floating_point() and held.is_leaf:
                        self._constants.append((table(module), leaf, f"{name}.{leaf}"))

    def __call__(
        self, training: bool, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[Program, Callable[[frozenset[str]], WatchedCall] | None]:
        """The program that the call runs by, and a watch over it if it has to be watched.

        Raises:
            UnprovedCallError: the call can't be proved.
            UnevenShardError: the ranks can't share its sequence evenly, and can't run it whole either.
        """
        self._look()
        repeats = not (self._asks_tensors or self._wrote or torch.is_grad_enabled()) and self._lockstep is None
        if repeats and not has_left():
            known = self._repeats.find(self._around(training), arguments, keywords)
            if known is not None:
                return known, None
        call, decision = self._decide(training, arguments, keywords)
        proof, key = decision.proof, decision.key
        device = next((tensor.device for tensor in self._tensors(call).values()), self._device)
        if self._assumed.is_open(device):
            self._assumed.settle(device, self._exchange)
        self._ran = None if self._changes is not None and self._changes.is_inside else key
        path = self._paths.of(key.kind)
        if path.drawn and self._axis is not None:
            refuse_different(self._exchange(_DRAWN, drawn_next(path.drawn)))
        if path.sides and not path.both and key.kind in proof.met:
            self._prove_sides(call, decision)
        if not self._paths.must_watch(key, proof):
            settled = not self._asks_tensors and key.kind not in self._uncompared
            if repeats and settled and not self._steering.is_known(decision.plain):
                # Whether a sequence is odd is part of a key, but of calls that continue a cache.
                holds = self._proofs.conditions(key) if call.parts or not self._sequence_dims else None
                self._repeats.note(self._around(training), arguments, keywords, proof.program, holds)
            return proof.program, None
        self._require_alike(call, key.kind)
        passed = Passed(arguments, keywords)
        if _passes_objects(call):  # as they are before the call writes to them
            before = with_tensors(call.arguments, call.keywords, self._names, lambda _, tensor: tensor)
            call = DecidedCall(training, *before, call.parts)
        return proof.program, functools.partial(GuardedCall, self, call, decision, passed)

    def _around(self, training: bool) -> tuple[object, ...]:
        """What counts of a call besides its arguments."""
        return training, self._modes, self.state, *settings_now(sorted(self._asked.settings))

    def _look(self) -> None:
        """Follow what was changed since the last call."""
        if inside_transform():
            raise UnprovedCallError.of(
                "TP117",
                "a sharded model was called inside of a transform of torch.func (`grad`, `vmap`, `jvp`) or of "
                "`torch.autograd.forward_ad`, which isn't proved",
                help="differentiate by `backward` or `torch.autograd.grad`; pass a batch as a batch",
            )
        if torch.is_grad_enabled():
            self._follow_thawed()
        if self._changes is not None:
            self.look()
            self._modes = self._changes.modes

    def look(self) -> int | None:
        """See `Guard`."""
        self._ran = None
        if self._changes is not None and self._changes.look():
            self._forget("hooks or wrappers")
            return None
        return self.state

    @property
    def _asks_tensors(self) -> bool:
        """Whether bodies ask for more of tensors than their sizes, dtypes and numbers."""
        return bool(self._asked.memory or self._asked.flags)

    def asks_flags(self) -> bool:
        """See `Guard`."""
        return bool(self._asked.flags)

    @property
    def _asks_recording(self) -> bool:
        """Whether bodies ask if autograd records, or take another way where it doesn't."""
        return RECORDING in self._asked.settings

    def _leaned_on(self, written: Sequence[Written], before: int, now: int) -> bool:
        """Whether proofs lean on what the call has written that ran last; those that don't hold in its state, too."""
        raised = sys.exc_info()[0] is not None  # amid its writes
        kinds = self._proofs.carry(None if raised else self._ran, written, before, now)
        self._paths.carry(kinds or (), now)
        return kinds is not None

    def results_of(self, program: Program) -> Results | None:
        """See `Guard`."""
        return next((proof.results for proof in self._proofs if proof.program is program), None)

    @property
    def state(self) -> int:
        """See `Guard`."""
        return 0 if self._changes is None else self._changes.state

    def _decide(
        self, training: bool, arguments: tuple[Any, ...], keywords: dict[str, Any], looks: int = 0
    ) -> tuple[DecidedCall, Decision]:
        """The call, and the proof that covers it; it is made now if there is none.

        Args:
            training, arguments, keywords: the call.
            looks: how often something has changed already while it was looked at.
        """
        call = DecidedCall(training, arguments, keywords, self._left.parts_of(arguments, keywords, self._names))
        if self._lockstep is not None:
            self._begin_watched(call, self._lockstep)
        plain = self._key(call)
        key = self._steering(plain, lambda: self._tensors(call))
        proof = self._proofs.of(key)
        if proof is None or has_left() or key.kind in self._uncompared:
            self._require_alike(call, key.kind)
        if proof is None:
            state = self.state
            if self._changes is not None and self._changes.compare():
                self._forget("hooks or wrappers")
            if state != self.state:
                if looks == _MANY:
                    found = self._changes and self._changes.difference
                    raise UnprovedCallError.of(
                        "TP130",
                        f"{found or 'what the model reads'}, and changes whenever this call's arguments are looked at",
                        help="let reading an argument (`__iter__`, `__getitem__`, a property) write to nothing that "
                        "the model reads",
                    )
                return self._decide(training, arguments, keywords, looks + 1)
            try:
                proof, compiled = self._prove(call)
            except UnprovedCallError as error:
                if not self._cuts(call):
                    # What calls have left with their caller may be mistaken for the whole, and fit nowhere.
                    raised = None if self._left.left or _passes_caches(call) else models_own(error)
                    raised = error if raised is None else raised
                    raise raised from raised.__cause__
                return self._decide(training, arguments, keywords)
            plain = self._key(call)  # what the call asks for, and keeps, is known by now
            key = self._steering.note(plain, compiled.facts)
            if self._steering.count(plain) == _MANY:
                warnings.warn(_STEERING_NUMBERS.warned, stacklevel=3)
            self._paths.note(key.kind, proof, compiled)
            self._paths.of(key.kind).begin_again(proof, key.kind)
            self._proofs.cover(key, proof, compiled, compiled.subject)
        return call, Decision(proof, key, plain)

    def _tensors(self, call: DecidedCall) -> dict[Path, Tensor]:
        return dict(tensors_of(call.arguments, call.keywords, self._names))

    def _begin_watched(self, call: DecidedCall, lockstep: LockstepCommunicator) -> None:
        """Raise if the ranks were called with different arguments, under `TPPLAN_DEBUG=1`."""
        program = self.main.program
        shapes = [tuple(t.shape) for _, t in tensors_of(call.arguments, call.keywords, self._names)]
        has_sizes = shapes == [r.shape for r in program.inputs]
        facts = facts_of(call, self._names, program, self.main.program.arriving)
        refuse_different(lockstep.begin(facts, has_sizes) or [facts] * lockstep.size)

    def _require_alike(self, call: DecidedCall, kind: CallKind) -> None:
        """Raise if the ranks were called with different arguments; looked at once for each kind of call.

        And once more after a call that raised on this rank, as the others may be in the middle of that, or of which
        nobody wanted more than shapes.
        """
        if self._axis is not None and (kind not in self._compared or has_left()):
            refuse_different(self._exchange(_NEW, facts_of(call, self._names, None, self.main.program.arriving)))
            (self._uncompared if wants_shapes_alone() else self._compared).add(kind)
            self._uncompared -= self._compared

    def require_alike_prompt(self, arguments: tuple[Any, ...], keywords: dict[str, Any], draws: bool) -> None:
        """Raise if ranks were asked to generate from different prompts, with other options, or from other seeds.

        Args:
            arguments, keywords: of `generate`. Objects, such as a cache, aren't compared.
            draws: whether tokens are drawn.

        Raises:
            DifferentInputsError: TP192.
        """
        if self._axis is None:
            return
        names = ("inputs", "generation_config")
        named = {names[i] if i < len(names) else f"*{i}": held for i, held in enumerate(arguments)} | keywords
        plain = {name: held for name, held in named.items() if isinstance(held, (Tensor, bool, int, float, str))}
        if draws:
            plain[RANDOM_STATE] = random_state()
        refuse_different(self._exchange(_PROMPT, facts_of(DecidedCall(False, (), plain, Parts()), ())))

    def _forget(self, changed: str) -> None:
        self._changed = changed
        self._repeats.forget()
        self._alone.clear()
        self._proofs.forget()
        self._paths.forget()
        self._steering.forget()

    # -- watched calls --------------------------------------------------------------------------------------------
    def departure(self, decision: Decision, steps: Sequence[Step], replaced: frozenset[str]) -> Departure | None:
        """Where a call left the proved paths of its kind."""
        return self._paths.departure(decision.key, decision.proof, steps, replaced)

    def as_written(self) -> AbstractContextManager[None]:
        """See `Prover`."""
        return nullcontext() if self._model is None or compiles(self._model) else nothing_compiled()

    def names(self, decision: Decision) -> Mapping[int, str]:
        """See `Prover`."""
        if self._changes is None or not self._paths.of(decision.key.kind).is_named:
            return {}
        return self._changes.names

    def _exchange(self, what: str, held: Any) -> list[Any]:
        """What all ranks have, which must come here."""
        if self._axis is None:
            return [held]
        if self._lockstep is not None:
            self._lockstep.meet(what)
        return exchange(self._axis.group, what, held)

    def on_any_rank(self, flag: bool) -> bool:
        """Whether `flag` holds on any rank."""
        if self._lockstep is not None:
            self._lockstep.meet("the ranks' comparison of a call")
        return any_rank(None if self._axis is None else self._axis.group, flag)

    def accept(self, decision: Decision) -> None:
        """Take a call as proved: it kept to a proved path on every rank."""
        decision.proof.met.add(decision.key.kind)
        if self._changes is not None:
            self._changes.settle()

    def prove_path(self, call: DecidedCall, decision: Decision, taken: Sides, branches: bool) -> tuple[Proof, bool]:
        """The proof of a call at its own sizes, by these sides of branches on data, and whether it changes attributes.

        Args:
            call, decision: the call, and the proof that it left.
            taken: the sides that it took.
            branches: whether it left the proof at a branch; calls of its kind are then expected to do so again.

        Raises:
            UnprovedCallError: there is none.
        """
        kind, before = decision.key.kind, dict(self._paths.of(decision.key.kind).sides)
        unseen = (at for at, side in before.items() if side and at not in taken.exact)  # torch may ask for it itself
        proof, compiled = self._proved(call, decision.proof, decision.proof, taken.also(unseen), replays=True)
        self._paths.note(kind, proof, compiled)
        self._steering.join(decision.plain, decision.key, compiled.facts)
        if proof is decision.proof:
            self._proofs.join(decision.key, compiled)
            path, tests = self._paths.of(kind), taken.exact.items()
            self._paths.free(
                kind,
                [at for at, sides in tests if path.tests.get(at, 0) < 2 and {before.get(at), *sides} >= {True, False}],
            )
        else:
            self._proofs.cover(decision.key, proof, compiled, compiled.subject if branches else None)
        return proof, compiled.writes

    def asks_recording(self) -> bool:
        """Let calls that autograd doesn't record be proved as such from now on; whether that is new."""
        if torch.is_grad_enabled() or self._asks_recording:
            return False
        self._asked |= Asked(settings=frozenset((RECORDING,)))
        self._repeats.forget()
        return True

    def set_forwards(self) -> Sequence[str]:
        """See `Prover`."""
        return () if self._changes is None else self._changes.forwards

    def buffer_versions(self) -> list[object]:
        """How often each buffer of the model was written to."""
        return [] if self._model is None else buffer_versions(self._model)

    def is_repeatable(self, call: DecidedCall) -> bool:
        """See `Prover`."""
        return self._leaves_nothing() and not _passes_caches(call)

    def kept_buffers(self) -> Callable[[], None]:
        """See `Prover`."""
        return (lambda: None) if self._model is None else kept_buffers(self._model)

    def followed_hooks(self) -> Sequence[object]:
        """See `Prover`."""
        return () if self._changes is None else self._changes.followed

    def _leaves_nothing(self) -> bool:
        return self._model is not None and not self._wrote and not any(map(hooks_of, self._model.modules()))

    def leaves_nothing(self, decision: Decision) -> bool:
        """See `Prover`."""
        if not self._leaves_nothing():
            return False
        if not self._paths.must_watch(decision.key, decision.proof):
            return True
        warnings.warn(_COMPILED_WATCHED.warned, stacklevel=2)
        return False

    def _prove_sides(self, call: DecidedCall, decision: Decision) -> None:
        """Prove the other side of each branch on data; calls of this kind are watched if one needs another program."""
        path = self._paths.of(decision.key.kind)
        path.both = True
        sides = dict(path.sides)
        for location, side in sides.items():
            others = () if location in path.free else path.others(location)
            if all(map(self._is_covered(call, decision, location), others)):
                path.free.add(location)
            path.watched |= location not in path.free
            path.sides[location] = side

    def _is_covered(self, call: DecidedCall, decision: Decision, location: Location) -> Callable[[Sides], bool]:
        """Whether a call that takes other sides of a branch runs by the same program, or raises, as unsharded."""

        def is_covered(taken: Sides) -> bool:
            try:
                proof, compiled = self._proved(call, decision.proof, decision.proof, taken)
            except (UnprovedCallError, UnevenShardError) as error:
                return _raising_side(error) == location
            self._steering.join(decision.plain, decision.key, compiled.facts)
            if proof is decision.proof:
                self._proofs.join(decision.key, compiled)
                self._paths.note(decision.key.kind, proof, compiled)
            return proof is decision.proof

        return is_covered

    def alone(self) -> Program | None:
        """The program for a module that is called by itself: the example's, with all sequences whole.

        Raises:
            UnprovedCallError: the model was changed in a way that no proof can follow.
        """
        self.look()
        if torch.is_grad_enabled():
            self._follow_thawed()
            self._refuse_thawed()
        if self.state not in self._alone:
            self._alone[self.state] = self._of_single_modules()
        return self._alone[self.state].program

    def _of_single_modules(self) -> Proof:
        """The example's proof with all sequences whole; once settings were changed, as it is under these.

        That a program of before covers it isn't enough: modules may return what they didn't, as attention its weights.
        """
        if self._hands_on:
            raise UnprovedCallError.of(
                "TP117",
                "modules of a part of a model that takes or hands on parts of a sequence can't be called by themselves",
                help="call the part itself, or let stages hand on whole sequences, without `input: sequence` and "
                "`output: sequence`",
            )
        base = self._with_whole_sequences() if self._sequence_dims else self.main
        if not (self._changed or self.state):
            return base
        example = DecidedCall(self.main.program.training, *self._example, Parts())
        with torch.enable_grad():
            _, compiled = self._proved(example, base)
        return Proof(base.plan, compiled.program)

    def _key(self, call: DecidedCall) -> CallKey:
        """The key of a call; under sequence parallelism with what decides how its sequences are split."""
        more: tuple[object, ...] = (self.state, *call.parts.key)
        if self._asked != _NOTHING:
            more = (*more, *self._answers(call))
        if self._modes:
            more = (*more, self._modes)
        if self._sequence_dims:
            more = (*more, self._is_odd(call), _is_single(call))
        elif self._flattens:
            more = (*more, _is_single(call))
        try:
            return self._read(call.training, call.arguments, call.keywords, more)
        except UnseenError as error:
            raise UnprovedCallError.of(
                "TP117",
                f"an argument of this call is or holds {error}, so that nobody can tell it from another",
                help=error.way_out or "pass numbers, texts, tensors, containers of these, or plain objects",
            ) from None

    def _answers(self, call: DecidedCall) -> Iterator[object]:
        """What bodies are told that ask for more than the rest of a key has."""
        yield settings_now(sorted(self._asked.settings))
        if self._asks_recording and not torch.is_grad_enabled():
            yield tuple(t.requires_grad for _, t in tensors_of(call.arguments, call.keywords, self._names))
        for method in sorted(self._asked.memory):
            called = tensors_of(call.arguments, call.keywords, self._names)
            yield tuple(_answer(tensor, method) for _, tensor in called)
        for name in sorted(self._asked.flags):
            owner, _, leaf = name.rpartition(".")
            stock = own_parameters(self._stock.get_submodule(owner))[leaf]
            ours = None if self._model is None else own_parameters(self._model.get_submodule(owner)).get(leaf)
            if stock is not None and ours is not None:
                stock.requires_grad_(ours.requires_grad)  # calls are proved as the model is now
            yield stock is not None and stock.requires_grad

    def _is_odd(self, call: DecidedCall) -> bool:
        if _continues(call):
            return True
        size = self.main.program.size
        return shows_odd_sequence(call.arguments, call.keywords, self._names, self._sequence_dims, size)

    # -- proofs ---------------------------------------------------------------------------------------------------
    def _cover(self, subject: Subject) -> Cover | None:
        """The sizes for which a proof holds, on all ranks; None if it is proved of those of its call alone."""
        found: Cover | None = None
        if self._changes is not None:
            self._changes.follow()
        with suppress(NotCoveredError), told_of_call(), ambience(self.followed_hooks()):
            found = cover(subject, self._read.sizes, self._rank)
        if self._axis is not None:
            shown = None if found is None else found.conditions
            every = self._exchange(_SIZES, shown)
            found = None if any(other != shown for other in every) else found
        return found

    def _cuts(self, call: DecidedCall) -> bool:
        """Whether the call can be proved with a guess of how what its objects hold lies; later calls go by that."""
        for guess in self._left.guesses(call.arguments, call.keywords, self._names):
            if self.on_any_rank(guess is None) or guess is None:
                continue
            try:
                self._prove(call._replace(parts=guess.beside(call.parts)))
            except (UnprovedCallError, UnevenShardError):
                continue
            self._left.take(guess, call.arguments, call.keywords, self._names)
            return True
        return False

    def _prove(self, call: DecidedCall) -> tuple[Proof, Compiled]:
        """The proof of a call of a new kind: one that is there, or with a program of its own."""
        if not self._sequence_dims:
            return self._proved(call, self.main)
        if self._is_odd(call):
            return self._proved(call, self._with_whole_sequences(call))
        try:
            return self._proved(call, self.main)
        except UnprovedCallError as error:
            try:
                return self._proved(call, self._with_whole_sequences(call))
            except TpplanError:
                raise error from error.__cause__

    def _proved(
        self,
        call: DecidedCall,
        base: Proof,
        first: Proof | None = None,
        taken: Sides | None = None,
        replays: bool = False,
    ) -> tuple[Proof, Compiled]:
        """A proof of a call by the plan of `base`, `first` if that covers it, and what was compiled for it."""
        parts = call.parts
        self._repeats.forget()
        self._refuse_hidden(call)

        def whole(path: Path, tensor: Tensor) -> Tensor:
            shape = self._left.whole_shape(path, tensor, parts)
            return on_meta(path, tensor, shape) if shape is not None else with_numbers(path, tensor)

        wanted = self._asks_recording or torch.is_grad_enabled()
        try:
            with torch.set_grad_enabled(wanted):  # without a record, a tensor may still say that it requires grad
                example = with_tensors(*without_opaque(call.arguments, call.keywords), self._names, whole)
        except WrapperError as error:
            raise self._unproved(call, str(error), _OF_CACHES) from error
        size, training = self.main.program.size, call.training
        request = Request(
            self._stock, base.plan, size, *example, training, True, parts, taken, self._members, self._device,
            values=self._steering.is_known(self._key(call)), replays=replays,
            records=torch.is_grad_enabled() or not self._asks_recording,
            attributes=self.main.program.local_attributes,
        )  # fmt: skip
        try:
            compiled = self._compiled(lambda: prove(request))
        except CompileError as error:
            advice = f"if this is about the cache: {_OF_CACHES}" if _passes_objects(call) else None
            raise self._unproved(call, "it can't be proved", advice, cause=error) from error
        program = compiled.program
        self._wrote |= compiled.writes
        if not compiled.asked.settings <= self._asked.settings:
            self._asked |= compiled.asked
            if self._asks_recording and request.records and not torch.is_grad_enabled():
                return self._proved(call, base, first, taken, replays)
        self._asked |= compiled.asked
        there = (*(() if first is None else (first,)), base, *self._proofs)
        known = next((p for p in there if p.plan is base.plan and covers(p.program, compiled)), None)
        self._refuse_difference(program if known is None else known.program, base.plan, call, compiled.wraps)
        if known is None:
            known = Proof(base.plan, program)
            self._proofs.add(known)
            self._flattens |= _splits_rows(program)
        known.results |= compiled.results
        self._left.note(program, told=False)
        return known, compiled

    def _refuse_hidden(self, call: DecidedCall) -> None:
        """Raise for an object of the call that keeps tensors where no proof can see them."""
        named = [*zip(self._names, call.arguments, strict=False), *call.keywords.items()]
        for name, held in named:
            if hides_tensors(held):
                raise self._unproved(
                    call,
                    f"`{name}` is or has an object that keeps tensors where no proof can see them",
                    "keep them in attributes of plain Python objects (without `__slots__`), in lists or in dicts, as "
                    "transformers' caches do",
                )
        for unlike in map(unlike_dense, self._tensors(call).values()):
            if unlike is not None:
                raise self._unproved(call, f"it passes {unlike[0]}", unlike[1])

    def _foreign(self, program: Program, plan: Plan) -> str:
        """Why another program by the same plan can't read what this one caches; "" if all can."""
        others = (proof.program for proof in self._proofs if proof.plan is plan)
        return next(filter(None, (cache_difference(other, program) for other in others)), "")

    def _refuse_difference(self, program: Program, plan: Plan, call: DecidedCall, wraps: bool) -> None:
        """Raise if one model can't be run by the programs that are there and by this one."""
        difference = placement_difference(self.main.program, program) or left_difference(self._left.layouts, program)
        guesses = self._left.guesses(call.arguments, call.keywords, self._names)
        if not difference and (wraps or any(guess is not None and not guess.wholes for guess in guesses)):
            difference = self._foreign(program, plan)
        if difference:
            advice = _OF_CACHES if wraps or _passes_caches(call) else _OF_CALLS
            reason = f"it needs different reshards, and {difference}"
            raise self._unproved(call, reason, advice, notes=_gathered(program))

    def _unproved(
        self,
        call: DecidedCall,
        reason: str,
        way_out: str | None,
        *,
        notes: Iterable[str] = (),
        cause: CompileError | None = None,
    ) -> UnprovedCallError:
        """A TP117 that says how a call differs from those that are proved, and why it can't be proved as well."""
        modes = (self.main.program.training, call.training)
        shown = call_difference(self._contents, contents(call.arguments, call.keywords, self._names), modes)
        differs = f"this call differs from the example ({shown})" if shown else ""
        difference = None if self._changes is None else self._changes.difference
        changed = f"{self._changed} changed after `parallelize`" if self._changed else ""
        changed = changed if difference is None else str(difference)
        broken = self._proofs.broken(self._key(call))
        size = f"calls like it are proved where {' and '.join(broken)}" if broken else ""
        reasons = ", and ".join(filter(None, (changed, differs, size))) or "this call isn't covered by a proof"
        return UnprovedCallError.of("TP117", f"{reasons}: {reason}", help=way_out, notes=notes, cause=cause)

    def _compiled(self, compile_it: Callable[[], Compiled]) -> Compiled:
        """A program that all ranks have compiled alike; every rank raises if one of them can't."""
        error: Exception | None = None
        compiled: Compiled | None = None
        if self._lockstep is not None:
            self._lockstep.meet("the proof of a call of a new kind")
        if self._changes is not None:
            self._changes.follow()
        try:
            with told_of_call(), ambience(self.followed_hooks()):
                compiled = compile_it()
        except Exception as raised:  # whatever a rank fails with, the others must not wait for it
            error = raised
        if self._axis is not None:
            agree(self._axis.group, None if compiled is None else compiled.digest, error)
        if compiled is None:
            assert error is not None
            raise error
        self._assumed.add(compiled.untried)
        if self._changes is not None:
            if self._changes.follow(compiled.reads):
                return self._compiled(compile_it)
            if compiled.writes:
                self._changes.expect_writes()
        return compiled

    # -- whole sequences ------------------------------------------------------------------------------------------
    @property
    def _hands_on(self) -> bool:
        main = self.main.program
        return self.main.plan.is_part and bool(main.arriving or main.hands_on)

    def _with_whole_sequences(self, call: DecidedCall | None = None) -> Proof:
        """The proof of the example with all sequences whole, compiled when it's first asked for, as by a call."""
        uneven = _UNEVEN, f"pad the sequence to a multiple of {self.main.program.size}"
        why, way_out = _CONTINUED if call is not None and _continues(call) else uneven
        if self._hands_on:
            raise UnevenShardError.of(
                "TP118",
                f"{why}, and the parts of the model before this one and after it hand on parts of them",
                help=f"{way_out}, or let stages hand on whole ones, without `input: sequence` and `output: sequence`",
            )
        if self._whole is None:
            self._whole = self._compile_whole(why, way_out)
            self._proofs.add(self._whole)
        return self._whole

    def _compile_whole(self, why: str, way_out: str) -> Proof:
        main = self.main.program
        plan = self.main.plan.with_whole_sequences()
        request = Request(
            self._stock, plan, main.size, *self._example, main.training, members=self._members, device=self._device
        )
        try:
            compiled = self._compiled(lambda: prove(request))
        except CompileError as error:
            message = f"{why}, and the plan can't be compiled without `sequence`"
            raise UnevenShardError.of("TP118", message, cause=error) from error
        program = compiled.program
        other = placement_difference(main, program)
        if other:
            raise UnevenShardError.of("TP118", f"{why}, and without `sequence` {other}", help=way_out)
        return Proof(plan, program, results=Results(compiled.results))

    def _follow_thawed(self) -> None:
        """Have calls proved anew that are to give gradients to parameters which were frozen in their proofs.

        The ranks thaw the same parameters, as they set the same flags; what is compiled for that is compared.
        """
        for table, leaf, name in self._constants:
            if getattr(table.get(leaf), "requires_grad", False):
                raise UnprovedCallError.of("TP130", f"`{name.lstrip('.')}` {WANTS_GRADIENT}", help=NO_PARAMETER)
        thawed = [held for held in self._frozen if getattr(held[0].get(held[2]), "requires_grad", False)]
        for held in thawed:
            _, stock, leaf, _ = held
            stock[leaf].requires_grad_(True)
        if thawed:
            followed = {*map(id, thawed)}  # they hold tensors, which `==` would compute with
            self._frozen = [held for held in self._frozen if id(held) not in followed]
            self._thawed = thawed[0][3].lstrip(".")
            self._whole = None
            self._forget("parameters that were frozen")

    def _refuse_thawed(self) -> None:
        """TP117 for a module that is called by itself: its program has no sum for parameters that were thawed since."""
        if self._thawed and not self._sequence_dims:
            raise UnprovedCallError.of(
                "TP117",
                f"`{self._thawed}` requires grad, but was frozen when the plan was compiled, so that no sum over the "
                "ranks was placed for calls of single modules",
                help="let all parameters that may ever be trained require grad when `parallelize` is called; they can "
                "be frozen afterwards",
            )


def _raising_side(error: BaseException | None) -> Location | None:
    """The branch on data of which one side is an error that the model itself raises; None if that isn't the reason."""
    while error is not None and not isinstance(error, BodyError):
        error = error.__cause__
    return None if error is None else error.side


def _passes_objects(call: DecidedCall) -> bool:
    """Whether the call passes an object that the call may write to, such as a cache."""
    return any(is_object(held) for held in (*call.arguments, *call.keywords.values()))


def _passes_caches(call: DecidedCall) -> bool:
    """Whether an object that it passes holds tensors, or hides what it holds."""
    objects = [held for held in (*call.arguments, *call.keywords.values()) if is_object(held)]
    return any(is_opaque(held) or any(tensors_in(held, objects=True)) for held in objects)


def _gathered(program: Program) -> Iterable[str]:
    """Why features that others leave split are gathered in a program."""
    notes = [note for found in program.diagnostics if found.code == "TP104" for note in found.notes]
    return dict.fromkeys(notes)


def _answer(tensor: Tensor, method: str) -> object:
    """What a tensor says of how it lies in memory; nothing if its sizes say that, which count by themselves."""
    if is_wrapper(tensor):
        return None  # it lies nowhere itself
    found = getattr(tensor, method)()
    like = torch.empty(tensor.shape, device="meta")
    return None if found == getattr(like, method)() else found


def _splits_rows(program: Program) -> bool:
    """Whether it splits first dims: of heads that are flattened with a batch, unless the batch is a single one."""
    return any(held.dim == 0 for _, reshard in program.reshards() for held in (reshard.source, reshard.target))


def _continues(call: DecidedCall) -> bool:
    """Whether it passes a cache that earlier calls have filled.

    A mask for the longer keys takes its rows from the sequence of a value that may be split, as one without a cache
    takes none. So sequences are whole in such calls.
    """
    objects = (held for held in (*call.arguments, *call.keywords.values()) if is_object(held))
    caches = (held for held in objects if not isinstance(held, nn.Module))
    return any(tensor.dim() > 1 for cache in caches for _, tensor in hidden_tensors(cache))


def _is_single(call: DecidedCall) -> bool:
    """Whether its batch is of one sequence, which is flattened with its batch to a sequence."""
    first = next((a for a in (*call.arguments, *call.keywords.values()) if isinstance(a, Tensor)), None)
    return first is not None and first.dim() > 0 and first.shape[0] == 1


__all__ = ["CallGuard", "Decision", "UnprovedCallError"]
