"""Loading reads what a rank holds, and no more; names that differ, tensors that are missing, and progress."""

from __future__ import annotations

import itertools
import os
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import tpplan
from tests.checkpoint.subjects import Packs
from tests.runtime.world import Member, world
from tpplan.checkpoint import reading
from tpplan.checkpoint.buffers import make_buffers
from tpplan.checkpoint.files import SINGLE, CheckpointError
from tpplan.checkpoint.header import read_header
from tpplan.checkpoint.loading import load
from tpplan.checkpoint.meter import Meter
from tpplan.checkpoint.reading import Files
from tpplan.compat.dtensors import local_of
from tpplan.runtime.parameters.pieces import Box, whole_box

SHAPES = [(), (0,), (1,), (7,), (6, 5), (1, 9), (9, 1), (4, 3, 5), (3, 1, 2, 4), (2, 0, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def boxes_of(shape: tuple[int, ...], seed: int) -> tuple[tuple[Box, ...], tuple[int, ...]]:
    """Some stretches of some dims, as boxes, and the shape of their part."""
    drawn = random.Random(seed)
    kept: list[list[tuple[int, int]]] = []
    for size in shape:
        edges = sorted(drawn.sample(range(size + 1), min(4, size + 1)))
        cut = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=False)]
        kept.append(drawn.choice([[(0, size)], cut or [(0, size)]]) if size else [])
    places = [list(itertools.accumulate((b - a for a, b in cut), initial=0)) for cut in kept]
    boxes = tuple(
        Box(
            tuple(kept[d][i][0] for d, i in enumerate(index)),
            tuple(places[d][i] for d, i in enumerate(index)),
            tuple(kept[d][i][1] - kept[d][i][0] for d, i in enumerate(index)),
            True,
        )
        for index in itertools.product(*(range(len(cut)) for cut in kept))
    )
    return boxes, tuple(place[-1] for place in places)


@pytest.mark.parametrize("chunk", [16, 4 * 1024**2])
@pytest.mark.parametrize("short", [0, 24, 10**9])
def test_any_box_is_read_as_it_is_cut(tmp_path: Path, chunk: int, short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CHUNK", chunk)
    monkeypatch.setattr(reading, "SHORT", short)
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        whole = torch.randn(shape).to(dtype)
        save_file({"odd": torch.zeros(1, dtype=torch.int8), "x": whole}, tmp_path / SINGLE)
        stored = next(t for t in read_header(tmp_path / SINGLE, Meter()).tensors if t.name == "x")
        for seed, target in itertools.product(range(6), DTYPES):
            boxes, size = boxes_of(shape, seed)
            part = torch.full(size, 7, dtype=target)
            if seed % 2 and part.dim() > 1:
                part = part.transpose(0, 1).contiguous().transpose(0, 1)
            meter = Meter()
            with Files(meter) as files:
                assert files.fill(part, boxes, stored)
            for box in boxes:
                assert torch.equal(box.of_part(part), box.of_whole(whole).to(target)), (shape, dtype, target, boxes)
            assert meter.bytes == sum(box.of_whole(whole).nbytes for box in boxes)


def test_a_number_that_is_not_finite_is_seen_in_every_way_of_reading(tmp_path: Path) -> None:
    whole = torch.zeros(64, 64)
    whole[63, 63] = torch.inf
    save_file({"x": whole}, tmp_path / SINGLE)
    (stored,) = read_header(tmp_path / SINGLE, Meter()).tensors
    corner = (Box((60, 60), (0, 0), (4, 4), True),)
    for dtype, boxes, finite in itertools.product(
        DTYPES, (whole_box((64, 64)), corner, (Box((0, 0), (0, 0), (63, 64), True),)), (None,)
    ):
        part = torch.zeros(boxes[0].sizes, dtype=dtype)
        with Files(Meter()) as files:
            finite = files.fill(part, boxes, stored)
        assert finite == bool(part.isfinite().all()), (dtype, boxes)


def test_a_file_that_was_cut_before_its_slices_are_read_is_an_error_and_no_signal(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(64, 64)}, tmp_path / SINGLE)
    (stored,) = read_header(tmp_path / SINGLE, Meter()).tensors
    os.truncate(tmp_path / SINGLE, stored.start + 64)
    with Files(Meter()) as files, pytest.raises(OSError, match="not fully covered") as caught:
        files.fill(torch.zeros(64, 4), (Box((0, 60), (0, 0), (64, 4), True),), stored)
    assert caught.value.filename == str(tmp_path / SINGLE)


