"""Placements: under TPPLAN_DEBUG=1 what crosses a module's boundary is held against what the program says of it.

A value that is whole must be the same on all ranks, in the forward and in the backward; of a part the ranks' shapes
must fit. Modules are seen from outside: as their callers give, and as they get back.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.compat.modes import without_dispatch_modes, without_function_modes
from tpplan.compat.modules import class_over
from tpplan.compat.pipelines import wants_shapes_alone
from tpplan.compiler.ir.layout import REPLICATED, Layout
from tpplan.compiler.ir.program import Boundary, Program, dtype_name
from tpplan.compiler.ir.pytree import tensors_of
from tpplan.compiler.trace.signatures import argument_names
from tpplan.runtime.modules.writes import CHECKS, Watched
from tpplan.runtime.ranks.lockstep import Facts, LockstepCommunicator, WatchError

_SPREAD = 64  # how many roundings apart equal values may be: kernels may add in another order
Found = tuple[str, Layout, Tensor]


class Checks:
    """Compares what one module is given and makes.

    Attributes:
        boundaries: of the program in place, which has those of each module's first call.
        is_under_way: whether a forward of the model is.
    """

    def __init__(self, name: str, names: tuple[str, ...], axis: LockstepCommunicator) -> None:
        """Check the module of this name, whose forward has arguments of `names`."""
        self._name = name
        self._names = names
        self._axis = axis
        self._latest = -1
        self.is_under_way: Callable[[], bool] = lambda: False
        self.boundaries: Mapping[str, tuple[Boundary, ...]] = {}

    def __deepcopy__(self, memo: object) -> Checks:
        return self

    def is_compared(self) -> bool:
        """Whether a call is compared: the module's first in the forward that is under way, if its numbers count."""
        if not self.is_under_way() or self._latest == self._axis.call:
            return False
        self._latest = self._axis.call
        return not wants_shapes_alone()

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare what the module is given."""
        layouts = self._layouts(True)
        self._compare("the arguments", [*self._found(tensors_of(args, kwargs, self._names), layouts)])

    def result(self, result: Any) -> None:
        """Compare what it makes; and later the gradients that arrive for that."""
        layouts = self._layouts(False)
        made = [(path[1:], tensor) for path, tensor in tensors_of((result,), {}, ("result",))]
        found = [*self._found(made, layouts)]
        self._compare("the result", found)
        for path, layout, tensor in found:
            if torch.is_grad_enabled() and tensor.requires_grad:
                tensor.register_hook(functools.partial(self._gradient, path, layout))

    def _gradient(self, path: str, layout: Layout, gradient: Tensor) -> None:
        whole = layout.gradient == "R"
        held = REPLICATED if whole else layout if layout.is_sharded else Layout("P", "R")
        self._compare("the gradient of the result", [(path, held, gradient)])

    def _layouts(self, inward: bool) -> dict[tuple[str | int, ...], Layout]:
        held = [b for b in self.boundaries.get(self._name, ()) if b.inward == inward]
        return {path: b.layout for b in held for path in (b.path, *b.aliases)}

    def _found(self, tensors: Any, layouts: Mapping[tuple[str | int, ...], Layout]) -> Iterator[Found]:
        for path, tensor in tensors:
            if len(path) > 1 and tuple(path) not in layouts:
                continue  # in a container or an object that no boundary takes apart
            yield ".".join(map(str, path)), layouts.get(tuple(path), REPLICATED), tensor

    def _compare(self, what: str, found: list[Found]) -> None:
        if not found:
            return
        place = f"{what} of `{self._name}`"
        with torch.no_grad(), without_dispatch_modes(), without_function_modes():
            told = self._axis.meet(place, [(path, _fact(layout, tensor)) for path, layout, tensor in found])
            if told:
                self._judge(place, found, told)

    def _judge(self, place: str, found: list[Found], told: list[Facts]) -> None:
        """Raise, unless what differs is only rounded otherwise."""
        for number, (path, layout, tensor) in enumerate(found):
            texts = [facts[number][1] if number < len(facts) else "nothing" for facts in told]
            if len(set(texts)) == 1 or _are_parts(texts, layout):
                continue
            same = len({text.partition(" with ")[0] for text in texts}) == 1
            error = 0.0
            if same and tensor.is_floating_point():
                every = self._axis.gather(tensor)
                error = max(float((held - every[0]).abs().max()) for held in every[1:])
                scale = max(float(held.abs().max()) for held in every)
                if error <= _SPREAD * torch.finfo(tensor.dtype).eps * scale:
                    continue
            parts = "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(texts))
            apart = f", which are {error:.2g} apart" if error else ""
            shown = f"`{path}` of {place}" if path else place
            raise WatchError.of(
                "TP178",
                f"{shown} should be {layout} and isn't: {parts}{apart}",
                help="let all ranks of the axis have the same replicated parameters, buffers and random seeds; if they "
                "have, report it",
            )


def _fact(layout: Layout, tensor: Tensor) -> str:
    """What must be the same on all ranks."""
    shape = [str(size) for size in tensor.shape]
    whole = layout == REPLICATED or layout.forward == "R"
    if layout.is_sharded and not layout.is_plain:
        shape = [str(tensor.dim())]
    text = f"{dtype_name(tensor.dtype)} ({', '.join(shape)})"
    return f"{text} with checksum {checksum(tensor):08x}" if whole else f"{text} as {layout}"


def _are_parts(texts: list[str], layout: Layout) -> bool:
    """Whether facts differ only as the uneven parts of one tensor do."""
    if not layout.is_plain or layout.dim is None:
        return False
    sizes: list[int] = []
    rests: set[str] = set()
    for text in texts:
        head, _, tail = text.partition("(")
        shape = tail.partition(")")[0].split(", ")
        if layout.dim >= len(shape):
            return False
        sizes.append(int(shape[layout.dim]))
        shape[layout.dim] = ""
        rests.add(f"{head}{shape}{tail.partition(')')[2]}")
    parts = [layout.local_size(sum(sizes), len(sizes), rank) for rank in range(len(sizes))]
    return len(rests) == 1 and sizes == parts


def checksum(tensor: Tensor) -> int:
    """Of a tensor's numbers, equal for equal ones."""
    if tensor.is_meta or not tensor.numel():
        return 0
    held: Tensor = (tensor.to_dense() if tensor.is_sparse else tensor).detach().resolve_conj().resolve_neg()
    flat = held.cpu().contiguous()
    return zlib.crc32((ctypes.c_char * (flat.numel() * flat.itemsize)).from_address(flat.data_ptr()))


