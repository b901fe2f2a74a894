"""What users do with a sharded model on a mesh of two axes, each as a cell: equal to the unsharded run, or refused.

The reference is the stock model in one process, on the batches of all data-parallel ranks together.
"""

from __future__ import annotations

import contextlib
import copy
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

import tpplan
from tests.plans.parity import PLANS, tolerance, whole
from tests.runtime.world import Member
from tpplan.rehearsal.prove import prove

ROWS, LENGTH, STEPS = 2, 6, 2


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "use_cache": False, **changes}))  # pyright: ignore


def gpt2(**changes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 31, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **drops, "use_cache": False, **changes}))  # pyright: ignore


def phi3(**changes: Any) -> nn.Module:
    from transformers import Phi3Config, Phi3ForCausalLM

    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "pad_token_id": 0,
    }
    return Phi3ForCausalLM(Phi3Config(**{**sizes, "use_cache": False, **changes}))  # pyright: ignore


FAMILIES: dict[str, Callable[[], tuple[nn.Module, str]]] = {
    "llama": lambda: (llama(), "llama"),
    "llama-sequence": lambda: (llama(), "llama-sequence"),
    "gpt2": lambda: (gpt2(), "gpt2"),
    "gpt2-sequence": lambda: (gpt2(), "gpt2-sequence"),
    "phi3": lambda: (phi3(), "phi3"),
    "shared": lambda: (llama(num_key_value_heads=1), "llama"),
    "uneven": lambda: (llama(vocab_size=33, intermediate_size=23), "llama"),
    "tied": lambda: (llama(vocab_size=33, tie_word_embeddings=True), "llama-sequence"),
}


def layers_of(model: nn.Module) -> list[nn.Module]:
    held: Any = model
    return list(held.transformer.h if hasattr(held, "transformer") else held.model.layers)


def batch(step: int, row: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + row)
    return torch.randint(31, (ROWS, LENGTH), generator=generator)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


Step = Callable[[nn.Module, Any, int, Callable[[int], Tensor]], None]


