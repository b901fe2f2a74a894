"""What owners do with parameters outside of a forward: edits, draws, penalties, gradients, optimizers of their own.

Each case takes a model, stock or sharded, and returns tensors, or None; it may change the model's parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.functional import hvp, jacobian
from torch.nn import functional
from torch.nn.utils import fuse_linear_bn_weights, prune, skip_init, stateless
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

Case = Callable[[Any], Any]
DOUBLE = torch.float64


@torch.library.custom_op("tests_owner::halved", mutates_args=())
def halved(tensor: Tensor) -> Tensor:
    """An operator of a user's own."""
    return tensor / 2


@torch.library.custom_op("tests_owner::halve_", mutates_args=("tensor",))
def halve(tensor: Tensor) -> None:
    """Another one, which works in place."""
    tensor.div_(2)


class Block(nn.Module):
    """A norm, a column and a row; `up` and `gate` are packed in one weight where `packed`."""

    def __init__(self, inner: int, packed: bool = False) -> None:
        super().__init__()
        self.packed = packed
        self.norm, self.up = nn.LayerNorm(16), nn.Linear(16, 2 * inner if packed else inner)
        self.down = nn.Linear(inner, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        if self.packed:
            gate, h = h.chunk(2, -1)
            h = h * gate.sigmoid()
        return x + self.down(h.relu())


class Shared(Block):
    """A second block with the weight of the first."""

    def __init__(self, inner: int) -> None:
        super().__init__(inner)
        self.second = nn.Linear(16, inner)
        self.second.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.down(self.second(x).tanh())


def batch(seed: int) -> Tensor:
    return torch.randn(4, 8, 16, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def backward(model: nn.Module, seed: int = 3) -> None:
    model.zero_grad()
    model(batch(seed)).square().mean().backward()


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    for seed in range(steps):
        backward(model, seed)
        optimizer.step()


def like(tensor: Tensor) -> Tensor:
    """A plain tensor of a parameter's shape."""
    return torch.arange(tensor.numel(), dtype=tensor.dtype).view(tensor.shape) / tensor.numel()


def edited(edit: Case) -> Case:
    """Without gradients; what it returns is of no matter."""

    def case(model: Any) -> None:
        torch.manual_seed(11)
        with torch.no_grad():
            edit(model)

    return case


def set_data(model: Any) -> None:
    model.up.weight.data = like(model.up.weight)


def put(tensor: Any, place: Any, value: float) -> None:
    tensor[place] = value


def loaded_by_swapping(model: Any) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict({name: like(held) for name, held in model.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def divided(rows: Any) -> None:
    for row in rows:
        row.div_(row.norm())


def in_inference_mode(model: Any, use: Case) -> Any:
    with torch.inference_mode():
        return use(model)


def pruned(model: Any, layer: nn.Module) -> None:
    """With the mask made permanent."""
    assert layer is model.up
    prune.remove(layer, "weight")


EDITS: dict[str, Case] = {
    "a diagonal": lambda m: m.up.weight.diagonal().fill_(0.0),
    "a row": lambda m: m.up.weight[20].zero_(),
    "rows": lambda m: m.up.weight[3:20].mul_(2),
    "a column": lambda m: m.down.weight[:, 5].fill_(3.0),
    "a transpose": lambda m: m.up.weight.t().mul_(torch.arange(len(m.up.weight), dtype=DOUBLE)),
    "a transpose's rows": lambda m: m.up.weight.T[3:5].add_(1),
    "entries": lambda m: put(m.up.weight, [1, 20], 0.0),
    "entries of a dim": lambda m: put(m.up.weight, (slice(None), [1, 3]), 5.0),
    "a slice of data": lambda m: put(m.up.bias.data, slice(10, 20), 0.0),
    "each row": lambda m: divided(m.up.weight),
    "unbind": lambda m: divided(m.up.weight.unbind(0)),
    "chunks": lambda m: [part.mul_(i) for i, part in enumerate(m.up.weight.chunk(3))],
    "flat": lambda m: m.up.weight.view(-1)[7:9].fill_(1),
    "data": set_data,
    "plain added": lambda m: m.up.weight.add_(like(m.up.weight)),
    "plain added to data": lambda m: m.up.weight.data.add_(like(m.up.weight)),
    "plain copied": lambda m: m.up.weight.copy_(like(m.up.weight)),
    "another parameter": lambda m: m.up.weight.add_(m.up.bias[:, None]),
    "norms of rows": lambda m: m.up.weight.div_(m.up.weight.norm(dim=1, keepdim=True).clamp_(1e-3)),
    "renorm": lambda m: m.up.weight.renorm_(2, 0, 0.1),
    "index_add": lambda m: m.up.weight.index_add_(0, torch.tensor([1, 20]), torch.ones(2, 16, dtype=DOUBLE)),
    "scatter": lambda m: m.up.weight.scatter_(0, torch.tensor([[20] * 16]), 2.0),
    "masked_fill": lambda m: m.up.weight.masked_fill_(torch.arange(16) > 8, 0.0),
    "an operator of one's own": lambda m: halve(m.up.weight),
    "sent from the first rank": lambda m: dist.broadcast(m.up.weight.mul_(2), 0),
    "rolled": lambda m: m.up.weight.copy_(m.up.weight.roll(3, 0)),
    "orthogonal": lambda m: m.up.weight.copy_(torch.linalg.qr(m.up.weight)[0]),
    "addmm": lambda m: m.up.weight.addmm_(
        torch.ones(len(m.up.weight), 2, dtype=DOUBLE), torch.ones(2, 16, dtype=DOUBLE)
    ),
    "smallest": lambda m: m.up.weight.mul_(m.up.weight.abs() > m.up.weight.abs().flatten().kthvalue(50)[0]),
    "normal": lambda m: m.up.weight.normal_(),
    "uniform": lambda m: m.down.weight.uniform_(-1, 1),
    "noise": lambda m: [p.add_(torch.randn_like(p) * 0.1) for p in m.parameters()],
    "noise of a shape": lambda m: [p.add_(torch.randn(p.shape, dtype=p.dtype) * 0.1) for p in m.parameters()],
    "vector": lambda m: nn.utils.vector_to_parameters(
        torch.arange(sum(p.numel() for p in m.parameters()), dtype=DOUBLE), m.parameters()
    ),
    "vector of its own": lambda m: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(m.parameters()) * 2, m.parameters()
    ),
    "data of another": lambda m: setattr(m.up.weight, "data", m.up.weight.detach().clone() * 3),
    "lists": lambda m: torch._foreach_mul_([*m.parameters()], [like(p) for p in m.parameters()]),  # pyright: ignore
    "load": lambda m: m.load_state_dict({name: held * 2 for name, held in m.state_dict().items()}),
    "load by swapping": loaded_by_swapping,
    **{
        name: lambda m, name=name: getattr(nn.init, name)(m.up.weight)
        for name in (
            "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "orthogonal_", "trunc_normal_",
            "normal_", "uniform_", "eye_", "zeros_", "ones_",
        )
    },
    "constant_": lambda m: nn.init.constant_(m.up.weight, 2.0),
    "rows of the data at once": lambda m: torch._foreach_mul_([m.up.weight.data[i] for i in (0, 5, 20)], 2.0),  # pyright: ignore
    "all and a row": lambda m: torch._foreach_add_([m.up.weight, m.up.weight[0]], 1.0),  # pyright: ignore
    "larger lists": lambda m: m.up.weight.copy_(
        torch._foreach_mul([m.up.bias], [torch.ones(16, 1, dtype=DOUBLE)])[0].t()  # pyright: ignore
    ),
    "into a row": lambda m: torch.sum(m.up.weight, 0, out=m.up.weight.data[1]),
    "of all ranks": lambda m: dist.all_reduce(m.up.weight.data.view(-1)),
    "unsafe chunks": lambda m: [part.mul_(i) for i, part in enumerate(m.up.weight.unsafe_chunk(3))],
    "by a function": lambda m: m.up.weight.data.apply_(lambda number: number * 2),
    "in inference mode": lambda m: in_inference_mode(m, lambda held: held.up.weight.data[3].zero_()),
    "pruned by entries": lambda m: pruned(m, prune.l1_unstructured(m.up, "weight", 0.3)),
    "pruned by rows": lambda m: pruned(m, prune.ln_structured(m.up, "weight", 0.3, n=2, dim=0)),
    "pruned by a mask": lambda m: pruned(m, prune.custom_from_mask(m.up, "weight", like(m.up.weight) > 0.3)),
    "pruned at random": lambda m: pruned(m, prune.random_unstructured(m.up, "weight", 0.3)),
    "sparse_": lambda m: nn.init.sparse_(m.up.weight, 0.3),
}  # fmt: skip


def of_a_norm(bias: Tensor) -> tuple[Tensor, Tensor, float, Tensor, Tensor]:
    return like(bias), like(bias), 1e-5, like(bias), like(bias)


def detached(model: Any) -> dict[str, Tensor]:
    return {name: held.detach() for name, held in model.named_parameters()}


READS: dict[str, Case] = {
    "norms": lambda m: [m.up.weight.norm(order) for order in (2, 1, 0, -1, float("inf"), -float("inf"))],
    "sums": lambda m: [m.up.weight.sum(), m.up.weight.mean(), m.up.weight.sum(0), m.up.weight.std(), m.up.weight.max()],
    "a number": lambda m: torch.tensor(m.up.weight.norm().item()),
    "numbers": lambda m: torch.tensor(m.up.weight[3].tolist()),
    "numpy": lambda m: torch.from_numpy(m.up.weight[2:4].detach().numpy()),
    "lists": lambda m: torch.tensor([m.up.weight.tolist(), (m.up.weight * 2).tolist(), m.up.weight[:].tolist()]),
    "arrays": lambda m: torch.tensor(numpy.asarray(m.up.weight.detach()) * m.up.weight.detach().numpy()),
    "formats": lambda m: torch.tensor([float(f"{n:.3f}") for n in (m.up.weight[3, 4], m.up.weight.detach().sum())]),
    "formats of norms": lambda m: torch.tensor(float(f"{nn.utils.get_total_norm([*m.parameters()]):.3f}")),
    "inference mode": lambda m: in_inference_mode(
        m,
        lambda held: torch.tensor(
            [float(held.up.weight[0, 0]), *held.up.weight[1].tolist(), float(held.up.weight.t().sum())]
        ),
    ),
    "an entry": lambda m: m.up.weight[3, 4],
    "some": lambda m: [m.up.weight[torch.tensor([1, 20])], m.up.weight[m.up.weight > 0], m.up.weight.split(10)[1]],
    "order": lambda m: [m.up.weight.topk(3)[0], m.up.weight.sort(dim=0)[0], m.up.weight.median(), m.up.weight.argmax()],
    "products": lambda m: [m.up.weight @ m.up.weight.t(), torch.einsum("ab,cb->ac", m.up.weight, m.up.weight)],
    "flattened": lambda m: [
        torch.cat([p.flatten() for p in m.parameters()]), nn.utils.parameters_to_vector(m.parameters())
    ],
    "stacked": lambda m: torch.stack([p.norm() for p in m.parameters()]),
    "a layer's": lambda m: functional.linear(torch.ones(3, 16, dtype=DOUBLE), m.up.weight, m.up.bias),
    "decomposed": lambda m: torch.linalg.svdvals(m.up.weight),
    "elementwise": lambda m: [
        torch.where(m.up.weight > 0, m.up.weight, torch.zeros_like(m.up.weight)), m.up.weight == m.up.weight,
        m.up.weight.float(), m.up.weight.round(), m.up.weight * m.up.bias[:, None],
    ],
    "moved": lambda m: [m.up.weight.cumsum(0), m.up.weight.flip(0), m.up.weight.unfold(0, 3, 2)],
    "compared": lambda m: torch.tensor(torch.allclose(m.up.weight, m.up.weight.detach().clone())),
    "into plain": lambda m: [
        torch.zeros(m.up.weight.shape, dtype=DOUBLE).lerp_(m.up.weight.detach(), 0.5),
        torch.zeros(m.up.weight.shape, dtype=DOUBLE).copy_(m.up.weight.detach()),
        torch.add(m.up.weight.detach(), 1, out=torch.empty(m.up.weight.shape, dtype=DOUBLE)),
    ],
    "copies": lambda m: copy.deepcopy([*m.parameters()]),
    "an operator of one's own": lambda m: [halved(m.up.weight.detach()), torch.ops.prims.cos(m.up.weight.detach())],
    "fused with a norm's": lambda m: [*fuse_linear_bn_weights(m.up.weight, m.up.bias, *of_a_norm(m.up.bias))],
    "beside a layer without numbers": lambda m: [skip_init(nn.Linear, 3, 4), m.up.weight][1:],
    "memory formats": lambda m: [
        *nn.utils.convert_conv2d_weight_memory_format(m, torch.channels_last).parameters(),
        *nn.utils.convert_conv3d_weight_memory_format(m, torch.channels_last_3d).parameters(),
    ],
    "a call with parameters": lambda m: torch.func.functional_call(m, dict(m.named_parameters()), (batch(2),)),
    "a call with changed ones": lambda m: [
        call(m, {name: held * 2 for name, held in m.named_parameters()}, (batch(2),))
        for call in (torch.func.functional_call, stateless.functional_call)
    ],
    "a call with one": lambda m: torch.func.functional_call(m, {"up.weight": m.up.weight * 2}, (batch(2),)),
    "func.grad": lambda m: [
        *torch.func.grad(lambda held: sum(t.square().sum() for t in held.values()))(detached(m)).values(),
        torch.func.grad(lambda weight: (weight @ weight.t()).square().sum())(m.up.weight.detach()),
    ],
    "func.vmap": lambda m: torch.func.vmap(torch.norm)(m.up.weight),
    "func.jvp": lambda m: [
        *torch.func.jvp(lambda weight: weight.square().sum(), (m.up.weight.detach(),), (like(m.up.weight),))
    ],
    "func.jacrev": lambda m: torch.func.jacrev(lambda weight: weight.sum(1))(m.up.weight.detach()),
    "func.hessian": lambda m: torch.func.hessian(lambda bias: (bias**3).sum())(m.up.bias.detach()),
    "a stack of models": lambda m: [*torch.func.stack_module_state([m, m])[0].values()],
    "autograd.functional": lambda m: [
        jacobian(lambda weight: weight.square().sum(0), m.up.weight.detach()),
        hvp(lambda bias: (bias**3).sum(), m.up.bias.detach(), like(m.up.bias))[1],
    ],
}  # fmt: skip

DRAWS: dict[str, Case] = {
    "randn_like": lambda m: torch.randn_like(m.up.weight),
    "rand_like": lambda m: torch.rand_like(m.down.weight),
    "bernoulli": lambda m: torch.bernoulli(m.up.weight.detach().abs().clamp(0, 1)),
    "dropout": lambda m: functional.dropout(m.up.weight, 0.5),
}


def drawn(draw: Case) -> Case:
    def case(model: Any) -> Any:
        torch.manual_seed(11)
        return draw(model)

    return case


# -- gradients --------------------------------------------------------------------------------------------------------
def gradients(model: Any) -> list[Any]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def after_backward(change: Case) -> Case:
    def case(model: Any) -> list[Any]:
        backward(model)
        made = change(model)
        return [*([made] if isinstance(made, Tensor) else []), *gradients(model)]

    return case


def total_norms(model: Any) -> list[Any]:
    backward(model)
    return [nn.utils.get_total_norm(gradients(model), order, foreach=True) for order in (1, 3.0, float("inf"))]


def set_gradient(model: Any) -> None:
    model.up.weight.grad = like(model.up.weight)


def clipped_by_unit(model: Any) -> None:
    """Adaptive clipping."""
    for p in model.parameters():
        limit = p.detach().norm(dim=-1, keepdim=True) / p.grad.norm(dim=-1, keepdim=True).clamp(min=1e-6)
        p.grad.mul_(limit.clamp(max=1.0))


def clipped_with_plain(model: Any) -> list[Any]:
    """With a head of the user's own beside the model."""
    backward(model)
    head = nn.Parameter(torch.ones(3, dtype=DOUBLE))
    head.grad = torch.ones(3, dtype=DOUBLE)
    return [nn.utils.clip_grad_norm_([*model.parameters(), head], 0.01), head.grad, *gradients(model)]


def hooked(model: Any) -> list[Any]:
    mask = (like(model.up.weight) > 0.3).double()
    handle = model.up.weight.register_hook(lambda gradient: gradient * mask)
    backward(model)
    handle.remove()
    return gradients(model)


def penalised(model: Any) -> list[Any]:
    model.zero_grad()
    weight = model.up.weight
    gram = weight @ weight.t() - torch.eye(len(weight), dtype=DOUBLE)
    loss = model(batch(3)).square().mean() + 0.1 * sum(p.square().sum() for p in model.parameters())
    loss = loss + 0.01 * weight.abs().sum() + 0.1 * gram.square().sum() + weight[20].norm()
    loss.backward()
    return [loss, *gradients(model)]


def penalties_alone(model: Any) -> list[Any]:
    model.zero_grad()
    for _ in range(2):
        (model.up.weight[20].norm() + model.up.weight.view(-1).square().sum() + model.down.weight.t().sum()).backward()
    model(batch(3)).square().mean().backward()
    return gradients(model)


def read_beside(model: Any) -> list[Any]:
    """A view that is read, and written nowhere, leaves alone what autograd has kept."""
    model.zero_grad()
    row, loss = torch.zeros(16, dtype=DOUBLE), (model.up.weight * model.up.weight).sum()
    with torch.no_grad():
        row.add_(model.up.weight[0])
    loss.backward()
    return [row, *gradients(model)]


def hooked_afterwards(model: Any) -> list[Any]:
    def tripled(parameter: Any) -> None:
        parameter.grad.mul_(3)

    handle = model.up.weight.register_post_accumulate_grad_hook(tripled)
    backward(model)
    handle.remove()
    return gradients(model)


def recomputed(model: Any) -> list[Any]:
    model.zero_grad()
    checkpoint(lambda weight: (weight @ weight.t()).square().sum(), model.up.weight, use_reentrant=False).backward()
    return gradients(model)


def twice(model: Any) -> list[Any]:
    model.zero_grad()
    (first,) = torch.autograd.grad((model.up.weight**3).sum(), model.up.weight, create_graph=True)
    first.square().sum().backward()
    return gradients(model)


def of_changed_ones(model: Any) -> list[Any]:
    """A step within a call, as of MAML."""
    held = dict(model.named_parameters())
    loss = torch.func.functional_call(model, held, (batch(1),)).square().mean()
    taken = torch.autograd.grad(loss, [*held.values()])
    stepped = {name: p - 0.1 * g for (name, p), g in zip(held.items(), taken, strict=True)}
    model.zero_grad()
    torch.func.functional_call(model, stepped, (batch(2),)).square().mean().backward()
    return gradients(model)


def of_a_vector(model: Any) -> list[Any]:
    model.zero_grad()
    nn.utils.parameters_to_vector(model.parameters()).square().sum().backward()
    return [nn.utils.parameters_to_vector(gradients(model)), *gradients(model)]


def taken(model: Any) -> list[Any]:
    weight, bias = model.up.weight, model.up.bias
    return [*torch.autograd.grad(weight.square().sum() + bias.sum(), [weight, bias])]


def of_complex_numbers(model: Any) -> list[Any]:
    model.zero_grad()
    weight = model.up.weight
    seen, made = torch.view_as_complex(weight.view(len(weight), 8, 2)), weight.to(torch.complex128) * (1 + 2j)
    ((seen * seen * seen.conj()).real.sum() + (made.conj() * made * made).imag.sum()).backward()
    return gradients(model)


GRADIENTS: dict[str, Case] = {
    "a row": after_backward(lambda m: m.up.weight.grad[20].zero_()),
    "rows": after_backward(lambda m: put(m.up.weight.grad, slice(0, 20), 0.0)),
    "a plain one": after_backward(set_gradient),
    "clipped": after_backward(lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.01)),
    "clipped by value": after_backward(lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.001)),
    "total norm": after_backward(lambda m: nn.utils.get_total_norm(gradients(m))),
    "total norms": total_norms,
    "clipped with a norm": after_backward(
        lambda m: nn.utils.clip_grads_with_norm_(m.parameters(), 0.01, nn.utils.get_total_norm(gradients(m)))
    ),
    "averaged by hand": after_backward(
        lambda m: [(dist.all_reduce(g), g.div_(dist.get_world_size())) for g in gradients(m)] and None
    ),
    "clipped by unit": after_backward(clipped_by_unit),
    "clipped with plain ones": clipped_with_plain,
    "hooks": hooked,
    "hooks afterwards": hooked_afterwards,
    "recomputed": recomputed,
    "twice": twice,
    "of changed ones": of_changed_ones,
    "of a vector": of_a_vector,
    "penalties": penalised,
    "penalties alone": penalties_alone,
    "read beside": read_beside,
    "taken": taken,
    "of complex numbers": of_complex_numbers,
}


# -- optimizers -------------------------------------------------------------------------------------------------------
def lion(model: Any) -> None:
    states: dict[Any, Any] = {}
    for seed in range(3):
        backward(model, seed)
        with torch.no_grad():
            for p in model.parameters():
                state = states.setdefault(p, torch.zeros_like(p))
                p.add_(state.clone().mul_(0.9).add_(p.grad, alpha=0.1).sign_(), alpha=-0.01)
                state.mul_(0.99).add_(p.grad, alpha=0.01)


def lamb(model: Any) -> None:
    states: dict[Any, Any] = {}
    for seed in range(3):
        backward(model, seed)
        for p in model.parameters():
            first, second = states.setdefault(p, (torch.zeros_like(p.data), torch.zeros_like(p.data)))
            gradient = p.grad.data
            first.mul_(0.9).add_(gradient, alpha=0.1)
            second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            step = (first / second.sqrt().add(1e-6)).add_(p.data, alpha=0.01)
            norms = p.data.pow(2).sum().sqrt().clamp(0, 10), step.pow(2).sum().sqrt()
            ratio = 1.0 if norms[0] == 0 or norms[1] == 0 else float(norms[0] / norms[1])
            p.data.add_(step, alpha=-0.01 * ratio)


def shampoo(model: Any) -> None:
    states: dict[Any, dict[int, Tensor]] = {}
    for seed in range(3):
        backward(model, seed)
        for p in model.parameters():
            gradient, shape = p.grad.data, p.grad.size()
            state = states.setdefault(p, {})
            for place, dim in enumerate(shape):
                held = state.setdefault(place, 1e-4 * torch.eye(dim, dtype=gradient.dtype))
                gradient = gradient.transpose(0, place).contiguous()
                turned = gradient.size()
                gradient = gradient.view(dim, -1)
                held.add_(gradient @ gradient.t())
                values, vectors = torch.linalg.eigh(held)
                root = vectors @ values.pow(-1 / len(shape)).diag() @ vectors.t()
                gradient = (root @ gradient).view(turned).transpose(0, place)
            p.data.add_(gradient, alpha=-0.01)


def adafactor(model: Any) -> None:
    states: dict[Any, dict[str, Tensor]] = {}
    for seed in range(3):
        backward(model, seed)
        for p in model.parameters():
            gradient, state = p.grad, states.setdefault(p, {})
            update = gradient**2 + 1e-30
            if gradient.dim() > 1:
                rows = state.setdefault("rows", torch.zeros(gradient.shape[:-1], dtype=DOUBLE))
                columns = state.setdefault("columns", torch.zeros(gradient.shape[-1:], dtype=DOUBLE))
                rows.mul_(0.9).add_(update.mean(-1), alpha=0.1)
                columns.mul_(0.9).add_(update.mean(-2), alpha=0.1)
                scale = (rows / rows.mean(-1, keepdim=True)).rsqrt_().unsqueeze(-1)
                update = scale * columns.unsqueeze(-2).rsqrt() * gradient
            else:
                held = state.setdefault("all", torch.zeros_like(gradient))
                update = held.mul_(0.9).add_(update, alpha=0.1).rsqrt() * gradient
            update.div_((update.norm(2) / update.numel() ** 0.5).clamp_(min=1.0))
            p.data.add_(-0.01 * update)


def muon(model: Any) -> None:
    states: dict[Any, Tensor] = {}
    for seed in range(3):
        backward(model, seed)
        for p in model.parameters():
            if p.dim() != 2:
                continue
            state = states.setdefault(p, torch.zeros_like(p.grad))
            state.mul_(0.95).add_(p.grad)
            update = p.grad.add(state, alpha=0.95)
            tall = update.size(0) > update.size(1)
            update = update.T if tall else update
            update = update / (update.norm() + 1e-7)
            for _ in range(5):
                product = update @ update.T
                update = 3.4445 * update + (-4.775 * product + 2.0315 * product @ product) @ update
            p.data.add_(update.T if tall else update, alpha=-0.02)


def sam(model: Any) -> None:
    """Sharpness-aware minimisation."""
    backward(model)
    with torch.no_grad():
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in model.parameters()]), p=2)
        steps = [p.grad * (0.05 / (norm + 1e-12)) for p in model.parameters()]
        for p, step in zip(model.parameters(), steps, strict=True):
            p.add_(step)
    backward(model)
    with torch.no_grad():
        for p, step in zip(model.parameters(), steps, strict=True):
            p.sub_(step)
    train(model, torch.optim.SGD(model.parameters(), 0.1), 1)


