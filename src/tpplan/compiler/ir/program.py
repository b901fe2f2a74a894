"""The compiler's output: plain data that says what becomes of each module, parameter and boundary.

Equal inputs give equal programs; a program survives JSON; its digest is what ranks compare before they start.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from pydantic import TypeAdapter

from tpplan.compiler.ir.layout import Collective, Layout, Pack, all_reduce_of
from tpplan.compiler.ir.overlaps import Overlap
from tpplan.compiler.ir.replaced_bodies import BODIES, Body, RecordedBody, SharedExperts, SplitNorm
from tpplan.cost.communication import NVLINK, Topology
from tpplan.cost.work import Work
from tpplan.plan import Diagnostic

PROGRAM_VERSION = 3
_EMPTY = (  # left out where they are
    *("assumed", "picked", "left", "buffers", "takes_gradients", "drawn", "one_shot", "overlaps", "fused_overlap"),
)
_PAIRWISE = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class Reshard:
    """A change of layout at a module boundary.

    Attributes:
        path: where the tensor sits: the argument's name and positions inside it, or positions in the result.
        aliases: further places where the very same tensor sits; it is resharded once for all.
        source, target: the layouts before and after.
        forward, backward: the collectives.
        shape: of the whole tensor, in the example call.
        dtype: of the tensor, such as `float32`.
        bytes: of the whole tensor, in the example call.
        differentiable: whether a gradient flows back.
        origin: why it stands here.
        times: how often it runs in a step, of a body that does so in a loop; None for once in each call of its module.
        without_gradient: in how many of the module's calls no gradient flows back, though it does in others.
        gathered_again: whether the backward gathers the tensor once more, of which the forward keeps a rank's part.
    """

    path: tuple[str | int, ...]
    source: Layout
    target: Layout
    forward: Collective
    backward: Collective
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    differentiable: bool
    origin: str
    aliases: tuple[tuple[str | int, ...], ...] = ()
    times: int | None = None
    without_gradient: int = 0
    gathered_again: bool = False

    def repeats(self, calls: int) -> tuple[int, int]:
        """How often it runs forward and backward in a step that calls its module so often."""
        forward = calls if self.times is None else self.times
        return forward, forward - self.without_gradient if self.differentiable else 0

    def collectives(self, calls: int) -> Iterator[tuple[bool, Collective, int]]:
        """What runs in a step that calls its module so often: whether in the backward, what, and how often."""
        forward, backward = self.repeats(calls)
        yield False, self.forward, forward
        yield True, self.backward, backward
        if self.gathered_again:
            yield True, self.forward, backward

    def padded_bytes(self, size: int) -> int:
        """Of the whole tensor as `size` ranks exchange it: where their parts differ, each is as long as the longest.

        Of a tail, of its entries alone.
        """
        shape = list(self.shape)
        if self.target.tail:
            shape[1] = min(self.target.tail, shape[1])
            return self.bytes * math.prod(shape) // math.prod(self.shape)
        if self.source.is_extreme:
            return self.bytes * size  # each rank's own, one beside the other
        for held in (self.source, self.target):
            if held.dim is not None:
                shape[held.dim] = held.longest(self.shape[held.dim], size) * size
        whole = math.prod(self.shape)
        return self.bytes * math.prod(shape) // whole if whole else 0


@dataclass(frozen=True, slots=True)
class ParameterPlacement:
    """What becomes of a parameter, or of a buffer that a rank stores its part of.

    Attributes:
        names: every name it goes by; the first is canonical.
        shape, local_shape: of the whole and of what a rank stores: the fullest, where the axis doesn't divide the
            sharded dim and others store less.
        dtype: such as `bfloat16`.
        layout: R or S(dim).
        summed: whether its gradient comes out partial and is summed over the axis once a backward.
        trainable: whether it wants a gradient.
        origin: the plan's line, or why it is replicated.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    itemsize: int
    layout: Layout
    summed: bool
    trainable: bool
    origin: str

    @property
    def name(self) -> str:
        """The canonical name."""
        return self.names[0]

    @property
    def bytes(self) -> int:
        """Of the whole parameter."""
        return math.prod(self.shape) * self.itemsize

    @property
    def local_bytes(self) -> int:
        """Of one rank's part, the largest where they differ."""
        return math.prod(self.local_shape) * self.itemsize

    def stored_shape(self, size: int, rank: int) -> tuple[int, ...]:
        """The shape of what `rank` stores on an axis of `size` ranks."""
        return self.layout.local_shape(self.shape, size, rank)

    @property
    def summed_bytes(self) -> int:
        """Of what is summed over the axis: the whole, or the packs of which several ranks hold the same part."""
        if self.layout.dim is None or not self.layout.has_replicas:
            return self.local_bytes
        shared = sum(pack.size for pack in self.layout.packs if pack.is_shared)
        return self.bytes // self.shape[self.layout.dim] * shared


