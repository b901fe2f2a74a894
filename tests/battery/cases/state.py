"""What a forward reads and writes besides its arguments."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.battery.case import ATTENTION, MLP, WIDE, Attention, D, Mlp, call, case, ids, t

CALLS = (call(), call(lambda: (t(2, 6, D),)), call(train=False), call())


@case("state", MLP, *CALLS)
class BatchNormWhole(Mlp):
    """Statistics of the stream, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x).transpose(1, 2)).transpose(1, 2)


@case("state", MLP, *CALLS, expect="equal_or_refused")
class BatchNormSplit(Mlp):
    """Statistics of split features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDE)

    def middle(self, h: Tensor) -> Tensor:
        return self.norm(h.transpose(1, 2)).transpose(1, 2)


@case("state", MLP, *CALLS)
class BatchNormCumulative(Mlp):
    """An average whose weight is the counter's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x).transpose(1, 2)).transpose(1, 2)


class Buffered(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.average: Tensor
        self.register_buffer("average", torch.tensor(2.0))
        self.register_buffer("count", torch.tensor(0))


@case("state", MLP, *CALLS)
class ScalarAverage(Buffered):
    """A scalar moving average of what comes in, written in place."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(0.1 * x.abs().mean())
        return super().forward(x / self.average)


@case("state", MLP, *CALLS, expect="equal_or_refused")
class ScalarAverageAssigned(Buffered):
    """The same, as an assignment."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x.detach().abs().mean()
        return super().forward(x / self.average)


@case("state", MLP, *CALLS, expect="equal_or_refused")
class ScalarAverageOfSplit(Buffered):
    """A scalar average of split features."""

    def middle(self, h: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.average.lerp_(h.abs().mean(), 0.1)
        return h / self.average


@case("state", MLP, *CALLS, expect="equal_or_refused")
class MaximumOfSplit(Buffered):
    """A largest number so far, of split features."""

    def middle(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.copy_(torch.maximum(self.average, h.abs().amax()))
        return h / self.average


@case("state", MLP, *CALLS)
class TensorCounter(Buffered):
    """A step counter that is a buffer and a factor."""

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * self.count


@case("state", MLP, *CALLS, expect="equal_or_refused")
class NumberCounter(Mlp):
    """A step counter that is a plain number."""

    count: int

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * self.count


@case("state", MLP, *CALLS, expect="equal_or_refused")
class WarmupCounter(NumberCounter):
    """A branch that opens after some steps."""

    def middle(self, h: Tensor) -> Tensor:
        return h.softmax(-1) if self.count > 2 else h.relu()  # pyright: ignore


@case("state", MLP, *CALLS, expect="equal_or_refused")
class CounterOfModule(Mlp):
    """A counter that is kept by an object among the attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.book: dict[str, Any] = {"calls": 0}

    def middle(self, h: Tensor) -> Tensor:
        self.book["calls"] += 1
        return h * self.book["calls"]


@case("state", MLP, *CALLS, expect="equal_or_refused")
class RemembersLast(Mlp):
    """The last call's features are added to this one's."""

    last: Tensor | None = None

    def middle(self, h: Tensor) -> Tensor:
        mean = h.detach().mean((0, 1))
        total = h if self.last is None else h + self.last
        self.last = mean
        return total


@case("state", MLP, *CALLS, expect="equal_or_refused")
class RemembersLastWhole(Mlp):
    """The last call's result is added to this one's."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        total = y if self.last is None else y + self.last
        self.last = y.detach().mean((0, 1))
        return total


@case("state", MLP, *CALLS, expect="equal_or_refused")
class LeavesAuxiliary(Mlp):
    """An attribute that one module writes and another one reads."""

    def middle(self, h: Tensor) -> Tensor:
        self.auxiliary = h.pow(2).mean()
        return h

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.auxiliary


@case("state", MLP, *CALLS, expect="equal_or_refused")
class LeavesForCaller(Mlp):
    """An attribute that a forward writes and a user reads after it."""

    def forward(self, x: Tensor) -> Any:
        result = super().forward(x)
        self.seen = result.detach().mean()
        return result


def _read(model: nn.Module) -> None:
    kept = getattr(model, "kept", None)
    if kept is not None:
        with torch.no_grad():
            model.get_parameter("down.bias").add_(kept.mean())


@case("state", MLP, call(), call(before=_read), call(before=_read), expect="equal_or_refused")
class LeavesSplitForCaller(Mlp):
    """Split features in an attribute, which a user reads between calls."""

    def middle(self, h: Tensor) -> Tensor:
        self.kept = h.detach()
        return h.relu()


@functools.lru_cache
def _table(length: int, width: int) -> Tensor:
    return torch.arange(length * width, dtype=torch.float64).view(length, width).sin()


@case("state", MLP, *CALLS)
class CachedTable(Mlp):
    """A table of positions that `lru_cache` keeps."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + _table(x.shape[1], D))


@functools.lru_cache
def _device_table(length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.arange(length, device=device, dtype=dtype).cos()


@case("state", MLP, *CALLS)
class CachedTableByDevice(Mlp):
    """Kept by device, which is another one in a capture."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * _device_table(x.shape[1], x.device, x.dtype)[:, None])


class CachesInGlobals(Mlp):
    """A dict of the module's file."""

    TABLES: ClassVar[dict[int, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length not in self.TABLES:
            self.TABLES[length] = torch.linspace(0, 1, length, dtype=x.dtype)
        return super().forward(x * self.TABLES[length][:, None])


case("state", MLP, *CALLS)(CachesInGlobals)


@case("state", ATTENTION, call(), call(lambda: (t(3, 9, D),)), call(lambda: (t(3, 4, D),)))
class GrowingMask(Attention):
    """A causal mask in a buffer that grows with the longest call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(2, 2).tril().bool(), persistent=False)
        self.mask: Tensor

    def score(self, scores: Tensor) -> Tensor:
        length = scores.shape[-1]
        if length > self.mask.shape[0]:
            self.mask = torch.ones(length, length, device=scores.device).tril().bool()
        return scores.masked_fill(~self.mask[:length, :length], -1e4)


@case("state", MLP, *CALLS)
class LazyTable(Mlp):
    """An attribute that is made when it's first needed."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.shape[0] < x.shape[1]:
            self.table = torch.arange(64, device=x.device, dtype=x.dtype).sin()
        return super().forward(x + self.table[: x.shape[1], None])


@case("state", MLP, *CALLS, expect="equal_or_refused")
class ClampsWeight(Mlp):
    """A forward that clamps a weight in place."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@case("state", MLP, *CALLS, expect="equal_or_refused")
class ClampsData(Mlp):
    """The same by `.data`."""

    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.data = self.up.weight.data.clamp(-0.1, 0.1)
        return super().forward(x)


@case("state", MLP, *CALLS, expect="equal_or_refused")
class NormalisesWeight(Mlp):
    """A forward that makes the columns of a split weight as long as one."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.div_(self.up.weight.norm(dim=0, keepdim=True))
        return super().forward(x)


@case("state", MLP, *CALLS, expect="equal_or_refused")
class SpectralNorm(Mlp):
    """torch's spectral norm: a power iteration in buffers at each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.utils.parametrizations.spectral_norm(self.down)


def _step(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), 0.1, momentum=0.9).step()


@case("state", MLP, call(), call(before=_step), call(before=_step))
class OptimiserSteps(Mlp):
    """Parameters that an optimiser changes in place."""


def _load(model: nn.Module) -> None:
    state = {name: torch.as_tensor(value) * 2 for name, value in model.state_dict().items()}
    model.load_state_dict(state)


@case("state", MLP, call(), call(before=_load))
class LoadsState(Mlp):
    """A state that is taken, changed and loaded again."""


@case("state", MLP | {"table": "vocab"}, call(lambda: (ids(3, 6),)), call(lambda: (ids(2, 9),)))
class PositionBuffer(Mlp):
    """Positions in a buffer that isn't saved."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(12, D), nn.Embedding(16, D)
        self.register_buffer("positions", torch.arange(16)[None], persistent=False)
        self.positions: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.table(x) + self.places(self.positions[:, : x.shape[1]]))


@case("state", MLP, call(), call(), call(lambda: (t(2, 5, D),)), expect="equal_or_refused")
class WritesArgument(Mlp):
    """A forward that changes its argument in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        x[..., 0] = 0
        x[:, 0] += 1
        return super().forward(x)


@case("state", MLP, call(lambda: (t(3, 6, D, grad=False),)), call(lambda: (t(2, 5, D, grad=False),)))
class WritesCallersArgument(Mlp):
    """A forward that changes its caller's tensor."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return super().forward(x)


def _cache(length: int) -> Any:
    return call(lambda: {"x": t(2, length, D), "cache": {}})


@case("state", ATTENTION, _cache(6), _cache(4), call(lambda: {"x": t(2, 6, D)}), expect="equal_or_refused")
class CacheInDict(Attention):
    """Keys that a forward leaves in its caller's dict, and what a caller makes of their size."""

    def forward(self, x: Tensor, cache: dict[str, Any] | None = None) -> Tensor:
        if cache is not None:
            cache["length"] = x.shape[1]
            cache["sum"] = x.sum()
        return super().forward(x)


@case("state", MLP, *CALLS, expect="equal_or_refused")
class QuantilesOfInput(Mlp):
    """A table of extremes, of which rows are written by an index that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ring", torch.zeros(4, D))
        self.register_buffer("place", torch.tensor(0))
        self.ring: Tensor
        self.place: Tensor

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.ring.index_copy_(0, (self.place % 4).view(1), x.mean((0, 1))[None])
            self.place += 1
        return super().forward(x + self.ring.mean(0))


@case("state", MLP, *CALLS, expect="equal_or_refused")
class RandomWithOwnGenerator(Mlp):
    """Noise from a generator that the module holds."""

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(5)
        noise = torch.rand(x.shape, generator=generator, dtype=x.dtype)
        return super().forward(x + noise.to(x.device))


@case("state", MLP, *CALLS)
class SeededNoise(Mlp):
    """Noise for the stream, from the default generator."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.dropout(x, 0.4, self.training))
