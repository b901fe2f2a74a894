"""Models that are changed after `parallelize`."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.battery.case import ATTENTION, MLP, WIDE, Attention, D, Mlp, call, case

Change = Callable[[nn.Module], Any]


class Adapter(nn.Module):
    """What an adapter library puts in place of a linear layer."""

    def __init__(self, base: Any, rank: int = 2) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.base = base
        inner, outer = base.in_features, base.out_features
        self.down = nn.Parameter(torch.randn(rank, inner, dtype=torch.float64))
        self.up = nn.Parameter(torch.randn(outer, rank, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + functional.linear(functional.linear(x, self.down), self.up)

    def merge(self) -> nn.Module:
        with torch.no_grad():
            self.base.weight += self.up @ self.down  # pyright: ignore
        return self.base


def adapt(*names: str) -> Change:
    return lambda model: [setattr(model, name, Adapter(getattr(model, name))) for name in names]


def merge(*names: str) -> Change:
    return lambda model: [setattr(model, name, getattr(model, name).merge()) for name in names]


@case("changes", MLP, call(), call(before=adapt("up")), expect="equal_or_refused")
class AdapterOnColumns(Mlp):
    """A colwise layer is wrapped."""


@case("changes", MLP, call(), call(before=adapt("down")), expect="equal_or_refused")
class AdapterOnRows(Mlp):
    """A rowwise layer is wrapped."""


@case(
    "changes", ATTENTION, call(), call(before=adapt("q", "v")), call(before=merge("q", "v")), expect="equal_or_refused"
)
class AdapterMerged(Attention):
    """Queries and values are wrapped, then merged."""


@case(
    "changes",
    MLP,
    call(),
    call(before=adapt("up", "down")),
    call(before=merge("up", "down")),
    call(),
    expect="equal_or_refused",
)
class AdapterMergedBoth(Mlp):
    """Both layers, wrapped and merged."""


@case("changes", MLP, call(before=adapt("up")), call(), expect="equal_or_refused")
class AdapterBeforeFirstCall(Mlp):
    """Wrapped before the first call."""


def _swap(model: nn.Module) -> None:
    torch.manual_seed(8)
    model.up = nn.Linear(D, WIDE, dtype=torch.float64)


@case("changes", MLP, call(), call(before=_swap), expect="equal_or_refused")
class SwapsLayer(Mlp):
    """A layer is replaced by a new one."""


class Two(nn.Module):
    """Two blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


PLAN = {f"layers.*.{name}": style for name, style in MLP.items()}


@case("changes", PLAN, call(), call(before=lambda model: model.layers.pop(1)), expect="equal_or_refused")
class DropsLayer(Two):
    """A layer is cut off."""


@case(
    "changes", PLAN, call(), call(before=lambda model: model.layers.append(model.layers[0])), expect="equal_or_refused"
)
class RepeatsLayer(Two):
    """A layer is run twice."""


@case(
    "changes", PLAN, call(), call(before=lambda model: model.layers.append(Mlp().double())), expect="equal_or_refused"
)
class AddsLayer(Two):
    """A stock layer is added."""


def _add_seeded(model: nn.Module) -> None:
    torch.manual_seed(9)
    model.layers.append(Mlp().double())  # pyright: ignore


@case(
    "changes",
    PLAN,
    call(),
    call(before=_add_seeded),
    call(before=lambda model: model.layers.insert(0, nn.ReLU())),
    expect="equal_or_refused",
)
class AddsLayers(Two):
    """Stock layers are added at the end and in front."""


@case(
    "changes",
    PLAN,
    call(),
    call(before=lambda model: setattr(model.layers[1], "forward", model.layers[0].forward)),
    expect="equal_or_refused",
)
class PatchesForward(Two):
    """A forward is patched after `parallelize`."""


def _hook(name: str, kind: str) -> Change:
    def clamp(module: nn.Module, *values: Any) -> Any:
        value = values[-1]
        return value.clamp(-0.1, 0.1) if isinstance(value, Tensor) else tuple(v.clamp(-0.1, 0.1) for v in value)

    def mean(module: nn.Module, arguments: Any) -> Any:
        return (arguments[0] - arguments[0].mean(-1, keepdim=True),)

    def register(model: nn.Module) -> None:
        module = model.get_submodule(name)
        getattr(module, f"register_forward_{kind}")(mean if kind == "pre_hook" else clamp)

    return register


