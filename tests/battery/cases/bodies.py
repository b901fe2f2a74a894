"""Bodies that look like a linear layer, a table or a norm, and do something more: what stands in for them must too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.battery.case import MLP, WIDE, D, Mlp, add, call, case, ids, t


class LinearPlusOne(nn.Linear):
    """Adds a number to what a linear layer gives."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias) + 1


class LinearHalfBias(nn.Linear):
    """Half of the bias."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x @ self.weight.T, self.bias, alpha=0.5)


class LinearBeta(nn.Linear):
    """A factor for the bias in the product itself."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, 1), self.weight.T, beta=0.25).view(*x.shape[:2], -1)


class LinearAlpha(nn.Linear):
    """A factor for the product."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, 1), self.weight.T, alpha=3.0).view(*x.shape[:2], -1)


class LinearBiasTwice(nn.Linear):
    """The bias in the product, and once more."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias) + self.bias


class LinearBiasMinus(nn.Linear):
    """The bias is subtracted."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight) - self.bias


class LinearNoBias(nn.Linear):
    """Has a bias and never uses it."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class LinearScaled(nn.Linear):
    """A factor between the product and the bias."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight) * 0.5 + self.bias


class LinearClamped(nn.Linear):
    """Clamps its result, bias included."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias).clamp(-0.3, 0.3)


class LinearSquaredWeight(nn.Linear):
    """Computes with the square of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight**2, self.bias)


class LinearResidual(nn.Linear):
    """Adds the mean of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias) + x.mean(-1, keepdim=True)


class LinearReluIn(nn.Linear):
    """Changes its argument first."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.relu() * 2, self.weight, self.bias)


class LinearStandardised(nn.Linear):
    """Weight standardisation: takes the mean of each row of its weight away."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight - self.weight.mean(1, keepdim=True), self.bias)


class LinearTuple(nn.Linear):
    """Returns its bias beside the result, as Megatron's does."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias * 1.0 if x.dim() > 2 else None)


def _mlp(up: type[nn.Linear], down: type[nn.Linear]) -> nn.Module:
    model = Mlp()
    model.up, model.down = up(D, WIDE), down(WIDE, D)
    return model


LINEARS = [
    LinearPlusOne,
    LinearHalfBias,
    LinearBeta,
    LinearAlpha,
    LinearBiasTwice,
    LinearBiasMinus,
    LinearNoBias,
    LinearScaled,
    LinearClamped,
    LinearSquaredWeight,
    LinearResidual,
    LinearReluIn,
    LinearStandardised,
    LinearTuple,
]
CALLS = (call(), call(lambda: (t(1, 9, D),)))
for kind in LINEARS:
    add(
        f"rowwise_{kind.__name__[6:].lower()}",
        "bodies",
        lambda kind=kind: _mlp(nn.Linear, kind),
        MLP,
        CALLS,
        "equal" if kind is LinearNoBias else "equal_or_refused",
    )
for kind in (LinearPlusOne, LinearHalfBias, LinearBiasTwice, LinearNoBias, LinearClamped):
    add(
        f"colwise_{kind.__name__[6:].lower()}",
        "bodies",
        lambda kind=kind: _mlp(kind, nn.Linear),
        MLP,
        CALLS,
        "equal_or_refused" if kind is LinearClamped else "equal",
    )


class ClampedRms(nn.Module):
    """A norm with a clamp behind it that random numbers don't reach."""

    limit = 3.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDE) + 0.5)

    def after(self, y: Tensor) -> Tensor:
        return y.clamp(-self.limit, self.limit)

    def forward(self, h: Tensor) -> Tensor:
        return self.after(h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)) * self.weight


class TanhRms(ClampedRms):
    """A norm that is softly capped far out."""

    def after(self, y: Tensor) -> Tensor:
        return torch.where(y.abs() > 3.5, y * 0.5, y)


class FlooredRms(ClampedRms):
    """A norm whose mean has a floor."""

    def forward(self, h: Tensor) -> Tensor:
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True).clamp(min=0.05)) * self.weight


class OneMoreRms(ClampedRms):
    """Gemma's: one more than the weight."""

    def forward(self, h: Tensor) -> Tensor:
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


