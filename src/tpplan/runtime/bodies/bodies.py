"""Bodies: what each module of a model needs at run time, by a program.

in:  the model's modules, a program, this rank's view of the axis
out: `Prepared` modules: their `ModuleRuntime`, and the attributes that hold a local count

Nothing is changed here: `lower` puts it into the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tpplan.compat.modules import own_buffers
from tpplan.compiler.ir.layout import PARTIAL, Collective, Layout
from tpplan.compiler.ir.program import Boundary, KernelUse, ModuleProgram, ParameterPlacement, Program, Reshard
from tpplan.compiler.ir.replaced_bodies import RecordedBody, Recurrence, SharedExperts, SplitNorm
from tpplan.compiler.ir.trace import quoted
from tpplan.compiler.rewrite.replay import Replay
from tpplan.compiler.trace.signatures import argument_names
from tpplan.runtime.around.standalone import alone_moves
from tpplan.runtime.bodies.expert_bodies import ElsewhereBody, StackBody, own_body
from tpplan.runtime.bodies.fused_sums import residual_norms
from tpplan.runtime.bodies.kernel_bodies import Body, active_uses, body_of, choice_of, fused_norms, without_bias
from tpplan.runtime.bodies.layer_bodies import column, layer_of
from tpplan.runtime.bodies.open_bodies import OpenBodies
from tpplan.runtime.bodies.recorded_bodies import Inside
from tpplan.runtime.bodies.recurrent_bodies import RecurrentBody
from tpplan.runtime.bodies.split_norm import split_norm_body
from tpplan.runtime.bodies.token_exchange import DispatchBody
from tpplan.runtime.classes.class_rows import ClassPart
from tpplan.runtime.classes.class_scope import ClassBody, ClassCounter
from tpplan.runtime.classes.split_logits import SplitLogits
from tpplan.runtime.modules.module_runtime import EntryStep, ExitStep, ModuleRuntime
from tpplan.runtime.modules.writes import stock_class
from tpplan.runtime.overlap.overlapped_layers import overlapped_layers
from tpplan.runtime.parameters.handed_out import (
    BlockReader,
    HandedOut,
    OnceReader,
    PartReader,
    SummedReader,
    ZerosReader,
    buffer_reader,
    local_part,
)
from tpplan.runtime.random.mixed_draws import CallersStream, DrawCounter, MixedStreams, OneStream, Randomness
from tpplan.runtime.random.randomness import SplitRandomness
from tpplan.runtime.ranks.communicator import Communicator, placed
from tpplan.runtime.ranks.lockstep import LockstepCommunicator
from tpplan.runtime.ranks.reshard import CallContext, Move, make_reshard

# For inference, these have kernels of torch's own.
_WITH_KERNELS = nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention


@dataclass(frozen=True, slots=True)
class Prepared:
    """A module that a program makes something of.

    Attributes:
        module: the module.
        style: the plan's style of it.
        runtime: what it needs at run time.
        attributes: the integer attributes that count what this rank holds, with their values.
    """

    module: nn.Module
    style: str | None
    runtime: ModuleRuntime
    attributes: tuple[tuple[str, int], ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        """The module's own tensors that its body reads, by their names there."""
        reads = (*self.runtime.reads, *self.runtime.parts)
        return tuple(sorted({name for owner, name, _ in reads if owner is self.module}))


