"""Attention as people run it: `flex_attention`, `varlen_attn` and flash-attn's operators, split by heads."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import tpplan
from tests.ops.flash import Flash, Packed, flash_attn_func
from tests.ops.flex import MODELS, Attention, HeadBias, Sized, gradients_on_a_cpu, llama
from tests.runtime.simulated import worst
from tests.runtime.test_owner import difference
from tests.runtime.world import Member, world

HEADS: dict[str, Any] = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
SLOPES = {**HEADS, "slopes": "colwise"}
TOLERANCE = 1e-12  # of float64, relative
# Where a function reads the head's number, or one list for all heads, every rank computes all heads.
WHOLE = frozenset(
    (
        "Numbered",
        "MaskedHeads",
        "Slopes",
        "HeadBias",
        "Mixed",
        "Scaled",
        "Converted",
        "Diagonal",
        "Table",
        "BufferedTable",
        "Pairs",
        "Method",
        "Again",
    )
)
COLLECTIVES = {"Bias": {"all-reduce": 2}, "PerQuery": {"all-reduce": 2}}  # and the gradient of what all heads read


def call(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(length)).double()


CASES = [(name, HEADS) for name in MODELS if name != "WindowedHeads"] + [
    ("Slopes", SLOPES), ("HeadBias", SLOPES), ("Table", SLOPES), ("BufferedTable", SLOPES),
    ("Method", SLOPES), ("Again", SLOPES), ("PerQuery", SLOPES)
]  # fmt: skip


@pytest.mark.one_in(6)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(("name", "rules"), CASES)
def test_heads_are_split_where_no_function_reads_them(name: str, rules: dict[str, Any], tp: int) -> None:
    with gradients_on_a_cpu():
        program = tpplan.compile_plan(MODELS[name]().double(), {"version": 1, "modules": rules}, tp, call(2, 8))
    whole = name in WHOLE and rules is HEADS
    reads = COLLECTIVES.get(name, {"all-reduce": 1}) if rules is HEADS else {"all-reduce": 1}
    expected = {"all-gather": 4, "all-reduce": 1} if whole else reads
    assert program.count_collectives() == expected
    assert any(found.code == "TP104" for found in program.diagnostics) == whole


def test_the_help_for_what_isnt_indexed_by_the_head_alone_helps() -> None:
    model = MODELS["Pairs"]().double()
    with gradients_on_a_cpu():
        with pytest.raises(tpplan.CompileError, match=r"TP107(?s:.*)help: remove the rule for `slopes`"):
            tpplan.compile_plan(model, {"version": 1, "modules": SLOPES}, 2, call(2, 8))
        tpplan.compile_plan(model, {"version": 1, "modules": HEADS}, 2, call(2, 8))


def of_gradients(models: Sequence[nn.Module], results: Sequence[Tensor]) -> float:
    """The largest difference between the gradients of two models, of which these are the results."""
    for model, result in zip(models, results, strict=True):
        model.zero_grad()
        result.square().sum().backward()
    return difference(*([parameter.grad for parameter in model.parameters()] for model in models))


def on_processes(member: Member, name: str, rules: dict[str, Any], gradients: bool) -> list[float]:
    torch.manual_seed(0)
    stock = MODELS[name]().double().requires_grad_(gradients)
    found: list[float] = []
    with gradients_on_a_cpu() if gradients else nullcontext():
        plan = {"version": 1, "modules": rules}
        model = tpplan.parallelize(copy.deepcopy(stock), plan, member.mesh(), inputs=call(2, 8))
        for batch, length in ((2, 8), (2, 8), (3, 12), (1, 8)):
            results = [held(call(batch, length)) for held in (model, stock)]
            found.append(difference(*results))
            if gradients:
                found.append(of_gradients((model, stock), results))
    return found


@pytest.mark.one_in(24)
@pytest.mark.processes
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("name", "rules"), CASES)
def test_the_same_on_real_processes(name: str, rules: dict[str, Any], gradients: bool) -> None:
    for found in world(2).run(on_processes, name, rules, gradients):
        assert max(found) < TOLERANCE


class Masked(Attention):
    """A block mask from outside, and a setting that a function reads."""

    cap = 2.0

    def forward(self, x: Tensor, block_mask: Any = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        cap = self.cap
        made = self.call(
            q, k, v, lambda score, *_: cap * torch.tanh(score / cap), block_mask=block_mask, enable_gqa=True
        )
        return x + self.o(made.transpose(1, 2).flatten(2))


def recorded(member: Member) -> list[float]:
    torch.manual_seed(0)
    stock = nn.Sequential(Sized(), nn.LayerNorm(16)).double().requires_grad_(False)
    plan = {"version": 1, "modules": {f"0.{name}": rule for name, rule in HEADS.items()}}
    model: Any = tpplan.parallelize(copy.deepcopy(stock), plan, member.mesh(), inputs=call(2, 8))
    return [difference(model(call(*size)), stock(call(*size))) for size in ((2, 8), (3, 12))]


@pytest.mark.processes
def test_no_body_with_functions_runs_from_a_record() -> None:
    for found in world(2).run(recorded):
        assert max(found) < TOLERANCE


def window(size: int) -> Any:
    return create_block_mask(lambda b, h, q, k: (q >= k) & (q - k <= size), None, None, 8, 8, device="cpu")


def by_document(seed: int) -> Any:
    documents = torch.randint(0, 2, (2, 8), generator=torch.Generator().manual_seed(seed))
    return create_block_mask(lambda b, h, q, k: documents[b, q] == documents[b, k], 2, None, 8, 8, device="cpu")


def masked(member: Member) -> list[float]:
    torch.manual_seed(0)
    stock, x = Masked().double().requires_grad_(False), call(2, 8)
    inputs = {"x": x, "block_mask": window(8)}
    plan = {"version": 1, "modules": HEADS}
    model: Any = tpplan.parallelize(copy.deepcopy(stock), plan, member.mesh(), inputs=inputs)
    found: list[float] = []
    for mask, cap in ((window(8), 2.0), (window(2), 2.0), (by_document(0), 2.0), (by_document(1), 2.0), (None, 0.1)):
        model.cap = stock.cap = cap
        found.append(difference(model(x, block_mask=mask), stock(x, block_mask=mask)))
    return found


@pytest.mark.slow
@pytest.mark.processes
def test_masks_and_settings_of_later_calls_are_theirs() -> None:
    for found in world(2).run(masked):
        assert max(found) < TOLERANCE


def test_what_a_function_reads_by_another_size_is_whole() -> None:
    class Table(HeadBias):
        def __init__(self) -> None:
            super().__init__()
            self.slopes = nn.Parameter(torch.randn(16))  # of which 8 are read

    program = tpplan.compile_plan(
        Table().requires_grad_(False), {"version": 1, "modules": HEADS}, 2, call(2, 8).float()
    )
    assert program.count_collectives() == {"all-gather": 3, "all-reduce": 1}


READS = {
    "Numbered": "needs each head, as its `score_mod` reads its number",
    "MaskedHeads": "needs each head, as its `mask_mod` reads its number",
}


@pytest.mark.parametrize("name", READS)
def test_which_function_reads_the_head_is_said(name: str) -> None:
    model = MODELS[name]().requires_grad_(False)
    program = tpplan.compile_plan(model, {"version": 1, "modules": HEADS}, 2, call(2, 8).float())
    assert READS[name] in "\n".join(found.text for found in program.diagnostics)


class Refused(Attention):
    """One whose function does what isn't computing a score."""

    counter: Tensor

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.register_buffer("counter", torch.zeros(8))

    def settings(self, x: Tensor) -> dict[str, Any]:
        functions: dict[str, Any] = {
            "branches on a number": lambda score, b, h, q, k: score * 2 if q > k else score,
            "calls a module": lambda score, b, h, q, k: score + self.q(x).sum(),
            "draws random numbers": lambda score, b, h, q, k: score + torch.rand_like(score),
            "writes to a tensor that it doesn't make": lambda score, b, h, q, k: score + self.counter.add_(1)[q],
        }
        return {"score_mod": functions[self.fault]}


