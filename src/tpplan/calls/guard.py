"""Guard: hold each call of a sharded model against what was proved, and tell which program it runs by.

A call with other tensors or flags than the example, or in the other mode (training, evaluation), may take another
path through the model. The first such call is proved on the spot: compiled like the example, from the same stock
skeleton. If it needs the same reshards, it goes ahead and is remembered; otherwise it is refused.

A call with a sequence that the ranks can't share evenly (decoding token by token, a prompt of odd length) can't run by
a sequence-parallel program. It runs by a second one, compiled at the first such call from the same plan with all
sequences whole. So do calls that only that one covers, such as those that are given an encoder's result, and modules
that are called by themselves.

What a call leaves in lists and dicts among its arguments, such as keys and values, is a rank's part of them, and the
program says which. A later call is proved with these parts as they lie; by its size each is told from a whole tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, Layout
from tpplan.compiler.ir.program import LeftTensor, ModuleProgram, Program, Reshard
from tpplan.compiler.ir.pytree import is_record, tensors_of, with_items, with_tensors
from tpplan.compiler.pipeline import compile_program
from tpplan.compiler.trace.capture import argument_names
from tpplan.parity.tree import Path, tensors_in
from tpplan.plan import CompileError, Plan, TpplanError
from tpplan.runtime.agreement import agree
from tpplan.runtime.communicator import ProcessGroupCommunicator
from tpplan.runtime.reshard import UnevenShardError

Signature = tuple[object, ...]


class UnprovedCallError(TpplanError):
    """A call that the program doesn't cover; the message says how it differs."""


@dataclass(slots=True)
class _Proof:
    """A program, the plan that it follows, and the kinds of calls that it is known to cover."""

    plan: Plan
    program: Program
    proved: set[Signature] = field(default_factory=set[Signature])