def prepare(
    modules: dict[str, nn.Module],
    program: Program,
    axis: Communicator,
    device: torch.device,
    stock: Mapping[str, nn.Module],
) -> tuple[Prepared, ...]:
    """What `program` makes of `modules`.

    Args:
        modules: of the stock or the lowered model, by qualified name.
        program: what to do.
        axis: the ranks.
        device: where the model runs.
        stock: the stock modules without their numbers, by qualified name; those whose bodies run from their records
            are looked up.
    """
    placements = {name: held for held in (*program.parameters, *program.buffers) for name in held.names}
    held_buffers = (f"{name}.{leaf}".lstrip(".") for name, module in modules.items() for leaf in own_buffers(module))
    buffers = placements.keys() & held_buffers
    context = CallContext()
    handed_out = HandedOut(axis, context)
    readers = _readers(modules, program, buffers, handed_out)
    opened = tuple(_owner(modules, placement.name) for placement in program.summed_parameters)
    random = _randomness(program, axis, device)
    uses, twice = active_uses(program, device), program.takes_gradients
    fused = fused_norms(program, device)
    steps = _Steps(axis, context, twice)
    found: list[Prepared] = []
    class_bodies = OpenBodies[ClassCounter]()
    losses = {use.module: use for use in program.kernels if use.kind == "cross_entropy"}
    taken, uses = uses, {name: use for name, use in uses.items() if name not in losses}
    norms = residual_norms(uses, modules, readers)
    fused_bodies = {norm.use.module: norm.body for held in norms.values() for norm in held}
    apart = {part for name in fused_bodies for part in uses[name].parts[1:]}
    specs = _with_kernels(program, uses, modules)
    readers_of = Counter(
        (id(owner), leaf) for spec in specs for owner, leaf in {_owner(modules, n) for n in spec.reads}
    )
    lefts = {u.parts[0] for u in uses.values() if u.kind == "bias_gelu"}
    overlapped = overlapped_layers(program, modules, readers, handed_out, lefts)
    for spec in specs:
        module = modules[spec.name]
        reads = _reads(spec, placements, readers, handed_out)
        owners = [_owner(modules, n) for n, _ in reads]
        own = {leaf: read for (owner, leaf), (_, read) in zip(owners, reads, strict=True) if owner is module}
        is_root, fresh = spec.name == "", spec.style in ("rowwise", "vocab") and not spec.walked
        use = uses.get(spec.name)
        left = spec.name in lefts
        body = without_bias(spec.transposed, module) if left else None
        kept = tuple(_kept(spec, modules, placements, steps))
        joint = overlapped.joints.get(spec.name)
        runtime = ModuleRuntime(
            label=_label(spec, placements, taken.get(spec.name)),
            axis=axis,
            entries=tuple(
                replace(s, joint=overlapped.entries.get((spec.name, r.path)))
                for r in spec.entries
                for s in _entries(module, r, *steps.at(_place(spec, r, True), r))
            ),
            exits=tuple(s for r in spec.exits for s in _exits(r, *steps.at(_place(spec, r, False), r, fresh))),
            alone=_alone(spec.name, module, program.boundaries.get(spec.name, ()), handed_out, context, is_root),
            split_classes=_split_classes(program.boundaries.get(spec.name, ())),
            reads=tuple((*_owner(modules, n), r) for n, r in reads if n not in buffers),
            parts=tuple((*_owner(modules, n), _apart(r) if kept else r) for n, r in reads if n in buffers),
            kept=kept,
            borrowed=tuple(held for held in owners if readers_of[id(held[0]), held[1]] > 1),
            classes=ClassBody(
                class_bodies,
                spec.class_calls,
                axis,
                quoted(spec.name),
                choice_of(losses.get(spec.name)),
                norms.get(spec.name, ()),
            )
            if spec.class_calls or spec.counted_apart or spec.name in norms or spec.name in apart
            else None,
            random=random.get(spec.name),
            handed_out=handed_out,
            opened=opened if is_root else (),
            context=context if is_root and (program.flattens_batch or program.replays) else None,
            transposed=spec.transposed,
            layer=None if is_root or spec.walked else column if joint is not None else layer_of(spec.style, module),
            joint=joint,
            scattered=overlapped.scattered.get(spec.name),
            shared=any(r.aliases for r in (*spec.entries, *spec.exits)),
            body=_replaced(spec, modules, stock, placements, handed_out, context, steps, readers, use)
            or fused_bodies.get(spec.name)
            or (body if use is None else body_of(use, module, modules)),
            replays=isinstance(spec.body, RecordedBody),
            dispatches=spec.experts is not None and spec.experts.dispatches,
            weight=own.get("weight"),
            bias=None if left else own.get("bias"),
            table=_table(spec, placements, axis),
            fused=fused.get(spec.name),
            infers=is_root and any(isinstance(held, _WITH_KERNELS) for held in modules.values()),
        )
        local = tuple((a.name, a.on(axis.rank)) for a in spec.local_attributes)
        found.append(Prepared(module, spec.style, runtime, local))
    return tuple(found)


