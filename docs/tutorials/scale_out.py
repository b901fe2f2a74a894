"""All axes of a mesh at once: pipeline, data, context and tensor parallelism, on processes of this machine.

    torchrun --nproc-per-node 4  docs/tutorials/scale_out.py --pp 2 --tp 2
    torchrun --nproc-per-node 16 docs/tutorials/scale_out.py --pp 2 --dp 2 --cp 2 --tp 2

One plan for the whole model is for each stage (`partial=True`). Stages hand on their rank's part of a sequence. Over
`dp` and `cp` FSDP2 cuts parameters and averages gradients; over `cp` ranks share a sequence, and attention sends keys
and values around in a ring: a function of this script's, of which tpplan is told that heads may be split. Losses,
gradients and a step are compared with those of the unsharded model; then the stages' checkpoint is loaded on another
mesh.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

import tpplan

WORDS, HIDDEN, WIDTH, HEADS, LAYERS, BATCH, LENGTH, MICRO = 64, 32, 64, 4, 2, 8, 16, 2
PLAN = """
version: 1
modules:
  embed: vocab
  layers.*: {style: replicate, input: sequence, output: sequence}   # between layers, and so between stages
  layers.*.norm_{1,2}: sequence
  layers.*.{q,k,v,up}: colwise
  layers.*.{o,down}: rowwise
  norm: sequence
  head: {style: colwise, output: replicate}
