"""Bodies that look like a linear layer, a table or a norm, and do something more: what stands in for them must too."""

from __future__ import annotations

from collections.abc import Callable
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


class LinearBiasBySize(nn.Linear):
    """The bias by the number of features that come in."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight) + self.bias * (x.shape[-1] / WIDE)


class LinearOverSize(nn.Linear):
    """Divides by the number of features that come in."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias) / x.shape[-1]


class LinearByAttribute(nn.Linear):
    """Divides by its own attribute."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias) / self.in_features


class LinearByMatmul(nn.Linear):
    """Another spelling of the same."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.weight.t()) + self.bias


class LinearByEinsum(nn.Linear):
    """One more spelling."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bsi,oi->bso", x, self.weight) + self.bias


class LinearReluBeforeBias(nn.Linear):
    """Not linear between the product and the bias."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight).relu() + self.bias


class LinearBiasInTraining(nn.Linear):
    """The bias in training only."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias if self.training else None)


class LinearMeanBias(nn.Linear):
    """The mean of the bias as well."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias) + self.bias.mean()


class LinearReversedRows(nn.Linear):
    """Its inputs in another order."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.flip(-1), self.weight, self.bias)


class LinearSwappedHalves(nn.Linear):
    """Halves of its weight change places."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, torch.cat(self.weight.chunk(2, -1)[::-1], -1), self.bias)


class LinearPerToken(nn.Linear):
    """A row for each token."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([functional.linear(row, self.weight, self.bias) for row in x.unbind(1)], 1)


class LinearTwice(nn.Linear):
    """Two products of one weight."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias) + functional.linear(x.tanh(), self.weight)


class LinearSingle(nn.Linear):
    """In float32, and back."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.float(), self.weight.float(), self.bias.float()).double()


class LinearDropped(nn.Linear):
    """A dropout of nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(functional.linear(x, self.weight, self.bias), 0.0, self.training)


class LinearGated(nn.Linear):
    """Gated by what comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias) * x.sum(-1, keepdim=True).sigmoid()


class LinearMasked(nn.Linear):
    """A weight without its small entries."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight * (self.weight.abs() > self.weight.abs().mean()), self.bias)


class LinearQuantised(nn.Linear):
    """Fake quantisation of the weight, by the largest entry of each row."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.detach().abs().amax(1, keepdim=True) / 7
        rounded = (self.weight / scale).round() * scale
        return functional.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)


class LinearBiasFromInput(nn.Linear):
    """A bias that is scaled by each token."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight) + self.bias * x[..., :1]


MORE = [
    LinearBiasBySize,
    LinearOverSize,
    LinearByAttribute,
    LinearByMatmul,
    LinearByEinsum,
    LinearReluBeforeBias,
    LinearBiasInTraining,
    LinearMeanBias,
    LinearReversedRows,
    LinearSwappedHalves,
    LinearPerToken,
    LinearTwice,
    LinearSingle,
    LinearDropped,
    LinearGated,
    LinearMasked,
    LinearQuantised,
    LinearBiasFromInput,
]
MORE_CALLS = (*CALLS, call(train=False))
for kind in MORE:
    name = kind.__name__[6:].lower()
    near = 1e-5 if kind is LinearSingle else 1e-9
    add(
        f"rowwise_{name}",
        "bodies",
        lambda kind=kind: _mlp(nn.Linear, kind),
        MLP,
        MORE_CALLS,
        "equal_or_refused",
        tolerance=near,
    )
    add(
        f"colwise_{name}",
        "bodies",
        lambda kind=kind: _mlp(kind, nn.Linear),
        MLP,
        MORE_CALLS,
        "equal_or_refused",
        tolerance=near,
    )


class TableBody(nn.Module):
    """A table whose look-up is each case's own."""

    def __init__(self, look: Callable[[nn.Embedding, Tensor], Tensor]) -> None:
        super().__init__()

        class Table(nn.Embedding):
            def forward(self, input: Tensor) -> Tensor:
                return look(self, input)

        self.table = Table(12, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


LOOKS: dict[str, Callable[[nn.Embedding, Tensor], Tensor]] = {
    "first_row": lambda table, x: functional.embedding(x, table.weight) + table.weight[0],
    "clamped": lambda table, x: functional.embedding(x.clamp(max=table.num_embeddings - 1), table.weight),
    "one_hot": lambda table, x: functional.one_hot(x, 12).to(table.weight.dtype) @ table.weight,
    "indexed": lambda table, x: table.weight[x],
    "select": lambda table, x: table.weight.index_select(0, x.flatten()).view(*x.shape, -1),
    "normalised": lambda table, x: functional.embedding(x, functional.normalize(table.weight, dim=-1)),
    "centred": lambda table, x: functional.embedding(x, table.weight - table.weight.mean(0)),
    "shifted": lambda table, x: functional.embedding((x + 1) % 12, table.weight),
    "scaled": lambda table, x: functional.embedding(x, table.weight) * table.embedding_dim**0.5,
    "by_rows": lambda table, x: functional.embedding(x, table.weight) * table.weight.shape[0],
    "bag": lambda table, x: functional.embedding_bag(x, table.weight, mode="mean"),
    "tanh": lambda table, x: functional.embedding(x, table.weight).tanh(),
    "padded": lambda table, x: functional.embedding(x, table.weight, padding_idx=3),
    "masked": lambda table, x: functional.embedding(x, table.weight) * (x != 0)[..., None],
    "twice": lambda table, x: functional.embedding(x, table.weight) + functional.embedding(x.flip(-1), table.weight),
}
for name, look in LOOKS.items():
    add(
        f"table_look_{name}",
        "bodies",
        lambda look=look: TableBody(look),
        {"table": "vocab"},
        (call(lambda: (ids(3, 6),)), call(lambda: (ids(2, 5),))),
        "equal_or_refused",
    )

NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "by_constant": lambda h: h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) / 32 + 1e-6),
    "over_tokens": lambda h: h * torch.rsqrt(h.pow(2).mean((1, 2), keepdim=True) + 1e-6),
    "first_half": lambda h: h * torch.rsqrt(h[..., :16].pow(2).mean(-1, keepdim=True) + 1e-6),
    "length": lambda h: h / (h.norm(dim=-1, keepdim=True) + 1e-6),
    "largest": lambda h: h / (h.abs().amax(-1, keepdim=True) + 1e-6),
    "eps_outside": lambda h: h / (h.pow(2).mean(-1, keepdim=True).sqrt() + 0.1),
    "unbiased": lambda h: (h - h.mean(-1, keepdim=True)) / (h.var(-1, keepdim=True) + 1e-5).sqrt(),
    "median": lambda h: h / (1 + h.abs().median(-1, keepdim=True).values),
    "detached": lambda h: h * torch.rsqrt(h.detach().pow(2).mean(-1, keepdim=True) + 1e-6),
    "residual": lambda h: h + h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6),
    "spike": lambda h: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True).clamp(max=1e4) + 1e-6),
    "guarded": lambda h: torch.nan_to_num(h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True)), posinf=1.0),
    "float": lambda h: (h.float() * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(h.dtype),
}


class NormBody(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.body = nn.Parameter(torch.rand(WIDE) + 0.5), body

    def forward(self, h: Tensor) -> Tensor:
        return self.body(h) * self.weight


for name, body in NORMS.items():
    add(
        f"norm_body_{name}",
        "bodies",
        lambda body=body: Normed(NormBody(body)),
        MLP,
        SMALL,
        "equal_or_refused",
        tolerance=1e-4 if name == "float" else 1e-9,
    )