class CallGuard:
    """Accepts calls that are covered by a proof, and raises for others."""

    def __init__(
        self,
        stock: nn.Module,
        plan: Plan,
        program: Program,
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
        axis: ProcessGroupCommunicator | None = None,
    ) -> None:
        """Start with the example call.

        Args:
            stock: a skeleton of the stock model, on `meta`.
            plan, program: what was compiled.
            arguments, keywords: the example call.
            axis: the ranks, which compare what they compile later; None if they needn't.
        """
        self._stock = stock
        self._names = argument_names(type(stock).forward)
        self._example = with_tensors(*without_opaque(arguments, keywords), self._names, _on_meta)
        self._axis = axis
        self._device = torch.device(program.device)
        self._main = _Proof(plan, program, {(program.training, signature(arguments, keywords))})
        self._whole: _Proof | None = None
        self._sequence_dims = _sequence_dims(program)
        self._frozen: list[tuple[nn.Module, str, str]] = []
        self._kept_whole: set[Signature] = set()
        self._left: dict[Path, LeftTensor] = {}
        self._note_left(program, told=True)

    def watch(self, model: nn.Module) -> None:
        """Refuse calls once a parameter of the sharded model wants a gradient that it didn't want in the proof."""
        for placement in self._main.program.parameters:
            if not placement.trainable:
                owner, _, leaf = placement.name.rpartition(".")
                self._frozen.append((model.get_submodule(owner), leaf, placement.name))

    def __call__(self, training: bool, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Program:
        """The program that the call runs by.

        Raises:
            UnprovedCallError: the call isn't proved, now or before.
            UnevenShardError: the ranks can't share its sequence evenly, and can't run it whole either.
        """
        if self._frozen and torch.is_grad_enabled():
            self._refuse_thawed()
        proof = self._main
        if self._sequence_dims and self._is_odd(arguments, keywords):
            proof = self._with_whole_sequences()
            self._refuse_foreign_caches(proof.program, arguments, keywords)
        parts = self._parts(arguments, keywords) if self._left else {}
        held = (training, signature(arguments, keywords), *parts.items())
        if held in self._kept_whole:
            proof = self._with_whole_sequences()
        if held not in proof.proved:
            try:
                self._prove(proof, training, arguments, keywords, parts)
            except UnprovedCallError as error:
                if proof is not self._main or not self._sequence_dims:
                    raise
                proof = self._prove_whole(error, training, arguments, keywords, parts)
                self._kept_whole.add(held)
            proof.proved.add(held)
        return proof.program

    def alone(self) -> Program | None:
        """The program for a module that is called by itself, with whole sequences; None if all have them whole."""
        return self._with_whole_sequences().program if self._sequence_dims else None

    def _prove_whole(
        self,
        error: UnprovedCallError,
        training: bool,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        parts: Mapping[Path, Layout],
    ) -> _Proof:
        """A proof of the call with whole sequences, which it may need where it is given what the model makes itself."""
        try:
            proof = self._with_whole_sequences()
            self._refuse_foreign_caches(proof.program, arguments, keywords)
            self._prove(proof, training, arguments, keywords, parts)
        except TpplanError:
            raise error from None
        return proof

    def _parts(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[Path, Layout]:
        """How those tensors lie that an earlier call has left, or what the caller has made of them since."""
        found: dict[Path, Layout] = {}
        for path, tensor in tensors_of(arguments, keywords, self._names):
            known = self._left.get(path)
            if known is None or tensor.dim() != len(known.shape):
                continue
            if self._is_part(known, tensor):
                found[path] = known.layout
        return found

    def _is_part(self, known: LeftTensor, tensor: Tensor) -> bool:
        layout = known.layout
        if layout.dim is None:  # whole on each rank; only its gradient isn't
            return tensor.requires_grad and not tensor.is_leaf
        rank = 0 if self._axis is None else self._axis.rank
        return tensor.shape[layout.dim] == layout.local_size(known.shape[layout.dim], self._main.program.size, rank)

    def _note_left(self, program: Program, told: bool) -> None:
        """Remember what calls leave; if nobody has been told of it, tell the caller once."""
        new = [held for held in program.left if held.path not in self._left]
        told = told or any(held.layout.is_sharded for held in self._left.values())
        self._left |= {held.path: held for held in program.left}
        finding = next((d for d in program.diagnostics if d.code == "TP125"), None)
        if new and not told and finding is not None:
            warnings.warn(f"{finding.headline}\n  help: {finding.help}", stacklevel=2)

    def _refuse_foreign_caches(self, program: Program, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """What a cache holds must be split alike by both programs, as each may read what the other has written."""
        if not any(held is not None and is_opaque(held) for held in (*arguments, *keywords.values())):
            return
        if program.feature_reshards != self._main.program.feature_reshards:
            raise UnevenShardError(
                f"{_TP118}, and the program that keeps it whole splits features in other places, so that it can't "
                f"share a cache\n  help: pad the sequence to a multiple of {program.size}, or pass no cache"
            )

    def _refuse_thawed(self) -> None:
        for owner, leaf, name in self._frozen:
            if getattr(owner, leaf).requires_grad:
                raise UnprovedCallError(
                    f"TP117 unproved-call: `{name}` wants a gradient, but was frozen when the plan was compiled, so "
                    "that no sum over the ranks was placed for it\n  help: let all parameters that may ever be trained "
                    "want a gradient when `parallelize` is called; they can be frozen afterwards"
                )

    def _is_odd(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
        """Whether a tensor of the call has a sequence that the axis doesn't divide.

        Which dims are sequences shows in the example. Of tensors that it doesn't have, it's dim 1 as in all others.
        """
        names = [*self._names, *(f"*{i}" for i in range(len(self._names), len(arguments)))]
        for name, held in (*zip(names, arguments, strict=False), *keywords.items()):
            if held is None or type(held) in (bool, int, float, str):
                continue
            if any(self._has_odd_dim(path, tensor) for path, tensor in tensors_in(held, (name,))):
                return True
        return False

    def _has_odd_dim(self, path: Path, tensor: Tensor) -> bool:
        dims = self._sequence_dims.get(path)
        if dims is None:
            dims = (1,) if tensor.dim() in (2, 3) else ()
        size = self._main.program.size
        return any(dim < tensor.dim() and tensor.shape[dim] % size for dim in dims)

    def _with_whole_sequences(self) -> _Proof:
        """The second program; compiled, and compared between the ranks, when it's first asked for."""
        if self._whole is None:
            error: Exception | None = None
            found: _Proof | None = None
            try:
                found = self._compile_whole()
            except Exception as raised:  # whatever a rank fails with, the others must not wait for it
                error = raised
            if self._axis is not None:
                agree(self._axis.group, None if found is None else found.program.digest, error)
            if found is None:
                assert error is not None
                raise error
            self._whole = found
        return self._whole

    def _compile_whole(self) -> _Proof:
        main = self._main
        plan = main.plan.with_whole_sequences()
        try:
            program = compile_program(
                self._stock, plan, main.program.size, *self._example, main.program.training, device=self._device
            )
        except CompileError as error:
            raise UnevenShardError(f"{_TP118}, and the plan can't be compiled without `sequence`\n{error}") from error
        ours, theirs = ({p.names: _stored(p.layout) for p in held.parameters} for held in (main.program, program))
        other = next((names[0] for names, layout in ours.items() if theirs.get(names) != layout), None)
        if other is not None:
            raise UnevenShardError(
                f"{_TP118}, and without `sequence` the plan places `{other}` otherwise\n  help: pad the sequence to a "
                f"multiple of {main.program.size}"
            )
        return _Proof(plan, program, {(program.training, signature(*self._example))})

    def _prove(
        self,
        proof: _Proof,
        training: bool,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        parts: Mapping[Path, Layout],
    ) -> None:
        def whole(path: Path, tensor: Tensor) -> Tensor:
            if path not in parts or parts[path].dim is None:
                return tensor
            dim = parts[path].dim or 0
            shape = (*tensor.shape[:dim], self._left[path].shape[dim], *tensor.shape[dim + 1 :])
            return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)

        program = proof.program
        call = with_tensors(*without_opaque(arguments, keywords), self._names, whole)
        try:
            other = compile_program(
                self._stock, proof.plan, program.size, *call, training, partly=True, parts=parts, device=self._device
            )
        except CompileError as error:
            raise UnprovedCallError(f"{_headline(training, keywords)}: it can't be proved\n{error}") from error
        difference = _difference(program, other)
        if difference:
            raise UnprovedCallError(
                f"{_headline(training, keywords)}: {difference}\n  help: pass `inputs=` like this call to "
                "`parallelize`, so that the program is compiled for it"
            )
        self._note_left(other, told=False)


_TP118 = "TP118 uneven-sequence: the ranks can't share the sequence of this call evenly"


def _on_meta(_: Path, tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)


def _sequence_dims(program: Program) -> dict[Path, tuple[int, ...]]:
    """For each tensor of the example, the dims that are sequences; empty if the program splits none."""
    lengths = program.sequence_lengths
    if not lengths:
        return {}
    return {i.path: tuple(d for d, n in enumerate(i.shape) if d and n in lengths) for i in program.inputs}


def signature(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Signature:
    """What of a call decides the path through a model: which tensors, of how many dims, and the values of flags."""
    return (*map(_kind, arguments), *((name, _kind(held)) for name, held in keywords.items() if held is not None))


def _kind(held: Any) -> object:
    if isinstance(held, Tensor):
        return (held.dim(), held.is_floating_point(), held.requires_grad and torch.is_grad_enabled())
    if isinstance(held, (tuple, list)):
        return tuple(map(_kind, held))  # pyright: ignore
    if isinstance(held, dict):
        return tuple((name, _kind(item)) for name, item in held.items())  # pyright: ignore
    if is_record(held):
        return tuple((field.name, _kind(getattr(held, field.name, None))) for field in fields(held))
    return type(held).__name__ if is_opaque(held) else held


def is_opaque(held: object) -> bool:
    """Whether an argument is an object that a proof leaves out, such as a key-value cache."""
    plain = (Tensor, tuple, list, dict, str, int, float, bool, type(None), torch.dtype, torch.device)
    return not (isinstance(held, plain) or is_record(held))


def without_opaque(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call as a proof takes it: without keywords that are opaque, and with None for what else is."""
    positional = tuple(with_items(argument, _unless_opaque) for argument in arguments)
    kept = {name: held for name, held in keywords.items() if not is_opaque(held)}
    return positional, {name: with_items(held, _unless_opaque) for name, held in kept.items()}


def _unless_opaque(held: object) -> object:
    return None if is_opaque(held) else held


def _headline(training: bool, keywords: Mapping[str, Any]) -> str:
    named = ", ".join(name for name, held in keywords.items() if isinstance(held, Tensor))
    mode = "training" if training else "evaluation"
    return f"TP117 unproved-call: this call ({named or 'positional arguments'}; in {mode}) differs from the example"


def _difference(ours: Program, other: Program) -> str:
    mine = {module.name: module for module in ours.modules}
    for module in other.modules:
        if not module.calls:
            continue  # the call does without it
        known = mine.get(module.name)
        if known is None or _moves(known) != _moves(module) or known.local_attributes != module.local_attributes:
            return f"`{module.name or 'the model'}` needs other reshards for it"
        if (known.recorded is None) != (module.recorded is None) or known.split_norm != module.split_norm:
            return f"`{module.name or 'the model'}` needs another body for it"
        if module.random not in (None, known.random):
            return f"`{module.name or 'the model'}` draws other random numbers for it"
    read = {name for module in other.modules for name in module.reads}
    placed = {p.names: _stored(p.layout) for p in ours.parameters}
    for parameter in other.parameters:
        if read.intersection(parameter.names) and _stored(parameter.layout) != placed.get(parameter.names):
            return f"`{parameter.name}` would have to lie otherwise for it"
    summed = {p.name for p in other.summed_parameters} ^ {
        p.name for p in ours.summed_parameters if read.intersection(p.names)
    }
    if summed:
        return f"the gradient of `{min(summed)}` is summed in one case only"
    return ""


def _stored(layout: Layout) -> Layout:
    """How a parameter is stored: a bias that one rank adds is whole on all of them."""
    return REPLICATED if layout == PARTIAL else layout


def _moves(module: ModuleProgram) -> tuple[frozenset[object], frozenset[object]]:
    def move(reshard: Reshard) -> object:
        return (reshard.path, reshard.source, reshard.target)

    return frozenset(map(move, module.entries)), frozenset(map(move, module.exits))