@dataclass(frozen=True, slots=True)
class LocalAttribute:
    """An integer attribute of a module that counts something global, with its value on one rank.

    Attributes:
        name: of the attribute; `config.n_head` is one of a settings object.
        whole, local: its value in the stock model, and on a rank: the first, where they differ.
        by_rank: its value on each rank, where they differ; otherwise empty.
    """

    name: str
    whole: int
    local: int
    by_rank: tuple[int, ...] = ()

    @classmethod
    def of(cls, name: str, whole: int, values: Sequence[int]) -> LocalAttribute:
        """The attribute with these values, by rank."""
        return cls(name, whole, values[0], tuple(values) if len(set(values)) > 1 else ())

    def on(self, rank: int) -> int:
        """Its value on `rank`."""
        return self.by_rank[rank] if self.by_rank else self.local


@dataclass(frozen=True, slots=True)
class SplitClasses:
    """A call of a function over all classes, such as a loss, of whose classes each rank has its part.

    Attributes:
        function: its name, such as `cross_entropy`.
        classes: how many there are, on all ranks.
        partial_gradient: whether the gradient that arrives at its result is partial, and is summed.
        stays_partial: whether each rank has its own term of the result, and these aren't summed here.
    """

    function: str
    classes: int
    partial_gradient: bool = False
    stays_partial: bool = False


ClassCalls = tuple[SplitClasses | None, ...]
"""The calls of such functions that a body makes, in order of execution; None for one whose classes aren't split."""

Draws = str | tuple[str, ...]
"""How a body draws random numbers: "split", others on each rank; "same", the same on all; the one or the other for each
draw, in order of execution; or "caller", as the body that calls it, among whose draws its own count."""


@dataclass(frozen=True, slots=True)
class ModuleProgram:
    """What becomes of a module.

    Attributes:
        name: qualified name; "" is the root.
        kind: the stock class's name.
        style: the plan's style, or None where it was inferred.
        origin: the plan's line, or "inferred".
        calls: how often the model calls it in one forward.
        entries, exits: reshards of its arguments and of its results.
        inner: reshards inside of its body, of which it has some only where the body is replaced or recorded.
        body: what takes the place of the stock forward; None for a module that runs its own Python.
        reads: names of the parameters, and of split buffers, that its body reads, relative to the root.
        random: how it draws random numbers, None if it draws none.
        local_attributes: attributes that hold a local count; `config.n_head` is one of a settings object.
        transposed: whether it is a linear layer whose weight is (inputs, outputs).
        walked: whether its own code runs, although its style has a body of the runtime's: it computes something else.
        class_calls: its calls of functions over all classes, if any is of split ones.
        counted_apart: whether a body with such calls calls it, among which its own don't count.
        experts: what takes the body's place, if that is of whole experts.
        recurrent: what takes the body's place, if that is a recurrent layer with a split hidden state.
    """

    name: str
    kind: str
    style: str | None
    origin: str
    calls: int
    entries: tuple[Reshard, ...] = ()
    exits: tuple[Reshard, ...] = ()
    reads: tuple[str, ...] = ()
    random: Draws | None = None
    local_attributes: tuple[LocalAttribute, ...] = ()
    transposed: bool = False
    inner: tuple[Reshard, ...] = ()
    body: Body | None = None
    walked: bool = False
    class_calls: ClassCalls = ()
    counted_apart: bool = False

    @property
    def recorded(self) -> RecordedBody | None:
        """How its values lie, where its body runs from its record."""
        return self.body if isinstance(self.body, RecordedBody) else None

    @property
    def split_norm(self) -> SplitNorm | None:
        """The norm over split features that it computes."""
        return self.body if isinstance(self.body, SplitNorm) else None

    @property
    def experts(self) -> SharedExperts | None:
        """The whole experts that it is, or has."""
        return self.body if isinstance(self.body, SharedExperts) else None

    @property
    def reshards(self) -> tuple[Reshard, ...]:
        """All of them, in order of execution."""
        return (*self.entries, *self.inner, *self.exits)

    @property
    def draws_by_rank(self) -> bool:
        """Whether ranks draw different random numbers in its body."""
        return self.random == "split" or isinstance(self.random, tuple)