def plain_step(model: nn.Module, optimizer: Any, step: int, data: Callable[[int], Tensor]) -> None:
    optimizer.zero_grad()
    loss_of(model, data(step)).backward()
    optimizer.step()


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        family: the model and its plan.
        wrap: what makes the sharded model data-parallel.
        step: one step of the loop.
        stock_step: the same of the stock model.
        stock_wrap: what makes the stock model data-parallel, where it runs on the rank's own batches.
        optimizer: over the parameters.
        prepare: done to both models before.
        overlap: whether all collectives that can, run beside products.
    """

    family: str
    wrap: Callable[[nn.Module, DeviceMesh], nn.Module]
    step: Step = plain_step
    stock_step: Step | None = None
    stock_wrap: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None
    optimizer: Callable[[list[nn.Parameter]], Any] = field(default=lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3))
    prepare: Callable[[nn.Module], object] | None = None
    dtype: torch.dtype = torch.float64
    allowed: float = tolerance(torch.float64, 8192)
    overlap: bool = False


def only_layers(model: nn.Module) -> None:
    """Freeze what no layer has: FSDP averages what it was given."""
    model.requires_grad_(False)
    for layer in layers_of(model):
        layer.requires_grad_(True)


def fsdp(layers: bool = True, root: bool = True, **options: Any) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    def wrap(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for layer in layers_of(model) if layers else ():
            fully_shard(layer, mesh=mesh["dp"], **options)
        if root:
            fully_shard(model, mesh=mesh["dp"], **options)
        return model

    return wrap


def made(case: Case) -> tuple[nn.Module, str]:
    torch.manual_seed(0)
    model, plan = FAMILIES[case.family]()
    model = model.to(case.dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases, too
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64).to(parameter) * 0.1)
    if case.prepare is not None:
        case.prepare(model)
    return model.train(), plan


OVERLAP = {"overlap": ["gather_linear", "linear_reduce", "weight_gradient"], "chunks": 2}
_proofs: dict[tuple[Any, ...], Any] = {}


def parallelized(case: Case, model: nn.Module, plan: str, mesh: DeviceMesh) -> nn.Module:
    """The model, sharded; each is proved once, as many cases have the same."""

    def proved(request: Any) -> Any:
        key = (case.family, case.dtype, case.prepare, case.overlap, request.size)
        if key not in _proofs:
            _proofs[key] = prove(request)
        return _proofs[key]

    with mock.patch("tpplan.api.prove", proved):
        document = tpplan.load_plan(PLANS / f"{plan}.yaml").to_dict()
        return tpplan.parallelize(model, {**document, **(OVERLAP if case.overlap else {})}, mesh)


def run_case(case: Case, mesh: DeviceMesh) -> str:
    """What is wrong, if anything; relative to how far the steps moved a parameter."""
    rows, row = replicas_of(mesh)
    stock, plan = made(case)
    before = [parameter.detach().clone() for parameter in stock.parameters()]
    sharded = copy.deepcopy(stock)
    parallelized(case, sharded, plan, mesh["tp"])
    wrapped = case.wrap(sharded, mesh)
    reference = stock if case.stock_wrap is None else case.stock_wrap(stock, mesh)
    ours = case.optimizer([p for p in wrapped.parameters() if p.requires_grad])
    theirs = case.optimizer([p for p in reference.parameters() if p.requires_grad])

    def own(at: int) -> Tensor:
        return batch(at, row)

    def whole_batch(at: int) -> Tensor:
        return torch.cat([batch(at, r) for r in range(rows)])

    for step in range(STEPS):
        case.step(wrapped, ours, step, own)
        (case.stock_step or case.step)(reference, theirs, step, own if case.stock_wrap else whole_batch)
    found: list[str] = []
    for (name, mine), other, start in zip(sharded.named_parameters(), stock.parameters(), before, strict=True):
        full, expected = whole(mine), whole(other)
        assert full is not None and expected is not None
        moved = (expected - start).abs().max().item()
        error = (full.to(expected) - expected).abs().max().item() / max(moved, 1e-3)
        if not error <= case.allowed:
            found.append(f"{name} off by {error:.1e}")
    return "; ".join(found[:4])


def replicas_of(mesh: DeviceMesh) -> tuple[int, int]:
    """How many ranks have each part, and which of these this one is."""
    names = [name for name in mesh.mesh_dim_names or () if name != "tp"]
    count = place = 0
    for name in names:
        size = mesh[name].size()
        count, place = max(count, 1) * size, place * size + mesh[name].get_local_rank()
    return count, place


@contextlib.contextmanager
def caught(found: dict[str, str], name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        found[name] = f"{type(error).__name__}: {str(error)[:700]}"
        if os.environ.get("SHOW"):
            found[name] += traceback.format_exc()[-2500:]


def run_cases(
    member: Member,
    names: list[str],
    shape: tuple[int, ...],
    axes: tuple[str, ...] = ("dp", "tp"),
    overlap: bool = False,
) -> Any:
    """What came of each case on this rank."""
    mesh = member.mesh(*shape, names=axes)
    found: dict[str, str] = {}
    for name in names:
        with caught(found, name):
            found[name] = run_case(replace(CASES[name], overlap=overlap), mesh)
    return found


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def accumulated(sync: Callable[[Any, bool], Any]) -> Step:
    """Steps of three backwards, of which the last alone averages."""

    def step(model: nn.Module, optimizer: Any, step: int, data: Callable[[int], Tensor]) -> None:
        optimizer.zero_grad()
        for part in range(3):
            with sync(model, part == 2):
                (loss_of(model, data(10 * step + part)) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    return step


@contextlib.contextmanager
def last_of_fsdp(model: Any, last: bool) -> Iterator[None]:
    model.set_is_last_backward(last)
    model.set_requires_gradient_sync(last)
    yield


@contextlib.contextmanager
def kept_of_fsdp(model: Any, last: bool) -> Iterator[None]:
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last)
    yield


def no_sync(model: Any, last: bool) -> Any:
    return contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()


def both(model: nn.Module, optimizer: Any, step: int, data: Callable[[int], Tensor]) -> None:
    """Two forwards before one backward."""
    optimizer.zero_grad()
    (loss_of(model, data(2 * step)) + 2 * loss_of(model, data(2 * step + 1))).backward()
    optimizer.step()


def ddp(**options: Any) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    def wrap(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if mesh["dp"].get_local_rank():
            with torch.no_grad():  # all ranks take the first one's numbers
                for parameter in model.parameters():
                    parameter.mul_(1.5)
        return DistributedDataParallel(model, device_mesh=mesh["dp"], **options)

    return wrap


def ddp_of_group(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh["dp"].get_group())


def replicated(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return replicate(model, device_mesh=mesh["dp"])


def replicated_by_fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    for layer in layers_of(model):
        replicate(layer, mesh=mesh["dp"])
    return replicate(model, mesh=mesh["dp"])  # pyright: ignore


def hsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh["replicate", "dp"])
    fully_shard(model, mesh=mesh["replicate", "dp"])
    return model


def freeze(model: nn.Module) -> None:
    """Train the second layer's norms and projections alone, and the head."""
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name or "lm_head" in name)


