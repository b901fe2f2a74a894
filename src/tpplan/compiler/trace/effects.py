"""Effects, and origins: which values are made for more than a run's results, and which follow from what it is passed.

in:  the tensors that are there before a run and are read again after it, and those of its call
out: the values that operations write there; the values that follow from the call's; an error for a tensor that comes
     from nowhere, as from another thread

    self.mean.mul_(0.9)   ->   an effect, the value of the buffer after it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn

from tpplan.compat.autograd import inside_transform
from tpplan.compat.modules import named_modules, own_buffers
from tpplan.compiler.ir.locations import Location, location_now
from tpplan.compiler.ir.trace import Operation, quoted
from tpplan.compiler.trace.tape import Observer, RunTape
from tpplan.compiler.trace.unfollowed import UnfollowedError

_STOCK = frozenset(vars(nn.Module()))  # tables of parameters, modules and hooks
_SCALARS = frozenset((bool, int, float, str, type(None)))


class EffectObserver:
    """Notes what operations make for more than the results of a run; `made` are these values."""

    def __init__(self, tape: RunTape) -> None:
        """Nothing outlives the run."""
        self.made: set[int] = set()
        self._outliving: set[int] = set()  # memory, by its first value
        self._tape = tape

    def outlives(self, tensor: Tensor) -> None:
        """Say that `tensor`, such as a buffer, is read again after the run: writing to it is an effect."""
        self._outliving.add(self._tape.storage_of(self._tape.value_of(tensor)))

    def wrote(self, targets: Iterable[Tensor], outputs: Iterable[int | None]) -> None:
        """An operation wrote to some tensors, and made these values."""
        if any(self._tape.storage_of(self._tape.value_of(target)) in self._outliving for target in targets):
            self.made.update(output for output in outputs if output is not None)


class OriginObserver(Observer):
    """Follows tensors from where they come.

    Attributes:
        given: values that the call is passed, and what follows from them.
        familiar: ids of tensors from before the run; None while any may be met.
    """

    def __init__(self, tape: RunTape) -> None:
        """Nothing was passed."""
        self.given: set[int] = set()
        self.familiar: set[int] | None = None
        self._tape = tape
        self._unfamiliar: list[tuple[str, Location | None, bool]] = []

    def added(self, operation: Operation, called: bool) -> None:
        """What it makes follows from what it reads."""
        self._follow(operation.inputs, (*operation.outputs, *operation.overwritten))

    def crossed(self, outside: int, inside: int) -> None:
        """It is the same beyond a boundary."""
        self._follow((outside,), (inside,))

    def _follow(self, inputs: Iterable[int], outputs: Iterable[int | None]) -> None:
        if not self.given.isdisjoint(inputs):
            self.given.update(output for output in outputs if output is not None)

    def is_given(self, tensor: Tensor) -> bool:
        """Whether a tensor follows from what the call is passed, and not from what is there before it alone."""
        return self._tape.held_value(tensor) in self.given

    def unmade(self, tensor: Tensor) -> None:
        """Note a tensor that wasn't there before the run."""
        if self.familiar is not None and tensor.is_meta and id(tensor) not in self.familiar:
            self._unfamiliar.append((self._tape.frames[-1].module, location_now(), inside_transform()))

    def refuse_unfamiliar(self) -> None:
        """Refuse a run that has read what it was neither passed nor seen to make."""
        for name, at, transformed in self._unfamiliar:
            if transformed:
                raise UnfollowedError(
                    f"{quoted(name)} calls modules inside of a transform of `torch.func`, such as `torch.vmap`, at "
                    f"{at}",
                    "call the modules on the whole batch, outside of the transform",
                )
            raise UnfollowedError(
                f"{quoted(name)} uses a tensor at {at} that no recorded operation made",
                "compute it in the thread of the forward, by operations of torch",
            )


def held_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors in the modules' buffers and attributes, also in lists and dicts there, with the attributes' names."""
    for name, module in named_modules(model):
        for leaf, held in (*own_buffers(module).items(), *vars(module).items()):
            if leaf in _STOCK or type(held) in _SCALARS:
                continue
            for tensor in _tensors_in(held):
                yield f"{name}.{leaf}" if name else leaf, tensor


def _tensors_in(held: object) -> Sequence[Tensor]:
    if isinstance(held, Tensor):
        return (held,)
    if not isinstance(held, (list, tuple, dict)) or not held:
        return ()
    items = dict.values(held) if isinstance(held, dict) else held  # pyright: ignore[reportUnknownVariableType]
    return [item for item in items if isinstance(item, Tensor)]  # pyright: ignore[reportUnknownVariableType]


__all__ = ["EffectObserver", "OriginObserver", "held_tensors"]
