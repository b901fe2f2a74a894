"""Trials of rules: an operator runs on random numbers, whole and in parts, along every claim of its rule.

in:  a rule, a function, and the arguments of a call of it by their geometry
out: nothing if each claim holds; why the rule can't be tried; or a `ClaimError` that names the dim

    b h s! d!, …  ->  b h s! d!     `b` and `h` in two and in three uneven parts: results and gradients of the parts are
                                    the parts of the whole's; what has no such dim gets gradients that add up to its own

What a rule says of whole dims is no claim. Plain and summed dims have a few entries in a trial, each another number,
and others few; then those of the call, in the parts of the ranks. Numbers are float64 where the operator takes that. Of
an operator that draws, shapes alone are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpplan.compat.tensors import READ_VERSION
from tpplan.plan.operator_rule import Dim, OperatorRule

UNTRIED = "its rule has `audit=False`"
DRAWS = "it draws random numbers, so that shapes alone were tried"
_ENTRIES, _FEW = 5, 16
_MOST = 1 << 22  # entries of a call whose own sizes are tried as well


class ClaimError(Exception):
    """A rule isn't true of its operator, or of the dim or the argument that it names."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument of a call.

    Attributes:
        argument: its name.
        dims: None for one that is whole.
        shape, dtype: of the call's.
        differentiable: whether it may have a gradient.
    """

    argument: str
    dims: tuple[Dim, ...] | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


@dataclass(frozen=True, slots=True)
class TrialCall:
    """A call of an operator, to be made again.

    Attributes:
        run: takes a tensor, or None, for each operand, and numbers for the arguments that count dims; returns a tensor
            or a list of tensors.
        operands: its tensors; None for one that wasn't given.
        results: the dims of each result.
        dtypes: of the results, as a capture takes them for.
        counts: the entries of each name.
    """

    run: Callable[[Sequence[Tensor | None], Mapping[str, int]], Any]
    operands: tuple[Operand | None, ...]
    results: tuple[tuple[Dim, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    counts: Mapping[str, int]


def tried(rule: OperatorRule, call: TrialCall, device: torch.device, ranks: int) -> str:
    """Try every claim of a rule; why that can't be done, or "" if all hold.

    Args:
        rule, call: the claims, and what they are of.
        device: where to try them.
        ranks: in how many parts the call's own sizes are tried.

    Raises:
        ClaimError: one doesn't hold.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        failed = _tried(rule, call, device, ranks)
    return failed or (DRAWS if rule.random else "")


def _tried(rule: OperatorRule, call: TrialCall, device: torch.device, ranks: int) -> str:
    counts: Mapping[str, int] = {}
    spare: _Trial | None = None
    failed, ran, own = "", "", {name: max(count, 1) for name, count in call.counts.items()}
    for counts in _sizes(rule, call):
        for wide, highest in ((True, 8), (True, 2), (False, 8), (False, 2)):
            trial = _Trial(rule, call, counts, device, wide, highest)
            try:
                trial.prepare()
            except ClaimError:
                if rule.placed and counts != own:
                    continue  # dims of which it tells nothing may hang together
                raise
            except Exception as error:
                failed = failed or f"it can't run on {device.type} here ({_first_line(error)})"
                continue
            if trial.ungraded and wide:  # in another dtype it may have gradients
                spare = spare or trial
                continue
            trial.check((2, 3))
            ran = trial.ungraded or "all"
            break
        if ran:
            break
    if not ran and spare is not None:
        spare.check((2, 3))
        ran, counts = spare.ungraded, spare.counts
    if not ran:
        return failed
    if _numbers(call) <= _MOST and own != counts:
        for wide in (True, False):
            trial = _Trial(rule, call, own, device, wide, 2)
            try:
                trial.prepare()
            except ClaimError:
                raise
            except Exception:  # the small one has shown what can be shown
                continue
            if trial.ungraded and wide:
                continue
            trial.check((ranks,))
            break
    return "" if ran == "all" else ran