@dataclass(frozen=True, slots=True)
class KernelUse:
    """A body that a kernel can take the place of, or why it can't.

    Attributes:
        module: qualified name of the module whose forward it replaces.
        kind: the kernel, such as `rms_norm`.
        choice: the plan's: "auto", "triton" or "torch".
        dtype: the input's in the proof; other calls take the model's own forward.
        refused: why it isn't replaced; "" if it is.
        parts: of `swiglu` and `geglu` the modules inside that are called, relative to `module`; of `bias_gelu` the
            qualified name of the linear layer that leaves its bias to the kernel; of `residual_norm` that of the module
            whose body makes the sum, and those of all that this body calls.
        eps, offset, cast, dims, weight, bias: of norms; the parameters by their names in the module.
        centred: of `residual_norm`, whether it is a LayerNorm.
        sum: of `residual_norm`, which of the body's sums of two tensors of one shape it reads.
        approximate: of GeLU, as torch names it.
        halves: of `swiglu` and `geglu`, where one module makes both factors, which half is the gate.
        note: what else could have been fused, and why it wasn't.
    """

    module: str
    kind: str
    choice: str
    dtype: str
    refused: str = ""
    parts: tuple[str, ...] = ()
    eps: float = 0.0
    offset: float = 0.0
    cast: str = "after"
    dims: int = 1
    weight: str | None = None
    bias: str | None = None
    approximate: str | None = None
    halves: int | None = None
    note: str = ""
    centred: bool = False
    sum: int | None = None


@dataclass(frozen=True, slots=True)
class InputRecord:
    """A tensor of the example call."""

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    dtype: str
    differentiable: bool


