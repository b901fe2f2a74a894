"""torch.compile of sharded models in the calls that transformers makes: with labels, in `generate`, recomputed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.caching import passing
from tests.models.tiny import tiny_model
from tests.plans.parity import PLANS, assert_same_run, tolerance
from tests.runtime.test_compile import WAYS, Graphs, compile_in_place, compile_layers, fresh, layers_of, run
from tests.runtime.vocabulary import LLAMA, SEQUENCE, gradient_error, llama, tokens
from tests.runtime.world import Member, world

pytestmark = pytest.mark.processes


class Around(nn.Module):
    """A model around one that computes its loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.inner(input_ids=input_ids, labels=labels).loss * 2


_LOSSES = {"tp": (LLAMA, "compile_in_place"), "tp+sp": (LLAMA | SEQUENCE, "compile_layers")}
_MORE = {"tp, layers": (LLAMA, "compile_layers"), "tp+sp, whole": (LLAMA | SEQUENCE, "compile_in_place")}


@pytest.mark.sweep
@pytest.mark.parametrize("kind", _LOSSES)
def test_a_loss_over_split_classes_runs_in_python_and_the_rest_is_compiled(kind: str) -> None:
    world(2).run(_labels, *_LOSSES[kind])


@pytest.mark.sweep
@pytest.mark.parametrize("kind", _MORE)
def test_each_way_to_compile_around_a_loss(kind: str) -> None:
    world(2).run(_labels, *_MORE[kind])


def _labels(member: Member, rules: dict[str, Any], way: str) -> None:
    stock, (ids, labels) = llama(), tokens()
    given = {"input_ids": ids, "labels": labels}
    stock(**given).loss.backward()
    model = tpplan.parallelize(copy.deepcopy(stock), {"version": 1, "modules": rules}, member.mesh())
    with fresh() as counters:
        graphs = Graphs("aot_eager")
        compiled = WAYS[way](model, backend=graphs, fullgraph=True)
        for step in range(3):
            compiled.zero_grad()
            made = compiled(**given)
            made.loss.backward()
            torch.testing.assert_close(made.loss, stock(**given).loss)
            assert gradient_error(stock, model) <= 2e-5, step
        assert len(graphs.seen) == 1
        assert not counters["graph_break"]
        compiled.eval()
        with torch.no_grad():
            torch.testing.assert_close(compiled(**given).loss, stock(**given).loss)


@pytest.mark.sweep
def test_a_loss_inside_of_what_is_compiled_ends_a_graph() -> None:
    world(2).run(_labels_inside)


def _labels_inside(member: Member) -> None:
    inner, (ids, labels) = llama(), tokens()
    stock = Around(inner)
    stock(ids, labels).backward()
    rules = {f"inner.{name}": rule for name, rule in LLAMA.items()}
    model = tpplan.parallelize(
        copy.deepcopy(stock), {"version": 1, "modules": rules}, member.mesh(), {"input_ids": ids, "labels": labels}
    )
    with fresh():
        compile_in_place(model, backend="eager", fullgraph=True)
        with pytest.raises(tpplan.TpplanError, match="TP185"):
            model(ids, labels)
    with fresh():
        graphs = Graphs("aot_eager")
        compile_in_place(model, backend=graphs)
        for _ in range(3):
            model.zero_grad()
            made = model(ids, labels)
            made.backward()
            torch.testing.assert_close(made, stock(ids, labels))
            assert gradient_error(stock, model) <= 2e-5
        assert graphs.seen


@pytest.mark.slow
def test_compiled_layers_generate_the_tokens_of_the_stock_model() -> None:
    world(2).run(_generate)


def _generate(member: Member) -> None:
    stock, keywords = tiny_model("llama", dtype=torch.float32, use_cache=True, num_hidden_layers=1)
    stock.eval()
    sharded = tpplan.parallelize(copy.deepcopy(stock), PLANS / "llama.yaml", member.mesh(), keywords)
    ids = keywords["input_ids"][:, :5]
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = stock.generate(ids, **options)  # pyright: ignore
    with fresh():
        graphs = Graphs("eager")
        compile_layers(sharded, backend=graphs, dynamic=True)
        for _ in range(2):
            assert torch.equal(sharded.generate(ids, **options), expected)  # pyright: ignore
        assert graphs.seen


def decoded(call: Any, cache: dict[str, Any], ids: Tensor) -> Tensor:
    """Tokens by a loop of a user's, with a cache of theirs."""
    positions = torch.arange(ids.shape[1])
    found = [ids]
    with torch.no_grad():
        for _ in range(4):
            logits = call(input_ids=found[-1], position_ids=positions[None], **cache, use_cache=True)[0]
            found.append(logits[:, -1:].argmax(-1))
            positions = positions[-1:] + 1
    return torch.cat(found, 1)


