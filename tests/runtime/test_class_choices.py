"""Choices among classes that are split over the ranks are those among all classes, and send a few numbers a row."""

from __future__ import annotations

import copy
import functools
import os
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import tpplan
from tests.marking import in_thirds
from tests.runtime.vocabulary import LLAMA, VOCABULARY, gpt2, llama
from tests.runtime.world import Member, world
from tpplan.parity.threads import ThreadCommunicator, run_ranks
from tpplan.runtime.classes import class_choices
from tpplan.runtime.classes.class_rows import ClassPart
from tpplan.runtime.classes.split_logits import SplitLogits

NAN, INF = float("nan"), float("inf")


def rows(classes: int, dtype: torch.dtype) -> Tensor:
    """Random ones; few values, so that many are equal; all equal; with NaN and infinities."""
    generator = torch.Generator().manual_seed(classes)
    random = torch.randn(4, classes, generator=generator)
    ties = torch.randint(3, (8, classes), generator=generator).float()
    odd = torch.zeros(5, classes)
    odd[0, -1], odd[1], odd[2, classes // 2], odd[3] = NAN, -INF, INF, NAN
    odd[4, : classes // 2] = NAN
    return torch.cat([random, ties, torch.ones(1, classes), odd]).to(dtype)


def stock_top(whole: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As `torch.topk`, which leaves it open which of equal numbers it takes: here those of the lowest classes."""
    found = whole.sort(dim=-1, descending=True, stable=True)
    return found.values[..., :k], found.indices[..., :k]


def on_ranks(size: int, whole: Tensor, work: Any) -> list[tuple[Any, Counter[str]]]:
    def rank(axis: ThreadCommunicator) -> tuple[Any, Counter[str]]:
        part = ClassPart(axis, whole.shape[-1])
        local = whole[..., part.first : part.first + part.count].clone()
        axis.counts.clear()
        return work(local, part), Counter(axis.counts)

    return run_ranks(size, rank)


@pytest.mark.parametrize(("size", "classes", "dtype"), in_thirds(
    [(2, 7, torch.float32), (4, 6, torch.bfloat16)],
    [(size, classes, torch.float32) for size in (2, 3, 4) for classes in (1, 5, 97)],
    [(size, classes, dtype) for size in (1, 2, 3, 4) for classes in (1, 5, 6, 7, 97)
     for dtype in (torch.float32, torch.float64, torch.bfloat16)],
))  # fmt: skip
def test_argmax_and_top_k_are_those_of_all_classes(size: int, classes: int, dtype: torch.dtype) -> None:
    whole = rows(classes, dtype)

    def work(local: Tensor, part: ClassPart, k: int) -> tuple[Tensor, ...]:
        soft = class_choices.gathered(class_choices.softmax(local, part), part)
        return class_choices.argmax(local, part), *class_choices.top_k(local, k, part), soft

    for k in {0, 1, min(3, classes), classes}:
        for (index, values, indices, soft), counts in on_ranks(size, whole, functools.partial(work, k=k)):
            assert torch.equal(index, whole.argmax(-1))
            for ours, theirs in zip((values, indices), stock_top(whole, k), strict=True):
                assert torch.equal(ours.nan_to_num(9), theirs.nan_to_num(9)) and ours.dtype == theirs.dtype
            torch.testing.assert_close(soft, whole.softmax(-1), equal_nan=True)
            assert sum(counts.values()) == 4 and counts["all-gather"] == 4


def test_more_than_there_are_is_refused_as_torch_does() -> None:
    with pytest.raises(Exception, match="selected index k out of range"):
        on_ranks(2, rows(5, torch.float32), lambda z, p: class_choices.top_k(z, 6, p))


def _of_wanted_gradients(member: Member) -> None:
    group = member.mesh().get_group()
    logits = torch.arange(6.0).view(2, 3).add(member.rank).requires_grad_()  # of six classes
    assert tpplan.generation.argmax(logits, mesh=group, classes=6).tolist() == [5, 5]
    with pytest.raises(tpplan.ArgumentError, match="want a gradient"):
        tpplan.generation.top_k(logits, 2, mesh=group, classes=6)
    with torch.no_grad():
        assert tpplan.generation.top_k(logits, 2, mesh=group, classes=6)[1].tolist() == [[5, 2], [5, 2]]


@pytest.mark.processes
def test_logits_that_want_a_gradient() -> None:
    world(2).run(_of_wanted_gradients)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def _worked(local: Tensor, part: ClassPart) -> list[Any]:
    """What a decoding loop does with logits; each with the number of collectives that it took."""
    found: list[Any] = []
    for work in WORKS:
        part.axis.counts.clear()  # pyright: ignore
        made = work(SplitLogits.of(local, part))
        split = isinstance(made, SplitLogits)
        count = sum(part.axis.counts.values())  # pyright: ignore
        found.append((made.whole() if split else made, split, count))
    return found


def _warped(logits: Tensor) -> Tensor:
    """As transformers' processors for `temperature` and `top_k` do it."""
    scores = logits / 0.7
    remove = scores < torch.topk(scores, 3)[0][..., -1, None]
    return scores.masked_fill(remove, -INF)


WORKS: list[Any] = [
    lambda z: z[:, -1].to(copy=True, dtype=torch.float32).argmax(-1),
    lambda z: torch.argmax(z[:, -1], dim=-1, keepdim=True),
    lambda z: _warped(z[:, -1]),
    lambda z: torch.multinomial(
        torch.nn.functional.softmax(_warped(z[:, -1]), dim=-1), num_samples=1, generator=_seeded()
    ).squeeze(1),
    lambda z: z.argmax(),  # here the logits are gathered
    lambda z: z[..., 3],
    lambda z: z.log_softmax(-1),
    lambda z: z + torch.arange(z.shape[-1]),
    lambda z: torch.cat([z, z]),
    lambda z: z[:, -1].tolist(),
    lambda z: z.numpy().shape,
    lambda z: (z.shape, z.size(-1), z.dtype, z.device, z.dim(), len(z), z.numel()),
    lambda z: copy.deepcopy(z),
    lambda z: z.sort(-1)[0],
    lambda z: z[[0, 1]],
    lambda z: z.index_select(-1, torch.tensor([1, 6])),
    lambda z: z.masked_fill_(z < 0, 0.0),
    lambda z: z.topk(2, dim=1)[0],
    lambda z: torch.multinomial(z[:, 0].softmax(-1), 3, generator=_seeded()),
    lambda z: (z.masked_fill_(z < 0, 0.0), z.argmax(-1), z[:, 0].sum(-1))[1],
    lambda z: (z[:, -1].fill_(5.0), z.argmax(-1))[1],  # a view is one
    lambda z: (z.float().detach().mul_(-1), z[:, -1].argmax(-1))[1],
]
EXPECTED = (1, 1, 2, 3, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 2, 1, 2, 3, 2, 2)


def test_loops_written_for_whole_logits_get_what_they_get_of_these() -> None:
    whole = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    expected = []
    for work in WORKS:
        expected.append(work(whole.clone()))
    for size in (2, 3):
        for seen, _ in on_ranks(size, whole, _worked):
            for number, ((made, _, count), stock) in enumerate(zip(seen, expected, strict=True)):
                if isinstance(stock, Tensor):
                    torch.testing.assert_close(made, stock, rtol=0, atol=0, msg=str(number))
                else:
                    assert made == stock, number
                assert count <= EXPECTED[number], (number, count)


# -- real processes ---------------------------------------------------------------------------------------------------
PROMPT = torch.randint(3, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(4))
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "top-k": {"do_sample": True, "top_k": 5, "temperature": 0.8},
    "sampled": {"do_sample": True, "top_k": 0},
    "top-p": {"do_sample": True, "top_k": 0, "top_p": 0.8},
    "beam": {"num_beams": 3},
    "repetition": {"do_sample": False, "repetition_penalty": 1.3},
    "scores": {"do_sample": False, "output_scores": True, "output_logits": True, "return_dict_in_generate": True},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 2},
}
GPT2_RULES = {
    "transformer.h.*.attn.c_attn": {"style": "colwise", "packed": ["q", "k", "v"]},
    "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise", "transformer.h.*.mlp.c_proj": "rowwise",
    "transformer.wte": "vocab", "lm_head": {"style": "colwise", "output": "shard"},
}  # fmt: skip


class _Counting:
    """Counts a model's collectives and the entries that they gather."""

    def __init__(self, axis: Any) -> None:
        self.counts, self.entries = Counter[str](), 0
        for name in ("all_reduce", "all_gather"):
            setattr(axis, name, self._counted(name, getattr(axis, name)))

    def clear(self) -> None:
        self.counts.clear()
        self.entries = 0

    def _counted(self, name: str, usual: Any) -> Any:
        def call(tensor: Tensor, *rest: Any) -> Tensor:
            self.counts[name] += 1
            self.entries = max(self.entries, tensor.numel() if name == "all_gather" else 0)
            return usual(tensor, *rest)

        return call


def tokens_of(model: Any, way: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(5)
    prompt = PROMPT[: 1 if "prompt_lookup_num_tokens" in way else 2]
    made = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, pad_token_id=0, eos_token_id=2, **way
    )
    return (made, []) if isinstance(made, Tensor) else (made.sequences, [*made.scores, *made.logits])


def generated(member: Member, name: str, ways: list[str]) -> None:
    stock: Any = (llama() if name == "llama" else gpt2()).eval()
    rules = LLAMA if name == "llama" else GPT2_RULES
    sharded: Any = copy.deepcopy(stock)
    tpplan.parallelize(sharded, {"version": 1, "modules": rules}, member.mesh(), {"input_ids": PROMPT})
    counting = _Counting(sharded.__dict__["_tpplan"].axis)
    for way in ways:
        (ours, more), (theirs, other) = tokens_of(sharded, WAYS[way]), tokens_of(stock, WAYS[way])
        assert torch.equal(ours, theirs), (name, way, ours, theirs)
        for mine, its in zip(more, other, strict=True):
            assert type(mine) is Tensor
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
    counting.clear()
    tokens_of(sharded, WAYS["greedy"])
    # Of a layer two sums, one of the table, and a gather of two numbers for each of two rows: no logits.
    assert counting.entries == 4 and counting.counts["all_gather"] <= 6, counting.counts
    assert counting.counts["all_reduce"] == 3 * counting.counts["all_gather"]
    with torch.no_grad():
        logits = sharded(PROMPT).logits
        whole = stock(PROMPT).logits
    assert logits.shape[-1] < VOCABULARY
    assert torch.equal(tpplan.generation.argmax(logits, model=sharded), whole.argmax(-1))
    values, classes = tpplan.generation.top_k(logits[:, -1], 4, model=sharded)
    torch.testing.assert_close(values, whole[:, -1].topk(4).values)
    assert torch.equal(classes, whole[:, -1].topk(4).indices)
    with pytest.raises(tpplan.LossError, match="TP165"):
        tpplan.generation.argmax(logits)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.sweep
def test_generate_chooses_among_split_logits(name: str) -> None:
    world(2).run(generated, name, list(WAYS) if name == "llama" else ["greedy", "top-k"])


@pytest.mark.slow
@pytest.mark.processes
def test_generate_chooses_among_split_logits_in_lockstep() -> None:
    with mock.patch.dict(os.environ, {"TPPLAN_DEBUG": "1"}):
        world(2).run(_in_lockstep)


def _in_lockstep(member: Member) -> None:
    with mock.patch.dict(os.environ, {"TPPLAN_DEBUG": "1"}):
        generated_tokens(member)


def generated_tokens(member: Member) -> None:
    stock: Any = llama().eval()
    sharded: Any = copy.deepcopy(stock)
    tpplan.parallelize(sharded, {"version": 1, "modules": LLAMA}, member.mesh(), {"input_ids": PROMPT})
    assert torch.equal(tokens_of(sharded, WAYS["greedy"])[0], tokens_of(stock, WAYS["greedy"])[0])
