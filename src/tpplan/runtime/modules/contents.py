"""Contents: what a module holds by name, in a form that can be remembered and compared later.

Of tensors only the shape is remembered, since their memory may be wanted.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpplan.compat.data_parallel import COMPOSED
from tpplan.compat.dynamo import COMPILED_CALL
from tpplan.compat.modules import own_buffers, own_modules, own_parameters
from tpplan.compiler.trace.preconditions import MARK
from tpplan.runtime.modules.writes import CHECKS, WRITES
from tpplan.runtime.parameters.packed_tensors import PackedShard

MISSING = object()
NOT_ATTRIBUTES = frozenset(vars(nn.Module())) | COMPOSED | {CHECKS, WRITES, MARK, COMPILED_CALL, "forward"}

TensorForm = tuple[tuple[int, ...], object, bool]
"""The shape of a tensor, of a DTensor what the axis of tensor parallelism does to it, and whether it's a parameter."""


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's children by name."""
    return dict(own_modules(module))


def tensor(module: nn.Module, name: str) -> Tensor | None:
    """A module's own parameter or buffer."""
    found = own_parameters(module).get(name)
    return own_buffers(module).get(name) if found is None else found


def tensors(module: nn.Module) -> dict[str, TensorForm]:
    """A module's own parameters and buffers."""
    parameters = {name: form(held, True) for name, held in own_parameters(module).items() if held is not None}
    return parameters | {name: form(held, False) for name, held in own_buffers(module).items() if held is not None}


def form(held: Tensor, is_parameter: bool) -> TensorForm:
    """What to remember of a parameter or buffer; how FSDP cuts a rank's part further is FSDP's own matter.

    A call may be given plain tensors in the place of parameters (`torch.func.functional_call`).
    """
    if not isinstance(held, DTensor):
        return tuple(held.shape), None, is_parameter
    placement = held.placements[-1]
    return tuple(held.shape), placement.layout if isinstance(placement, PackedShard) else placement, is_parameter


__all__ = ["MISSING", "NOT_ATTRIBUTES", "TensorForm", "children", "form", "tensor", "tensors"]