@pytest.mark.slow
def test_static_caches_compile_nothing_after_the_first_steps() -> None:
    """`generate` compiles a token's call itself where a cache is static; a loop may compile the model, or a step."""
    world(2).run(_static_caches, "llama-sequence", ("generate",))


@pytest.mark.sweep
@pytest.mark.parametrize("plan", ["llama-sequence", "gemma3_text", "gpt_oss-sequence", "mistral"])
def test_static_caches_compile_nothing_after_the_first_steps_in_any_way(plan: str) -> None:
    world(2).run(_static_caches, plan, ("generate", "model", "around"))


def _static_caches(member: Member, plan: str, ways: tuple[str, ...]) -> None:
    from transformers import CompileConfig, StaticCache

    from tests.runtime.test_caches import SETTINGS, tiny

    stock, example = tiny(plan.removesuffix("-sequence"))
    sharded: Any = tpplan.parallelize(copy.deepcopy(stock), f"plans/{plan}.yaml", member.mesh(), example)
    ids = torch.randint(4, 88, (2, 8), generator=torch.Generator().manual_seed(0))
    expected = stock.generate(ids, cache_implementation="static", **SETTINGS)[:, :12]
    graphs = Graphs("eager")

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return graphs(graph, inputs)  # a function, as `generate` copies what is in a config

    def step(**keywords: Any) -> Any:
        return sharded(**keywords)

    def generated() -> Tensor:
        config = CompileConfig(backend=backend, mode=None, fullgraph=True)  # pyright: ignore
        config._compile_all_devices = True  # pyright: ignore
        return sharded.generate(ids, cache_implementation="static", compile_config=config, **SETTINGS)

    whole: Any = torch.compile(sharded, backend=backend, fullgraph=True)
    calls = {"model": whole, "around": torch.compile(step, backend=backend)}
    for way in ways:
        with fresh():
            graphs.seen.clear()
            for turn in range(3):
                with torch.compiler.set_stance("fail_on_recompile" if turn == 2 else "default"):
                    cache = StaticCache(config=stock.config, max_cache_len=16)
                    found = generated() if way == "generate" else decoded(calls[way], passing(stock, cache), ids)
                assert torch.equal(found[:, :12], expected), (way, turn)
            assert 1 <= len(graphs.seen) <= 3, way  # a prompt, a token, one of any length


@pytest.mark.sweep
@pytest.mark.parametrize(
    "plan", [pytest.param("llama-sequence", marks=pytest.mark.slow), pytest.param("llama", marks=pytest.mark.sweep)]
)
def test_layers_that_transformers_recomputes_are_compiled(plan: str) -> None:
    world(2).run(_recomputed, plan)


def _recomputed(member: Member, plan: str) -> None:
    stock, keywords = tiny_model("llama", dtype=torch.float32, num_hidden_layers=1)
    reference = run(stock, keywords)
    sharded = tpplan.parallelize(copy.deepcopy(stock), PLANS / f"{plan}.yaml", member.mesh(), keywords)
    sharded.gradient_checkpointing_enable({"use_reentrant": False})  # pyright: ignore
    with fresh():
        graphs = Graphs("aot_eager")
        compile_layers(sharded, backend=graphs)
        for _ in range(3):
            sharded.zero_grad()
            assert_same_run(run(sharded, keywords), reference, tolerance(torch.float32))
        assert graphs.seen


@pytest.mark.gpu
@pytest.mark.slow
def test_layers_run_in_cuda_graphs() -> None:
    world(1).run(_cuda_graphs)


def _cuda_graphs(member: Member) -> None:
    stock, keywords = tiny_model("torch_transformer", dtype=torch.float32, device="cuda")
    keywords = {name: held.cuda() if isinstance(held, torch.Tensor) else held for name, held in keywords.items()}
    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (1,), mesh_dim_names=("tp",))
    sharded = tpplan.parallelize(copy.deepcopy(stock), PLANS / "torch_transformer.yaml", mesh, keywords)
    reference = run(stock, keywords)
    with fresh():
        for layer in layers_of(sharded):
            layer.compile(mode="reduce-overhead", fullgraph=True)
        for _ in range(4):  # warm-up, recording, replays
            torch.compiler.cudagraph_mark_step_begin()
            sharded.zero_grad()
            assert_same_run(run(sharded, keywords), reference, tolerance(torch.float32))
