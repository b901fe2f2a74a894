"""Train a model of one's own: a plan from `tpplan suggest`, training, and a checkpoint that any number of ranks reads.

    tpplan suggest --model docs/tutorials/own.py:example --tp 2 4 -o docs/tutorials/own.yaml
    tpplan verify docs/tutorials/own.yaml --model docs/tutorials/own.py:example --tp 4
    torchrun --nproc-per-node 2 docs/tutorials/own.py

The model knows nothing of tpplan: plain torch, with a projection for queries, keys and values together. The first two
commands need no process group: `example` says what the model is called with. On GPUs nothing changes but the sizes; a
model that fits on none of them is built on `meta`, where `tpplan.init_weights` gives it its numbers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import tpplan

VOCABULARY = 256
PLAN = Path(__file__).with_name("own.yaml")


class Block(nn.Module):
    """Attention and a gated MLP, each with a norm before it."""

    def __init__(self, width: int, heads: int) -> None:
        """Of `width` features, in so many heads."""
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Of features (batch, length, width), the same shape."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """A language model over bytes."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 3, length: int = 64) -> None:
        """Of so many blocks, for so many positions."""
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """The loss of predicting each of the ids (batch, length) but the first."""
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def example() -> tuple[nn.Module, tuple[Tensor]]:
    """The model and a call of it, on `meta`, for the command line."""
    with torch.device("meta"):
        return Model(), (torch.zeros(2, 64, dtype=torch.long),)


def train(
    model: nn.Module,
    data: Iterator[Tensor],
    steps: int,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[float]:
    """The usual loop; `around` is what a forward runs in, such as autocast."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for _ in range(steps):
        with around():
            loss = model(next(data))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train, compare, save, and load again; set up as in finetune.py, so that each reads by itself."""
    from curve import draw, tell
    from text import batches, corpus

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("out/own"), help="where the model and the picture go")
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    size, device = dist.get_world_size(), "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (size,), mesh_dim_names=("tp",))
    text = corpus().to(device)
    call = (torch.zeros(options.batch, options.length, dtype=torch.long, device=device),)

    torch.manual_seed(0)
    stock = Model(length=options.length).to(device)
    torch.manual_seed(0)
    model = tpplan.parallelize(Model(length=options.length).to(device), PLAN, mesh, inputs=call)
    curves = {
        name: train(held, batches(text, options.batch, options.length, 1), options.steps)
        for name, held in (("unsharded", stock), (f"tpplan on {size}", model))
    }

    tpplan.save_weights(model, options.out)  # the stock model's names and shapes, in safetensors
    with torch.device("meta"):
        again = Model(length=options.length)
    again = tpplan.parallelize(again, PLAN, mesh, inputs=call)
    tpplan.load_weights(again, options.out)
    held_out = next(batches(text, options.batch, options.length, 2))
    with torch.no_grad():
        same = torch.equal(again(held_out), model(held_out))

    draw(curves, options.out.with_suffix(".svg"), "A model of one's own, 512 bytes a step")
    tell(curves)
    if dist.get_rank() == 0:
        print(f"loaded again, the model computes {'the same' if same else 'SOMETHING ELSE'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