class Wide(nn.Module):
    """Layers of which no header is a hundredth; `more` makes them uneven on two ranks."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(96, 256 + more, bias=False), nn.Linear(256 + more, 96, bias=False)
        self.wide, self.narrow = 128 + more, 64 + more
        self.pair = nn.Linear(96, self.wide + self.narrow, bias=False)
        self.wide_out, self.narrow_out = (nn.Linear(n, 96, bias=False) for n in (self.wide, self.narrow))

    def forward(self, x: Tensor) -> Tensor:
        wide, narrow = self.pair(x).split([self.wide, self.narrow], -1)
        return self.down(self.up(x).relu()) + self.wide_out(wide) + self.narrow_out(narrow)


PLAN: dict[str, Any] = {
    "version": 1,
    "modules": {
        "up": "colwise",
        "down": "rowwise",
        "pair": {"style": "colwise", "packed": ["wide", "narrow"]},
        "{wide,narrow}_out": "rowwise",
    },
}


def _reads_its_share(member: Member, folder: str, more: int, meta: bool, dtype: torch.dtype) -> tuple[int, int, int]:
    with torch.device("meta" if meta else "cpu"):
        model = Wide(more).to(dtype)
    tpplan.parallelize(model, PLAN, member.mesh(), inputs=(torch.zeros(2, 96, dtype=dtype),))
    loaded = load(model, folder)
    torch.manual_seed(5)
    for name, tensor in Wide(more).state_dict().items():
        ours = model.state_dict()[name].full_tensor()
        assert torch.equal(ours, tensor.to(dtype)), name
    held = [local_of(parameter) for parameter in model.parameters()]
    return loaded.bytes_read, sum(t.numel() * 4 for t in held), sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.one_in(3)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("more", "meta", "dtype"),
    [(0, True, torch.float32), (1, True, torch.float32), (1, False, torch.bfloat16), (0, True, torch.bfloat16)],
)
def test_a_rank_reads_its_share(tmp_path: Path, more: int, meta: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    save_file(Wide(more).state_dict(), tmp_path / SINGLE)
    found = world(2).run(_reads_its_share, str(tmp_path), more, meta, dtype)
    for read, share, whole in found:
        assert share <= read <= 1.02 * share, (read, share)
        assert share < 0.52 * whole


def _saved(folder: Path, change: Any = lambda name: name) -> dict[str, Tensor]:
    torch.manual_seed(5)
    state = Packs().state_dict()
    save_file({change(name): tensor for name, tensor in state.items()}, folder / SINGLE)
    return state


def _holds(model: nn.Module, state: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_names_are_changed_by_patterns_one_after_the_other(tmp_path: Path) -> None:
    state = _saved(tmp_path, lambda name: f"model.{name.replace('weight', 'w')}")
    model = Packs()
    tpplan.load_weights(model, tmp_path, rename={r"^model\.": "", r"\.w$": r".weight"})
    assert _holds(model, state)


@pytest.mark.parametrize(
    ("rename", "expected"),
    [
        ({"(": ""}, "isn't a regular expression and a replacement"),
        ({"up": r"\4"}, "isn't a regular expression and a replacement"),
        ({"^nothing": ""}, "matches no name in the checkpoint"),
        ({r"\.(weight|bias)$": ""}, "makes `down` of `down.bias`, `down.weight`"),
        ({"up": "onwards"}, "`up.weight` is not in the checkpoint"),
    ],
)
def test_patterns_that_are_wrong_are_named(tmp_path: Path, rename: dict[str, str], expected: str) -> None:
    _saved(tmp_path)
    model = Packs()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="TP121") as caught:
        tpplan.load_weights(model, tmp_path, rename=rename)
    assert expected in str(caught.value) and _holds(model, before)


def test_loosely_what_is_missing_stays_and_is_named(tmp_path: Path) -> None:
    state = _saved(tmp_path)
    del state["up.bias"]
    save_file(state | {"head": torch.zeros(1)}, tmp_path / SINGLE)
    model = Packs()
    before = model.up.bias.clone()
    with pytest.warns(UserWarning) as warned:
        assert tpplan.load_weights(model, tmp_path, strict=False) is model
    texts = sorted(str(one.message) for one in warned)
    assert "1 of the model's tensors are not in the checkpoint, and stay" in texts[0] and "`up.bias`" in texts[0]
    assert "1 tensors that the model doesn't" in texts[1] and "`head`" in texts[1]
    assert warned[0].filename == __file__
    assert _holds(model, state | {"up.bias": before})
    loaded = load(model, tmp_path, strict=False)
    assert (loaded.missing, loaded.unexpected) == (("up.bias",), ("head",))


def test_loosely_a_shape_must_fit_all_the_same(tmp_path: Path) -> None:
    save_file(_saved(tmp_path) | {"up.bias": torch.zeros(3)}, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match="shape"):
        tpplan.load_weights(Packs(), tmp_path, strict=False)


def test_progress_is_told(tmp_path: Path) -> None:
    state = _saved(tmp_path)
    told: list[tuple[int, int]] = []
    tpplan.load_weights(Packs(), tmp_path, progress=lambda done, total: told.append((done, total)))
    assert {total for _, total in told} == {sum(t.nbytes for t in state.values())}
    assert [done for done, _ in told] == sorted({done for done, _ in told}) and told[-1][0] == told[-1][1]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_a_terminal(
    terminal: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = _saved(tmp_path)
    monkeypatch.setattr("tpplan.progress.wants_progress", lambda _: terminal)
    model = Packs()
    tpplan.load_weights(model, tmp_path, progress=True)
    assert _holds(model, state)
    told: list[tuple[int, int]] = []
    tpplan.save_weights(model, tmp_path / "again", progress=lambda done, total: told.append((done, total)))
    size = sum(tensor.nbytes for tensor in state.values())
    assert told[-1] == (size, size) and told == sorted(told)
    tpplan.save_weights(model, tmp_path / "once more", progress=True)
    said = capsys.readouterr().err
    assert ("loading weights" in said, "saving weights" in said) == (terminal, terminal) and (terminal or not said)


def test_a_backward_that_began_before_a_load_is_refused_by_autograd(tmp_path: Path) -> None:
    """Numbers that are read into memory are written in place, as by `copy_`."""
    _saved(tmp_path)
    model = Packs()
    result = model(torch.ones(2, 8)).sum()
    tpplan.load_weights(model, tmp_path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


class Frequencies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", 1 / (10 ** torch.arange(4)), persistent=False)
        self.register_buffer("steps", torch.arange(4), persistent=False)
        self.scale = nn.Parameter(torch.ones(4))


class Rotary(nn.Module):
    """As transformers' models: what isn't in a checkpoint is made by the root's `_init_weights`."""

    def __init__(self, makes: str = "all") -> None:
        super().__init__()
        self.makes, self.inner, self.up = makes, Frequencies(), nn.Linear(4, 4)

    def _init_weights(self, module: Any) -> None:
        assert not isinstance(module, nn.Linear), "it lacks nothing"
        module.scale.zero_()
        if self.makes != "none":
            module.inverse.copy_(1 / (10 ** torch.arange(4)))
        if self.makes == "all":
            module.steps.copy_(torch.arange(4))
        elif self.makes == "some":
            module.steps[0] = 0
        elif self.makes == "raises":
            raise KeyError("steps")


