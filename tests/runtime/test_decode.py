"""Prompts and the tokens after them, called as `generate` does: results, and the collectives that each takes."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.caching import cache_name, passing
from tests.marking import in_thirds
from tests.plans.parity import PLANS
from tests.runtime.simulated import on_ranks
from tests.zoo.architectures import ARCHITECTURES, VOCABULARY
from tpplan.calls.guard import CallGuard
from tpplan.compiler.ir.program import Program
from tpplan.compiler.pipeline import compile_call
from tpplan.compiler.request import Request
from tpplan.compiler.trace.skeleton import make_skeleton
from tpplan.parity.materialise import copy_structure
from tpplan.parity.rank import SimulatedDistributor
from tpplan.parity.threads import ThreadCommunicator, run_ranks
from tpplan.plan import load_plan
from tpplan.runtime.lower import lower
from tpplan.runtime.modules.module_runtime import RUNTIME

transformers = pytest.importorskip("transformers")

BATCH, LENGTH, TP = 2, 12, 2
NAMES = {"falcon": "falcon_new", "falcon-multi-query": "falcon_old"}  # where plans have other names than architectures
CAUSAL = (
    "bloom", "cohere", "deepseek_v3", "falcon", "falcon-multi-query", "falcon_h1", "gemma", "gemma2", "gemma3_text",
    "glm4", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "llama", "mamba",
    "mistral", "mixtral", "mpt", "olmo2", "olmoe", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "qwen3_next", "stablelm", "starcoder2",
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One call on a rank: the last token's logits, what was sent, and what the program says is sent."""

    logits: Tensor
    counts: Counter[str]
    program: Program

    @property
    def predicted(self) -> Counter[str]:
        return self.program.count_collectives(backward=False)


def made(name: str) -> Any:
    architecture = ARCHITECTURES[NAMES.get(name, name)]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(architecture.kind, **architecture.settings)
    config._experts_implementation = "batched_mm"  # torch has no grouped products in float64
    return transformers.AutoModelForCausalLM.from_config(config).double().eval()


