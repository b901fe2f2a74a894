"""Bodies that run from their records, since their own Python doesn't work on shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.marking import slow_but
from tpplan.compat.process_groups import fake_process_group
from tpplan.compiler.ir.layout import REPLICATED
from tpplan.compiler.ir.program import Program
from tpplan.compiler.ir.replaced_bodies import RecordedBody
from tpplan.compiler.rewrite import replay
from tpplan.parity import verify_program

WIDTH, HEADS, LENGTH = 16, 4, 6
ACTIVATIONS = (torch.randn(3, LENGTH, WIDTH, requires_grad=True),)
PACKED: dict[str, Any] = {"style": "colwise", "packed": ["q", "k", "v"]}


class Derived(nn.Module):
    """The size of a head is derived from the width of the input, and a mask is cut from a buffer."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.heads, self.width = HEADS, WIDTH
        self.drop = nn.Dropout(0.5)
        self.register_buffer("mask", torch.ones(1, 1, 32, 32).tril())

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(self.width, dim=2)
        q, k, v = (y.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for y in (q, k, v))
        scores = q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        y = self.drop(scores.softmax(-1)) @ v
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))


class Parted(nn.Module):
    """The parts of a packed projection are as wide as the input: of what a rank holds, `split` makes fewer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (y.view(batch, length, HEADS, -1).transpose(1, 2) for y in self.qkv(x).split(width, dim=2))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, attention: type[nn.Module] = Derived) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


class Torch(nn.Module):
    """torch's own attention, of a value with itself or with another."""

    def __init__(self, cross: bool) -> None:
        super().__init__()
        self.cross = cross
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        other = x.flip(1) if self.cross else x
        return x + self.attention(x, other, other, need_weights=False)[0]


PLAN = {"version": 1, "modules": {"attention.qkv": PACKED, "attention.out": "rowwise"}}
TORCH_PLAN = {"version": 1, "modules": {"attention.in_proj_{weight,bias}": PACKED, "attention.out_proj": "rowwise"}}


def compiled(model: nn.Module, plan: dict[str, Any], size: int) -> Program:
    program = tpplan.compile_plan(model, plan, size, ACTIVATIONS)
    assert [m.name for m in program.modules if m.recorded is not None] == ["attention"]
    assert [d.code for d in program.diagnostics if d.subject == "attention"] == ["TP124"]
    return program


KINDS = ("derived", "parted", "self", "cross")


@pytest.mark.parametrize(
    ("kind", "size"),
    slow_but([(kind, 2) for kind in KINDS] + [("self", 4)], [(kind, n) for kind in KINDS for n in (2, 4)]),
)
@pytest.mark.one_in(3)
def test_it_computes_the_same(kind: str, size: int) -> None:
    blocks = {"derived": Derived, "parted": Parted}
    model = Block(blocks[kind]) if kind in blocks else Torch(cross=kind == "cross")
    program = compiled(model, PLAN if kind in blocks else TORCH_PLAN, size)
    # In cross attention queries and keys come from two values, each with a gradient to sum.
    assert program.count_collectives() == {"all-reduce": 3 if kind == "cross" else 2}
    assert Program.from_dict(program.to_dict()) == program
    for shape in ((3, LENGTH, WIDTH), (2, 11, WIDTH), (1, 1, WIDTH)):  # other shapes than the example's as well
        example = ((torch.randn(shape, requires_grad=True),), {})
        report = verify_program(model, program, example)
        assert report.ok, report.problems


@pytest.mark.processes
def test_on_processes() -> None:
    report = tpplan.verify(Torch(cross=True), TORCH_PLAN, 2, ACTIVATIONS, processes=True)
    assert report.ok, report.problems


def test_heads_in_another_order_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Block()
    program = compiled(model, PLAN, 2)
    true = replay.play
    monkeypatch.setattr(replay, "play", lambda *arguments: true(*arguments).flip(-1))
    assert not verify_program(model, program, (ACTIVATIONS, {})).ok


def test_dropout_draws_other_numbers_on_other_ranks_and_the_same_again() -> None:
    with fake_process_group(2):
        sharded = tpplan.parallelize(Block(), PLAN, inputs=ACTIVATIONS).train()
        made = []
        for _ in range(2):
            torch.manual_seed(0)
            made.append(sharded(*ACTIVATIONS))
        assert torch.equal(*made)


def test_a_new_geometry_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_process_group(2):
        sharded = tpplan.parallelize(Block(), PLAN, inputs=ACTIVATIONS).eval()
        sharded(torch.randn(3, 4, WIDTH, requires_grad=True))
        recorded = []
        true = replay.record
        monkeypatch.setattr(replay, "record", lambda *arguments: recorded.append(1) or true(*arguments))
        for length in (4, 5, 4):
            sharded(torch.randn(3, length, WIDTH, requires_grad=True))
        assert len(recorded) == 1


def test_a_tensor_in_two_places_is_another_geometry_than_two_tensors() -> None:
    with torch.device("meta"):
        attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    whole = tuple(((name,), REPLICATED) for name in ("query", "key", "value"))
    body = RecordedBody(whole, (), (((0,), REPLICATED), ((1,), REPLICATED)))
    run = replay.Replay(attention, body, {}, 2, 0, lambda: 3)
    stock = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    x, y = (torch.randn(3, LENGTH, WIDTH, requires_grad=True) for _ in range(2))
    for arguments in ((x, x, x), (x, y, y), (x, x, x)):
        torch.testing.assert_close(run(stock, arguments, {})[0], stock(*arguments)[0], rtol=0, atol=1e-5)