def _kept(
    spec: ModuleProgram, modules: dict[str, nn.Module], placements: dict[str, ParameterPlacement], steps: _Steps
) -> Iterator[tuple[nn.Module, str, Move]]:
    """The buffers of which the body writes a part, with the steps that make them whole."""
    for reshard in spec.inner:
        held = placements.get(str(reshard.path[0])) if len(reshard.path) == 1 else None
        read = [name for name in spec.reads if held is not None and name in held.names]
        if read:
            yield (*_owner(modules, read[0]), steps(reshard, place=f"`{read[0]}`"))


def _apart(read: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """As `read`, in memory of its own: a backward may have saved it when the whole is written to."""
    return lambda buffer: read(buffer).clone()


def _reads(
    spec: ModuleProgram,
    placements: dict[str, ParameterPlacement],
    readers: dict[str, Callable[[Tensor], Tensor]],
    handed_out: HandedOut,
) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
    """How a body reads its parameters: all features of a replicated one, but where it works on a part of these."""
    if not isinstance(spec.body, SplitNorm):
        return [(name, readers[name]) for name in spec.reads]
    layout = replace(spec.body.layout, dim=0)
    parts = (spec.body.weight, spec.body.bias)
    return [
        (
            name,
            PartReader(readers[name], layout, placements[name].shape, handed_out.axis)
            if name in parts
            else readers[name],
        )
        for name in spec.reads
    ]


def _replaced(
    spec: ModuleProgram,
    modules: dict[str, nn.Module],
    stock: Mapping[str, nn.Module],
    placements: dict[str, ParameterPlacement],
    handed_out: HandedOut,
    context: CallContext,
    steps: _Steps,
    readers: Mapping[str, Callable[[Tensor], Tensor]],
    use: KernelUse | None,
) -> Body | None:
    """What the program has in place of the module's own body, kernels apart."""
    module, axis = modules[spec.name], handed_out.axis
    match spec.body:
        case None:
            return None
        case SharedExperts(owner=None, dispatches=dispatches):
            kind, shapes = DispatchBody if dispatches else StackBody, _shapes_inside(spec, placements, axis)
            return kind(spec, spec.body, module, stock[spec.name], handed_out, shapes)
        case SharedExperts(owner=owner) if owner == axis.rank:
            return None if use is not None else own_body
        case SharedExperts():
            inside = [name for name in placements if name in readers and name.startswith(f"{spec.name}.")]
            held = [(*_owner(modules, name), readers[name]) for name in inside if placements[name].trainable]
            return ElsewhereBody(stock[spec.name], held)
        case Recurrence():
            # Layers may be frozen one by one, and then have no gradient to reduce.
            gather = [steps(replace(held, backward=Collective.REDUCE_SCATTER)) for held in spec.inner[:1]]
            return RecurrentBody(spec.body, module, axis, next(iter(gather), None))
        case SplitNorm():
            return split_norm_body(spec.body, module, modules, steps(spec.inner[-1]), axis.size)
        case RecordedBody():
            prefix = f"{spec.name}." if spec.name else ""
            own = {n.removeprefix(prefix): held.layout for n, held in placements.items() if n.startswith(prefix)}
            within = steps.inside(spec.name)
            replay = Replay(stock[spec.name], spec.body, own, axis.size, axis.rank, lambda: context.batch, within)
            return lambda stock, args, kwargs: replay(module, args, kwargs)


def _shapes_inside(
    spec: ModuleProgram, placements: Mapping[str, ParameterPlacement], axis: Communicator
) -> dict[str, tuple[int, ...]]:
    """What the body of stacked experts reads of stacks that are split inside."""
    return {
        name.rpartition(".")[2]: held.shape if held.layout.is_on_first else held.stored_shape(axis.size, axis.rank)
        for name in spec.reads
        for held in (placements[name],)
        if held.layout.inner_dim is not None
    }


def _with_kernels(program: Program, uses: dict[str, KernelUse], modules: dict[str, nn.Module]) -> list[ModuleProgram]:
    """The modules to swap: those of the program, and those whose body alone is replaced."""
    known = {spec.name: spec for spec in program.modules}
    found = list(program.modules)
    parts = [part for use in uses.values() if use.kind == "residual_norm" for part in use.parts]
    for name in dict.fromkeys((*uses, *parts)):
        if name not in known:
            found.append(ModuleProgram(name, type(modules[name]).__name__, None, "inferred", calls=1))
    for name, use in uses.items():
        if use.kind == "bias_gelu":
            place = next(i for i, spec in enumerate(found) if spec.name == name)
            found[place] = replace(found[place], reads=(*found[place].reads, f"{use.parts[0]}.bias"))
    return found


def _randomness(program: Program, axis: Communicator, device: torch.device) -> dict[str, Randomness]:
    """The contexts that modules draw random numbers in; none are needed where nothing is split."""
    drawn = {spec.name: spec.random for spec in program.modules if spec.random is not None}
    if not any(spec.draws_by_rank for spec in program.modules):
        return {}
    split = SplitRandomness(axis, device)
    streams = {"split": split, "same": split.replicated()}
    if all(kind in streams for kind in drawn.values()):
        return {name: streams[str(kind)] for name, kind in drawn.items()}
    bodies = OpenBodies[DrawCounter]()
    alone = {kind: OneStream(stream, bodies) for kind, stream in streams.items()}
    found: dict[str, Randomness] = {}
    for name, kind in drawn.items():
        if isinstance(kind, tuple):
            found[name] = MixedStreams(name, kind, streams, bodies)
        else:
            found[name] = CallersStream(name, bodies) if kind == "caller" else alone[kind]
    return found


def _table(spec: ModuleProgram, placements: dict[str, ParameterPlacement], axis: Communicator) -> tuple[int, int]:
    """Of a table split by rows, the first that this rank holds, and the number of all; zeros for other modules."""
    if spec.style != "vocab" or not spec.reads:  # a table that the example doesn't call isn't read
        return 0, 0
    table = placements[spec.reads[0]]
    ((start, _),) = table.layout.intervals(table.shape[0], axis.size, axis.rank)
    return start, table.shape[0]


def _owner(modules: dict[str, nn.Module], name: str) -> tuple[nn.Module, str]:
    owner, _, leaf = name.rpartition(".")
    return modules[owner], leaf


def _readers(
    modules: dict[str, nn.Module], program: Program, buffers: Collection[str], handed_out: HandedOut
) -> dict[str, Callable[[Tensor], Tensor]]:
    """How to read each parameter, by each of its names."""
    summed = frozenset(_owner(modules, placement.name) for placement in program.summed_parameters)
    members: dict[str, list[tuple[nn.Module, str]]] = {}
    for placement in program.parameters:
        if not placement.summed and placement.name not in buffers:
            members.setdefault(_block(modules, placement.name), []).append(_owner(modules, placement.name))
    blocks = {block: BlockReader(handed_out, held) for block, held in members.items()}
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    for placement in program.parameters:
        if placement.name in buffers:
            read = local_part
        elif placement.summed:
            read = SummedReader(handed_out, _owner(modules, placement.name), summed)
        else:
            read = blocks[_block(modules, placement.name)]
        if placement.layout == PARTIAL:
            read = OnceReader(read, handed_out.axis)
        if placement.layout.is_on_first:
            read = ZerosReader(read, placement.shape[-1])
        found |= dict.fromkeys(placement.names, read)
    for placement in program.buffers:
        found |= dict.fromkeys(placement.names, buffer_reader(placement.layout, placement.shape, handed_out.axis))
    return found


def _block(modules: dict[str, nn.Module], name: str) -> str:
    """The outermost element of a list of modules that holds a parameter; its own module where there is none."""
    *path, _ = name.split(".")
    for depth in range(1, len(path)):
        if isinstance(modules[".".join(path[:depth])], (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            return ".".join(path[: depth + 1])
    return ".".join(path)


def _entries(module: nn.Module, held: Reshard | Boundary, step: Move, place: str = "") -> list[EntryStep]:
    names = argument_names(stock_class(module).forward)
    steps: list[EntryStep] = []
    for name, *inner in (held.path, *held.aliases):
        text = str(name)
        if text.startswith("*"):
            position: int | None = int(text[1:])
        else:
            position = names.index(text) if text in names else None
        steps.append(EntryStep(text, position, tuple(inner), step, place))
    return steps


def _exits(held: Reshard | Boundary, step: Move, place: str = "") -> list[ExitStep]:
    return [ExitStep(path, step, place) for path in (held.path, *held.aliases)]


def _alone(
    name: str, module: nn.Module, held: Sequence[Boundary], handed_out: HandedOut, context: CallContext, is_root: bool
) -> ModuleRuntime:
    """What happens at a module's boundary if it is called by itself; at the root's, if `generate` calls it."""
    moves = alone_moves(name, isinstance(module, nn.Linear), held, handed_out.axis, context)
    if is_root:
        moves = [(at, _kept_split(at, handed_out.axis) if _splits_classes(at) else move) for at, move in moves]
    return ModuleRuntime(
        label="",
        axis=handed_out.axis,
        handed_out=handed_out,
        entries=tuple(s for at, move in moves if at.inward for s in _entries(module, at, move)),
        exits=tuple(s for at, move in moves if not at.inward for s in _exits(at, move)),
        shared=any(at.aliases for at in held),
    )


def _split_classes(held: Sequence[Boundary]) -> tuple[int, ...]:
    """Of results that are split along their last dim in one stretch, its size as a whole."""
    return tuple(dict.fromkeys(at.shape[-1] for at in held if _splits_classes(at)))


def _splits_classes(at: Boundary) -> bool:
    layout = at.layout
    return not at.inward and layout.is_sharded and layout.is_plain and layout.dim == len(at.shape) - 1


def _kept_split(at: Boundary, axis: Communicator) -> Callable[[Tensor], Tensor]:
    part = ClassPart(axis, at.shape[-1])
    return lambda tensor: SplitLogits.of(tensor, part)


class _Steps:
    """The reshards of a program, one for all places that do the same: graphs of equal layers are then one."""

    def __init__(self, axis: Communicator, context: CallContext, twice: bool) -> None:
        self._axis = axis
        self._context = context
        self._twice = twice
        self._made: dict[tuple[object, ...], Move] = {}

    def __call__(self, reshard: Reshard, fresh: bool = False, place: str = "") -> Move:
        place = place if isinstance(self._axis, LockstepCommunicator) else ""
        axis = placed(self._axis, place) if place else self._axis
        ways = (reshard.source, reshard.target, reshard.forward, reshard.backward)
        key = (*ways, fresh, reshard.shape, place)
        if key not in self._made:
            self._made[key] = make_reshard(*ways, axis, fresh, self._context, reshard.shape, self._twice)
        return self._made[key]

    def at(self, place: str, reshard: Reshard, fresh: bool = False) -> tuple[Move, str]:
        """A reshard and the place that it serves."""
        return self(reshard, fresh, place), place

    def inside(self, module: str) -> Inside:
        """What stands between the operations of a body that runs from its record."""
        return Inside(self._axis, self._context, self._twice, module)


def _place(spec: ModuleProgram, reshard: Reshard, inward: bool) -> str:
    """A place at a module's boundary."""
    what = f"the argument `{_shown(reshard)}`" if inward else "the result"
    return f"{what} of `{spec.name or 'the model'}`"


def _label(spec: ModuleProgram, placements: dict[str, ParameterPlacement], use: KernelUse | None) -> str:
    parts = [f"kernel={use.kind}"] if use is not None else []
    for name in spec.reads:
        layout: Layout = placements[name].layout
        if layout.is_sharded:
            parts.append(f"{name.rpartition('.')[2]}={layout}")
    parts += [f"{_shown(r)}: {r.source} -> {r.target}" for r in (*spec.entries, *spec.inner)]
    parts += [f"result: {r.source} -> {r.target}" for r in spec.exits]
    return ", ".join(parts)


def _shown(reshard: Reshard) -> str:
    return ".".join(str(part) for part in reshard.path)


__all__ = ["Prepared", "prepare"]
