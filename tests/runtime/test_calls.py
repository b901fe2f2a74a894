"""Calls of other kinds than the example: each is proved, runs by a program that covers it, and computes the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tests.compiler.toys import HIDDEN, MLP, Mlp
from tests.models.tiny import example_keywords, tiny_model
from tests.runtime.simulated import on_ranks, worst
from tpplan.calls import guard as guards
from tpplan.compiler.refine import refine
from tpplan.rehearsal.prove import prove

TOLERANCE = 1e-12
EXAMPLE = ((torch.zeros(3, 12, HIDDEN, dtype=torch.float64),), {})


def x(batch: int = 3, length: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(1)  # ranks are threads
    return torch.randn(batch, length, HIDDEN, dtype=torch.float64, generator=generator)


def seeded(make: Any, *arguments: Any) -> nn.Module:
    torch.manual_seed(0)
    return make(*arguments).double()


@dataclass(eq=False)
class Wish:
    """A flag in a record."""

    wide: bool = False


class Flags:
    """A flag in an object."""

    def __init__(self, wide: bool) -> None:
        self.wide = wide


class Steered(Mlp):
    """Where `wide` is true, all features are needed at once."""

    def forward(self, x: Tensor, wide: Any = False, act: Any = functional.gelu) -> Tensor:
        y = act(self.up(x))
        if getattr(wide, "wide", wide) is True:
            y = torch.softmax(y, -1)
        return self.down(y)


@pytest.mark.parametrize("wide", [True, Wish(True), Flags(True)], ids=["flag", "record", "object"])
def test_a_flag_is_seen_wherever_it_is_kept(wide: Any) -> None:
    narrow = {True: 1}.get(wide) if wide is True else type(wide)(False)
    calls = [((x(),), {"wide": narrow}), ((x(),), {"wide": wide}), ((x(),), {"wide": narrow})]
    proofs: list[int] = []
    assert max(worst(seeded(Steered), MLP, 2, EXAMPLE, calls, proofs)) < TOLERANCE
    assert proofs == [2, 2], "a program is used again where it covers a call"


def test_a_flag_in_the_same_object_is_seen_when_it_changes() -> None:
    flags = Flags(False)

    def widen(_: nn.Module) -> None:
        flags.wide = True

    def work(model: nn.Module, guard: guards.CallGuard) -> int:
        model(x(), flags)
        return len(list(guard._proofs))

    assert on_ranks(seeded(Steered), MLP, 2, EXAMPLE, work) == [1, 1]
    widen(nn.Module())
    assert on_ranks(seeded(Steered), MLP, 2, EXAMPLE, work) == [2, 2]


def test_a_function_is_run_in_the_proof() -> None:
    calls = [((x(),), {"act": act}) for act in (torch.relu, lambda y: y.softmax(-1), lambda y: y.flip(-1))]
    assert max(worst(seeded(Steered), MLP, 2, EXAMPLE, calls)) < TOLERANCE


class Heads(Steered):
    """Counts the heads of its features."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.size = 4, self.up.out_features // 4

    def forward(self, x: Tensor, wide: Any = False, act: Any = functional.gelu) -> Tensor:
        y = act(self.up(x).view(*x.shape[:-1], self.heads, self.size))
        return self.down((y / y.norm(dim=-1, keepdim=True)).flatten(-2))


def test_counts_that_are_local_in_one_proof_are_tried_first_in_another() -> None:
    calls = [((x(),), {"act": act}) for act in (torch.relu, torch.tanh)]
    with mock.patch("tpplan.compiler.search.refine", side_effect=refine) as refined:
        assert max(worst(seeded(Heads), MLP, 2, EXAMPLE, calls)) < TOLERANCE
    assert refined.call_count == 1


