"""Numbers of a call that a model's Python reads: another number is another call, and is proved when it comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compiler.toys import HIDDEN, MLP
from tests.runtime.simulated import on_ranks, worst
from tpplan.api import suggest_text
from tpplan.calls.guard import CallGuard
from tpplan.plan import CompileError

TOLERANCE = 1e-12
WIDTH = 24
Between = Callable[[Tensor, Tensor], Tensor]


class Steered(nn.Module):
    """A column, what `between` makes of it with a tensor of whole numbers, and a row."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.between = between

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        return self.down(self.between(self.up(x), numbers))


def along(h: Tensor, numbers: Tensor) -> Tensor:
    """The same steps in Python whatever the number, and other reshards."""
    return h.softmax(1 + numbers[0].item() % 2)  # pyright: ignore


def by_number(h: Tensor, numbers: Tensor) -> Tensor:
    return h.softmax(-1) if int(numbers.max()) > 24 else h.relu()


def by_list(h: Tensor, numbers: Tensor) -> Tensor:
    return h.softmax(-1) if 5 in numbers.tolist() else h.relu()


def by_array(h: Tensor, numbers: Tensor) -> Tensor:
    return h.softmax(-1) if numbers.numpy().min() < 7 else h.relu()


def by_count(h: Tensor, numbers: Tensor) -> Tensor:
    found = numbers[numbers > 20]
    assert found.sum().item() >= 0  # what reads no number knows no sizes
    return h.softmax(-1) if len(found) > 1 else h.relu()


def by_written(h: Tensor, numbers: Tensor) -> Tensor:
    places = torch.zeros(4, dtype=torch.int64, device=h.device)
    places[1:3] += numbers[:2] // 20
    return h.softmax(-1) if places.flip(0)[1].item() else h.relu()


def by_another(h: Tensor, numbers: Tensor) -> Tensor:
    """The second number is only looked at if the first one is large."""
    if numbers[0].item() > 24 and numbers[1].item() > 24:
        return h.softmax(-1)
    return h.relu()


def by_side(h: Tensor, numbers: Tensor) -> Tensor:
    """The second number is only looked at on one side of a branch on a tensor."""
    if (numbers[0] > 24).all():
        return h.softmax(-1) if numbers[1].item() > 24 else h.tanh()
    return h * numbers[2].item()


def by_view(h: Tensor, numbers: Tensor) -> Tensor:
    made = torch.zeros(6, dtype=torch.int64, device=h.device)
    row = made.view(2, 3)[1]
    row.copy_(numbers)
    made[5] += 1
    return h.softmax(-1) if made.sum().item() > 60 else h.relu()


def by_places(h: Tensor, numbers: Tensor) -> Tensor:
    met = torch.zeros(64, dtype=torch.bool, device=h.device)
    met[numbers] = True
    return h.softmax(-1) if met[:28].sum().item() > 2 else h.relu()


def by_constant(h: Tensor, numbers: Tensor) -> Tensor:
    zeros = torch.zeros_like(torch.tensor([50, 60, 70]), device=h.device)
    return h.softmax(-1) if (zeros + numbers).max().item() > 31 else h.relu()


def by_list_of_tensors(h: Tensor, numbers: Tensor) -> Tensor:
    made = torch.tensor([numbers[0], numbers[1] * 2, 7], device=h.device)
    return h.softmax(-1) if made.max().item() > 59 else h.relu()


def by_larger(h: Tensor, numbers: Tensor) -> Tensor:
    return h.softmax(-1) if max(numbers[0], numbers[1]).item() > 31 else h.relu()


def by_expanded(h: Tensor, numbers: Tensor) -> Tensor:
    mask = (torch.arange(h.shape[1], device=h.device) < numbers[2])[None, :, None].expand_as(h)
    return (h.softmax(-1) if numbers[0].item() > 24 else h.relu()) * h[mask].numel()


def by_selected(h: Tensor, numbers: Tensor) -> Tensor:
    mask = torch.arange(h.shape[1], device=h.device)[:, None] < numbers[2]
    kept = h.masked_select(mask).view(h.shape[0], -1, h.shape[2])
    return torch.cat([kept.softmax(-1), h], 1)[:, : h.shape[1]] * numbers[2].item()


