"""Gradients that aren't the forward's derivative: functions, hooks, and bodies that take gradients themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.battery.case import ATTENTION, MLP, WIDE, Attention, D, Mlp, add, call, case, t

CALLS = (call(), call(lambda: (t(1, 9, D),)), call(lambda: (t(3, 6, D, grad=False),)))


class NormalisedGradient(Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / (gradient.norm(dim=-1, keepdim=True) + 1)


class DividedGradient(Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / gradient.shape[-1]


class ClampedGradient(Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.clamp(-0.05, 0.05)


class StraightThrough(Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


class Reversed(Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -0.3 * gradient


class SavedSwish(Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h * h.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (h,) = ctx.saved_tensors
        s = h.sigmoid()
        return gradient * (s + h * s * (1 - s))


class SavedSize(Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.width = h.shape[-1]
        return h * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * (ctx.width**0.5)


class OwnLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, (gradient.flatten(0, 1).T @ x.flatten(0, 1)).clamp(-1, 1)


class Applied(Mlp):
    """Applies one of the functions between the two linear layers."""

    function: Any = None

    def middle(self, h: Tensor) -> Tensor:
        return self.function.apply(h).tanh()


@case("backward", MLP, *CALLS, expect="equal_or_refused")
class FunctionNormalises(Applied):
    function = NormalisedGradient


@case("backward", MLP, *CALLS, expect="equal_or_refused")
class FunctionDividesBySize(Applied):
    function = DividedGradient


@case("backward", MLP, *CALLS, expect="equal_or_refused")
class FunctionSavesSize(Applied):
    function = SavedSize


@case("backward", MLP, *CALLS)
class FunctionClampsWhole(Applied):
    function = ClampedGradient


@case("backward", MLP, *CALLS)
class FunctionStraightThrough(Applied):
    function = StraightThrough


@case("backward", MLP, *CALLS)
class FunctionReverses(Applied):
    function = Reversed


@case("backward", MLP, *CALLS)
class FunctionSwish(Applied):
    function = SavedSwish


@case("backward", MLP, *CALLS, expect="equal_or_refused")
class FunctionClampsPartial(Mlp):
    """In front of a colwise layer the gradient is a partial sum."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(ClampedGradient.apply(x * 3))