@case("changes", MLP, call(), call(before=_hook("down", "hook")), expect="equal_or_refused")
class HookOnRows(Mlp):
    """A forward hook that clamps what a rowwise layer gives."""


@case("changes", MLP, call(), call(before=_hook("down", "pre_hook")), expect="equal_or_refused")
class PreHookOnRows(Mlp):
    """A pre-hook that takes the mean of what a rowwise layer gets."""


@case("changes", MLP, call(), call(before=_hook("up", "hook")), expect="equal_or_refused")
class HookOnColumns(Mlp):
    """A forward hook that clamps what a colwise layer gives."""


@case("changes", MLP, call(), call(before=_hook("", "hook")))
class HookOnRoot(Mlp):
    """A forward hook on the model itself."""


class Records:
    """What a feature extractor does."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def hang(self, model: nn.Module) -> None:
        model.get_submodule("up").register_forward_hook(self)

    def __call__(self, module: nn.Module, arguments: Any, result: Tensor) -> None:
        module.mean = result.detach().mean()  # pyright: ignore


@case("changes", MLP, call(), call(before=Records().hang), call(), expect="equal_or_refused")
class RecordsFeatures(Mlp):
    """A hook that writes down a statistic of split features."""


@case(
    "changes",
    MLP,
    call(),
    call(before=lambda model: nn.utils.parametrizations.weight_norm(model.up)),
    expect="equal_or_refused",
)
class ParametrisesLater(Mlp):
    """A parametrisation is added to a split weight."""


def _tie(model: nn.Module) -> None:
    model.last.weight = model.down.weight  # pyright: ignore


@case(
    "changes",
    {"up": "colwise", "down": "rowwise", "last": "colwise"},
    call(),
    call(before=_tie),
    expect="equal_or_refused",
)
class TiesLater(nn.Module):
    """Two weights of one size, split in different ways, are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.down(self.up(x).relu()))


def _fresh_weight(model: nn.Module) -> None:
    torch.manual_seed(4)
    model.up.weight = nn.Parameter(torch.randn(WIDE, D, dtype=torch.float64))  # pyright: ignore


@case("changes", MLP, call(), call(before=_fresh_weight), expect="equal_or_refused")
class FreshWeight(Mlp):
    """A parameter is replaced by a plain one."""


def _fill(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
        model.get_parameter("down.bias").zero_()


@case("changes", MLP, call(), call(before=_fill))
class FillsParameters(Mlp):
    """Parameters are changed in place."""


def _prune(model: nn.Module) -> None:
    from torch.nn.utils import prune

    prune.custom_from_mask(model.down, "weight", (torch.arange(D * WIDE).view(D, WIDE) % 3 > 0).double())


@case("changes", MLP, call(), call(before=_prune), expect="equal_or_refused")
class PrunesLater(Mlp):
    """torch's pruning: a mask in a buffer, and a pre-hook."""


@case(
    "changes",
    MLP,
    call(),
    call(before=lambda model: model.up.register_parameter("bias", None)),
    expect="equal_or_refused",
)
class DropsBias(Mlp):
    """A bias is taken away."""


def _to_eval_and_back(model: nn.Module) -> None:
    model.eval().train()


@case("changes", MLP, call(), call(before=_to_eval_and_back))
class ModeAndBack(Mlp):
    """Evaluation and back."""


@case(
    "changes",
    MLP,
    call(),
    call(before=lambda model: model.requires_grad_(False)),
    call(before=lambda model: model.requires_grad_(True)),
    expect="equal_or_refused",
)
class FreezesAll(Mlp):
    """All is frozen, then thawed."""


class CopiesItself(Mlp):
    """A copy of the model's own layer is called as well, as a teacher."""

    teacher: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.teacher is None else y - self.teacher[0](x).detach()


def _teach(model: Any) -> None:
    model.teacher = [copy.deepcopy(model)]


case("changes", MLP, call(), call(before=_teach), expect="equal_or_refused")(CopiesItself)


def _through_pickle(model: nn.Module) -> None:
    data = io.BytesIO()
    torch.save({name: value for name, value in model.state_dict().items()}, data)
    data.seek(0)
    model.load_state_dict(torch.load(data, weights_only=False))


@case("changes", MLP, call(), call(before=_through_pickle))
class SavesAndLoads(Mlp):
    """A state_dict through a file."""