def by_pairs(h: Tensor, numbers: Tensor) -> Tensor:
    met = torch.zeros(2, 64, dtype=torch.int64, device=h.device)
    rows, columns = zip(*torch.stack([numbers % 2, numbers], -1), strict=True)
    met[rows, columns] = 1  # torch makes an index of each of the two
    return h.softmax(-1) if met[0].sum().item() > 1 else h.relu()


def model(between: Between) -> Steered:
    torch.manual_seed(0)
    return Steered(between).double()


def call(*numbers: int, length: int = 12) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, length, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    return (x, torch.tensor(numbers)), {}


ALL = (along, by_number, by_list, by_array, by_count, by_written, by_another, by_side)


@pytest.mark.filterwarnings("ignore:TP186")  # after eight of the ten
@pytest.mark.parametrize("between", ALL)
@pytest.mark.one_in(8)
def test_another_number_is_proved_when_it_comes(between: Any) -> None:
    numbers = [(24, 30, 7), (11, 5, 7), (24, 30, 7), (11, 5, 7), (30, 40, 7), (30, 5, 7), (30, 40, 7), (24, 30, 9)]
    calls = [call(*held, length=length) for length in (12, 20) for held in numbers]
    assert max(worst(model(between), MLP, 2, call(24, 30, 7), calls)) < TOLERANCE


def test_calls_without_gradients_look_at_numbers_too() -> None:
    stock = model(along)
    numbers = ((24, 30, 7), (24, 30, 7), (24, 30, 7), (24, 5, 5), (11, 5, 7), (24, 30, 7), (11, 5, 7))
    calls = [((arguments[0].detach(), arguments[1]), {}) for arguments, _ in (call(*held) for held in numbers)]
    with torch.no_grad():
        expected = [stock(*arguments) for arguments, _ in calls]

    def work(own: nn.Module, _: CallGuard) -> list[Tensor]:
        with torch.no_grad():
            return [own(*arguments) for arguments, _ in calls]

    for found in on_ranks(stock, MLP, 2, call(24, 30, 7), work):
        assert all(map(torch.allclose, found, expected))


WAYS = (by_view, by_places, by_constant, by_list_of_tensors, by_larger, by_expanded, by_selected, by_pairs)


@pytest.mark.parametrize("between", WAYS)
@pytest.mark.one_in(5)
def test_numbers_may_be_made_in_many_ways(between: Any) -> None:
    numbers = [(24, 30, 7), (5, 5, 5), (24, 30, 7), (40, 5, 8), (30, 40, 7), (5, 5, 5)]
    assert max(worst(model(between), MLP, 2, call(24, 30, 7), [call(*held) for held in numbers])) < TOLERANCE


def test_a_call_that_reads_the_same_is_not_proved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import tpplan.calls.guard as module

    proved: list[int] = []
    stock = module.prove

    def counted(request: Any) -> Any:
        proved.append(1)
        return stock(request)

    monkeypatch.setattr(module, "prove", counted)

    def work(own: nn.Module, _: CallGuard) -> list[int]:
        seen: list[int] = []
        for numbers in ((24, 30, 7), (24, 5, 5), (25, 30, 7), (25, 8, 8), (24, 9, 9)):
            proved.clear()
            own(*call(*numbers)[0])
            seen.append(len(proved))
        return seen

    assert on_ranks(model(along), {}, 1, call(24, 30, 7), work) == [[0, 0, 1, 0, 0]]


def test_numbers_that_follow_from_a_parameter_are_not_known() -> None:
    def between(h: Tensor, numbers: Tensor) -> Tensor:
        return h * int(h.argmax(-1).max() + numbers[0])

    with pytest.raises(CompileError, match="reads a tensor's values"):
        worst(model(between), MLP, 2, call(24, 30, 7), [])