@case("backward", MLP, *CALLS, expect="equal_or_refused")
class FunctionNormalisesPartial(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(NormalisedGradient.apply(x * 3))


@case("backward", MLP, *CALLS)
class FunctionReversesPartial(Mlp):
    """Linear in a partial sum, so that it may stay one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Reversed.apply(x * 3)) + x


@case("backward", {"weight": "colwise", "down": "rowwise"}, *CALLS, expect="equal_or_refused")
class FunctionIsLinear(nn.Module):
    """A linear layer with a backward of its own that clamps what it makes for the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.down = nn.Parameter(torch.randn(WIDE, D) / 4), nn.Linear(WIDE, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(OwnLinear.apply(x, self.weight).relu())


@case("backward", MLP, *CALLS, expect="equal_or_refused")
class HookClampsSplit(Mlp):
    """A hook on a split tensor that takes its largest number."""

    def middle(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient / (1 + gradient.abs().max()))
        return h.relu()


@case("backward", MLP, *CALLS, expect="equal_or_refused")
class HookClampsPartial(Mlp):
    """A hook in front of a colwise layer, on what is a partial sum there."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return super().forward(y)


@case("backward", MLP, *CALLS)
class HookScales(Mlp):
    """A hook that is linear."""

    def middle(self, h: Tensor) -> Tensor:
        h = h.relu()
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 0.25)
        return h


@case("backward", MLP, *CALLS, expect="equal_or_refused")
class HookOnWeight(Mlp):
    """A forward that hangs a hook on a parameter: the rows' mean of its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.up.weight * 1.0
        if weight.requires_grad:
            weight.register_hook(lambda gradient: gradient - gradient.mean(0, keepdim=True))
        return self.down(functional.linear(x, weight, self.up.bias).relu())


@case("backward", MLP, *CALLS, expect="equal_or_refused")
class BackwardHookOnModule(Mlp):
    """A full backward hook that changes what leaves the colwise layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up.register_full_backward_hook(lambda module, inner, outer: (inner[0].clamp(-0.05, 0.05),))


@case("backward", MLP, *CALLS, expect="equal_or_refused")
class BackwardPreHookOnModule(Mlp):
    """A backward pre-hook that normalises what comes into the colwise layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up.register_full_backward_pre_hook(
            lambda module, outer: (outer[0] / (1 + outer[0].norm(dim=-1, keepdim=True)),)
        )


@case("backward", MLP, *CALLS, expect="equal_or_refused")
class BackwardPreHookOnDown(Mlp):
    """A backward pre-hook of the rowwise layer, where the gradient is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.down.register_full_backward_pre_hook(lambda module, outer: (outer[0].clamp(-0.2, 0.2),))


def _halve(module: nn.Module, inner: Any, outer: Any) -> Any:
    return (None if inner[0] is None else inner[0] * 0.5,)


@case("backward", MLP, *CALLS, expect="equal_or_refused")
class BackwardHookOnRoot(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(_halve)


@case("backward", MLP, *CALLS, expect="equal_or_refused")
class ParameterHook(Mlp):
    """A hook on a replicated parameter, before the model is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.down.bias.register_hook(lambda gradient: gradient.clamp(-0.3, 0.3))


@case("backward", MLP, *CALLS, expect="equal_or_refused")
class SplitParameterHook(Mlp):
    """A hook on a split parameter that takes a norm over all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up.weight.register_hook(lambda gradient: gradient / (1 + gradient.norm()))


def _clip_after(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))


@case("backward", MLP, call(), call(before=_clip_after), call())
class PostAccumulateHooks(Mlp):
    """Hooks that a user hangs on the sharded model's parameters."""


@case("backward", MLP, *CALLS, expect="equal_or_refused")
class GradientInForward(Mlp):
    """A gradient that is taken inside of a forward: a force from an energy."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = super().forward(x).pow(2).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force


@case("backward", MLP, *CALLS, expect="equal_or_refused")
class GradientPenaltyInBody(Mlp):
    """A gradient inside of a body, with respect to split features."""

    def middle(self, h: Tensor) -> Tensor:
        with torch.enable_grad():
            h = h if h.requires_grad else h.detach().requires_grad_()
            (slope,) = torch.autograd.grad(h.tanh().sum(), h, create_graph=True)
        return h * slope


@case("backward", MLP, *CALLS, expect="equal_or_refused")
class VectorJacobian(Mlp):
    """torch.func inside of a body."""

    def middle(self, h: Tensor) -> Tensor:
        value, slope = torch.func.jvp(torch.tanh, (h,), (torch.ones_like(h),))[:2]
        return value + slope


@case("backward", MLP, *CALLS)
class Checkpointed(Mlp):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


@case("backward", ATTENTION, *CALLS, expect="equal_or_refused")
class CheckpointedReentrant(Attention):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=True)


@case("backward", MLP, *CALLS)
class DetachedBranch(Mlp):
    """A gate whose own gradient is stopped."""

    def middle(self, h: Tensor) -> Tensor:
        return h.detach().sigmoid() * h + (h.relu() - h.detach())


@case("backward", MLP, *CALLS)
class NoGradPart(Mlp):
    """A statistic without a gradient, on what comes in."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().amax(-1, keepdim=True)
        return super().forward(x / (scale + 1))


def _freeze(name: str, wants: bool = False) -> Any:
    return lambda model: model.get_parameter(name).requires_grad_(wants)


@case("backward", MLP, call(), call(before=_freeze("up.weight")), call(before=_freeze("up.weight", True)), call())
class FrozenLater(Mlp):
    """A weight that is frozen for a while."""


@case("backward", MLP, call(), call(under=torch.no_grad), call(under=torch.inference_mode), call(train=False), call())
class WithoutGradient(Mlp):
    """Gradient modes in turn."""


@case("backward", MLP, call(under=torch.no_grad), call(), call(lambda: (t(3, 6, D, grad=False),)))
class ExampleWithoutGradient(Mlp):
    """The first call wants no gradient of the argument; later ones do."""


@case("backward", MLP, *CALLS, expect="equal_or_refused")
class RetainedGradient(Mlp):
    """A body that asks for the gradient of what it makes."""

    def middle(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.retain_grad()
        return h.relu()


@case("backward", MLP, *CALLS, expect="equal_or_refused")
class SavedTensorsHooks(Mlp):
    """Saved tensors that are rounded, whole rows at a time."""

    def middle(self, h: Tensor) -> Tensor:
        def pack(tensor: Tensor) -> Tensor:
            return tensor - tensor.mean(-1, keepdim=True) if tensor.dim() == 3 else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return h.tanh()


class NewStyle(Function):
    @staticmethod
    def forward(h: Tensor, scale: float) -> Tensor:
        return h * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.scale / gradient.abs().amax(-1, keepdim=True), None


class OwnSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        y = h.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return y * (gradient - (gradient * y).sum(-1, keepdim=True))


class CountsZeros(Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.where(gradient > gradient.mean(), gradient, torch.zeros_like(gradient))


class ReadsGradient(Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / gradient.norm().item() if gradient.norm() > 1e-3 else gradient


class NoisyGradient(Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * (torch.rand_like(gradient) > 0.5)


class BySizeBackward(Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient if gradient.shape[-1] >= WIDE else gradient * 2


class DropsGradient(Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None


class LastTokensGradient(Function):
    """A gradient that is changed in place, by tokens."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.clone()
        gradient[:, :-1] = 0
        return gradient


class LogitsLoss(Function):
    """A loss whose gradient is made in the forward, as fused cross-entropies do."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y.softmax(-1) - 1 / y.shape[-1])
        return y.logsumexp(-1) - y.mean(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.saved_tensors[0] * gradient[..., None]


class AppliesNew(Mlp):
    def middle(self, h: Tensor) -> Tensor:
        return NewStyle.apply(h, 0.5)


FUNCTIONS: dict[str, Any] = {
    "own_softmax": OwnSoftmax,
    "counts_zeros": CountsZeros,
    "reads_gradient": ReadsGradient,
    "noisy": NoisyGradient,
    "by_size": BySizeBackward,
    "drops": DropsGradient,
    "last_tokens": LastTokensGradient,
    "logits_loss": LogitsLoss,
}
case("backward", MLP, *CALLS, expect="equal_or_refused")(AppliesNew)
for name, function in FUNCTIONS.items():
    if name != "logits_loss":
        kind = type(f"Split{function.__name__}", (Applied,), {"function": function})
        add(f"split_function_{name}", "backward", kind, MLP, CALLS, "equal_or_refused")


class WrapsEnds(Mlp):
    """Applies a function in front of the block, where the gradient is partial, or behind it, where all is whole."""

    def __init__(self, front: Any = None, back: Any = None) -> None:
        super().__init__()
        self.front, self.back = front, back

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x if self.front is None else self.front.apply(x))
        return y if self.back is None else self.back.apply(y)


for name, function in FUNCTIONS.items():
    if name != "logits_loss":
        add(f"front_function_{name}", "backward", lambda f=function: WrapsEnds(f), MLP, CALLS, "equal_or_refused")
    add(f"back_function_{name}", "backward", lambda f=function: WrapsEnds(None, f), MLP, CALLS, "equal_or_refused")


def _on_output(name: str, change: Any) -> Any:
    """Forward hooks that hang a tensor hook on what a module gives."""

    def hang(module: nn.Module, arguments: Any, result: Tensor) -> None:
        if result.requires_grad:
            result.register_hook(change)

    def build() -> nn.Module:
        model = Mlp()
        model.get_submodule(name).register_forward_hook(hang)
        return model

    return build


CHANGES: dict[str, Any] = {
    "clamps": lambda gradient: gradient.clamp(-0.1, 0.1),
    "centres": lambda gradient: gradient - gradient.mean(-1, keepdim=True),
    "squares": lambda gradient: gradient * gradient.abs(),
    "by_size": lambda gradient: gradient / gradient.shape[-1],
}
for name, change in CHANGES.items():
    for module in ("up", "down", ""):
        add(
            f"output_hook_{name}_{module or 'root'}",
            "backward",
            _on_output(module, change),
            MLP,
            CALLS,
            "equal_or_refused",
        )


class OnlyInTraining(Mlp):
    """A function that is applied in training alone."""

    def middle(self, h: Tensor) -> Tensor:
        return NormalisedGradient.apply(h) if self.training and h.requires_grad else h.relu()


case("backward", MLP, call(train=False), call(), call(under=torch.no_grad), call(), expect="equal_or_refused")(
    OnlyInTraining
)


class LateHook(Mlp):
    """A hook that a later forward hangs up, depending on a mode that isn't the module's."""

    def middle(self, h: Tensor) -> Tensor:
        if torch.is_grad_enabled() and h.shape[1] > 8:
            h.register_hook(lambda gradient: gradient / (1 + gradient.norm(dim=-1, keepdim=True)))
        return h.tanh()


case("backward", MLP, call(), call(lambda: (t(2, 12, D),)), expect="equal_or_refused")(LateHook)


class HookOnce(Mlp):
    """A hook that is taken away in its own call."""

    def middle(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            handle = h.register_hook(lambda gradient: gradient * 2)
            handle.remove()
        return h.tanh()


case("backward", MLP, *CALLS)(HookOnce)


class LogsNorm(Mlp):
    """A hook that writes down a norm of a split gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = 0.0

    def middle(self, h: Tensor) -> Tensor:
        def write(gradient: Tensor) -> None:
            self.norm = float(gradient.norm())

        if h.requires_grad:
            h.register_hook(write)
        return h.tanh()


case("backward", MLP, *CALLS, expect="equal_or_refused")(LogsNorm)


class ScalesAndDetaches(Mlp):
    """Half of a gradient, by a detached difference."""

    def middle(self, h: Tensor) -> Tensor:
        return h * 0.5 + (h * 0.5).detach()

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + (x * 2 - x).detach())


case("backward", MLP, *CALLS)(ScalesAndDetaches)


class SecondRoot(Mlp):
    """Two results, of which one is made of the other without its gradient."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return {"y": y, "loss": (y.detach() - x).pow(2).mean(), "both": y.sum() * x.detach().sum()}


case("backward", MLP, *CALLS)(SecondRoot)


class GradientMultiplier(Mlp):
    """A parameter without data dependence: its gradient is the sum of another one's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(WIDE))

    def middle(self, h: Tensor) -> Tensor:
        return (h * self.scale + self.shift).tanh()


case("backward", MLP, *CALLS)(GradientMultiplier)
