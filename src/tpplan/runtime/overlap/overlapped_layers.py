"""What runs beside the products of a program's linear layers, bound to its modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from tpplan.compat.modules import own_parameters
from tpplan.compiler.ir.layout import Collective
from tpplan.compiler.ir.program import ModuleProgram, Program
from tpplan.runtime.overlap.joint import Joint, JointLayer
from tpplan.runtime.overlap.scattered import Scattered
from tpplan.runtime.parameters.handed_out import HandedOut
from tpplan.runtime.ranks.communicator import placed


@dataclass(frozen=True, slots=True)
class OverlappedLayers:
    """By module: what makes an argument with the products of its readers; of a layer, what makes its product.

    Attributes:
        entries: by the module and the path of the argument.
        joints: by the layer.
        scattered: by the layer.
    """

    entries: Mapping[tuple[str, tuple[str | int, ...]], Joint] = field(
        default_factory=dict[tuple[str, tuple[str | int, ...]], Joint]
    )
    joints: Mapping[str, Joint] = field(default_factory=dict[str, Joint])
    scattered: Mapping[str, Scattered] = field(default_factory=dict[str, Scattered])


def overlapped_layers(
    program: Program,
    modules: Mapping[str, nn.Module],
    readers: Mapping[str, Callable[[Tensor], Tensor]],
    handed_out: HandedOut,
    without_bias: Collection[str],
) -> OverlappedLayers:
    """The overlaps of a program.

    Args:
        program: what to do.
        modules: by qualified name.
        readers: how to read each parameter, by name.
        handed_out: the call under way.
        without_bias: the layers that leave their bias to another body.
    """
    specs = {spec.name: spec for spec in program.modules}
    entries: dict[tuple[str, tuple[str | int, ...]], Joint] = {}
    joints: dict[str, Joint] = {}
    scattered: dict[str, Scattered] = {}
    for overlap in program.overlaps:
        spec, reshard = program.overlapped(overlap)
        axis = placed(handed_out.axis, f"the {'input' if overlap.inward else 'result'} of `{overlap.module}`")
        if not overlap.inward:
            dim = reshard.target.dim if reshard.forward is Collective.REDUCE_SCATTER else None
            scattered[spec.name] = Scattered(axis, dim, spec.transposed, overlap.least, overlap.groups)
            continue
        members = tuple(_member(specs[name], modules, readers, name in without_bias) for name in overlap.linears)
        dim = reshard.source.dim if reshard.forward.communicates else None
        joint = Joint(
            axis, dim, members, frozenset(overlap.units), reshard.gathered_again, overlap.least, overlap.groups,
            overlap.grouped, handed_out,
        )  # fmt: skip
        entries[spec.name, overlap.path] = joint
        joints |= dict.fromkeys(overlap.linears, joint)
    return OverlappedLayers(entries, joints, scattered)


def _member(
    spec: ModuleProgram,
    modules: Mapping[str, nn.Module],
    readers: Mapping[str, Callable[[Tensor], Tensor]],
    without_bias: bool,
) -> JointLayer:
    module = modules[spec.name]
    has_bias = not without_bias and own_parameters(module).get("bias") is not None
    bias = readers[f"{spec.name}.bias"] if has_bias else None
    return JointLayer(module, readers[f"{spec.name}.weight"], bias, spec.transposed)


__all__ = ["OverlappedLayers", "overlapped_layers"]
