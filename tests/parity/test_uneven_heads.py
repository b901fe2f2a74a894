"""Heads that the axis doesn't divide: ranks hold different numbers of them, and compute the same."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tests.caching import cache_of
from tests.marking import in_thirds, slow_but
from tests.models.heads import ATTENTIONS, IN_ONE, Attention, attention
from tests.models.tiny import ARCHITECTURES, first_output, tiny_model
from tests.runtime.world import Member, world
from tests.zoo.architectures import ARCHITECTURES as ARCHITECTURES_OF_ZOO
from tests.zoo.architectures import model_of
from tpplan.api import suggest_text
from tpplan.compiler.check import local_run
from tpplan.compiler.ir.program import Program
from tpplan.compiler.pipeline import compile_call
from tpplan.compiler.request import Request
from tpplan.parity import verify_program
from tpplan.plan import Severity, load_plan
from tpplan.rehearsal.prove import prove
from tpplan.report.program_page import render_program
from tpplan.suggest.sharded_share import block_share

PLANS = Path(__file__).parents[2] / "plans"
FEW_KEYS = [(14, 2, 4), (10, 2, 3), (9, 3, 4), (28, 4, 6), (28, 4, 8)]
SIZES = [(6, 6, 4), (4, 4, 3), (5, 5, 3), (6, 3, 2), (32, 8, 3), *FEW_KEYS]
NOTES = {"TP124", "TP126", "TP132"}  # a recorded body, a single head that stays whole, ranks with more heads


def right(name: str, queries: int, keys: int, tp: int) -> Program:
    model, rules, call = attention(name, queries, keys)
    program = compile_call(Request(model, load_plan({"version": 1, "modules": rules}), tp, *call)).program
    assert {d.code for d in program.diagnostics} <= NOTES
    report = verify_program(model, program, call)
    assert report.ok, str(report)
    assert report.max_error < 1e-13
    assert report.collectives == report.predicted
    assert set(report.collectives) == {"all-reduce"}
    assert {g.name for g in report.gradients} >= {n for n, _ in model.named_parameters()}
    return program


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize(("queries", "keys", "tp"), SIZES)
def test_attentions_compute_the_same(name: str, queries: int, keys: int, tp: int) -> None:
    if name in ("grouped", "gated") and (queries, keys, tp) in FEW_KEYS:
        pytest.skip("refused with any number of heads: queries by key, and a norm of keys that ranks share")
    program = right(name, queries, keys, tp)
    sharded = {p.name.removeprefix("0.") for p in program.parameters if p.layout.is_sharded}
    assert sharded >= {f"{'first.' if name == 'two' else ''}{layer}.weight" for layer in "qkvo"}


@pytest.mark.parametrize(("queries", "keys", "tp"), SIZES)
@pytest.mark.one_in(5)
def test_projections_in_one_compute_the_same(queries: int, keys: int, tp: int) -> None:
    for name in IN_ONE if queries == keys else ("together",):
        right(name, queries, keys, tp)


@pytest.mark.parametrize("tp", [3, 4])
def test_one_key_for_all_stays_whole(tp: int) -> None:
    program = right("plain", 6 if tp == 4 else 4, 1, tp)
    (q,) = (p for p in program.parameters if p.name == "0.q.weight")
    assert len({q.stored_shape(tp, rank) for rank in range(tp)}) == 2


# -- stock models -----------------------------------------------------------------------------------------------------
def subject(name: str, queries: int, keys: int | None, eager: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """A stock model with so many heads, in float64."""
    sizes = {"num_attention_heads": queries, "hidden_size": queries * 6}
    sizes |= {} if keys is None else {"num_key_value_heads": keys}
    settings: dict[str, Any] = sizes | ({"attn_implementation": "eager"} if eager else {})
    model, keywords = tiny_model(name, **settings)
    return model.double(), keywords


STOCK = [
    ("llama", 4, 4, 3), ("llama", 28, 4, 8), ("llama", 32, 8, 3), ("qwen2", 28, 4, 6), ("qwen2", 14, 2, 4),
    ("qwen2", 14, 2, 3), ("qwen3", 9, 3, 4), ("gpt2", 4, None, 3), ("gpt2", 6, None, 4), ("phi3", 14, 2, 3),
    ("gpt_neox", 4, None, 3), ("bert", 4, None, 3),
]  # fmt: skip


# In turns: each by itself, in its sequence-parallel form, and with attention written out; the others in the sweep.
FORMS = [(*case, sequence, eager) for case in STOCK for sequence in (False, True) for eager in (False, True)]
TURNS = [form for place, form in enumerate(FORMS) if place % 8 == place // 8 % 8]


@pytest.mark.parametrize(
    ("name", "queries", "keys", "tp", "sequence", "eager"),
    in_thirds(TURNS[:2], TURNS, FORMS),
)
def test_stock_models_compute_the_same(
    name: str, queries: int, keys: int | None, tp: int, sequence: bool, eager: bool
) -> None:
    if sequence and 12 % tp:
        pytest.skip("a sequence of 12 isn't split over so many")
    model, keywords = subject(name, queries, keys, eager)
    plan = load_plan(PLANS / f"{name}{'-sequence' if sequence else ''}.yaml")
    program = compile_call(Request(model, plan, tp, (), keywords)).program
    assert not {d.code for d in program.diagnostics} - {"TP120", *NOTES}
    assert program.is_uneven
    report = verify_program(model, program, ((), keywords))
    assert report.ok, str(report)
    assert report.max_error < (1e-13 if ARCHITECTURES[name].coarsest is torch.float64 else 1e-5)
    assert report.collectives == report.predicted


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "queries", "keys", "tp"),
    [("llama", 4, 4, 3), ("qwen2", 14, 2, 3), ("qwen2", 14, 2, 4), ("gpt2", 4, None, 3)],
)
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
def test_processes_compute_the_same(name: str, queries: int, keys: int | None, tp: int, sequence: bool) -> None:
    model, keywords = subject(name, queries, keys)
    plan = load_plan(PLANS / f"{name}{'-sequence' if sequence else ''}.yaml")
    program = compile_call(Request(model, plan, tp, (), keywords)).program
    report = verify_program(model, program, ((), keywords), processes=True)
    assert report.ok, str(report)
    assert report.collectives == report.predicted


def trained(member: Member, name: str, queries: int, keys: int | None) -> float:
    """The largest difference of a parameter from the stock model's after steps with clipped gradients, and loads."""
    stock, keywords = subject(name, queries, keys)
    sharded = tpplan.parallelize(copy.deepcopy(stock), str(PLANS / f"{name}.yaml"), member.mesh(), keywords)
    for model in (stock, sharded):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            first_output(model(**keywords)).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    again = tpplan.parallelize(subject(name, queries, keys)[0], str(PLANS / f"{name}.yaml"), member.mesh(), keywords)
    again.load_state_dict(stock.state_dict())  # whole tensors
    apart = [(first_output(again(**keywords)) - first_output(stock(**keywords))).abs().max()]
    again.load_state_dict(sharded.state_dict())
    for model in (sharded, again):
        whole = {key: held.full_tensor() for key, held in model.state_dict().items()}  # pyright: ignore
        apart += [(whole[key] - held).abs().max() for key, held in stock.state_dict().items()]
    return float(torch.stack([held.double() for held in apart]).max())


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize(("name", "queries", "keys"), [("qwen2", 14, 2), ("gpt2", 4, None)])
def test_training_ends_at_the_same_weights(name: str, queries: int, keys: int | None) -> None:
    assert max(world(3).run(trained, name, queries, keys)) < (1e-10 if name == "gpt2" else 1e-6)