def sgld(model: Any) -> None:
    torch.manual_seed(2)
    backward(model)
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(0.1 * p.grad)
            p.add_(torch.randn_like(p), alpha=0.01)


def averaged(**options: Any) -> Case:
    def case(model: Any) -> list[Any]:
        average = swa_utils.AveragedModel(model, **options)
        for _ in range(2):
            train(model, torch.optim.SGD(model.parameters(), 0.1))
            average.update_parameters(model)
        again = swa_utils.AveragedModel(model, **options)
        again.load_state_dict(average.state_dict())
        swa_utils.update_bn([batch(1)], average)
        return [average.n_averaged, average(batch(1)), *average.parameters(), *again.parameters()]

    return case


def scheduled(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
    for _ in range(3):
        train(model, optimizer, 1)
        schedule.step()


def scaled(model: Any) -> list[Any]:
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    model.zero_grad()
    scaler.scale(model(batch(1)).square().mean()).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    return [norm]


def lbfgs(model: Any) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch(1)).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)  # pyright: ignore


def trained(kind: str, **options: Any) -> Case:
    def case(model: Any) -> None:
        every = [p for p in model.parameters() if p.dim() == 2 or kind != "Muon"]
        train(model, getattr(torch.optim, kind)(every, **options))

    return case


_TORCHS = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop",
)  # fmt: skip
OPTIMIZERS: dict[str, Case] = {
    **{kind: trained(kind) for kind in _TORCHS},
    "SGD": trained("SGD", lr=0.1, momentum=0.9),
    **({"torch's Muon": trained("Muon", lr=0.01)} if hasattr(torch.optim, "Muon") else {}),
    "LBFGS": lbfgs,
    "Lion": lion,
    "LAMB": lamb,
    "Shampoo": shampoo,
    "Adafactor of the paper": adafactor,
    "Muon": muon,
    "SAM": sam,
    "SGLD": sgld,
    "an average": averaged(),
    "a moving average": averaged(multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
    "a moving average of each": averaged(avg_fn=swa_utils.get_ema_avg_fn(0.9), use_buffers=True),
    "an average of each": averaged(avg_fn=swa_utils.get_swa_avg_fn()),
    "an average of lists": averaged(multi_avg_fn=swa_utils.get_swa_multi_avg_fn(), use_buffers=True),
    "SWALR": scheduled,
    "GradScaler": scaled,
}

CASES: dict[str, Case] = {
    **{f"edit: {name}": edited(case) for name, case in EDITS.items()},
    **{f"read: {name}": case for name, case in READS.items()},
    **{f"draw: {name}": drawn(case) for name, case in DRAWS.items()},
    **{f"gradient: {name}": case for name, case in GRADIENTS.items()},
    **{f"optimizer: {name}": case for name, case in OPTIMIZERS.items()},
}