@pytest.mark.parametrize(
    "fault",
    ["branches on a number", "calls a module", "draws random numbers", "writes to a tensor that it doesn't make"],
)
def test_a_function_that_does_more_is_refused(fault: str) -> None:
    model = Refused(fault).requires_grad_(False)
    with pytest.raises(tpplan.CompileError, match=rf"TP110.*the `score_mod` of a `flex_attention` {fault}"):
        tpplan.compile_plan(model, {"version": 1, "modules": HEADS}, 2, call(2, 8).float())


def test_training_on_a_cpu_is_what_torch_refuses() -> None:
    with pytest.raises(tpplan.CompileError, match="does not support backward on CPU") as caught:
        tpplan.compile_plan(Attention(), {"version": 1, "modules": HEADS}, 2, call(2, 8).float())
    assert '`compile_plan(…, device="cuda")`' in str(caught.value)
    program = tpplan.compile_plan(Attention(), {"version": 1, "modules": HEADS}, 2, call(2, 8).float(), device="cuda")
    assert program.count_collectives() == {"all-reduce": 1}


FLASH: dict[str, tuple[Any, dict[str, Any], int, dict[str, int]]] = {
    "heads": (lambda: Flash(8, 8), HEADS, 2, {"all-reduce": 1}),
    "fewer keys": (lambda: Flash(8, 4), HEADS, 4, {"all-reduce": 1}),
    "one key a rank": (lambda: Flash(8, 2), HEADS, 2, {"all-reduce": 1}),
    "keys that ranks share": (lambda: Flash(8, 2), HEADS, 4, {"all-reduce": 2}),
    "slopes": (lambda: Flash(8, 4, slopes=True), SLOPES, 2, {"all-reduce": 1}),
    "one key": (lambda: Flash(8, 1), HEADS, 2, {"all-reduce": 2}),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", FLASH)
def test_operators_of_flash_attn_have_rules(name: str) -> None:
    torch.manual_seed(0)
    make, rules, tp, collectives = FLASH[name]
    model = make().double()
    program = tpplan.compile_plan(model, {"version": 1, "modules": rules}, tp, call(2, 6))
    assert program.count_collectives() == collectives
    calls = [((call(*size),), {}) for size in ((2, 6), (3, 9))]
    assert max(worst(model, rules, tp, calls[0], calls)) < TOLERANCE


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_each_rank_draws_the_dropout_of_its_heads(dropout: float) -> None:
    program = tpplan.compile_plan(Flash(dropout=dropout), {"version": 1, "modules": HEADS}, 2, call(2, 6).float())
    assert program.count_collectives() == {"all-reduce": 1}
    assert program.modules[0].random == ("split" if dropout else None)


def test_rules_that_are_never_tried_are_assumed() -> None:
    program = tpplan.compile_plan(Flash(), {"version": 1, "modules": HEADS}, 2, call(2, 6).float())
    (assumed,) = program.assumed
    assert assumed.startswith("flash_attn::_flash_attn_forward: b s! (k g) d!") and "audit=False" in assumed


@pytest.mark.parametrize(("keys", "tp", "reduces"), [(8, 2, 1), (4, 4, 1), (2, 4, 2)])
def test_sequences_one_behind_the_other(keys: int, tp: int, reduces: int) -> None:
    example = {"x": torch.randn(40, 16).bfloat16(), "ends": torch.tensor([0, 16, 40], dtype=torch.int32), "longest": 24}
    program = tpplan.compile_plan(Packed(8, keys).bfloat16(), {"version": 1, "modules": HEADS}, tp, example)
    assert program.count_collectives() == {"all-reduce": reduces}


def calls_of(ids: Tensor) -> list[dict[str, Any]]:
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return [{"input_ids": ids}, {"input_ids": ids[:, :9]}, {"input_ids": ids, "attention_mask": mask},
            {"input_ids": ids, "labels": ids}]  # fmt: skip


def in_transformers(member: Member, implementation: str) -> list[float]:
    stock: Any = llama(implementation).requires_grad_(False)
    ids = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids}
    model: Any = tpplan.parallelize(copy.deepcopy(stock), "plans/llama.yaml", member.mesh(), inputs=inputs)
    found = [difference(*(held(**given).logits for held in (model, stock))) for given in calls_of(ids)]
    generated: list[Any] = [held.generate(ids, max_new_tokens=5, do_sample=False) for held in (model, stock)]
    return [*found, float(not torch.equal(*generated))]


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize("implementation", ["flex_attention", "sdpa"])
def test_transformers_interfaces(implementation: str) -> None:
    ids = torch.zeros(2, 16, dtype=torch.int64)
    program = tpplan.compile_plan(
        llama(implementation).requires_grad_(False), "plans/llama.yaml", 2, {"input_ids": ids}
    )
    assert program.count_collectives() == {"all-reduce": 5, "all-gather": 1}
    for found in world(2).run(in_transformers, implementation):
        assert max(found) < TOLERANCE