@functools.cache
def checked_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A class like `kind`, of its name, whose calls are checked."""
    own: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return class_over(kind.__name__, _Checked, kind, own)


class _Checked(Watched):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        checks: Checks | None = self.__dict__.get(CHECKS)
        if checks is None or not checks.is_compared():
            return super().__call__(*args, **kwargs)
        checks.arguments(args, kwargs)
        result = super().__call__(*args, **kwargs)
        checks.result(result)
        return result


def check_modules(
    modules: Mapping[str, nn.Module], axis: LockstepCommunicator, stock: Callable[[nn.Module], type[nn.Module]]
) -> None:
    """Let all modules but the root be checked."""
    for name, module in modules.items():
        if name and isinstance(module, Watched):
            module.__dict__[CHECKS] = Checks(name, argument_names(stock(module).forward), axis)
            module.__class__ = checked_class(type(module))  # pyright: ignore[reportAttributeAccessIssue]


def follow(modules: Mapping[str, nn.Module], program: Program, is_under_way: Callable[[], bool]) -> None:
    """Check by `program` from now on."""
    for module in modules.values():
        checks: Checks | None = module.__dict__.get(CHECKS)
        if checks is not None:
            checks.boundaries, checks.is_under_way = program.boundaries, is_under_way


__all__ = ["check_modules", "checksum", "follow"]