def generated(member: Member, name: str, queries: int, keys: int | None) -> tuple[Tensor, Tensor, set[int]]:
    """Tokens of the stock model and of the sharded one, with a cache; the heads that this rank's cache has."""
    stock, keywords = subject(name, queries, keys)
    stock.eval()
    ids = keywords["input_ids"][:, :5]
    sharded = tpplan.parallelize(copy.deepcopy(stock), str(PLANS / f"{name}.yaml"), member.mesh(), {"input_ids": ids})
    wanted = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    expected = stock.generate(ids, **wanted)  # pyright: ignore
    found = sharded.generate(ids, return_dict_in_generate=True, **wanted)  # pyright: ignore
    cache = cache_of(found)
    return expected, found.sequences, {layer.keys.shape[1] for layer in cache.layers}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "queries", "keys", "tp", "held"),
    [("qwen2", 14, 2, 3, [1, 2, 1]), ("qwen2", 9, 3, 4, [1, 1, 1, 1]), ("gpt2", 4, None, 3, [2, 1, 1])],
)
@pytest.mark.sweep
def test_tokens_are_generated_with_a_cache(name: str, queries: int, keys: int | None, tp: int, held: list[int]) -> None:
    found = world(tp).run(generated, name, queries, keys)
    assert all(torch.equal(expected, tokens) for expected, tokens, _ in found)
    assert [heads for _, _, (heads,) in found] == held


# -- planted bugs -----------------------------------------------------------------------------------------------------
@functools.cache
def planted() -> tuple[nn.Module, Any, Any]:
    model, rules, call = attention("plain", 10, 2)
    return model, load_plan({"version": 1, "modules": rules}), call


def test_gradients_of_shared_keys_that_are_not_summed_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpplan.runtime.parameters import handed_out as parameters

    model, plan, call = planted()
    program = compile_call(Request(model, plan, 3, *call)).program
    monkeypatch.setattr(parameters, "_shared", lambda layout, size, rank: (0, 0, ()))
    report = verify_program(model, program, call)
    assert not report.ok
    assert {"0.k.weight", "0.v.weight"} <= {g.name for g in report.gradients if g.error > 1e-6}