def with_flash(member: Member | None) -> Any:
    from transformers import modeling_flash_attention_utils as flash

    functions = ((flash_attn_func, None, None, None, None), (dict, dict))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "lazy_import_flash_attention", lambda *_, **__: functions)
        stock: Any = llama("eager")
        stock.config._attn_implementation = "flash_attention_2"
        ids = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(0))
        if member is None:
            return tpplan.compile_plan(stock, "plans/llama.yaml", 2, {"input_ids": ids})
        model = tpplan.parallelize(copy.deepcopy(stock), "plans/llama.yaml", member.mesh(), inputs={"input_ids": ids})
        found: list[float] = []
        for given in ({"input_ids": ids}, {"input_ids": ids[:, :9], "labels": ids[:, :9]}):
            results = [held(**given).logits for held in (model, stock)]
            found.append(difference(*results))
            found.append(of_gradients((model, stock), results))
    return found


@pytest.mark.slow
@pytest.mark.processes
def test_flash_attention_2_of_transformers() -> None:
    assert with_flash(None).count_collectives() == {"all-reduce": 10, "all-gather": 1}
    for found in world(2).run(with_flash):
        assert max(found) < TOLERANCE


def test_a_compiled_function_in_a_body_is_read_as_it_was_written() -> None:
    class Compiled(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.activation = torch.compile(torch.tanh, backend="eager")
            self.call = torch.compile(flex_attention, backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            return self.activation(super().forward(x))

    program = tpplan.compile_plan(
        Compiled().requires_grad_(False), {"version": 1, "modules": HEADS}, 2, call(2, 8).float()
    )
    assert program.count_collectives() == {"all-reduce": 1}