def test_numbers_that_were_written_over_are_not_known() -> None:
    def between(h: Tensor, numbers: Tensor) -> Tensor:
        made = torch.zeros(3, dtype=h.dtype, device=h.device)
        last = made[2:]
        made[2] = h.sum()
        return h.softmax(-1) if last.item() > 0 and numbers[0].item() else h.relu()

    with pytest.raises(CompileError, match="reads a tensor's values"):
        worst(model(between), MLP, 2, call(24, 30, 7), [])


def test_an_example_without_numbers_says_which_are_wanted() -> None:
    (x, numbers), _ = call(24, 30, 7)
    with pytest.raises(CompileError, match="`numbers`"):
        worst(model(by_number), MLP, 2, ((x, numbers.to("meta")), {}), [])


class Masked(Steered):
    """It reads a number, and branches on a mask."""

    def forward(self, x: Tensor, numbers: Tensor, mask: Tensor) -> Tensor:
        h = self.up(x) * numbers[0].item()
        if not mask.all():
            h = h * mask[..., None]
        return self.down(h)


def test_a_branch_on_a_mask_is_proved_for_both_sides_whatever_the_mask() -> None:
    torch.manual_seed(0)
    masked = Masked(along).double()

    def with_mask(seed: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        mask = torch.rand(3, 12, generator=torch.Generator().manual_seed(seed)) > (0.5 if seed else -1)
        return (*call(24, 30, 7)[0], mask), {}

    proofs: list[int] = []
    calls = [with_mask(seed) for seed in (0, 1, 2, 0, 3)]
    assert max(worst(masked, MLP, 2, with_mask(0), calls, proofs)) < TOLERANCE
    assert proofs == [1, 1]


def test_what_is_written_to_an_input_is_read_as_written() -> None:
    def between(h: Tensor, numbers: Tensor) -> Tensor:
        numbers[1:] += numbers[:-1].clone()
        return h.softmax(-1) if numbers[2].item() > 50 else h.relu()

    held = [(24, 30, 7), (10, 5, 7), (24, 30, 7), (10, 5, 7)]
    assert max(worst(model(between), MLP, 2, call(24, 30, 7), [call(*n) for n in held])) < TOLERANCE


def test_many_proofs_for_the_numbers_that_are_read_are_told_of() -> None:
    def work(own: nn.Module, _: CallGuard) -> None:
        for number in range(9):
            own(*call(number, 30, 7)[0])

    with pytest.warns(UserWarning, match="TP186"):
        on_ranks(model(along), {}, 1, call(24, 30, 7), work)


class Reading(nn.Module):
    """A tower is called if any token stands for a picture, and a count says how much of it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, HIDDEN)
        self.tower, self.layers = (
            nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.ReLU(), nn.Linear(WIDTH, HIDDEN)) for _ in "12"
        )

    def forward(self, ids: Tensor, pictures: Tensor, counted: Tensor) -> Tensor:
        x = self.table(ids)
        if (ids == 63).any():
            seen = self.tower(pictures)[:, : int(counted[0].sum().item())]
            x = x.index_put(torch.nonzero(ids == 63, as_tuple=True), seen.flatten(0, 1))
        return x + self.layers(x)


def pictured(counted: torch.dtype) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    ids = torch.arange(24).reshape(2, 12)
    ids[:, 4:7] = 63
    return (ids, torch.randn(2, 5, HIDDEN, dtype=torch.float64), torch.ones(2, 3, dtype=counted)), {}


READING = {
    f"{part}.{place}": style for part in ("tower", "layers") for place, style in ((0, "colwise"), (2, "rowwise"))
}


def test_of_a_branch_that_the_call_takes_numbers_are_read() -> None:
    torch.manual_seed(0)
    stock, example = Reading().double(), pictured(torch.int64)
    assert "tower.0: colwise" in suggest_text(stock, 2, inputs=example[0])  # it is seen to be called
    text = ((example[0][0].clamp(max=62), *example[0][1:]), {})
    assert max(worst(stock, READING, 2, example, [example, text, example])) < TOLERANCE


def test_numbers_that_nobody_knows_are_missed_on_the_side_that_the_call_takes() -> None:
    with pytest.raises(CompileError, match="TP110"):
        worst(Reading().double(), READING, 2, pictured(torch.float64), [])