"""


class Turned(torch.autograd.Function):
    """A tensor of the rank before this one in a ring; its gradient goes back there."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Send it ahead."""
        ctx.group = group
        return turned(tensor, group, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Send its gradient back."""
        return turned(gradients[0], ctx.group, -1), None


def turned(tensor: Tensor, group: dist.ProcessGroup, way: int) -> Tensor:
    """What the neighbour has, as each sends its own to the other one."""
    rank, size = group.rank(), group.size()
    ahead, behind = (dist.get_global_rank(group, (rank + step) % size) for step in (way, -way))
    sent = tensor.contiguous()
    received = torch.empty_like(sent)
    ops = [dist.P2POp(dist.isend, sent, ahead, group), dist.P2POp(dist.irecv, received, behind, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


_turn: Callable[[Tensor, dist.ProcessGroup], Tensor] = Turned.apply  # pyright: ignore
RING: list[dist.ProcessGroup] = []


@tpplan.operator("b h s! d!, b h s! d!, b h s! d! -> b h s! d!", audit=False)  # alone, a rank has nobody to try it with
def ring(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention over a sequence of which each rank of a ring has a stretch, in order."""
    (group,) = RING
    length = query.shape[2]
    place = torch.arange(length, device=query.device)
    most, made = query.new_full((*query.shape[:3], 1), -math.inf), torch.zeros_like(query)
    total = torch.zeros_like(most)
    for step in range(group.size()):
        start = (group.rank() - step) % group.size() - group.rank()  # in stretches, from this rank's own
        hidden = place[None, :] + start * length > place[:, None]
        scores = (query @ key.transpose(2, 3) / math.sqrt(query.shape[3])).masked_fill(hidden, -math.inf)
        larger = torch.maximum(most, scores.detach().amax(3, keepdim=True))  # finite: a rank's own stretch comes first
        weights, kept = (scores - larger).exp(), (most - larger).exp()
        made, total, most = made * kept + weights @ value, total * kept + weights.sum(3, keepdim=True), larger
        if step + 1 < group.size():
            key, value = (_turn(held, group) for held in (key, value))
    return made / total


class Layer(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.in_ring = False

    def forward(self, x: Tensor) -> Tensor:
        """Run it on a rank's stretch of the sequences."""
        h = self.norm_1(x)
        made = (self.q(h), self.k(h), self.v(h))
        q, k, v = (features.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for features in made)
        h = ring(q, k, v) if self.in_ring else functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(h.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """A transformer; a stage has some of its modules, and None for the others."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(layers)})
        self.norm: nn.Module | None = nn.LayerNorm(HIDDEN)
        self.head: nn.Module | None = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens, or what the stage before hands on; logits, or what this one does."""
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        x = x if self.norm is None else self.norm(x)
        return x if self.head is None else self.head(x)


def build(layers: int) -> Model:
    """The same model on every rank."""
    torch.manual_seed(0)
    return Model(layers).double()


def cut(model: Model, place: int, stages: int) -> Model:
    """What the stage at `place` has of a model; names stay the model's."""
    each = len(model.layers) // stages
    for name in [*model.layers]:
        if int(name) // each != place:
            del model.layers[name]
    if place:
        model.embed = None
    if place < stages - 1:
        model.norm = model.head = None
    return model


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """The mean over tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """The same tokens on every rank, and what comes after them."""
    text = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1], text[:, 1:]


def whole(tensor: Any) -> Tensor:
    """All of a tensor of which ranks have parts."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def worst(errors: list[float]) -> float:
    """The largest of all ranks."""
    found = torch.tensor(max(errors, default=0.0))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def trained(pp: int, dp: int, cp: int, tp: int, layers: int) -> tuple[Model, Model, list[float]]:
    """This rank's stage and the unsharded model, after a step of each, and how far they are apart."""
    mesh = init_device_mesh("cpu", (pp, dp * cp, tp), mesh_dim_names=("pp", "data", "tp"))
    inner = init_device_mesh("cpu", (pp, dp, cp, tp), mesh_dim_names=("pp", "dp", "cp", "tp"))
    RING[:] = [inner["cp"].get_group()]
    place, row, column = (inner[name].get_local_rank() for name in ("pp", "dp", "cp"))

    stock, stage = build(layers), cut(build(layers), place, pp)
    for layer in stage.layers.values():
        layer.in_ring = cp > 1  # pyright: ignore
    local = (BATCH // dp // MICRO, LENGTH // cp)  # a micro-batch of this rank
    example = torch.zeros(*local, HIDDEN, dtype=torch.float64).requires_grad_() if place else torch.zeros(*local).long()
    tpplan.parallelize(stage, PLAN, mesh["tp"], (example,), partial=True)
    tpplan.check_stages(stage, PLAN, mesh["pp"])
    for layer in stage.layers.values():
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(stage, mesh=mesh["data"])
    pipe = PipelineStage(stage, place, pp, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(pipe, MICRO, loss_fn=loss_of)

    def own(tensor: Tensor) -> Tensor:
        return tensor.chunk(dp, 0)[row].chunk(cp, 1)[column].contiguous()

    x, y = batch(1)
    losses: list[Tensor] = []
    first = () if place else (own(x),)
    last: dict[str, Any] = {"target": own(y), "losses": losses} if place == pp - 1 else {}
    schedule.step(*first, **last)
    lost = loss_of(stock(x), y)
    lost.backward()
    expected = float(lost.detach())

    errors: list[float] = []
    if losses:
        mean = torch.stack(losses).detach().mean()
        dist.all_reduce(mean, group=mesh["data"].get_group())
        errors.append(abs(float(mean) / (dp * cp) - expected))
    found = [worst(errors)]
    stocks = dict(stock.named_parameters())
    found.append(worst([apart(p.grad, stocks[n].grad) for n, p in stage.named_parameters()]))
    for model in (stock, stage):
        torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    found.append(worst([apart(p, stocks[n]) for n, p in stage.named_parameters()]))
    return stage, stock, found


def loaded(folder: str, stock: Model, layers: int, mesh: DeviceMesh) -> float:
    """How far the whole model is from the stock one, once it has read the stages' checkpoint on another mesh."""
    model = tpplan.parallelize(build(layers), PLAN, mesh["tp"], (batch(1)[0],))
    fully_shard(model, mesh=mesh["dp"])
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder)  # pyright: ignore[reportPrivateImportUsage]
    set_model_state_dict(model, state)
    stocks = dict(stock.named_parameters())
    return worst([apart(p, stocks[n]) for n, p in model.named_parameters()])


def apart(ours: Any, theirs: Any) -> float:
    """How far two tensors are apart, of which one may be in parts."""
    return float((whole(ours).detach() - theirs.detach()).abs().max())


def compared(pp: int, dp: int, cp: int, tp: int) -> tuple[list[float], float, tuple[int, ...]]:
    """Train, save and load: how far all is from the unsharded model, and the mesh on which it was loaded."""
    layers = max(LAYERS, pp)
    stage, stock, found = trained(pp, dp, cp, tp, layers)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    dcp.save(get_model_state_dict(stage), checkpoint_id=folder[0])  # pyright: ignore[reportPrivateImportUsage]
    ranks = min(4, dist.get_world_size())
    mesh = init_device_mesh("cpu", (dist.get_world_size() // ranks, ranks), mesh_dim_names=("dp", "tp"))
    return found, loaded(folder[0], stock, layers, mesh), tuple(mesh.shape)


def main() -> None:
    """Run it, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for axis in ("pp", "dp", "cp", "tp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    dist.init_process_group("gloo")
    found, again, mesh = compared(**vars(parser.parse_args()))
    if dist.get_rank() == 0:
        for what, error in zip(("the two losses", "gradients", "parameters after a step"), found, strict=True):
            print(f"{what} differ by {error:.1e} at most")
        print(f"loaded on {mesh[0]} x {mesh[1]} ranks, parameters differ by {again:.1e} at most")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