def generating(model: nn.Module, ids: Tensor) -> list[Any]:
    """Each call's logits: of the prompt, then of two tokens after it; with what is called between, for counting."""
    accepted, name = inspect.signature(type(model).forward).parameters, cache_name(model)
    common: dict[str, Any] = {"use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in accepted else {})
    found: list[Any] = []
    kept: dict[str, Any] = {}
    if name != "cache_params":
        kept = {name: transformers.DynamicCache(config=model.config)}
    for start, end in ((0, LENGTH), (LENGTH, LENGTH + 1), (LENGTH + 1, LENGTH + 2)):
        mask = {"attention_mask": torch.ones(BATCH, end, dtype=torch.long)} if name != "cache_params" else {}
        with torch.no_grad():
            result = model(input_ids=ids[:, start:end], **mask, **kept, **common)
        kept = {name: result[name]}
        found.append(result.logits[:, -1])
    return found


def simulated(stock: nn.Module, plan_name: str, ids: Tensor) -> list[list[Step]]:
    """By rank, what each call of a second generation shows: in the first, programs are compiled."""
    plan = load_plan(PLANS / f"{plan_name}.yaml")
    example = ((), {"input_ids": ids[:, :LENGTH], "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long)})
    compiled = compile_call(Request(stock, plan, TP, *example))

    def work(axis: ThreadCommunicator) -> list[Step]:
        guard = CallGuard(make_skeleton(stock).model, plan, compiled, *example, rank=axis.rank)
        own = lower(copy_structure(stock), compiled.program, SimulatedDistributor(axis), guard).eval()
        generating(own, ids)
        seen: list[tuple[Counter[str], Program]] = []

        def note(*_: object) -> None:
            variants: Any = own.__dict__[RUNTIME].guard
            seen.append((Counter(axis.counts), variants._current))
            axis.counts.clear()

        axis.counts.clear()
        forward = own.forward
        vars(own)["forward"] = lambda *args, **kwargs: (forward(*args, **kwargs), note())[0]
        logits = generating(own, ids)
        return [Step(held, *shown) for held, shown in zip(logits, seen, strict=True)]

    return run_ranks(TP, work)


def in_chunks(model: Any, ids: Tensor) -> Tensor:
    """The logits of a prompt that comes in parts, all of which the ranks could share; positions are the caller's."""
    cache, found = transformers.DynamicCache(config=model.config), list[Tensor]()
    for start, end in ((0, 8), (8, 12), (12, 14)):
        positions = torch.arange(start, end).expand(BATCH, -1)
        with torch.no_grad():
            result = model(input_ids=ids[:, start:end], position_ids=positions, **passing(model, cache), use_cache=True)
        found.append(result.logits)
    return torch.cat(found, 1)


@pytest.mark.sweep
def test_a_prompt_in_parts_is_masked_as_a_whole() -> None:
    stock, plan = made("llama"), str(PLANS / "llama-sequence.yaml")
    ids = torch.randint(4, VOCABULARY, (BATCH, LENGTH + 2), generator=torch.Generator().manual_seed(1))
    example = ((), {"input_ids": ids[:, :LENGTH], "position_ids": torch.arange(LENGTH).expand(BATCH, -1)})
    expected = in_chunks(stock, ids)
    for logits in on_ranks(stock, plan, TP, example, lambda model, _: in_chunks(model, ids)):
        assert float((logits - expected).abs().max()) < 1e-5 * float(expected.abs().max())


CASES = [(name, form) for name in CAUSAL for form in ("", "-sequence")]


@pytest.mark.parametrize(("name", "form"), in_thirds([], [("llama", "-sequence")], CASES))
def test_a_token_costs_two_sums_a_block_and_the_gather_of_its_logits(name: str, form: str) -> None:
    stock = made(name)
    ids = torch.randint(4, VOCABULARY, (BATCH, LENGTH + 2), generator=torch.Generator().manual_seed(1))
    expected = generating(stock, ids)
    for steps in simulated(stock, name + form, ids):
        for step, logits in zip(steps, expected, strict=True):
            scale = float(logits.abs().max())
            assert float((step.logits - logits).abs().max()) < 1e-5 * scale  # norms and routers compute in float32
        prompt, *tokens = steps
        assert prompt.counts == prompt.predicted or prompt.program.picked  # experts that are hit, or aren't
        if form:
            assert prompt.counts["reduce-scatter"]  # the prompt is split
        for token in tokens:
            assert token.counts == token.predicted or token.program.picked
            table = int(any(m.style == "vocab" for m in token.program.modules))
            sums = 4 if name in ("olmo2", "olmoe") else 2  # its norms of all queries and of all keys sum their squares
            assert token.counts["all-reduce"] <= sums * stock.config.num_hidden_layers + table
            assert token.counts["all-gather"] <= 1
            assert set(token.counts) <= {"all-reduce", "all-gather"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU; they were never tried")
def test_a_token_replays_from_a_cuda_graph() -> None:
    """One rank, so that no collective is in the graph; caches need fixed places, so that none is passed."""
    from torch.distributed.device_mesh import init_device_mesh

    import tpplan
    from tpplan.compat.process_groups import fake_process_group

    with fake_process_group(1), torch.no_grad():
        stock = made("llama").cuda()
        ids = torch.randint(4, VOCABULARY, (BATCH, 1), device="cuda")
        expected = stock(input_ids=ids, use_cache=False).logits
        sharded = tpplan.parallelize(
            stock, PLANS / "llama.yaml", init_device_mesh("cuda", (1,), mesh_dim_names=("tp",))
        )
        for _ in range(3):
            sharded(input_ids=ids, use_cache=False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = sharded(input_ids=ids, use_cache=False).logits
        graph.replay()
        assert torch.equal(logits, expected)