class Joined(nn.Module):
    """Three heads, which two ranks share, are joined with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.heads = nn.Linear(HIDDEN, 12), nn.Linear(12, HIDDEN), 3

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.up(x).view(batch, length, self.heads, 4).transpose(1, 2).reshape(batch * self.heads, length, 4)
        y = torch.bmm(torch.bmm(y, y.transpose(1, 2)).softmax(-1), y)
        return self.down(y.view(batch, self.heads, length, 4).transpose(1, 2).flatten(2))


def test_uneven_heads_that_are_joined_with_the_batch_are_proved_once_for_each_batch() -> None:
    calls = [((x(batch, length),), {}) for batch, length in ((3, 7), (3, 9), (2, 12), (2, 5), (4, 8))]
    with mock.patch("tpplan.calls.guard.prove", side_effect=prove) as proved:
        assert max(worst(seeded(Joined), MLP, 2, EXAMPLE, calls)) < TOLERANCE
    assert proved.call_count == 2 * 2  # on two ranks, for batches of 2 and 4


class AlongLength(nn.Module):
    """Three heads are joined with a length that ranks share outside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 12), nn.Linear(12, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.up(self.norm(x)).view(batch, length, 3, 4).reshape(batch, length * 3, 4)
        y = (y / (1 + y.square().sum(-1, keepdim=True))).view(batch, length, 3, 4).flatten(2)
        return self.last(x + self.down(y))


def test_uneven_heads_that_are_joined_with_a_split_length_are_proved_at_each_length() -> None:
    calls = [((x(batch, length),), {}) for batch, length in ((3, 8), (2, 12))]
    rules = MLP | {"norm": "sequence", "last": "sequence"}
    assert max(worst(seeded(AlongLength), rules, 2, EXAMPLE, calls)) < TOLERANCE


class ByGradient(Mlp):
    """What the caller wants a gradient of."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.exp())


def test_a_gradient_that_the_example_does_not_want() -> None:
    calls = [((x().requires_grad_(),), {}), ((x(),), {}), ((x().requires_grad_(),), {})]
    assert max(worst(seeded(ByGradient), MLP, 2, EXAMPLE, calls)) < TOLERANCE


class ByMode(Mlp):
    """In evaluation all features are needed at once."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(functional.gelu(y) if self.training else y.softmax(-1))


class Outer(nn.Module):
    """A module of which a part may be in another mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ByMode(), ByMode()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Short(Mlp):
    """A part that raises once it has computed something."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if x.shape[1] > 12:
            raise ValueError("too long")
        return y


class Falls(Outer):
    """Goes on without a part that raises."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Short()

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        except ValueError:
            return self.second(x)


class Tries(Mlp):
    """Calls itself, which raises."""

    def forward(self, x: Tensor, inside: bool = False) -> Tensor:
        y = functional.gelu(self.up(x))
        if inside:
            raise ValueError("inside")
        try:
            self(x, inside=True)
        except ValueError:
            y = y + 1
        return self.down(y)


PAIR = {f"{half}.{name}": style for half in ("first", "second") for name, style in MLP.items()}


@pytest.mark.parametrize(("kind", "rules"), [(Falls, PAIR), (Tries, MLP)])
def test_what_a_part_raises_may_be_caught(kind: type[nn.Module], rules: dict[str, str]) -> None:
    calls = [((x(length=length),), {}) for length in (12, 12, 13, 14, 12)]
    assert max(worst(seeded(kind), rules, 2, EXAMPLE, calls)) < TOLERANCE


def test_each_mode_has_a_program() -> None:
    calls = [((x(),), {}), nn.Module.eval, ((x(),), {}), nn.Module.train, ((x(),), {})]
    proofs: list[int] = []
    assert max(worst(seeded(Outer), PAIR, 2, EXAMPLE, calls, proofs)) < TOLERANCE
    assert proofs == [2, 2]


def test_a_part_of_the_model_may_be_in_another_mode() -> None:
    def freeze(model: Any) -> None:
        model.second.eval()

    def thaw(model: Any) -> None:
        model.second.train()

    calls = [((x(),), {}), freeze, ((x(),), {}), thaw, ((x(),), {})]
    assert max(worst(seeded(Outer), PAIR, 2, EXAMPLE, calls)) < TOLERANCE


def test_a_part_may_be_in_another_mode_from_the_start() -> None:
    stock = seeded(Outer)
    stock.second.eval()  # pyright: ignore
    thaw = lambda model: model.second.train()  # noqa: E731
    assert max(worst(stock, PAIR, 2, EXAMPLE, [((x(),), {}), thaw, ((x(),), {})])) < TOLERANCE


class Flattened(nn.Module):
    """The sequence is flattened with its batch between the bodies, as in Bloom; a mask has a path of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = Mlp(), nn.LayerNorm(HIDDEN), Mlp()

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        flat = self.norm(self.first(x).flatten(0, 1))
        return self.second(flat if bias is None else flat + bias).view(x.shape)


SEQUENCE = {"{first,second}.up": "colwise", "{first,second}.down": "rowwise", "norm": "sequence"}


@pytest.mark.slow
def test_a_sequence_flattened_with_its_batch_is_split_by_the_batch_of_the_call() -> None:
    bias = torch.ones(HIDDEN, dtype=torch.float64)
    calls = [((x(batch, 12),), more) for batch in (3, 2, 1, 4) for more in ({}, {"bias": bias})]
    calls += [nn.Module.eval, ((x(2),), {}), ((x(1),), {})]
    proofs: list[int] = []
    assert max(worst(seeded(Flattened), SEQUENCE, 2, EXAMPLE, calls, proofs)) < TOLERANCE
    assert max(proofs) <= 3


class Refuses(Steered):
    """One flag asks for what no program gives."""

    def forward(self, x: Tensor, wide: Any = False, act: Any = functional.gelu) -> Tensor:
        if wide == "broken":
            x = x * float(x.sum())
        return super().forward(x, wide, act)


def test_a_refusal_says_how_the_call_differs() -> None:
    def work(model: nn.Module, _: guards.CallGuard) -> str:
        with pytest.raises(tpplan.UnprovedCallError) as raised:
            model(x(), wide="broken")
        return str(raised.value)

    for text in on_ranks(seeded(Refuses), MLP, 2, EXAMPLE, work):
        assert text.startswith("TP117 unproved-call: this call differs from the example (`wide` is 'broken', which")
        assert "can't be proved" in text and "reads a tensor's values" in text


def test_a_refusal_names_the_entry_that_differs() -> None:
    example = (x(),), {"wide": {"kinds": ["plain"], "more": 1}}

    class Looks(Refuses):
        def forward(self, x: Tensor, wide: Any = False, act: Any = functional.gelu) -> Tensor:
            return super().forward(x, wide["kinds"][0], act)

    def work(model: nn.Module, _: guards.CallGuard) -> str:
        with pytest.raises(tpplan.UnprovedCallError) as raised:
            model(x(), wide={"kinds": ["broken"], "more": 1})
        return str(raised.value)

    for text in on_ranks(seeded(Looks), MLP, 2, example, work):
        assert "(`wide['kinds'][0]` is 'broken', and 'plain' in the example)" in text


def test_a_program_that_places_parameters_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "placement_difference", lambda *_: "`up.weight` would need layout R for it")

    def work(model: nn.Module, _: guards.CallGuard) -> str:
        with pytest.raises(tpplan.UnprovedCallError) as raised:
            model(x(), wide=True)
        return str(raised.value)

    for text in on_ranks(seeded(Steered), MLP, 2, EXAMPLE, work):
        assert "(`wide` is True, which the example doesn't pass)" in text
        assert "different reshards, and `up.weight` would need layout R" in text and "help: pass `inputs=`" in text


