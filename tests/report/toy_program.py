"""Programs made by hand, as the compiler would write them for a small Llama under sequence parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, REPLICATED_PARTIAL, Layout, reshard_between, sharded
from tpplan.compiler.ir.program import InputRecord, LocalAttribute, ModuleProgram, ParameterPlacement, Program, Reshard

SIZE = 4
HIDDEN = 64
ACTIVATION = (3, 32, HIDDEN)


def reshard(
    source: Layout,
    target: Layout,
    *path: str,
    shape: tuple[int, ...] = ACTIVATION,
    origin: str = "inferred",
    differentiable: bool = True,
    itemsize: int = 4,
) -> Reshard:
    collectives = reshard_between(source, target)
    assert collectives is not None
    count = itemsize
    for size in shape:
        count *= size
    dtype = {2: "bfloat16", 4: "float32"}[itemsize]
    return Reshard(
        path, source, target, collectives.forward, collectives.backward, shape, dtype, count, differentiable, origin
    )


def parameter(
    *names: str, shape: tuple[int, ...], dim: int | None = None, summed: bool = False, dtype: str = "float32"
) -> ParameterPlacement:
    layout = REPLICATED if dim is None else sharded(dim)
    local = layout.local_shape(shape, SIZE, 0)
    origin = "replicated: no rule shards it" if dim is None else f"toy.yaml:{5 + dim}"
    itemsize = {"float32": 4, "bfloat16": 2}[dtype]
    return ParameterPlacement(names, shape, local, dtype, itemsize, layout, summed, True, origin)


def layer(index: int) -> Iterator[ModuleProgram | ParameterPlacement]:
    """One layer: the first takes the partial sums of the embedding, the others what the layer before left."""
    name = f"model.layers.{index}"
    if index == 0:
        entry = reshard(PARTIAL, sharded(1), "hidden_states", origin="for input_layernorm (toy.yaml:4)")
        yield ModuleProgram(name, "LlamaDecoderLayer", None, "inferred", 1, entries=(entry,))
    gather = reshard(sharded(1), REPLICATED_PARTIAL, "hidden_states", origin="for q_proj, k_proj (toy.yaml:5)")
    attention = f"{name}.self_attn"
    heads = (LocalAttribute("num_heads", 8, 2),)
    yield ModuleProgram(
        attention, "LlamaAttention", None, "inferred", 1, (gather,), random="split", local_attributes=heads
    )
    for projection in ("q_proj", "k_proj"):
        yield from linear(f"{attention}.{projection}", "colwise", (HIDDEN, HIDDEN))
    leave = reshard(PARTIAL, sharded(1), origin=f"rowwise {attention}.o_proj (toy.yaml:6)")
    yield from linear(f"{attention}.o_proj", "rowwise", (HIDDEN, HIDDEN), leave)
    norm = f"{name}.input_layernorm"
    yield ModuleProgram(norm, "LlamaRMSNorm", "sequence", "toy.yaml:4", 1, reads=(f"{norm}.weight",))
    yield parameter(f"{norm}.weight", shape=(HIDDEN,), summed=True)


def linear(
    name: str, style: str, shape: tuple[int, ...], leave: Reshard | None = None
) -> Iterator[ModuleProgram | ParameterPlacement]:
    dim = 0 if style == "colwise" else 1
    exits = () if leave is None else (leave,)
    yield ModuleProgram(name, "Linear", style, f"toy.yaml:{5 + dim}", 1, exits=exits, reads=(f"{name}.weight",))
    yield parameter(f"{name}.weight", shape=shape, dim=dim)


def toy_program(layers: int = 3) -> Program:
    """A tied embedding, `layers` layers, of which the first differs from the others, a norm and a head."""
    table = parameter("model.embed_tokens.weight", "lm_head.weight", shape=(128, HIDDEN), dim=0)
    parts: list[ModuleProgram | ParameterPlacement] = [
        ModuleProgram("", "LlamaForCausalLM", None, "inferred", 1),
        ModuleProgram("model.embed_tokens", "Embedding", "vocab", "toy.yaml:3", 1, reads=table.names),
        table,
        *(part for index in range(layers) for part in layer(index)),
        ModuleProgram("model.norm", "LlamaRMSNorm", "sequence", "toy.yaml:7", 1, reads=("model.norm.weight",)),
        parameter("model.norm.weight", shape=(HIDDEN,), summed=True),
        ModuleProgram(
            "lm_head",
            "Linear",
            "colwise",
            "toy.yaml:8",
            1,
            entries=(reshard(sharded(1), REPLICATED_PARTIAL, "input", origin="toy.yaml:8"),),
            exits=(reshard(sharded(2), REPLICATED, shape=(3, 32, 128), origin="colwise lm_head (toy.yaml:8)"),),
            reads=table.names,
        ),
    ]
    return Program(
        plan="toy",
        model="LlamaForCausalLM",
        axis="tp",
        size=SIZE,
        training=True,
        inputs=(InputRecord(("input_ids",), (3, 32), "int64", False),),
        parameters=tuple(part for part in parts if isinstance(part, ParameterPlacement)),
        modules=tuple(part for part in parts if isinstance(part, ModuleProgram)),
        assumptions=("model at modeling_toy.py:12", "model at modeling_toy.py:12"),
    )


def one_module(module: ModuleProgram, *parameters: ParameterPlacement, size: int = SIZE) -> Program:
    """A program of one module."""
    return replace(toy_program(0), modules=(module,), parameters=parameters, assumptions=(), size=size)
