"""Residual norms: a sum in a body and the norm that reads it, by one kernel.

in:  a `KernelUse` of kind `residual_norm`
out: what the sum is replaced by in the body that makes it, and the norm's own body

    s = x + residual            computes norm(s) as well, and keeps it
    y = norm(s)                 takes what was kept, if s is that very tensor and nothing has written to it

So a body is computed right whatever becomes of the sum: a norm that gets anything else runs its own forward. A compiled
body is left as it is: its compiler puts the two together itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tpplan.compat.autograd import saving_hook
from tpplan.compat.dynamo import is_traced
from tpplan.compat.modules import own_parameters
from tpplan.compat.subclasses import without_tensor_classes
from tpplan.compiler.ir.program import KernelUse, dtype_name
from tpplan.kernels.kinds import KINDS
from tpplan.plan import KernelKind
from tpplan.runtime.bodies.kernel_bodies import Stock
from tpplan.runtime.data_parallel.averaging import DataParallelError

Reader = Callable[[Tensor], Tensor]

_launch: Any = KINDS[KernelKind.RESIDUAL_NORM].launch

ADDITIONS: frozenset[Any] = frozenset((torch.add, Tensor.add))
"""The functions by which torch calls a sum of two tensors."""


class _Kept(NamedTuple):
    """A sum, its version, whether its operations were cast, and the norm of it."""

    sum: Tensor
    state: tuple[int | None, bool]
    norm: Tensor


class ResidualNorm:
    """One norm of a sum.

    Attributes:
        use: what the program says of it.
    """

    def __init__(self, use: KernelUse, module: nn.Module, readers: Mapping[str, Reader]) -> None:
        """Compute `module` by `use`; `readers` give the model's parameters by qualified name."""
        self.use = use
        self._module = module
        self._readers = readers
        self._begun: tuple[bool, object] | None = None
        self._kept: _Kept | None = None
        self._warned = False

    def begin(self) -> None:
        """The body that makes the sum begins."""
        self._begun, self._kept = _saving(), None

    def end(self) -> None:
        """The body that makes the sum ends."""
        self._begun, self._kept = None, None

    def serves(self, a: Tensor, b: Tensor) -> bool:
        """Whether the proof speaks of a sum of these, which isn't inside of a checkpoint of a part of the body."""
        return self._begun == _saving() and dtype_name(torch.promote_types(a.dtype, b.dtype)) == self.use.dtype

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """The sum, with the norm computed and kept."""
        try:
            weight, bias = (self._parameter(name) for name in (self.use.weight, self.use.bias))
        except DataParallelError:  # a unit of its own, which isn't put together yet
            return a + b
        with without_tensor_classes():
            norm, total = _launch(self.use, a, b, weight, bias)
        self._kept = _Kept(total, _state(total), norm)
        return total

    def body(self, stock: Stock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The norm's body."""
        if is_traced() or self._begun is None:
            return stock(*args, **kwargs)
        (x, *more), kept, self._kept = (*args, *kwargs.values()), self._kept, None
        if kept is not None and not more and x is kept.sum and _state(x) == kept.state and self._begun == _saving():
            return kept.norm
        self._tell(x)
        return stock(*args, **kwargs)

    def _parameter(self, name: str | None) -> Tensor | None:
        held = None if name is None else own_parameters(self._module)[name]
        return None if held is None else self._readers[f"{self.use.module}.{name}"](held)

    def _tell(self, x: Any) -> None:
        """Say once that it wasn't fused, though it was proved of a call like this."""
        proved = isinstance(x, Tensor) and not x.is_meta and dtype_name(x.dtype) == self.use.dtype
        if proved and not self._warned:
            self._warned = True
            warnings.warn(
                f"`{self.use.module}` isn't computed together with the sum before it, as `residual_norm: triton` asks: "
                "it didn't get the sum as its caller made it (a hook, a checkpoint or other code stands between)",
                stacklevel=2,
            )


def residual_norms(
    uses: Mapping[str, KernelUse],
    modules: Mapping[str, nn.Module],
    readers: Mapping[str, Reader],
) -> dict[str, list[ResidualNorm]]:
    """By the module whose body makes their sums, the norms of `uses` that are fused with these."""
    found: dict[str, list[ResidualNorm]] = {}
    for name, use in uses.items():
        if use.kind == "residual_norm":
            found.setdefault(use.parts[0], []).append(ResidualNorm(use, modules[name], readers))
    return found


def _saving() -> tuple[bool, object]:
    """Whether gradients are recorded, and by what hook; both change inside of an activation checkpoint."""
    return torch.is_grad_enabled(), saving_hook()


def _state(tensor: Tensor) -> tuple[int | None, bool]:
    device = tensor.device.type
    version = None if tensor.is_inference() else tensor._version
    return version, device != "meta" and torch.is_autocast_enabled(device)


__all__ = ["ADDITIONS", "ResidualNorm", "residual_norms"]