LLAMA: dict[str, Any] = {"num_key_value_heads": 2, "num_hidden_layers": 1}


@pytest.mark.sweep
@pytest.mark.parametrize("plan", ["plans/llama.yaml", "plans/llama-sequence.yaml"])
def test_a_call_without_the_mask_of_the_example_or_with_embeddings(plan: str) -> None:
    """With as few key heads as that, attention repeats them otherwise where it has a mask."""
    stock = tiny_model("llama", **LLAMA)[0]
    keywords = example_keywords("llama")
    ids, mask = keywords["input_ids"], torch.ones_like(keywords["input_ids"])
    embeddings = stock.get_input_embeddings()(ids).detach()  # pyright: ignore
    calls = [
        ((), {"input_ids": ids}),
        ((), {"input_ids": ids, "attention_mask": mask}),
        ((), {"inputs_embeds": embeddings}),
        ((), {"inputs_embeds": embeddings.clone().requires_grad_(), "attention_mask": mask}),
        ((), {"input_ids": ids, "logits_to_keep": 1}),
    ]
    example = ((), {"input_ids": ids, "attention_mask": mask})
    assert max(worst(stock, plan, 4, example, calls)) < TOLERANCE


def test_a_single_token_with_a_mask_and_fewer_key_heads_than_ranks() -> None:
    """For one query torch multiplies the queries of a key head as rows of one matrix; ranks have some of the rows."""
    stock = tiny_model("llama", num_key_value_heads=2, num_hidden_layers=1)[0]
    token = example_keywords("llama")["input_ids"][:, :1]
    report = tpplan.verify(stock, "plans/llama.yaml", 4, {"input_ids": token, "attention_mask": torch.ones_like(token)})
    assert report.ok, report.problems


class Kept(nn.Module):
    """Keeps so many of the last entries of its sequence, which may be all of a short one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = Mlp(), nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor, last: int) -> Tensor:
        return self.norm(self.first(x))[:, -last:]


class KeptFirst(Kept):
    def forward(self, x: Tensor, last: int) -> Tensor:
        return self.norm(self.first(x))[:, :last, ...]


class KeptAll(Kept):
    def forward(self, x: Tensor, last: int) -> Tensor:
        h = self.norm(self.first(x))
        return h[:, : h.shape[1]] * last


@pytest.mark.parametrize("last", [4, 5])
@pytest.mark.parametrize("kind", [Kept, KeptFirst, KeptAll])
@pytest.mark.one_in(5)
def test_as_many_entries_as_the_example_has_are_not_all_of_a_longer_sequence(kind: type[Kept], last: int) -> None:
    plan = {"first.up": "colwise", "first.down": "rowwise", "norm": "sequence"}
    calls = [((x(3, length),), {"last": last}) for length in (4, 12, 4, 6)]
    assert max(worst(seeded(kind), plan, 2, calls[0], calls)) < TOLERANCE


class WholeQueries(nn.Module):
    """Of the attention's columns a plan may name one alone, so that what it makes meets whole queries by heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(HIDDEN, 2 * HIDDEN) for _ in range(3))
        self.out = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        mixed = (q @ k.transpose(-1, -2) / 2) @ v
        return x + self.out(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("example", [(4, 6), (3, 4), (4, 4)], ids=["batch", "length", "both"])
def test_an_example_of_as_many_sequences_as_heads_serves_any_number(example: tuple[int, int]) -> None:
    stock = seeded(lambda: nn.Sequential(nn.Linear(HIDDEN, HIDDEN), WholeQueries(4), nn.Linear(HIDDEN, 6)))
    rules = {"1.k": "colwise", "1.out": "rowwise"}
    calls = [((x(batch, length),), {}) for batch, length in (example, (5, 6), (3, 5), (1, 7))]
    assert max(worst(stock, rules, 2, ((x(*example),), {}), calls)) < TOLERANCE