def clipped(model: nn.Module, optimizer: Any, step: int, data: Callable[[int], Tensor]) -> None:
    """A step that keeps the gradients' memory."""
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, data(step)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def recovered(model: nn.Module, optimizer: Any, step: int, data: Callable[[int], Tensor]) -> None:
    """The same, after a backward that raises on all ranks."""

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    handle = [*model.parameters()][4].register_post_accumulate_grad_hook(fail)
    with contextlib.suppress(ZeroDivisionError):
        loss_of(model, data(77)).backward()
    handle.remove()
    clipped(model, optimizer, step, data)


UNSYNCED = accumulated(lambda *_: contextlib.nullcontext())


def half(family: str, **options: Any) -> Case:
    """Products in bfloat16, sums over replicas in float32, against FSDP around the stock model."""
    wrap = fsdp(mp_policy=HALF, **options)
    return Case(
        family,
        wrap,
        stock_wrap=wrap,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        dtype=torch.float32,
        allowed=tolerance(torch.bfloat16, 16),
    )


def checkpointed(model: nn.Module) -> None:
    """Let each layer's forward run once more in the backward."""
    held: Any = model
    held.gradient_checkpointing_enable({"use_reentrant": False})


def of_everything(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Prefetching, parameters that FSDP is to leave alone, and a method of the model that runs modules."""
    ignored = {parameter for parameter in model.parameters() if not parameter.requires_grad}
    layers: Any = layers_of(model)
    for layer in layers:
        fully_shard(layer, mesh=mesh["dp"], ignored_params=ignored)
    layers[0].set_modules_to_forward_prefetch([layers[1]])
    layers[1].set_modules_to_backward_prefetch([layers[0]])
    fully_shard(model, mesh=mesh["dp"], ignored_params=ignored)
    register_fsdp_forward_method(model, "generate")
    return model


def looked_at(model: nn.Module, optimizer: Any, step: int, data: Callable[[int], Tensor]) -> None:
    """A step between evaluation and generation."""
    generated: Any = model
    ids = data(50 + step)
    model.eval()
    with torch.no_grad():
        model(input_ids=ids)
        generated.generate(ids[:, :3], max_new_tokens=2, do_sample=False)
    model.train()
    optimizer.zero_grad()
    loss_of(model, data(step)).backward()
    with torch.no_grad():
        model(input_ids=ids)
    if hasattr(generated, "reshard"):
        generated.reshard()  # which FSDP leaves to the backward, at the root
    optimizer.step()


CASES: dict[str, Case] = {
    **{name: Case(name, fsdp()) for name in FAMILIES},
    "kept": Case("llama-sequence", fsdp(reshard_after_forward=False), clipped),
    "number": Case("llama", fsdp(reshard_after_forward=2)),
    "root only": Case("llama-sequence", fsdp(layers=False), clipped),
    "layers only": Case("llama", fsdp(root=False), prepare=only_layers),
    "of everything": Case("llama-sequence", of_everything, looked_at, prepare=freeze),
    "checkpointed": Case("llama-sequence", fsdp(), prepare=checkpointed),
    "ddp checkpointed": Case("llama-sequence", ddp(bucket_cap_mb=0.001), prepare=checkpointed),
    "frozen": Case("llama-sequence", fsdp(), prepare=freeze),
    "offload": Case("llama", fsdp(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "accumulated": Case("llama-sequence", fsdp(), accumulated(last_of_fsdp), UNSYNCED),
    "accumulated kept": Case("llama-sequence", fsdp(), accumulated(kept_of_fsdp), UNSYNCED),
    "two forwards": Case("llama-sequence", fsdp(), both),
    "two forwards kept": Case("llama-sequence", fsdp(reshard_after_forward=False), both),
    "half": half("llama"),
    "half, sequence": half("llama-sequence", reshard_after_forward=False),
    "half, packs": half("gpt2"),
    "ddp": Case("llama-sequence", ddp(), recovered),
    "ddp buckets": Case("gpt2-sequence", ddp(bucket_cap_mb=0.001, find_unused_parameters=True)),
    "ddp packs": Case("phi3", ddp(gradient_as_bucket_view=True, static_graph=True)),
    "ddp tied": Case("tied", ddp_of_group),
    "ddp shared": Case("shared", ddp_of_group, accumulated(no_sync), UNSYNCED),
    "ddp uneven": Case("uneven", ddp_of_group),
    "ddp frozen": Case("llama-sequence", ddp(), prepare=freeze),
    "ddp accumulated": Case("llama-sequence", ddp(bucket_cap_mb=0.001), accumulated(no_sync), UNSYNCED),
    "ddp two forwards": Case("llama-sequence", ddp(), both),
    "replicate": Case("llama-sequence", replicated),
    "replicate by fsdp": Case("llama-sequence", replicated_by_fsdp),
    "hsdp": Case("llama-sequence", hsdp),
}