class Normed(Mlp):
    """A norm over the split features."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def middle(self, h: Tensor) -> Tensor:
        return self.norm(h)


def _spiky() -> tuple[Tensor]:
    x = t(3, 6, D, grad=False)
    x[0, 0, 0] = 400.0
    return (x.requires_grad_(),)


SMALL = (call(), call(lambda: (t(3, 6, D, scale=1e-3),)), call(_spiky))
NORM = MLP | {"norm": "colwise"}
for norm in (ClampedRms, TanhRms, FlooredRms, OneMoreRms):
    for style, rules in (("free", MLP), ("styled", NORM)):
        add(
            f"norm_{style}_{norm.__name__.lower()}",
            "bodies",
            lambda norm=norm: Normed(norm()),
            rules,
            SMALL,
            "equal_or_refused",
        )
for name, make in {
    "layer_norm_bare": lambda: nn.LayerNorm(WIDE, elementwise_affine=False),
    "layer_norm_no_bias": lambda: nn.LayerNorm(WIDE, bias=False),
    "rms_norm_bare": lambda: nn.RMSNorm(WIDE, elementwise_affine=False),
    "rms_norm_default_eps": lambda: nn.RMSNorm(WIDE),
    "group_norm": lambda: nn.GroupNorm(3, 6),
}.items():
    add(f"split_{name}", "bodies", lambda make=make: Normed(make()), MLP, SMALL, "equal_or_refused")


@case(
    "bodies",
    {"table": "vocab"},
    call(lambda: (ids(3, 6),)),
    call(lambda: (ids(3, 6) + 8,)),
    call(lambda: (ids(3, 6) - 12,)),
    call(lambda: (ids(2, 5),)),
)
class OutOfRangeIds(nn.Module):
    """Ids that the table doesn't have: an error in the stock model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x) * 2


@case("bodies", {"table": "vocab"}, call(lambda: (ids(3, 6),)), call(lambda: (ids(3, 6),)))
class TableWithPadding(nn.Module):
    """A row that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, D, padding_idx=7)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


@case("bodies", {"table": "vocab"}, call(lambda: (ids(3, 6),)), call(lambda: (ids(3, 6),)), expect="equal_or_refused")
class TableMaxNorm(nn.Module):
    """A table that renormalises its rows in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, D, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x) + 1


@case("bodies", {"table": "vocab"}, call(lambda: (ids(3, 6),)), call(lambda: (ids(3, 6),)), expect="equal_or_refused")
class TableByFrequency(nn.Module):
    """Gradients are divided by how often an id is there."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, D, scale_grad_by_freq=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x) + 1


class ScaledTable(nn.Embedding):
    """Gemma's: rows times a number, and an offset."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.embedding_dim**0.5 + 0.125


@case("bodies", {"table": "vocab"}, call(lambda: (ids(3, 6),)), call(lambda: (ids(3, 6),)), expect="equal_or_refused")
class TableWithOffset(nn.Module):
    """A subclass of a table that does more."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ScaledTable(12, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


@case("bodies", {"table": "vocab"}, call(lambda: (ids(3, 6),)), call(lambda: (ids(3, 6),)), expect="equal_or_refused")
class TableClipsIds(nn.Module):
    """A table whose ids are shifted and wrapped in its own body."""

    class Wrapped(nn.Embedding):
        def forward(self, x: Tensor) -> Tensor:
            return functional.embedding((x + 5) % self.num_embeddings, self.weight)

    def __init__(self) -> None:
        super().__init__()
        self.table = self.Wrapped(12, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


@case("bodies", MLP, *CALLS, expect="equal_or_refused")
class ParametrisedDown(Mlp):
    """Weight normalisation by torch's parametrisations."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.utils.parametrizations.weight_norm(self.down)


@case("bodies", MLP, *CALLS, expect="equal_or_refused")
class HookedDown(Mlp):
    """A forward hook that changes the result of the rowwise layer."""

    def __init__(self) -> None:
        super().__init__()
        self.down.register_forward_hook(lambda module, arguments, result: result.clamp(-0.2, 0.2))


@case("bodies", MLP, *CALLS, expect="equal_or_refused")
class PreHookedDown(Mlp):
    """A hook that changes the argument of the rowwise layer by its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.down.register_forward_pre_hook(lambda module, arguments: (arguments[0] - arguments[0].mean(-1, True),))


class OverridesByStaticMethod(Mlp):
    """A public method of the base, overridden by something else than a function."""

    middle = staticmethod(torch.tanh)  # pyright: ignore


class OverridesByClassMethod(Mlp):
    @classmethod
    def middle(cls, h: Tensor) -> Tensor:
        return h.tanh()


class OverridesByProperty(Mlp):
    @property
    def middle(self) -> Any:
        return torch.tanh


class OverridesByObject(Mlp):
    """An instance that can be called, among the attributes of the class."""

    middle: Any = nn.Tanh()


class OverridesOnInstance(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.middle: Any = torch.tanh


for kind in (
    OverridesByStaticMethod,
    OverridesByClassMethod,
    OverridesByProperty,
    OverridesByObject,
    OverridesOnInstance,
):
    case("bodies", MLP, *CALLS)(kind)
