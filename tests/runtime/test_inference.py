"""What `explain --inference` says a rank caches and sends is what ranks cache and send that really run."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.caching import cache_of, passing, returned_cache
from tests.marking import in_thirds, slow_but
from tests.runtime.world import Member, world
from tpplan.calls.guard import CallGuard
from tpplan.calls.inference_cost import inference
from tpplan.calls.storage import StorageMeter
from tpplan.compiler.ir.hidden import hidden_tensors
from tpplan.compiler.pipeline import compile_call
from tpplan.compiler.request import Request
from tpplan.compiler.trace.skeleton import make_skeleton
from tpplan.cost.communication import bytes_sent
from tpplan.cost.traffic import module_traffic
from tpplan.parity.materialise import copy_structure
from tpplan.parity.rank import SimulatedDistributor
from tpplan.parity.threads import ThreadCommunicator, run_ranks
from tpplan.plan import load_plan
from tpplan.report.inference_tables import Inference
from tpplan.runtime.lower import lower

transformers = pytest.importorskip("transformers")

BATCH, LENGTH = 2, 12
TOKENS = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1, "num_attention_heads": 8, "vocab_size": 88,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {"n_embd": 48, "n_layer": 1, "n_head": 8, "vocab_size": 88, "n_positions": 64}
MLA = {
    "num_key_value_heads": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "q_lora_rank": 20,
    "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 10, "v_head_dim": 12, "first_k_dense_replace": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
MAMBA = {"hidden_size": 48, "num_hidden_layers": 1, "vocab_size": 88, "state_size": 6, "time_step_rank": 4}
T5 = {"d_model": 48, "d_kv": 6, "d_ff": 80, "num_layers": 1, "num_heads": 8, "vocab_size": 88}


def build(kind: str, settings: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **settings)
    maker = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
    return maker.from_config(config).eval()


def prompt(kind: str) -> dict[str, Tensor]:
    ids = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 80 + 1
    mask = {"attention_mask": torch.ones_like(ids)}
    return {
        "input_ids": ids,
        **(mask if kind != "mamba" else {}),
        **({"decoder_input_ids": ids} if kind == "t5" else {}),
    }


def kept_by(result: Any) -> dict[str, Tensor]:
    """Keys, values and states in a cache, by their names."""
    return {name: tensor for name, tensor in hidden_tensors(cache_of(result)) if tensor.dim()}


def next_call(result: Any, call: dict[str, Tensor]) -> dict[str, Any]:
    """The call of the token after the prompt."""
    one = torch.ones(BATCH, 1, dtype=torch.long)
    if "decoder_input_ids" in call:
        outputs = transformers.modeling_outputs.BaseModelOutput(result["encoder_last_hidden_state"])
        return {"encoder_outputs": outputs, "decoder_input_ids": one, "attention_mask": call["attention_mask"],
                **returned_cache(result)}  # fmt: skip
    longer = {k: torch.cat([mask, one], 1) for k, mask in call.items() if k == "attention_mask"}
    return {"input_ids": one, **longer, **returned_cache(result)}


class Meter:
    """Counts the bytes that a communicator's collectives send."""

    def __init__(self, axis: ThreadCommunicator) -> None:
        self.sent: Counter[str] = Counter()
        for name, parts in (("all_reduce", 1), ("all_gather", axis.size), ("reduce_scatter", 1)):
            setattr(axis, name, self._metered(axis, name, parts))

    def _metered(self, axis: ThreadCommunicator, name: str, parts: int) -> Any:
        usual, kind = getattr(axis, name), name.replace("_", "-")

        def call(tensor: Tensor, *rest: Any) -> Tensor:
            self.sent[kind] += bytes_sent(kind, tensor.nbytes * parts, axis.size)
            return usual(tensor, *rest)

        return call


def first_call(kind: str, stock: Any) -> dict[str, Any]:
    """The call with the prompt, as `generate` makes it: it passes a cache that is still empty."""
    passes = kind not in ("mamba", "t5")
    return prompt(kind) | (passing(stock, transformers.DynamicCache(config=stock.config)) if passes else {})


