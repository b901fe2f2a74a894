"""torch.compile of sharded models: results, gradients, collectives, graphs, and what is refused."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import tpplan
from tests.compiler.test_replay import ACTIVATIONS, PLAN, Block, Parted
from tests.models.tiny import output_tensors, tiny_model
from tests.plans.parity import PLANS, Run, assert_same_run, loss_of, tolerance, whole
from tests.runtime.world import Member, world

pytestmark = pytest.mark.processes


class Graphs:
    """A backend that keeps the graphs it compiles.

    With `dynamic=True` Dynamo reads numbers such as a norm's epsilon as symbols at first. AOTAutograd then has it read
    the code anew with constants (`TensorifyScalarRestartAnalysis`): nothing has been compiled by that call.
    """

    def __init__(self, backend: str) -> None:
        self.seen: list[torch.fx.GraphModule] = []
        self._backend = backend

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        from torch._dynamo import lookup_backend

        compiled = lookup_backend(self._backend)(graph, inputs)
        self.seen.append(graph)
        return compiled


@contextmanager
def fresh() -> Iterator[Any]:
    """torch.compile with nothing compiled before; what it counts."""
    from torch._dynamo.utils import counters
    from torch._inductor import config as inductor

    torch.compiler.reset()
    counters.clear()
    with inductor.patch(compile_threads=1):  # rather than in processes that import torch first
        yield counters
    torch.compiler.reset()


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The model's blocks."""
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def compile_layers(model: nn.Module, **options: Any) -> nn.Module:
    """Each block in place."""
    for layer in layers_of(model):
        layer.compile(**options)
    return model


def wrap_layers(model: nn.Module, **options: Any) -> nn.Module:
    """Each block replaced by a compiled module."""
    layers = layers_of(model)
    for index, layer in enumerate(layers):
        layers[index] = torch.compile(layer, **options)  # pyright: ignore
    return model


def compile_in_place(model: nn.Module, **options: Any) -> nn.Module:
    """The whole model in place."""
    model.compile(**options)
    return model


def compile_whole(model: nn.Module, **options: Any) -> nn.Module:
    """The whole model, as a compiled module."""
    return torch.compile(model, **options)  # pyright: ignore


WAYS = {way.__name__: way for way in (compile_layers, wrap_layers, compile_in_place, compile_whole)}


def counted(sent: Any) -> Counter[str]:
    """The collectives that ran, in a graph or not. Under a dispatch mode that counts them nothing is compiled."""
    found: Counter[str] = Counter()
    for event in sent.key_averages():
        if event.key == "c10d::allgather_":  # of objects, by which ranks agree on a watched call
            continue
        name = event.key.removeprefix("c10d::").replace("_", "")
        kind = next((kind for kind in _KINDS if name.startswith(kind)), None)
        if kind is not None and event.key.startswith("c10d::"):
            found[kind] += event.count
    return found


_KINDS = ("allreduce", "allgather", "reducescatter", "alltoall")


def run(model: nn.Module, keywords: dict[str, Any]) -> Run:
    """One forward and backward; parameters by the stock model's names."""
    with torch.autograd.profiler.profile(use_kineto=False) as there:
        outputs = output_tensors(model(**keywords))
    loss = loss_of([o for o in outputs if o.is_floating_point()])
    with torch.autograd.profiler.profile(use_kineto=False) as back:
        loss.backward()
    gradients = {n.replace("_orig_mod.", ""): whole(p.grad) for n, p in model.named_parameters()}
    return Run([o.detach() for o in outputs], gradients, counted(there), counted(back))


