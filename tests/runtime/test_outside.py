"""What a model's own code does outside of its forward, as in `generate`: reads parameters and calls modules there."""

from __future__ import annotations

import copy
import inspect
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpplan
from tests.compiler.toys import HIDDEN, MLP, Mlp
from tests.runtime.world import Member, world

BATCH, LENGTH = 3, 12


class Joined(nn.Module):
    """Has no parameters, so that no other class takes its place."""

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        return torch.cat([tokens, x], 1)


class Prompted(nn.Module):
    """Puts tokens of its own before the input, also in a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(1, 2, HIDDEN))
        self.joined, self.norm, self.first, self.second = Joined(), nn.LayerNorm(HIDDEN), Mlp(), Mlp()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y = self.first(self.joined(self.tokens.expand(x.shape[0], -1, -1), x))
        return self.second(self.norm(scale * y))

    def prompted(self, x: Tensor) -> Tensor:
        """As `forward`, on its own ways."""
        y = self.joined(self.tokens.expand(x.shape[0], -1, -1), x)
        y = self.first(y + 0 * self.tokens.sum())
        return self.second(self.norm(y)) + self.second(self.tokens.expand(x.shape[0], -1, -1))[:, :1]


def outside(member: Member, sequence: bool) -> list[float]:
    """The largest differences of the results of calls outside and inside of a forward."""
    torch.manual_seed(0)
    stock = Prompted().double()
    model = copy.deepcopy(stock)
    rules = {f"{half}.{name}": style for half in ("first", "second") for name, style in MLP.items()}
    rules |= {"norm": "sequence"} if sequence else {}
    x = torch.randn(BATCH, LENGTH, HIDDEN, dtype=torch.float64)
    tpplan.parallelize(model, {"version": 1, "modules": rules}, member.mesh(), (x,))
    errors: list[float] = []
    for call in ("prompted", "forward", "prompted"):
        with torch.no_grad():
            ours, theirs = (getattr(one, call)(x) for one in (model, stock))
        assert not isinstance(ours, DTensor)
        errors.append(float((ours - theirs).abs().max()))
    return errors


class Meeting(Prompted):
    """Runs outside of its forward while another one does, in another thread; `leaves` says who ends first."""

    leaves: str

    def prompted(self, x: Tensor) -> Tensor:
        MEETING.wait(60)
        y = super().prompted(x)
        if self.leaves == "last":
            FIRST_LEFT.wait(60)
            y = super().prompted(x)
        return y


MEETING, FIRST_LEFT = threading.Barrier(2), threading.Event()


def in_two_threads(member: Member) -> list[float]:
    """The largest difference of the results of two sharded models that are called at the same time."""
    rules = {f"{half}.{name}": style for half in ("first", "second") for name, style in MLP.items()}
    x = torch.randn(BATCH, LENGTH, HIDDEN, dtype=torch.float64)
    errors: list[float] = []

    def call(model: nn.Module, expected: Tensor, leaves: str) -> None:
        with torch.no_grad():
            errors.append(float((model.prompted(x) - expected).abs().max()))  # pyright: ignore
        if leaves == "first":
            FIRST_LEFT.set()

    threads: list[threading.Thread] = []
    for leaves in ("first", "last"):
        stock = Meeting().double()
        stock.leaves = leaves
        with torch.no_grad():
            expected = Prompted.prompted(stock, x)
        model = tpplan.parallelize(stock, {"version": 1, "modules": rules}, member.mesh(), (x,))
        threads.append(threading.Thread(target=call, args=(model, expected, leaves), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return errors


def signature_of(member: Member) -> list[str]:
    torch.manual_seed(0)
    x = torch.zeros(BATCH, LENGTH, HIDDEN)
    rules = {f"first.{name}": style for name, style in MLP.items()}
    model = tpplan.parallelize(Prompted(), {"version": 1, "modules": rules}, member.mesh(), (x,))
    names = [list(inspect.signature(m.forward).parameters) for m in (model, model.get_submodule("first.up"))]
    return [*names[0], *names[1]]


def multimodal() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import Blip2Config, Blip2ForConditionalGeneration

    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = Blip2Config(
        vision_config=sizes | {"intermediate_size": 64, "image_size": 16, "patch_size": 8},
        qformer_config=sizes | {"vocab_size": 88, "intermediate_size": 64, "encoder_hidden_size": 32},
        text_config=sizes
        | {"model_type": "opt", "vocab_size": 88, "ffn_dim": 64, "word_embed_proj_dim": 32}
        | {"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        num_query_tokens=4,
        image_token_id=87,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    ids = torch.randint(3, 80, (2, 10))
    ids[:, :4] = 87
    return Blip2ForConditionalGeneration(config).eval(), {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16)}


def generated(member: Member) -> bool:
    stock, call = multimodal()
    model = copy.deepcopy(stock)
    rules = {
        "language_model.model.decoder.layers.*.fc1": "colwise",
        "language_model.model.decoder.layers.*.fc2": "rowwise",
        "qformer.encoder.layer.*.intermediate_query.dense": "colwise",
        "qformer.encoder.layer.*.output_query.dense": "rowwise",
    }
    tpplan.parallelize(model, {"version": 1, "modules": rules}, member.mesh(), call)
    settings = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    with torch.no_grad():
        return torch.equal(model.generate(**call, **settings), stock.generate(**call, **settings))  # pyright: ignore


@pytest.mark.processes
@pytest.mark.parametrize("sequence", [False, True])
def test_parameters_read_outside_of_a_forward_work_beside_plain_tensors(sequence: bool) -> None:
    for errors in world(2).run(outside, sequence):
        assert max(errors) < 1e-12


@pytest.mark.processes
def test_two_models_are_called_outside_of_their_forwards_in_two_threads() -> None:
    (errors,) = world(1).run(in_two_threads)
    assert len(errors) == 2
    assert max(errors) < 1e-12


@pytest.mark.processes
def test_a_forward_shows_the_arguments_that_it_takes() -> None:
    assert world(2).run(signature_of)[0] == ["x", "scale", "input"]


@pytest.mark.processes
def test_a_model_generates_that_reads_a_parameter_in_generate() -> None:
    assert world(2).run(generated) == [True, True]