@dataclass(frozen=True, slots=True)
class LeftTensor:
    """A tensor that the call leaves in a list or dict among its arguments, of which each rank has its part.

    Attributes:
        path: where it sits: the argument's name and positions inside it.
        shape: of the whole tensor, in the example call.
        layout: how it lies.
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    layout: Layout


@dataclass(frozen=True, slots=True)
class Drawn:
    """How random numbers lie that a body draws.

    Attributes:
        operation: the operator's name.
        shape: of the whole, in the example call.
        layout: of the result.
    """

    operation: str
    shape: tuple[int, ...]
    layout: Layout


@dataclass(frozen=True, slots=True)
class Boundary:
    """How a tensor lies outside of a module that is given it or makes it, where that isn't whole, alike and proved.

    Attributes:
        inward: whether it is an argument.
        path, aliases: where it sits, as of a `Reshard`.
        layout: outside of the module's own reshards.
        shape: of the whole tensor, in the example call.
        differentiable: whether the proof has its gradient.
    """

    inward: bool
    path: tuple[str | int, ...]
    aliases: tuple[tuple[str | int, ...], ...]
    layout: Layout
    shape: tuple[int, ...]
    differentiable: bool


Boundaries = Mapping[str, tuple[Boundary, ...]]


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled plan; see the module's docstring.

    Attributes:
        plan: the plan's name.
        model: the model's class.
        axis: the mesh axis's name.
        size: how many ranks the axis has.
        training: the mode that was captured.
        inputs: the tensors of the example call.
        parameters, modules: in the model's order.
        buffers: those that are split; each is stored whole, and bodies read a rank's part.
        kernels: the candidates for a kernel, in order of execution.
        assumptions: data-dependent branches that the proof leaves aside, with their place.
        assumed: rules of the user's operators that couldn't be tried, each with the reason.
        picked: modules that are called with what is found in a tensor, as experts with the tokens routed to them: for
            some data they aren't.
        left: what calls leave of a rank's own in lists and dicts among their arguments, such as keys and values.
        takes_gradients: whether the forward takes gradients itself: collectives of the backward then run there too.
        drawn: draws of which ranks hold something else than an even stretch of one dim, and others of the same operator
            and shape, in order of execution.
        diagnostics: warnings and notes; not part of the digest.
        boundaries: by module, what isn't whole outside of it, for modules that are called by themselves; nor is this.
        varied: modules of which these differ between calls; nor is this.
        device: where the model runs, as its bodies were told; nor is this.
        freedoms: what had to be allowed for the plan to compile, by the names of `ir/freedoms`; nor is this.
        one_shot: the largest all-reduces that ranks do in one step, in bytes, as the plan says.
        overlaps: the reshards whose collectives run beside matrix products.
        fused_overlap: whether torch's fused operators run these where ranks share memory, but for all-reduces.
        topology: the links by whose times placement has chosen.
        work: what a step has a rank do, of a program that was read; not part of the digest.
        measure: measures that, of a program that was compiled here: by a call, or `at(batch, sequence)`; nor is this.
    """

    plan: str
    model: str
    axis: str
    size: int
    training: bool
    inputs: tuple[InputRecord, ...]
    parameters: tuple[ParameterPlacement, ...]
    modules: tuple[ModuleProgram, ...]
    kernels: tuple[KernelUse, ...] = ()
    assumptions: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    picked: tuple[str, ...] = ()
    left: tuple[LeftTensor, ...] = ()
    buffers: tuple[ParameterPlacement, ...] = ()
    takes_gradients: bool = False
    drawn: tuple[Drawn, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = field(default=(), compare=False)
    boundaries: Mapping[str, tuple[Boundary, ...]] = field(
        default_factory=dict[str, tuple[Boundary, ...]], compare=False
    )
    varied: frozenset[str] = field(default=frozenset(), compare=False)
    device: str = field(default="cpu", compare=False)
    freedoms: tuple[str, ...] = field(default=(), compare=False)
    one_shot: int = 0
    overlaps: tuple[Overlap, ...] = ()
    fused_overlap: bool = False
    topology: Topology = NVLINK
    version: int = PROGRAM_VERSION
    work: Work | None = field(default=None, compare=False, repr=False)
    measure: Any = field(default=None, compare=False, repr=False)

    # -- what it costs --------------------------------------------------------------------------------------------
    def reshards(self) -> Iterator[tuple[ModuleProgram, Reshard]]:
        """Every reshard with its module, entries first."""
        for module in self.modules:
            for reshard in module.reshards:
                yield module, reshard

    def count_collectives(self, backward: bool = True, picked: bool = True, sums: bool = True) -> Counter[str]:
        """How often each collective runs in one forward, or in one forward and backward.

        A pairwise exchange counts as the collective in whose place it runs, and a sum in parts as one; see
        `count_pairwise` and `count_parts`. The coalesced sum of parameter gradients counts as one all-reduce
        per dtype, in the backward. (Where FSDP cuts parameters, it is one for each of its units.)

        Args:
            backward: whether to count those of the backward.
            picked: whether to count those inside of modules that are called for some data only, as if all were called.
            sums: whether to count those of parameter gradients.
        """
        counted: Counter[str] = Counter()
        inside = tuple(f"{name}." for name in self.picked)
        for module, reshard in self.reshards():
            if not picked and f"{module.name}.".startswith(inside):
                continue
            for back, way, times in reshard.collectives(module.calls):
                if way.communicates and times and (backward or not back):
                    counted[str(way)] += times
        if backward and sums:
            counted.update(name for name, _ in self.gradient_sums)
        return counted

    def overlapped(self, overlap: Overlap) -> tuple[ModuleProgram, Reshard]:
        """The reshard whose collectives an overlap hides, and its module."""
        module = next(spec for spec in self.modules if spec.name == overlap.module)
        held = module.entries if overlap.inward else module.exits
        return module, next(reshard for reshard in held if reshard.path == overlap.path)

    def exchanges(self, overlap: Overlap) -> bool:
        """Whether an overlap runs a gather or a reduce-scatter, and no all-reduce, in exchanges of pairs."""
        return bool(overlap.units) and self.overlapped(overlap)[1].forward in _PAIRWISE

    def count_pairwise(self, backward: bool = True) -> Counter[str]:
        """How many of these run as exchanges of pairs, beside matrix products, in calls of any size."""
        counted: Counter[str] = Counter()
        for overlap in self.overlaps:
            module, reshard = self.overlapped(overlap)
            if overlap.least or not self.exchanges(overlap):
                continue
            there, back = reshard.repeats(module.calls)
            counted[str(reshard.forward)] += there
            if backward and reshard.backward in _PAIRWISE and not overlap.inward:
                counted[str(reshard.backward)] += back
        return +counted

    def count_parts(self) -> Counter[str]:
        """How many all-reduces more there are in a call like the example, as sums run in parts beside products."""
        counted: Counter[str] = Counter()
        for overlap in self.overlaps:
            module, reshard = self.overlapped(overlap)
            rows = math.prod(reshard.shape[:-1])
            if reshard.forward is Collective.ALL_REDUCE and not overlap.inward and rows >= overlap.least:
                parts = min(len(overlap.groups), rows)
                counted[str(reshard.forward)] += (parts - 1) * reshard.repeats(module.calls)[0]
        return +counted

    @property
    def summed_parameters(self) -> tuple[ParameterPlacement, ...]:
        """Parameters whose gradients are summed over the axis."""
        return tuple(p for p in self.parameters if p.summed and p.trainable)

    @property
    def gradient_sums(self) -> list[tuple[str, int]]:
        """The sums of their gradients, one for each dtype: the collective's name, and its bytes."""
        counted: Counter[str] = Counter()
        for parameter in self.summed_parameters:
            counted[parameter.dtype] += parameter.summed_bytes
        return [(str(all_reduce_of(n, getattr(torch, name), self.one_shot)), n) for name, n in counted.items()]

    @property
    def flattens_batch(self) -> bool:
        """Whether a reshard needs to know the batch size of a call, as its sequence is flattened with the batch."""
        return any(r.source.interleave != 1 or r.target.interleave != 1 for _, r in self.reshards())

    @property
    def replays(self) -> bool:
        """Whether a body runs from its record."""
        return any(isinstance(module.body, RecordedBody) for module in self.modules)

    @property
    def shares_experts(self) -> bool:
        """Whether ranks hold whole experts."""
        return any(module.experts is not None for module in self.modules)

    @property
    def sequence_lengths(self) -> frozenset[int]:
        """The lengths, in the example call, of the sequences along which values are split."""
        return frozenset(
            reshard.shape[held.dim or 0] // held.interleave
            for _, reshard in self.reshards()
            for held in (reshard.source, reshard.target)
            if splits_sequence(held, reshard.shape)
        )

    @property
    def sequence_dims(self) -> dict[tuple[str | int, ...], tuple[int, ...]]:
        """For each tensor of the example, the dims that are sequences which ranks share; empty if there are none."""
        lengths = self.sequence_lengths
        if not lengths:
            return {}
        arriving = self.arriving  # ranks share these already
        return {
            i.path: () if i.path in arriving else tuple(d for d, n in enumerate(i.shape) if d and n in lengths)
            for i in self.inputs
        }

    @property
    def arriving(self) -> dict[tuple[str | int, ...], Boundary]:
        """The tensors of which a rank is passed its part, by path."""
        held = self.boundaries.get("", ())
        return {boundary.path: boundary for boundary in held if boundary.inward and boundary.layout.is_sharded}

    @property
    def hands_on(self) -> bool:
        """Whether a rank returns its part of a sequence."""
        held = self.boundaries.get("", ())
        return any(not boundary.inward and splits_sequence(boundary.layout, boundary.shape) for boundary in held)

    @property
    def feature_reshards(self) -> frozenset[object]:
        """Where values begin or cease to be split along features or heads: what other reshards leave as it is."""
        found: set[object] = set()
        for module in self.modules:
            for inward, reshards in ((True, module.entries), (False, module.exits)):
                for reshard in reshards:
                    before, after = (_feature_split(h, reshard.shape) for h in (reshard.source, reshard.target))
                    if before != after:
                        found.add((module.name, inward, reshard.path, before, after))
        return frozenset(found)

    @property
    def local_attributes(self) -> dict[str, tuple[LocalAttribute, ...]]:
        """The attributes that hold a local count, by module."""
        return {module.name: module.local_attributes for module in self.modules if module.local_attributes}

    @property
    def is_uneven(self) -> bool:
        """Whether there is a parameter of which some ranks hold less than others."""
        sharded = [p for p in self.parameters if p.layout.dim is not None]
        return any(not p.layout.is_even(p.shape[p.layout.dim or 0], self.size) for p in sharded)

    # -- data -----------------------------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Nested plain data; `from_dict` reads it back (what is no part of the digest apart)."""
        plain = asdict(replace(self, diagnostics=(), boundaries={}, varied=frozenset(), work=None, measure=None))
        for name in ("diagnostics", "boundaries", "varied", "device", "freedoms", "work", "measure"):
            del plain[name]
        for name in _EMPTY:
            if not plain[name]:
                del plain[name]
        for module, spec in zip(plain["modules"], self.modules, strict=True):
            for name in ("walked", "class_calls", "counted_apart"):
                if not module[name]:
                    del module[name]
            module |= _written_body(module.pop("body"), spec.body)
        return _without_defaults(json.loads(json.dumps(_plain(plain))))

    def to_json(self, indent: int | None = 2) -> str:
        """The program as JSON text with sorted keys.

        With its diagnostics and its work, measured for that, which the digest leaves out.
        """
        work = self.work if self.measure is None else self.measure()
        plain = self.to_dict() | ({} if work is None else {"work": asdict(work)})
        plain["diagnostics"] = [asdict(found.without_source) for found in self.diagnostics]
        return json.dumps(plain, indent=indent, sort_keys=True)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Program:
        """Read back what `to_dict` wrote.

        Raises:
            ValueError: it is of another version, or isn't a program.
        """
        if plain.get("version") != PROGRAM_VERSION:
            raise ValueError(f"program version {plain.get('version')} is not {PROGRAM_VERSION}")
        modules = [_read_body(module) for module in plain.get("modules", ())]
        return _adapter().validate_python({**plain, "modules": modules})

    @property
    def digest(self) -> str:
        """SHA-256 of the program's JSON; equal on all ranks or something is wrong, in whatever order these run."""
        kernels, assumptions = sorted(self.kernels, key=repr), sorted(self.assumptions)
        unordered = replace(self, kernels=tuple(kernels), assumptions=tuple(assumptions))
        return hashlib.sha256(json.dumps(unordered.to_dict(), sort_keys=True).encode()).hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


_BOTH = {"split_norm": None, "recorded": None}  # written for each module, whatever its body
_SPARSE = {  # left out where a body has none
    "recorded": ("moves", "passed", "partial", "averages", "lengths", "weights"),
    "experts": ("exchange", "sent"),
}


def _written_body(plain: dict[str, Any] | None, body: Body | None) -> dict[str, Any]:
    """A body in a program's JSON, under the key of its class."""
    if plain is None:
        return dict(_BOTH)
    key = next(key for key, kind in BODIES.items() if type(body) is kind)
    return {**_BOTH, key: {name: held for name, held in plain.items() if held or name not in _SPARSE.get(key, ())}}


def _read_body(module: Mapping[str, Any]) -> dict[str, Any]:
    """A module of a program's JSON, with the body that it has under one of the keys."""
    found = [TypeAdapter(kind).validate_python(module[key]) for key, kind in BODIES.items() if module.get(key)]
    return {**{key: held for key, held in module.items() if key not in BODIES}, "body": found[0] if found else None}


def _plain(held: Any) -> Any:
    """Without the parts of packs that have none."""
    if isinstance(held, Pack):
        return [*held] if held.parts else [*held[:4]]
    if isinstance(held, dict):
        return {key: _plain(item) for key, item in held.items()}  # pyright: ignore
    return [_plain(item) for item in held] if isinstance(held, (list, tuple)) else held  # pyright: ignore


def _without_defaults(plain: Any) -> Any:
    """Without what hardly any layout has."""
    if isinstance(plain, dict):
        rare = (
            ("tail", 0),
            ("times", None),
            ("without_gradient", 0),
            ("gathered_again", False),
            ("inner_dim", None),
            ("ranks", 1),
            ("stays_partial", False),
        )
        return {key: _without_defaults(held) for key, held in plain.items() if (key, held) not in rare}  # pyright: ignore
    return [_without_defaults(held) for held in plain] if isinstance(plain, list) else plain  # pyright: ignore


def splits_sequence(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether it splits dim 1 of (batch, sequence, hidden), or the sequence of (batch · sequence, hidden)."""
    if layout.interleave != 1:
        return len(shape) == 2
    return layout.is_plain and layout.dim == 1 and len(shape) == 3


def _feature_split(layout: Layout, shape: tuple[int, ...]) -> Layout | None:
    return layout if layout.is_sharded and not splits_sequence(layout, shape) else None


@functools.cache
def _adapter() -> TypeAdapter[Program]:
    return TypeAdapter(Program)