def test_buffers_that_no_checkpoint_has_are_made_as_the_stock_model_makes_them(tmp_path: Path) -> None:
    stock = Rotary()
    save_file(stock.state_dict(), tmp_path / SINGLE)
    with torch.device("meta"):
        model = Rotary()
    tpplan.load_weights(model, tmp_path)
    assert {n: t.tolist() for n, t in model.named_buffers()} == {n: t.tolist() for n, t in stock.named_buffers()}
    assert torch.equal(model.inner.scale, torch.ones(4)) and _holds(model, stock.state_dict())
    assert not set(dict(model.named_buffers())) & set(model.state_dict())


@pytest.mark.parametrize(("makes", "left"), [("some", 1), ("none", 2), ("raises", 2)])
def test_buffers_that_cannot_be_made_are_named(tmp_path: Path, makes: str, left: int) -> None:
    save_file(Rotary().state_dict(), tmp_path / SINGLE)
    with torch.device("meta"):
        model = Rotary(makes)
    with pytest.raises(CheckpointError, match=rf"TP121(?s:.*){left} buffers are on `meta`(?s:.*)`inner.steps`"):
        tpplan.load_weights(model, tmp_path)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    with pytest.warns(UserWarning, match=f"{left} buffers are on `meta`"):
        tpplan.load_weights(model, tmp_path, strict=False)
    assert not model.up.weight.is_meta and model.inner.steps.is_meta


def test_what_makes_buffers_writes_to_no_parameter() -> None:
    model = Rotary()
    model.inner.steps = torch.empty(4, dtype=torch.int64, device="meta")
    (made,), nothing = make_buffers(model, torch.device("cpu"), strict=True)
    assert not nothing and torch.equal(made.numbers, torch.arange(4))
    assert torch.equal(model.inner.scale, torch.ones(4)) and model.inner.steps.is_meta


def test_materialised_buffers_are_left_alone(tmp_path: Path) -> None:
    save_file(Rotary().state_dict(), tmp_path / SINGLE)
    model = Rotary("none")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tpplan.load_weights(model, tmp_path)
    assert torch.equal(dict(model.named_buffers())["inner.steps"], torch.arange(4))


def test_a_parameter_that_was_frozen_on_meta_stays_frozen(tmp_path: Path) -> None:
    state = _saved(tmp_path)
    with torch.device("meta"):
        model = Packs()
    model.up.weight.requires_grad_(False)
    tpplan.load_weights(model, tmp_path)
    assert _holds(model, state)
    assert {name for name, held in model.named_parameters() if not held.requires_grad} == {"up.weight"}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)
        self.head.weight = self.table.weight


@pytest.mark.parametrize("change", [0.0, 1.0])
def test_tied_tensors_must_be_one_in_the_checkpoint_as_well(tmp_path: Path, change: float) -> None:
    numbers = torch.rand(64, 64)
    save_file({"table.weight": numbers, "head.weight": numbers + change}, tmp_path / SINGLE)
    model = Tied()
    before = model.table.weight.clone()
    if not change:
        tpplan.load_weights(model, tmp_path)
        assert torch.equal(model.head.weight, numbers) and model.head.weight is model.table.weight
        return
    with pytest.raises(CheckpointError, match=r"`table\.weight`, `head\.weight` are one tensor in the model"):
        tpplan.load_weights(model, tmp_path)
    assert torch.equal(model.head.weight, before)