def tiny(name: str, way: str, backend: str = "", **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny model: of two layers where the graphs of layers are to be shared, else of one, which is traced faster."""
    layers = "layers" if name == "torch_transformer" else "num_hidden_layers"
    return tiny_model(name, **{layers: 2 if "layers" in way and backend != "inductor" else 1}, **options)


def check(member: Member, name: str, plan: str, way: str, backend: str) -> None:
    """Three steps of a compiled model, and two calls in evaluation, against the stock one; collectives as predicted."""
    dtype = torch.float32 if backend == "inductor" else torch.float64
    stock, keywords = tiny(name, way, backend, dtype=dtype)
    reference = run(stock, keywords)
    program = tpplan.compile_plan(tiny(name, way, backend, device="meta")[0], PLANS / f"{plan}.yaml", 2, keywords)
    there, both = (
        Counter({kind.replace("-", ""): n for kind, n in program.count_collectives(backward=back).items()})
        for back in (False, True)
    )
    sharded = tpplan.parallelize(copy.deepcopy(stock), PLANS / f"{plan}.yaml", member.mesh(), keywords)
    with fresh() as counters:
        graphs = Graphs(backend)
        compiled = WAYS[way](sharded, backend=graphs, fullgraph=True)
        output_tensors(compiled(**keywords))[0].sum().backward()
        for _ in range(2):
            compiled.zero_grad()
            found = run(compiled, keywords)
            assert_same_run(found, reference, tolerance(torch.float32 if name == "llama" else dtype))
            assert (found.forward, found.forward + found.backward) == (there, both)
        assert graphs.seen and not counters["graph_break"]
        # A first block that is given what the others aren't has a graph of its own.
        assert len(graphs.seen) <= (2 if "layers" in way else 1)
        before = len(graphs.seen)
        compiled.eval()
        with torch.no_grad():
            ours = [run_forward(compiled, keywords) for _ in range(2)]
            theirs = run_forward(stock.eval(), keywords)
        for one in ours:
            torch.testing.assert_close(one, theirs, rtol=1e-4, atol=1e-5)
        assert len(graphs.seen) > before


def run_forward(model: nn.Module, keywords: dict[str, Any]) -> torch.Tensor:
    result = model(**keywords)
    return getattr(result, "logits", result) if not isinstance(result, tuple) else result[0]


QUICK = [
    ("torch_transformer", "torch_transformer-sequence", "compile_in_place", "eager"),
]
OTHERS = [
    ("torch_transformer", "torch_transformer-sequence", "compile_layers", "aot_eager"),
    ("torch_transformer", "torch_transformer", "compile_whole", "aot_eager"),
    ("llama", "llama-sequence", "compile_whole", "aot_eager"),
    ("gpt2", "gpt2", "wrap_layers", "inductor"),
]


def test_a_compiled_model_is_the_stock_one_with_the_collectives_of_its_program() -> None:
    world(2).run(_cases, QUICK)


def _cases(member: Member, cases: list[tuple[str, str, str, str]]) -> None:
    for case in cases:
        try:
            check(member, *case)
        except Exception as error:
            error.add_note(f"in {case}")
            raise


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=lambda case: "-".join(case[1:]))
def test_shipped_plans_compile(case: tuple[str, str, str, str]) -> None:
    world(2).run(_cases, [case])


@pytest.mark.sweep
@pytest.mark.parametrize("plan", ["llama", "llama-sequence", "gpt2", "gpt2-sequence", "phi3-sequence"])
def test_shipped_plans_compile_in_every_way(plan: str) -> None:
    name = plan.removesuffix("-sequence")
    ways = (("compile_layers", "inductor"), ("compile_whole", "aot_eager"), ("wrap_layers", "aot_eager"))
    world(2).run(_cases, [(name, plan, *way) for way in ways])


@pytest.mark.slow
def test_modules_compiled_by_themselves_take_and_return_whole_tensors() -> None:
    world(2).run(_alone)


def _alone(member: Member) -> None:
    stock, keywords = tiny_model("torch_transformer")
    for plan in ("torch_transformer", "torch_transformer-sequence"):
        sharded = tpplan.parallelize(copy.deepcopy(stock), PLANS / f"{plan}.yaml", member.mesh(), keywords)
        x = torch.randn(3, 12, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        parts = ("blocks.0", "blocks.1.attention", "blocks.0.mlp.up") if "sequence" in plan else ("blocks.1",)
        for name in parts:
            with fresh() as counters:
                graphs = Graphs("aot_eager")
                theirs, ours = stock.get_submodule(name), sharded.get_submodule(name)
                compiled = torch.compile(ours, backend=graphs, fullgraph=True)
                for _ in range(2):
                    found: list[torch.Tensor] = []
                    for module, held in ((theirs, theirs), (compiled, ours)):
                        module.zero_grad()
                        leaf = x.clone().requires_grad_()
                        result = module(leaf)  # pyright: ignore
                        loss_of([result]).backward()
                        found += [result, leaf.grad, *(whole(p.grad) for p in held.parameters())]  # pyright: ignore
                    for one, other in zip(found[: len(found) // 2], found[len(found) // 2 :], strict=True):
                        torch.testing.assert_close(other, one)
                assert len(graphs.seen) == 1, name
                assert not counters["graph_break"]


@pytest.mark.slow
def test_many_equal_blocks_share_their_graphs_and_no_step_compiles_again() -> None:
    world(2).run(_many)


def _many(member: Member) -> None:
    stock, keywords = tiny_model("torch_transformer", layers=12)
    sharded = tpplan.parallelize(stock, PLANS / "torch_transformer-sequence.yaml", member.mesh(), keywords)
    with fresh() as counters:
        graphs = Graphs("eager")
        compile_layers(sharded, backend=graphs, fullgraph=True)
        for step in range(4):
            sharded(**keywords).sum().backward()
            torch.optim.SGD(sharded.parameters(), 1e-3).step()
            sharded.zero_grad(set_to_none=step % 2 == 0)
            assert len(graphs.seen) == 2  # the first block is given the whole stream, and splits it
        assert not counters["graph_break"]


# By layers there are two: the first block is given the whole stream, and splits it.
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        ("torch_transformer-sequence", "compile_layers", "eager", 2),
        ("torch_transformer", "compile_in_place", "aot_eager", 1),
    ],
    ids=lambda case: case[1],
)
def test_dynamic_sizes_compile_nothing_again(case: tuple[str, str, str, int]) -> None:
    world(2).run(_dynamic, *case)


def _dynamic(member: Member, plan: str, way: str, backend: str, graphs_of_all: int) -> None:
    stock, keywords = tiny("torch_transformer", way)
    sharded = tpplan.parallelize(copy.deepcopy(stock), PLANS / f"{plan}.yaml", member.mesh(), keywords)
    with fresh() as counters:
        graphs = Graphs(backend)
        WAYS[way](sharded, backend=graphs, fullgraph=True, dynamic=True)
        for batch, length in ((3, 12), (2, 12), (5, 16)):
            _compare(sharded, stock, batch, length)
            assert len(graphs.seen) == graphs_of_all
        _compare(sharded, stock, 2, 7)  # an odd sequence can't be split, and runs by another program
        made = len(graphs.seen)
        _compare(sharded, stock, 4, 9)
        assert len(graphs.seen) == made, (way, made, len(graphs.seen))
        assert not counters["graph_break"]


def _compare(sharded: nn.Module, stock: nn.Module, batch: int, length: int) -> None:
    ids = torch.randint(88, (batch, length), generator=torch.Generator().manual_seed(length))
    stock.zero_grad()
    sharded.zero_grad()
    assert_same_run(run(sharded, {"ids": ids}), run(stock, {"ids": ids}), tolerance(torch.float64))


@pytest.mark.sweep
def test_dropout_draws_what_it_draws_without_a_compiler() -> None:
    world(2).run(_dropout)


def _dropout(member: Member) -> None:
    stock, keywords = tiny_model("torch_transformer", dropout=0.3, layers=1)
    found: list[Run] = []
    for way, backend in ((None, ""), ("compile_layers", "aot_eager"), ("compile_in_place", "eager")):
        sharded = tpplan.parallelize(
            copy.deepcopy(stock), PLANS / "torch_transformer-sequence.yaml", member.mesh(), keywords
        )
        with fresh():
            if way is not None:
                WAYS[way](sharded, backend=backend)
            for seed in range(2):
                torch.manual_seed(seed)
                sharded.zero_grad()
                found.append(run(sharded, keywords))
    for other in (found[2:4], found[4:]):
        for one, two in zip(found[:2], other, strict=True):
            assert_same_run(two, one, tolerance(torch.float64))
    compiled = compile_in_place(sharded, backend="eager", fullgraph=True)  # pyright: ignore
    with fresh(), pytest.raises(tpplan.TpplanError, match="TP181"):
        compiled(**keywords)
    compiled.eval()
    with fresh():
        torch.testing.assert_close(compiled(**keywords), stock.eval()(**keywords))


@pytest.mark.slow
def test_a_function_around_the_model_has_graphs_before_and_after_it() -> None:
    world(2).run(_around)


def _around(member: Member) -> None:
    from torch._dynamo.exc import Unsupported

    stock, keywords = tiny_model("torch_transformer")
    sharded = tpplan.parallelize(copy.deepcopy(stock), PLANS / "torch_transformer.yaml", member.mesh(), keywords)

    def step(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return (model(ids + 0) * 2).sum()

    ids = keywords["ids"]
    with fresh():
        with pytest.raises(Unsupported, match="TP180 compiled-around"):
            torch.compile(step, backend="eager", fullgraph=True)(sharded, ids)
        compiled = torch.compile(step, backend="aot_eager")
        for _ in range(3):
            stock.zero_grad()
            sharded.zero_grad()
            ours, theirs = compiled(sharded, ids), step(stock, ids)
            torch.testing.assert_close(ours, theirs)
            ours.backward()
            theirs.backward()
            for one, other in zip(sharded.parameters(), stock.parameters(), strict=True):
                torch.testing.assert_close(whole(one.grad), other.grad)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_was_compiled_before_is_parallelized_inside(way: str) -> None:
    world(2).run(_before, way)


def _before(member: Member, way: str) -> None:
    stock, keywords = tiny_model("torch_transformer", layers=1)
    with fresh() as counters:
        graphs = Graphs("eager")
        model = WAYS[way](copy.deepcopy(stock), backend=graphs, fullgraph=True)
        model(**keywords)
        count = len(graphs.seen)
        compiled = tpplan.parallelize(model, PLANS / "torch_transformer.yaml", member.mesh(), keywords)
        assert compiled is model
        for _ in range(2):
            compiled.zero_grad()
            stock.zero_grad()
            assert_same_run(run(compiled, keywords), run(stock, keywords), tolerance(torch.float64))
        assert len(graphs.seen) > count
        assert not counters["graph_break"]


def test_calls_that_are_watched_for_good_say_that_nothing_is_compiled() -> None:
    world(2).run(_watched)


def _watched(member: Member) -> None:
    stock, keywords = tiny_model("torch_transformer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPPLAN_DEBUG", "1")
        sharded = tpplan.parallelize(copy.deepcopy(stock), PLANS / "torch_transformer.yaml", member.mesh(), keywords)
    with fresh():
        compile_in_place(sharded, backend="aot_eager", fullgraph=True)
        with pytest.warns(UserWarning, match="TP183"):
            torch.testing.assert_close(sharded(**keywords), stock(**keywords))


@pytest.mark.slow
def test_a_body_that_runs_from_its_record_ends_a_graph() -> None:
    world(2).run(_recorded)


def _recorded(member: Member) -> None:
    torch.manual_seed(0)
    stock = Block(Parted)
    x = torch.randn(ACTIVATIONS[0].shape)
    sharded = tpplan.parallelize(copy.deepcopy(stock), PLAN, member.mesh(), ACTIVATIONS)
    with fresh():
        compile_in_place(sharded, backend="eager", fullgraph=True)
        with pytest.raises(tpplan.TpplanError, match=r"TP184 .* isn't compiled\n  help: leave out"):
            sharded(x)
    with fresh():
        compile_in_place(sharded, backend="eager")
        for _ in range(2):
            torch.testing.assert_close(sharded(x), stock(x))


@pytest.mark.slow
def test_a_model_is_not_compiled_around_what_fsdp_gathers() -> None:
    world(2).run(_around_fsdp)


def _around_fsdp(member: Member) -> None:
    from torch.distributed.fsdp import fully_shard

    stock, keywords = tiny_model("torch_transformer", dtype=torch.float32)
    mesh = member.mesh(2, 1, names=("dp", "tp"))
    sharded = tpplan.parallelize(copy.deepcopy(stock), PLANS / "torch_transformer.yaml", mesh["tp"], keywords)
    for layer in layers_of(sharded):
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=True)
    sharded(**keywords)
    with fresh():
        compile_in_place(sharded, backend="eager")
        with pytest.raises(tpplan.TpplanError, match="TP182"):
            sharded(**keywords)
