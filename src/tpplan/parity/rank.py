"""What one rank of a verification does: lower its copy of the model, run it, and show what came out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpplan.compat.propagator import fake_mesh
from tpplan.compiler.ir.arrivals import call_on_rank
from tpplan.compiler.ir.layout import Pack
from tpplan.compiler.ir.program import Program
from tpplan.compiler.trace.signatures import argument_names
from tpplan.parity.call import Call
from tpplan.parity.materialise import copy_structure
from tpplan.parity.measure import split_dim
from tpplan.parity.observed import Observation, observe
from tpplan.runtime.lower import lower
from tpplan.runtime.parameters.distribute import MeshDistributor
from tpplan.runtime.ranks.communicator import Communicator


class CountingCommunicator(Communicator, Protocol):
    """A communicator that counts its calls."""

    counts: Counter[str]


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank shows.

    Attributes:
        seen: outputs and gradients, local.
        counts: how often each collective ran.
    """

    seen: Observation
    counts: Counter[str]


class SimulatedDistributor(MeshDistributor):
    """Cuts a rank's shards as `parallelize` does, for a mesh without a process group."""

    owns = False

    def __init__(self, axis: Communicator, mesh: DeviceMesh | None = None) -> None:
        """Cut for `axis`; its ranks hold the same numbers already."""
        super().__init__(mesh or fake_mesh(axis.size, axis.rank), axis, None)


def run_rank(
    model: nn.Module,
    program: Program,
    call: Call,
    cotangents: Mapping[str, Tensor],
    axis: CountingCommunicator,
    mesh: DeviceMesh | None = None,
) -> RankResult:
    """Run `program` as one rank.

    Args:
        model: the stock model with numbers; not changed.
        program: what to lower it by.
        call: the call.
        cotangents: the whole gradients to send into the outputs.
        axis: this rank's view of the axis.
        mesh: the mesh of the DTensors; None for one without a process group.
    """
    own = lower(copy_structure(model), program, SimulatedDistributor(axis, mesh))

    def cotangent(name: str, output: Tensor) -> Tensor | None:
        whole = cotangents.get(name)
        return None if whole is None else part_of(whole, tuple(output.shape), axis)

    passed = call_on_rank(program, axis.rank, call.arguments, call.keywords, argument_names(type(model).forward))
    return RankResult(observe(own, Call(*passed), cotangent), axis.counts)


def part_of(whole: Tensor, shape: tuple[int, ...], axis: Communicator) -> Tensor | None:
    """The part of `whole` that belongs to a local tensor of `shape`; None if it is split along no single dim."""
    if tuple(whole.shape) == shape:
        return whole
    dim = split_dim(shape, tuple(whole.shape))
    if dim is None:
        return None
    start, length = Pack(whole.shape[dim]).part(axis.size, axis.rank)
    return whole.narrow(dim, start, length) if length == shape[dim] else None