def _numbers(call: TrialCall) -> int:
    return sum(math.prod(held.shape) for held in call.operands if held is not None)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _sizes(rule: OperatorRule, call: TrialCall) -> Iterator[dict[str, int]]:
    split = [n for n in call.counts if n not in rule.whole]
    few = {name: _ENTRIES + place for place, name in enumerate(split)}
    yield {n: few.get(n, min(count, _FEW)) for n, count in call.counts.items()}
    yield {n: few.get(n, count) for n, count in call.counts.items()}
    yield {n: max(count, 1) for n, count in call.counts.items()}


class _Trial:
    def __init__(
        self,
        rule: OperatorRule,
        call: TrialCall,
        counts: Mapping[str, int],
        device: torch.device,
        wide: bool,
        highest: int,
    ) -> None:
        self.rule, self.call, self.counts, self.device = rule, call, counts, device
        self.wide, self.highest = wide, highest
        self.ungraded = ""
        self.generator = torch.Generator(device).manual_seed(0)
        self.inputs: list[Tensor | None] = []
        self.results: list[Tensor] = []
        self.cotangents: list[Tensor] = []
        self.gradients: list[Tensor | None] = [None] * len(call.operands)
        self.has_gradients = True

    def prepare(self) -> None:
        """Run it whole."""
        self.inputs = [None if held is None else self._drawn(held) for held in self.call.operands]
        self.results = self._run(self.inputs, self.counts)
        if len(self.results) != len(self.call.results):
            raise ClaimError(
                f"it returns {len(self.results)} tensors, and its rule has {len(self.call.results)} results"
            )
        self.cotangents = [self._random(made.shape, made.dtype) for made in self.results]
        self._compare_kinds()
        self._compare_again()
        try:
            self.gradients = self._gradients(self.inputs, self.results, self.cotangents)
        except ClaimError:
            raise
        except Exception as error:
            self.has_gradients = False
            if not isinstance(error, NotImplementedError) and "autograd formula" not in str(error):
                self.ungraded = f"its gradients can't be tried here ({_first_line(error)})"
        for made, dims in zip(self.results, self.call.results, strict=True):
            if tuple(made.shape) != self._shape(dims):
                raise ClaimError(f"a result has shape {list(made.shape)}, where its rule has {list(self._shape(dims))}")

    def _compare_kinds(self) -> None:
        for made, dtype in zip(self.results, self.call.dtypes, strict=True):
            same = made.is_floating_point() == dtype.is_floating_point if self.wide else made.dtype == dtype
            if not same:
                raise ClaimError(f"a result is {made.dtype}, where a capture takes it for {dtype}: give its `dtype=`")

    def _compare_again(self) -> None:
        for again, made in zip(self._run(self.inputs, self.counts), self.results, strict=True):
            self._compare(again, made, "it draws random numbers, and has no `random=True`: its results, run again,")

    def check(self, numbers: Sequence[int]) -> None:
        """Run it in so many parts.

        Raises:
            ClaimError: a claim doesn't hold.
        """
        for name in (n for n in self.counts if n not in self.rule.whole):
            for parts in numbers:
                if self.counts[name] > 1:
                    self._in_parts(name, _uneven(self.counts[name], min(parts, self.counts[name])))
        for argument in self.rule.linear:
            self._linear(argument)

    def _in_parts(self, name: str, parts: Sequence[int]) -> None:
        summed = [not any(name in dim.names for dim in dims) for dims in self.call.results]
        what = f"`{name}` can't be {'summed over parts' if name in self.rule.summed else 'split'}"
        made: list[list[Tensor]] = []
        gradients: list[list[Tensor | None]] = []
        start = 0
        for length in parts:
            inputs = [self._part(held, operand, name, start, length) for held, operand in self._pairs()]
            counts = {**self.counts, name: length}
            results = [
                _narrowed(held, dims, name, start, length, self.counts)
                for held, dims in zip(self.cotangents, self.call.results, strict=True)
            ]
            try:
                own = self._run(inputs, counts)
                found = self._gradients(inputs, own, results)
            except Exception as error:
                of = f"{length} of {self.counts[name]}"
                raise ClaimError(f"{what}: on {of} it raises: {_first_line(error)}") from error
            for held, dims in zip(own, self.call.results, strict=True):
                if tuple(held.shape) != (shape := tuple(_size(dim, counts) for dim in dims)):
                    of = f"{length} of {self.counts[name]}"
                    raise ClaimError(f"{what}: on {of} a result has shape {list(held.shape)}, and not {list(shape)}")
            made.append(own)
            gradients.append(found)
            start += length
        for place, (whole, dims) in enumerate(zip(self.results, self.call.results, strict=True)):
            held = [own[place] for own in made]
            joined = _sum(held) if summed[place] else _joined(held, dims, name, self.counts)
            self._compare(joined, whole, f"{what}: the parts' results")
        for place, (whole, operand) in enumerate(zip(self.gradients, self.call.operands, strict=True)):
            if whole is None or operand is None:
                continue
            own = [found[place] for found in gradients]
            given = [torch.zeros_like(whole[:0]) if held is None else held for held in own]
            split = operand.dims is not None and any(name in dim.names for dim in operand.dims)
            joined = _joined(given, operand.dims or (), name, self.counts) if split else _sum(given)
            self._compare(joined, whole, f"{what}: the parts' gradients for `{operand.argument}`")

    def _linear(self, argument: str) -> None:
        what = f"a sum can't pass through `{argument}`"
        for place, operand in enumerate(self.call.operands):
            whole = self.inputs[place]
            if operand is None or operand.argument != argument or whole is None:
                continue
            other = self._random(whole.shape, whole.dtype)
            terms = [
                self._run([held if i != place else term for i, held in enumerate(self.inputs)], self.counts)
                for term in (whole.detach() - other, other)
            ]
            for result, made in enumerate(self.results):
                self._compare(_sum([term[result] for term in terms]), made, f"{what}: the terms' results")

    def _pairs(self) -> Iterator[tuple[Tensor | None, Operand | None]]:
        return zip(self.inputs, self.call.operands, strict=True)

    def _run(self, inputs: Sequence[Tensor | None], counts: Mapping[str, int]) -> list[Tensor]:
        with torch.enable_grad():
            given = [None if held is None else held.clone() for held in inputs]  # no leaves, which may be written to
            made: Any = self.call.run(given, {argument: counts[name] for argument, name in self.rule.sizes})
        for held, operand in zip(given, self.call.operands, strict=True):
            if held is not None and operand is not None and READ_VERSION(held):
                raise ClaimError(f"it writes to `{operand.argument}`, and a capture takes that for what it was")
        return [made] if isinstance(made, Tensor) else [held for held in made if isinstance(held, Tensor)]

    def _gradients(
        self, inputs: Sequence[Tensor | None], results: Sequence[Tensor], cotangents: Sequence[Tensor]
    ) -> list[Tensor | None]:
        wanted = [held for held in inputs if held is not None and held.requires_grad]
        pairs = [(made, given) for made, given in zip(results, cotangents, strict=True) if made.requires_grad]
        if not wanted or not pairs or not self.has_gradients:
            return [None] * len(inputs)
        outputs, given = zip(*pairs, strict=True)
        given = [held.clone() for held in given]  # in which a backward may put what it makes
        found = iter(torch.autograd.grad(outputs, wanted, given, allow_unused=True))
        return [next(found) if held is not None and held.requires_grad else None for held in inputs]

    def _drawn(self, operand: Operand) -> Tensor:
        shape = operand.shape if operand.dims is None else self._shape(operand.dims)
        dtype = operand.dtype
        if self.wide and dtype.is_floating_point:
            dtype = torch.float64
        return self._random(shape, dtype).requires_grad_(operand.differentiable)

    def _random(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            kind = torch.complex128 if dtype.is_complex else torch.float64
            return torch.randn(shape, generator=self.generator, device=self.device, dtype=kind).to(dtype)
        return torch.randint(
            0, 2 if dtype == torch.bool else self.highest, tuple(shape), generator=self.generator, device=self.device
        ).to(dtype)

    def _shape(self, dims: Sequence[Dim]) -> tuple[int, ...]:
        return tuple(_size(dim, self.counts) for dim in dims)

    def _part(self, held: Tensor | None, operand: Operand | None, name: str, start: int, length: int) -> Tensor | None:
        if held is None or operand is None:
            return None
        part = held.detach()
        if operand.dims is not None:
            part = _narrowed(part, operand.dims, name, start, length, self.counts)
        return part.clone(memory_format=torch.contiguous_format).requires_grad_(operand.differentiable)

    def _compare(self, ours: Tensor, theirs: Tensor, what: str) -> None:
        if ours.shape != theirs.shape:
            raise ClaimError(f"{what} have shape {list(ours.shape)}, where the whole has {list(theirs.shape)}")
        if self.rule.random:
            return
        if not (theirs.dtype.is_floating_point or theirs.dtype.is_complex):
            if not torch.equal(ours.to(theirs.dtype), theirs):
                raise ClaimError(f"{what} differ from the whole's")
            return
        kind = torch.complex128 if theirs.dtype.is_complex else torch.float64
        ours, theirs = ours.detach().to(kind), theirs.detach().to(kind)
        scale = float(theirs.abs().nan_to_num(0.0, 0.0, 0.0).max()) if theirs.numel() else 0.0
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        error = float((ours - theirs).abs().nan_to_num(torch.inf).masked_fill(same, 0).max()) if ours.numel() else 0.0
        if error > self._limit * scale:
            raise ClaimError(f"{what} differ from the whole's by {error:.2g}")

    @property
    def _limit(self) -> float:
        """By how much sums in another order may differ, relative to the largest."""
        held = [t.dtype for t in (*self.inputs, *self.results) if t is not None]
        eps = max((torch.finfo(kind).eps for kind in held if kind.is_floating_point or kind.is_complex), default=0.0)
        if self.wide:
            return 16 * torch.finfo(torch.float32).eps  # in which an operator may compute whatever it is given
        return eps * (4 if eps > 1e-4 else 64)


def _uneven(count: int, parts: int) -> list[int]:
    longest = -(-count // parts)
    found = [min(longest, max(count - place * longest, 0)) for place in range(parts)]
    return [length for length in found if length]


def _size(dim: Dim, counts: Mapping[str, int]) -> int:
    found = 1
    for name in dim.names:
        found *= counts[name]
    return found


def _narrowed(
    tensor: Tensor, dims: Sequence[Dim], name: str, start: int, length: int, counts: Mapping[str, int]
) -> Tensor:
    for place, dim in enumerate(dims):
        if name in dim.names:
            sizes = [counts[held] for held in dim.names]
            opened = tensor.reshape(*tensor.shape[:place], *sizes, *tensor.shape[place + 1 :])
            part = opened.narrow(place + dim.names.index(name), start, length)
            return part.reshape(*tensor.shape[:place], -1, *tensor.shape[place + 1 :])
    return tensor


def _joined(parts: Sequence[Tensor], dims: Sequence[Dim], name: str, counts: Mapping[str, int]) -> Tensor:
    place, dim = next((i, dim) for i, dim in enumerate(dims) if name in dim.names)
    at = place + dim.names.index(name)
    opened: list[Tensor] = []
    for part in parts:
        inner = {held: counts[held] for held in dim.names}
        others = _size(Dim(tuple(held for held in dim.names if held != name)), inner)
        inner[name] = part.shape[place] // max(others, 1)
        opened.append(part.reshape(*part.shape[:place], *(inner[h] for h in dim.names), *part.shape[place + 1 :]))
    made = torch.cat(opened, at)
    return made.reshape(*made.shape[:place], -1, *made.shape[place + len(dim.names) :])


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.double() if part.dtype.is_floating_point else part for part in parts]).sum(0)


__all__ = ["DRAWS", "UNTRIED", "ClaimError", "Operand", "TrialCall", "tried"]
