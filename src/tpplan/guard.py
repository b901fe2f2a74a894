"""Guard: hold each call of a sharded model against what was proved.

A call with other tensors or flags than the example, or in the other mode (training, evaluation), may take another
path through the model. The first such call is proved on the spot: compiled like the example, from the same stock
skeleton. If it needs the same reshards, it goes ahead and is remembered; otherwise it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.compiler.pipeline import compile_program
from tpplan.compiler.program import ModuleProgram, Program, Reshard
from tpplan.plan import CompileError, Plan, TpplanError

Signature = tuple[object, ...]


class UnprovedCallError(TpplanError):
    """A call that the program doesn't cover; the message says how it differs."""


class CallGuard:
    """Accepts calls that are covered by a proof, and raises for others."""

    def __init__(
        self, stock: nn.Module, plan: Plan, program: Program, arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> None:
        """Start with the example call.

        Args:
            stock: a skeleton of the stock model, on `meta`.
            plan, program: what was compiled.
            arguments, keywords: the example call.
        """
        self._stock = stock
        self._plan = plan
        self._program = program
        self._proved: set[Signature] = {(program.training, signature(arguments, keywords))}
        self._frozen: list[tuple[nn.Module, str, str]] = []

    def watch(self, model: nn.Module) -> None:
        """Refuse calls once a parameter of the sharded model wants a gradient that it didn't want in the proof."""
        for placement in self._program.parameters:
            if not placement.trainable:
                owner, _, leaf = placement.name.rpartition(".")
                self._frozen.append((model.get_submodule(owner), leaf, placement.name))

    def __call__(self, training: bool, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Raise `UnprovedCallError` unless the call is proved, now or before."""
        if self._frozen and torch.is_grad_enabled():
            self._refuse_thawed()
        held = (training, signature(arguments, keywords))
        if held not in self._proved:
            self._prove(training, arguments, keywords)
            self._proved.add(held)

    def _refuse_thawed(self) -> None:
        for owner, leaf, name in self._frozen:
            if getattr(owner, leaf).requires_grad:
                raise UnprovedCallError(
                    f"TP117 unproved-call: `{name}` wants a gradient, but was frozen when the plan was compiled, so "
                    "that no sum over the ranks was placed for it\n  help: let all parameters that may ever be trained "
                    "want a gradient when `parallelize` is called; they can be frozen afterwards"
                )

    def _prove(self, training: bool, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        program = self._program
        kept = {name: a for name, a in keywords.items() if not is_opaque(a)}
        given = tuple(None if is_opaque(a) else a for a in arguments)
        try:
            other = compile_program(self._stock, self._plan, program.size, given, kept, training)
        except CompileError as error:
            raise UnprovedCallError(f"{_headline(training, keywords)}: it can't be proved\n{error}") from error
        difference = _difference(program, other)
        if difference:
            raise UnprovedCallError(
                f"{_headline(training, keywords)}: {difference}\n  help: pass `inputs=` like this call to "
                "`parallelize`, so that the program is compiled for it"
            )


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
    return type(held).__name__ if is_opaque(held) else held


def is_opaque(held: object) -> bool:
    """Whether an argument is an object that a proof leaves out, such as a key-value cache."""
    return not isinstance(
        held, (Tensor, tuple, list, dict, str, int, float, bool, type(None), torch.dtype, torch.device)
    )


def _headline(training: bool, keywords: Mapping[str, Any]) -> str:
    named = ", ".join(name for name, held in keywords.items() if isinstance(held, Tensor))
    mode = "training" if training else "evaluation"
    return f"TP117 unproved-call: this call ({named or 'positional arguments'}; in {mode}) differs from the example"


def _difference(ours: Program, other: Program) -> str:
    mine = {module.name: module for module in ours.modules}
    for module in other.modules:
        known = mine.get(module.name)
        if known is None or _moves(known) != _moves(module) or known.local_attributes != module.local_attributes:
            return f"`{module.name or 'the model'}` needs other reshards for it"
    summed = {p.name for p in other.summed_parameters} ^ {p.name for p in ours.summed_parameters}
    if summed:
        return f"the gradient of `{min(summed)}` is summed in one case only"
    return ""


def _moves(module: ModuleProgram) -> tuple[frozenset[object], frozenset[object]]:
    def move(reshard: Reshard) -> object:
        return (reshard.path, reshard.source, reshard.target)

    return frozenset(map(move, module.entries)), frozenset(map(move, module.exits))