class Turns(Attention):
    """Only a rank with four queries takes the other branch."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projected(x)
        mixed = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.joined(mixed.relu() if q.shape[1] == 4 else mixed)


def test_a_check_of_the_first_rank_alone_would_miss_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model, call = Turns(10, 2), ((torch.randn(3, 6, 12),), {})
    plan = load_plan({"version": 1, "modules": {"{q,k,v}": "colwise", "o": "rowwise"}})
    with pytest.raises(tpplan.CompileError):
        compile_call(Request(model, plan, 3, *call))
    monkeypatch.setattr(local_run, "different_ranks", lambda given: [0])
    wrong = compile_call(Request(model, plan, 3, *call)).program
    assert not verify_program(model, wrong, call).ok


# -- what is told -----------------------------------------------------------------------------------------------------
def test_explain_tells_how_many_heads_each_rank_has() -> None:
    model, rules, call = attention("plain", 28, 4)
    program = compile_call(Request(model, load_plan({"version": 1, "modules": rules}), 8, *call)).program
    (note,) = program.diagnostics
    assert (note.code, note.severity) == ("TP132", Severity.NOTE)
    assert "`0` has 28 heads on 8 ranks, which hold 4, 3, 4, 3, 4, 3, 4, 3: the fullest has 14% more" in note.message
    assert note.help == "nothing is wrong; 2, 4, 28 ranks share them out evenly"
    text = render_program(program)
    assert "28 heads on 8 ranks" in text and "parts=16|12|16|12|16|12|16|12" in text


def test_heads_that_ranks_share_evenly_have_no_note() -> None:
    model, rules, call = attention("plain", 8, 2)
    assert not compile_call(Request(model, load_plan({"version": 1, "modules": rules}), 4, *call)).program.diagnostics


def test_fewer_heads_than_ranks_are_refused_with_a_remedy_that_works() -> None:
    model, rules, call = attention("plain", 6, 3)
    plan = load_plan({"version": 1, "modules": rules})
    with pytest.raises(tpplan.CompileError) as raised:
        compile_call(Request(model, plan, 7, *call))
    found = raised.value.diagnostics[0]
    assert (found.code, found.help) == ("TP103", "use an axis of at most 6 ranks, or remove the rule")
    for ranks in range(2, 7):
        compile_call(Request(model, plan, ranks, *call))


@pytest.mark.parametrize(("queries", "keys", "tp"), slow_but([(14, 2, 3)], [(28, 4, 6), (14, 2, 3), (6, 6, 4)]))
def test_suggested_plans_split_them(queries: int, keys: int, tp: int) -> None:
    model, keywords = subject("qwen2", queries, keys)
    plan = load_plan(suggest_text(model, tp, False, keywords))
    assert block_share(tpplan.compile_plan(model, plan, tp, keywords)).percent > 98


def test_programs_survive_json() -> None:
    model, rules, call = attention("counted", 10, 2)
    program = compile_call(Request(model, load_plan({"version": 1, "modules": rules}), 3, *call)).program
    again = Program.from_dict(program.to_dict())
    assert again == program and again.digest == program.digest


def with_cache(name: str, device: str) -> tuple[nn.Module, dict[str, Any]]:
    """An architecture of the zoo as it comes, with a cache where it has one."""
    held = ARCHITECTURES_OF_ZOO[name]
    cached = held.settings | ({"use_cache": True} if held.kind else {})
    with torch.device(device), torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = model_of(replace(held, settings=cached))
    return model.eval(), held.inputs()


# Biases by position; queries that are joined with the batch alone; decays beside the heads of one of two kinds of body.
@pytest.mark.parametrize(
    ("name", "tp"),
    [
        *(("t5", 3), ("t5", 6), ("t5", 7), ("deberta-v2", 3), ("deberta-v2", 7), ("torch_decoder", 3)),
        *(("torch_decoder", 7), pytest.param("qwen3_next", 3, marks=pytest.mark.sweep)),
    ],
)
@pytest.mark.one_in(5)
def test_all_that_goes_with_heads_is_split_like_them(name: str, tp: int) -> None:
    model, call = with_cache(name, "meta")
    program = compile_call(Request(model, load_plan(PLANS / f"{name}.yaml"), tp, (), call)).program
    assert {d.code for d in program.diagnostics} <= NOTES
    report = verify_program(model, program, ((), call), dtype=torch.float32)
    assert report.ok, str(report)
    assert report.collectives == report.predicted


def generated_with_biases(member: Member) -> tuple[bool, int]:
    """Whether the tokens are the stock model's, and how many calls were proved for them."""
    stock, call = with_cache("t5", "cpu")
    ids = torch.arange(24).reshape(3, 8) + 4
    sharded = tpplan.parallelize(copy.deepcopy(stock), str(PLANS / "t5.yaml"), member.mesh(), call)
    with mock.patch("tpplan.calls.guard.prove", side_effect=prove) as proved:
        made = [model.generate(input_ids=ids, max_new_tokens=6, do_sample=False) for model in (stock, sharded)]  # pyright: ignore
    return torch.equal(*made), proved.call_count


@pytest.mark.slow
@pytest.mark.processes
def test_biases_by_position_generate_the_same_on_processes() -> None:
    # Without keys, with those of one token, and with any number of them.
    assert world(3).run(generated_with_biases) == [(True, 3)] * 3