class TakesAnObject(nn.Module):
    """What a body that runs from its record is handed must be plain data."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Keeps()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, [])


class Keeps(Derived):
    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        made = super().forward(x)
        seen.append(made)
        return made


def test_what_a_body_writes_to_an_argument_is_not_lost_silently() -> None:
    with pytest.raises(tpplan.PlanError, match="TP107"):
        tpplan.compile_plan(TakesAnObject(), PLAN, 2, ACTIVATIONS)


def test_what_is_not_split_is_left_alone() -> None:
    program = tpplan.compile_plan(Block(), {"version": 1, "modules": {"norm": "replicate"}}, 2, ACTIVATIONS)
    assert not program.replays


class Keeper(nn.Module):
    """Derives the size of a head, so that it runs from its record, and scales by a tensor that it keeps."""

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.width, self.keep = WIDTH, keep
        scale = torch.randn(()) if keep == "number" else torch.randn(WIDTH // HEADS)
        if keep in ("buffer", "number"):
            self.register_buffer("scale", scale)
        else:
            self.scale = {"attribute": scale, "list": [scale], "dict": {0: scale}}[keep]

    def forward(self, x: Tensor) -> Tensor:
        y = self.q(x)
        scale: Any = self.scale[0] if self.keep in ("list", "dict") else self.scale
        heads = y.view(*y.shape[:2], HEADS, self.width // HEADS) * scale
        return self.o(heads.transpose(1, 2).transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize(("keep", "replays"), [("attribute", True), ("buffer", True), ("number", True),
                                               ("list", False), ("dict", False)])  # fmt: skip
def test_a_tensor_that_a_body_keeps_is_read_anew_or_the_body_is_not_replayed(keep: str, replays: bool) -> None:
    model = nn.Sequential(nn.LayerNorm(WIDTH), Keeper(keep))
    program = tpplan.compile_plan(model, {"version": 1, "modules": {"1.q": "colwise", "1.o": "rowwise"}}, 2,
                                  ACTIVATIONS)  # fmt: skip
    assert program.replays == replays
    assert verify_program(model, program, (ACTIVATIONS, {})).ok
    if keep == "number":  # what is loaded after the proof counts
        script = Scripts(model, program)
        assert script.reads("scale")


class Scripts:
    """The script that a program's body is played from."""

    def __init__(self, model: nn.Module, program: Program) -> None:
        (spec,) = (module for module in program.modules if module.recorded is not None)
        assert spec.recorded is not None
        stock = replay.make_skeleton(model).model.get_submodule(spec.name)
        layouts = {p.name.removeprefix(f"{spec.name}."): p.layout for p in program.parameters}
        body = replay.Replay(stock, spec.recorded, layouts, 2, 0, lambda: 3)
        self.script = body._write(True, ACTIVATIONS, {}, 3)

    def reads(self, name: str) -> bool:
        return name in dict(self.script.held).values()


def test_a_record_is_made_anew_for_a_tensor_that_lies_otherwise() -> None:
    def key(*tensors: Tensor) -> object:
        return replay._geometry((tensors, {}), {})

    x = torch.randn(3, 4, 5)
    assert key(x) == key(torch.randn(3, 4, 5))
    assert key(x) != key(torch.randn(4, 3, 5).transpose(0, 1))
    assert key(x) != key(x.double()) and key(x, x) != key(x, x.clone())
    assert replay._geometry(1, {}) != replay._geometry(True, {}) != replay._geometry(1.0, {})


class Casting(Parted):
    """The same under an autocast of its own, which tensors on `meta` don't show."""

    def forward(self, x: Tensor) -> Tensor:
        qkv, (batch, length, width) = self.qkv(x), x.shape
        with torch.autocast(x.device.type, torch.bfloat16):
            q, k, v = (y.view(batch, length, HEADS, -1).transpose(1, 2) for y in qkv.split(width, dim=2))
            y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.out(y.to(x.dtype).transpose(1, 2).reshape(batch, length, width))


def test_a_body_that_turns_autocast_on_runs_as_it_is_written() -> None:
    model = nn.Sequential(Casting())
    plan = {"version": 1, "modules": {"0.qkv": PACKED, "0.out": "rowwise"}}
    program = tpplan.compile_plan(model, plan, 2, torch.randn(3, LENGTH, WIDTH))
    assert [d.code for d in program.diagnostics] == ["TP104", "TP105"]


class Remembering(Parted):
    """Biases by head, which it keeps in a dict in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.biases = nn.Parameter(torch.randn(HEADS, LENGTH))
        self.cache: dict[str, Tensor] = {}

    def bias(self) -> Tensor:
        place = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
        if self.training:
            return self.biases[:, place]
        if "bias" not in self.cache:
            self.cache["bias"] = self.biases[:, place]
        return self.cache["bias"]

    def forward(self, x: Tensor) -> Tensor:
        qkv, (batch, length, width) = self.qkv(x), x.shape
        q, k, v = (y.view(batch, length, HEADS, -1).transpose(1, 2) for y in qkv.split(width, dim=2))
        y = (q @ k.transpose(-2, -1) + self.bias()).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def test_a_body_may_keep_what_it_has_made() -> None:
    plan = {"version": 1, "modules": {"0.qkv": PACKED, "0.out": "rowwise"}}
    report = tpplan.verify(nn.Sequential(Remembering()), plan, 2, torch.randn(3, LENGTH, WIDTH))
    assert report.ok, report.problems
