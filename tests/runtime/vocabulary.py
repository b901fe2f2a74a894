"""What processes do for the tests of losses over a split vocabulary."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import tpplan
from tests.runtime.world import Member

VOCABULARY, TOKENS = 97, (2, 12)
LLAMA = {
    "model.embed_tokens": "vocab",
    "model.layers.*.self_attn.{q,k,v}_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.{gate,up}_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": {"style": "colwise", "output": "shard"},
}
SEQUENCE = {"model.layers.*.{input,post_attention}_layernorm": "sequence", "model.norm": "sequence"}
GPT2 = {"transformer.wte": "vocab", "lm_head": {"style": "colwise", "output": "shard"}}


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for held in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(held, Tensor):
                self.entries = max(self.entries, held.numel())
        return made


def llama(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    )


def tokens() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCABULARY, TOKENS, generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :4] = -100
    return ids, labels


def with_z(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """A loss function of the user's own, set on an instance."""
    rows, labels = logits[:, :-1].reshape(-1, vocab_size).float(), labels[:, 1:].reshape(-1)
    loss = functional.cross_entropy(rows, labels, label_smoothing=0.1)
    return loss + 1e-3 * rows.logsumexp(-1).square().mean()


def gradient_error(stock: nn.Module, model: nn.Module) -> float:
    """The largest difference of a gradient, relative to the largest entry of all."""
    wanted = {name: p.grad for name, p in stock.named_parameters()}
    scale = max(float(grad.abs().max()) for grad in wanted.values()) or 1.0  # pyright: ignore
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}  # pyright: ignore
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) / scale for name in wanted)


def by_labels(member: Member, kind: str, rules: dict[str, Any], calls: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Losses and gradients of calls with labels: (loss, stock loss, gradients' error, shape of the logits)."""
    stock = llama() if kind == "llama" else gpt2()
    model = tpplan.parallelize(copy.deepcopy(stock), {"version": 1, "modules": rules}, member.mesh())
    found: list[tuple[Any, ...]] = []
    for call in calls:
        own = call.pop("loss", None)
        for held in (stock, model):
            held.zero_grad()
            held.loss_function = with_z if own == "z" else type(stock).loss_function.fget(held)  # pyright: ignore
        ids, labels = tokens()
        given = {"input_ids": ids, "labels": labels, **call}
        with torch.autocast("cpu", torch.bfloat16, enabled=own == "autocast"):
            expected, made = stock(**given), model(**given)
        expected.loss.backward()
        made.loss.backward()
        found.append((made.loss.item(), expected.loss.item(), gradient_error(stock, model), tuple(made.logits.shape)))
    return found


def own_loop(member: Member) -> dict[str, Any]:
    """Losses that a loop computes of local logits, in each of the ways to say what they are; and of hidden states."""
    mesh, (ids, labels) = member.mesh(), tokens()
    stock = llama()
    model = tpplan.parallelize(copy.deepcopy(stock), {"version": 1, "modules": LLAMA}, mesh)
    options = {"label_smoothing": 0.1, "z_loss": 1e-3}
    whole = stock(ids).logits[:, :-1].flatten(0, 1)
    expected = functional.cross_entropy(whole, labels[:, 1:].flatten(), label_smoothing=0.1)
    kept = labels[:, 1:].flatten() != -100
    expected = expected + 1e-3 * whole.logsumexp(-1).square()[kept].mean()
    expected.backward()
    errors: dict[str, tuple[float, float]] = {}

    def compare(name: str, loss: Callable[[], Tensor]) -> None:
        model.zero_grad()
        made = loss()
        made.backward()
        errors[name] = (abs(made.item() - expected.item()), gradient_error(stock, model))

    def logits() -> Tensor:
        return model(ids).logits[:, :-1]

    target = labels[:, 1:]
    compare("model", lambda: tpplan.loss.cross_entropy(logits(), target, model=model, **options))  # pyright: ignore
    compare("chunk", lambda: tpplan.loss.cross_entropy(logits(), target, model=model, chunk=3, **options))  # pyright: ignore
    compare("mesh", lambda: tpplan.loss.cross_entropy(logits(), target, mesh=mesh, classes=VOCABULARY, **options))  # pyright: ignore
    compare(
        "hidden",
        lambda: tpplan.loss.linear_cross_entropy(
            model.model(ids).last_hidden_state[:, :-1],  # pyright: ignore
            model.lm_head.weight,  # pyright: ignore
            target,
            chunk=5,
            **options,  # pyright: ignore
        ),
    )
    return errors


def dtensors(member: Member) -> list[float]:
    """Of logits that are a DTensor, the errors of the loss and of the gradient."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(6, 8, generator=generator, dtype=torch.float64)
    target = torch.tensor([0, 7, -100, 3, 4, 5])
    part = DTensor.from_local(whole.chunk(member.size, 1)[member.rank].contiguous(), member.mesh(), [Shard(1)])
    whole.requires_grad_()
    expected = functional.cross_entropy(whole, target)
    expected.backward()
    part.requires_grad_()
    loss = tpplan.loss.cross_entropy(part, target)
    loss.backward()
    return [abs(loss.item() - expected.item()), float((part.grad.full_tensor() - whole.grad).abs().max())]  # pyright: ignore


def refused(member: Member) -> list[str]:
    """What `tpplan.loss` says of logits that it can't place."""
    ids, labels = tokens()
    model = tpplan.parallelize(llama(), {"version": 1, "modules": LLAMA}, member.mesh())
    logits = model(ids).logits
    found: list[str] = []
    for given in (
        lambda: tpplan.loss.cross_entropy(logits, labels),
        lambda: tpplan.loss.cross_entropy(logits[..., :-1], labels, model=model),
        lambda: tpplan.loss.cross_entropy(logits, labels, mesh=member.mesh()),
        lambda: tpplan.loss.cross_entropy(logits, labels, mesh=member.mesh(), classes=2 * VOCABULARY),
        lambda: tpplan.loss.cross_entropy(logits, labels[:, 1:], model=model),
        lambda: tpplan.loss.cross_entropy(logits, labels, torch.ones(5), model=model),
        lambda: tpplan.loss.cross_entropy(logits, labels, reduction="average", model=model),
    ):
        try:
            found.append(f"{given()}")
        except tpplan.LossError as error:
            found.append(str(error))
    return found


def generated(member: Member) -> tuple[list[int], list[int], tuple[int, ...]]:
    """Tokens that the sharded and the unsharded model choose, and the shape of a call's logits without labels."""
    stock = llama().eval()
    model = tpplan.parallelize(copy.deepcopy(stock), {"version": 1, "modules": LLAMA}, member.mesh())
    ids = tokens()[0][:1, :5]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    made, expected = model.generate(ids, **options), stock.generate(ids, **options)  # pyright: ignore
    return made[0].tolist(), expected[0].tolist(), tuple(model(ids).logits.shape)


def largest(member: Member, output: str) -> int:
    """The entries of the largest tensor of a forward and backward with labels, with many classes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    rules = {**LLAMA, "lm_head": {"style": "colwise", "output": output}}
    model = tpplan.parallelize(LlamaForCausalLM(config), {"version": 1, "modules": rules}, member.mesh())
    ids = torch.randint(0, 4096, (2, 64))
    model(input_ids=ids, labels=ids)  # compiled and watched
    with Largest() as seen:
        model(input_ids=ids, labels=ids).loss.backward()
    return seen.entries