def ran(stock: nn.Module, plan_name: str, tp: int, kind: str, settings: dict[str, Any], guarded: bool) -> list[Any]:
    """By rank: the cache after the prompt, what the prompt sent; the same after one token more."""
    plan, example = load_plan(plan_name), ((), prompt(kind) | settings)
    compiled = compile_call(Request(stock, plan, tp, *example, training=False))

    def one(axis: ThreadCommunicator) -> Any:
        meter = Meter(axis)
        guard = CallGuard(make_skeleton(stock).model, plan, compiled, *example, rank=axis.rank) if guarded else None
        own = lower(copy_structure(stock), compiled.program, SimulatedDistributor(axis), guard)
        seen: list[Any] = []
        call = first_call(kind, stock)
        with torch.no_grad():
            if guarded:  # the first call of a kind may be run twice, as its mask decides which program it needs
                own(**next_call(own(**call, **settings), call), **settings)
                call = first_call(kind, stock)
            for _ in range(2):
                meter.sent.clear()
                result = own(**call, **settings)
                shapes = {name: (tuple(t.shape), t.nbytes) for name, t in kept_by(result).items()}
                seen.append((shapes, dict(meter.sent)))
                call = next_call(result, call) if len(seen) == 1 else {}
        return seen

    return run_ranks(tp, one)


CASES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "heads": ("llama", "llama", 2, TOKENS | {"num_key_value_heads": 4}),
    "fewer heads than ranks": ("llama", "llama", 4, TOKENS | {"num_key_value_heads": 2, "dtype": "bfloat16"}),
    "gpt2": ("gpt2", "gpt2", 2, GPT2),
    "windows": ("mistral", "mistral", 2, TOKENS | {"num_key_value_heads": 4, "sliding_window": 5}),
    "some windows": (
        "gemma2", "gemma2", 2,
        TOKENS | {"num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 14, "sliding_window": 5},
    ),
    "sequence": ("llama", "llama-sequence", 4, TOKENS | {"num_key_value_heads": 4}),
    "compressed": ("deepseek_v3", "deepseek_v3", 2, TOKENS | MLA | {"num_hidden_layers": 2}),
    "states": ("mamba", "mamba", 2, MAMBA),
    "encoder": ("t5", "t5", 2, T5),
}  # fmt: skip


def check(case: str, guarded: bool) -> None:
    kind, plan, tp, fields = CASES[case]
    stock = build(kind, fields)
    view = inference(stock, load_plan(plan), tp, (), prompt(kind))
    assert not view.unknown and view.kept is not None and view.decode is not None
    with torch.no_grad():
        assert view.kept.bytes == sum(t.nbytes for t in kept_by(stock(**prompt(kind), use_cache=True)).values())
    assert view.kept.growth is not None
    assert view.prefill.sent == module_traffic(view.program.modules, tp).forward.sent  # as `explain` counts
    runs = ran(stock, plan, tp, kind, dict(view.settings), guarded)
    for rank, ((prefilled, sent), (decoded, sent_for_one)) in enumerate(runs):
        said = {t.path.partition(".")[2]: (t.local_shapes[rank], t.bytes_by_rank[rank]) for t in view.kept.tensors}
        assert said == prefilled
        assert view.kept.growth[rank] == sum(n for _, n in decoded.values()) - sum(n for _, n in prefilled.values())
        assert (dict(view.prefill.sent), dict(view.decode.sent)) == (sent, sent_for_one)


@pytest.mark.parametrize("case", slow_but(["windows"], ["fewer heads than ranks", "gpt2", "windows"]))
def test_a_rank_caches_and_sends_what_is_said(case: str) -> None:
    check(case, guarded=False)


@pytest.mark.parametrize("case", in_thirds([], ["states", "encoder", "windows"], CASES))
def test_so_it_is_with_the_programs_that_calls_run_by(case: str) -> None:
    check(case, guarded=True)


def _kept(member: Member, fields: dict[str, Any]) -> int:
    import tpplan

    model = tpplan.parallelize(build("llama", fields), "llama", member.mesh())
    with torch.no_grad():
        cache = cache_of(model.eval()(**prompt("llama"), **passing(model, transformers.DynamicCache())))
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@pytest.mark.slow
@pytest.mark.processes
def test_processes_cache_what_is_said() -> None:
    fields = TOKENS | {"num_key_value_heads": 4, "dtype": "bfloat16"}
    view = inference(build("llama", fields), load_plan("llama"), 2, (), prompt("llama"))
    assert view.kept is not None and {tensor.dtype for tensor in view.kept.tensors} == {"bfloat16"}
    assert list(view.kept.bytes_by_rank) == world(2).run(_kept, fields)


LARGER: dict[str, dict[str, Any]] = {
    "llama": TOKENS | {"num_key_value_heads": 4, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2},
    "gpt2": GPT2 | {"n_embd": 256},
    "mamba": MAMBA | {"hidden_size": 256},
}


def _allocated(member: Member, kind: str) -> tuple[int, int]:
    """The most bytes that there are at once: by torch's allocator for the prompt, by storages for a token more.

    For the prompt the least of some calls, as the thread of a collective may keep a tensor for a moment longer.
    """
    import tpplan

    stock = build(kind, LARGER[kind])
    model = tpplan.parallelize(stock, kind, member.mesh()).eval()
    settings = {"use_cache": True} | ({} if kind == "mamba" else {"logits_to_keep": 1})
    found: list[int] = []

    def prefill() -> tuple[Any, dict[str, Any]]:
        call = first_call(kind, stock)
        with torch.profiler.profile(profile_memory=True) as profile:
            result = model(**call, **settings)
        events: list[Any] = profile.profiler.kineto_results.events()  # pyright: ignore
        found.append(max(itertools.accumulate(e.nbytes() for e in events if e.name() == "[memory]")))
        return result, next_call(result, call)

    with torch.no_grad():
        for _ in range(3):  # by what a new kind of call is proved is allocated as well
            model(**prefill()[1], **settings)
        del found[:]
        for _ in range(12):  # on a busy machine most calls may see such a tensor
            prefill()
        result, call = prefill()
        with StorageMeter(kept_by(result).values()) as storage:
            del result
            model(**call, **settings)
    return min(found), storage.peak


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("kind", LARGER)
def test_processes_allocate_what_is_said(kind: str) -> None:
    view = inference(build(kind, LARGER[kind]), load_plan(kind), 2, (), prompt(kind))
    kept = view.kept
    assert kept is not None and kept.growth is not None
    for rank, (prefill, decode) in enumerate(world(2).run(_allocated, kind)):
        stored = kept.bytes_by_rank[rank]
        assert stored + view.temporary[1 + rank] == pytest.approx(prefill, rel=0.1)
        assert stored + kept.growth[rank] + view.temporary_for_one[rank] == pytest.approx(decode, rel=0.1)


# -- other models -------------------------------------------------------------------------------------------------
class Lists(nn.Module):
    """Puts what it keeps into a list of its caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor, kept: list[Tensor] | None = None) -> Tensor:
        y = self.up(x).relu()
        if kept is not None:
            kept.append(y)
        return self.down(y)


class Nothing(Lists):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class Unnamed(Lists):
    """Returns its list, and puts nothing into it."""

    def forward(self, x: Tensor, kept: list[Any] | None = None) -> tuple[Tensor, list[Any]]:  # type: ignore[override]
        return super().forward(x), [] if kept is None else kept


PLAN = load_plan({"version": 1, "modules": {"up": "colwise", "down": "rowwise"}})


def own(kind: type[nn.Module], *more: Any) -> Inference:
    with torch.device("meta"):
        return inference(kind(), PLAN, 4, (torch.empty(3, 8), *more), {})


def test_what_goes_into_a_list_is_kept() -> None:
    view = own(Lists, [])
    assert view.kept is not None and view.kept.bytes == 3 * 16 * 4
    assert view.kept.bytes_by_rank == (3 * 4 * 4,) * 4 and view.decode is None
    assert "made up" in view.unknown["decode"] and view.prefill.counts == {"all-reduce": 1}


@pytest.mark.parametrize("kind", [Nothing, Unnamed])
def test_no_cache_is_said_in_words(kind: type[nn.Module]) -> None:
    view = own(kind)
    assert view.kept is None and view.unknown["cache"].startswith("No cache: ")


def test_a_cache_that_shapes_dont_tell_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpplan.calls import inference_cost as module

    def fails(*_: object) -> object:
        raise RuntimeError("reads a number.")

    monkeypatch.setattr(module, "lowered_on_shapes", fails)
    view = own(Lists, [])
    assert view.kept is None and view.unknown == {
        "cache": "The cache can't be told without numbers: RuntimeError: reads a number."
    }
    assert view.prefill.counts == {"all-reduce": 1}
