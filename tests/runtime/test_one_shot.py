"""One-shot all-reduces on two and four processes: outputs, gradients, and how often each kind of sum ran.

CPUs of several processes share no memory, so torch's operator gets a kernel here that gathers what the ranks have.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.compiler.toys import HIDDEN
from tests.runtime.world import Member, world
from tpplan import compile_plan, parallelize, verify
from tpplan.bench.collectives import by_kind
from tpplan.compiler.ir.layout import Collective, all_reduce_of
from tpplan.plan import PlanError, load_plan
from tpplan.runtime.ranks import one_shot

LARGEST = 2 * 4 * HIDDEN * 4  # bytes of (2, 4, HIDDEN) in float32
TOLERANCE = 1e-5  # of numbers near 1 in float32, summed in another order


class Toy(nn.Module):
    """A block whose norm's weight has a summed gradient, where its sequence is split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


RULES: dict[str, Any] = {"up": "colwise", "down": "rowwise"}
SPLIT = {"norm": "sequence", **RULES}


def plan(rules: dict[str, Any], largest: int = LARGEST) -> dict[str, Any]:
    return {"version": 1, "modules": rules, "one_shot_all_reduce": largest}


def made(dtype: torch.dtype = torch.float32) -> Toy:
    torch.manual_seed(0)
    return Toy().to(dtype)


def batch(length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, length, HIDDEN, generator=torch.Generator().manual_seed(length), dtype=dtype)


def gathered(place: Tensor, own: Tensor, operation: str, group: str, out: Tensor) -> Tensor:
    """What the kernel computes, by other means; `place` is memory of this rank, as large as `own`, both aligned."""
    assert operation == "sum" and place.shape == own.shape == out.shape and place.dtype == own.dtype
    assert not own.data_ptr() % 16 and not place.data_ptr() % 16
    place.copy_(own)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, place)
    out.copy_(torch.stack(every).sum(0))
    return out


class Shots(TorchDispatchMode):
    """Counts the operator, which torch's own counter doesn't know."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "one_shot" in str(func)
        return func(*args, **(kwargs or {}))


@contextmanager
def shared_memory() -> Iterator[None]:
    """As on GPUs that read each other's memory."""
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("one_shot_all_reduce_copy_out", gathered, "CPU")
    empty = lambda size, device: torch.empty(size, dtype=torch.uint8, device=device)  # noqa: E731
    with (
        mock.patch.object(one_shot, "symmetric_empty", empty),
        mock.patch.object(one_shot, "rendezvous", lambda memory, group: None),
    ):
        yield
    library._destroy()


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    given = x.clone().requires_grad_()
    result = model(given)
    result.square().sum().backward()
    found: dict[str, Any] = {"input": given.grad, **{name: p.grad for name, p in model.named_parameters()}}
    model.zero_grad()
    return result.detach(), {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}


def counted(model: nn.Module, x: Tensor, backward: bool) -> Counter[str]:
    with warnings.catch_warnings(), CommDebugMode() as counter, Shots() as shots:
        warnings.simplefilter("ignore", UserWarning)
        given = x.clone().requires_grad_(backward)
        with torch.set_grad_enabled(backward):
            result = model(given)
        if backward:
            result.sum().backward()
            model.zero_grad()
    found = by_kind(counter.get_comm_counts())
    if shots.count:
        found[str(Collective.ONE_SHOT)] += shots.count
    return found


def run(member: Member, rules: dict[str, Any], lengths: tuple[int, ...]) -> Any:
    """The largest error, and the sums of each call beside those that the program has for one of its size."""
    stock, model = made(), made()
    with shared_memory():
        model = parallelize(model, plan(rules), member.mesh(), inputs=batch(lengths[0]))
        worst, counts = 0.0, []
        for length in lengths:
            x = batch(length)
            (result, grads), (own, own_grads) = step(stock, x), step(model, x)
            worst = max([worst, (result - own).abs().max().item()])
            worst = max([worst, *((grads[n] - own_grads[n]).abs().max().item() for n in grads)])
            with torch.no_grad():
                worst = max(worst, (model(x) - result).abs().max().item())
            program = compile_plan(made(), plan(rules), member.size, x.clone().requires_grad_())
            for backward in (True, False):
                counts.append((counted(model, x, backward), program.count_collectives(backward)))
    return worst, counts


@pytest.mark.one_in(3)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("rules", [RULES, SPLIT], ids=["whole", "sequence"])
def test_sums_of_up_to_so_many_bytes_are_made_in_one_step(size: int, rules: dict[str, Any]) -> None:
    for worst, counts in world(size).run(run, rules, (4, 8)):
        assert worst < TOLERANCE * 100  # gradients are near 100
        assert all(found == predicted for found, predicted in counts), counts
        (small, _), (small_forward, _), (large, _), _ = counts
        assert small["one-shot all-reduce"] >= 1
        if rules is RULES:
            assert (small_forward["one-shot all-reduce"], small_forward["all-reduce"]) == (1, 0)
            assert (large["one-shot all-reduce"], large["all-reduce"]) == (0, 2)


def decode(member: Member) -> Any:
    """Greedy tokens of a small Llama, with the sums of the last."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    torch.manual_seed(0)
    stock: Any = transformers.LlamaForCausalLM(config).eval()
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config).eval()
    prompt = torch.arange(8).view(1, 8)
    expected = stock.generate(prompt, max_new_tokens=4, do_sample=False)
    with shared_memory():
        document = {**load_plan("llama").to_dict(), "one_shot_all_reduce": 4 * 32}
        model = parallelize(model, document, member.mesh(), inputs={"input_ids": prompt})
        found = model.generate(prompt, max_new_tokens=4, do_sample=False)
        with torch.no_grad(), Shots() as shots:
            model(prompt)
            long = shots.count
            model(prompt[:, :1])
    return torch.equal(found, expected), long, shots.count


@pytest.mark.slow
def test_a_decoded_token_takes_them_and_its_prompt_does_not() -> None:
    for equal, long, short in world(2).run(decode):
        assert equal
        assert (long, short) == (0, 5)  # the table, and two in each block


def unaligned(member: Member) -> Any:
    with shared_memory():
        found = one_shot.share_memory(dist.group.WORLD, 1024, torch.device("cpu"))  # pyright: ignore
        assert isinstance(found, one_shot.SharedMemory)
        held = torch.arange(9.0)[1:] + member.rank
        took = found.sums(held)
        others = [
            torch.ones(8, dtype=torch.float64),
            torch.ones(3, dtype=torch.bfloat16),
            torch.ones(0),
            torch.ones(300),
        ]
        return took, held, [found.sums(other) for other in others]


def test_a_tensor_that_begins_between_words_is_copied_and_others_are_the_groups() -> None:
    for took, held, others in world(2).run(unaligned):
        assert took and torch.equal(held, 2 * torch.arange(1.0, 9.0) + 1)
        assert others == [False] * 4


def without(member: Member, failing: int | None) -> Any:
    def refuse(memory: Tensor, group: Any) -> None:
        if member.rank == failing:
            raise RuntimeError("no peer access\nand so on")

    with contextlib.ExitStack() as stack:
        if failing is not None:
            stack.enter_context(shared_memory())
            stack.enter_context(mock.patch.object(one_shot, "rendezvous", refuse))
        told = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        model = parallelize(made(), plan(RULES), member.mesh(), inputs=batch(4))
    return [str(w.message) for w in told], torch.allclose(model(batch(4)), made()(batch(4)), atol=TOLERANCE)


@pytest.mark.parametrize("failing", [None, 1])
def test_ranks_that_share_no_memory_say_so_and_use_their_groups(failing: int | None) -> None:
    told = world(2).run(without, failing)
    assert all(equal for _, equal in told)
    texts = ["another rank can't read the memory of all others", "no peer access"]
    for rank, (messages, _) in enumerate(told):
        reason = "SymmetricMemory does not support device type cpu" if failing is None else texts[rank]
        asked = "the plan asks for one-shot all-reduces, but the process group's own are used"
        assert f"{asked}: {reason}" in messages


def test_the_program_names_them() -> None:
    program = compile_plan(made(), plan(SPLIT), 2, batch(4))
    whole = compile_plan(made(), plan(RULES), 2, batch(4))
    assert [str(r.forward) for _, r in whole.reshards() if r.forward.communicates] == ["one-shot all-reduce"]
    assert whole.to_dict()["one_shot"] == LARGEST
    assert type(whole).from_dict(whole.to_dict()) == whole
    assert whole.digest != compile_plan(made(), plan(RULES, 0), 2, batch(4)).digest
    assert "one-shot all-reduce" in program.count_collectives()  # of the norm's gradients
    assert (
        "one-shot all-reduce"
        not in compile_plan(made(torch.float64), plan(RULES), 2, batch(4, torch.float64)).to_json()
    )


def test_which_sums_fit() -> None:
    assert all_reduce_of(64, torch.float32, 64) is Collective.ONE_SHOT
    assert all_reduce_of(64, torch.bfloat16, 64) is Collective.ONE_SHOT
    for count, dtype in ((65, torch.float32), (68, torch.float32), (64, torch.float16), (6, torch.bfloat16)):
        assert all_reduce_of(count, dtype, 64) is Collective.ALL_REDUCE
    assert all_reduce_of(64, torch.float32, 0) is Collective.ALL_REDUCE


@pytest.mark.parametrize("given", ["64 KiB", 1.5, -1, True, [1]])
def test_a_size_that_is_no_number_of_bytes_is_refused(given: Any) -> None:
    with pytest.raises(PlanError) as caught:
        load_plan({"version": 1, "modules": RULES, "one_shot_all_reduce": given})
    assert "`one_shot_all_reduce` has to be a number of bytes" in str(caught.value)


def test_a_plan_takes_it_from_its_base_and_may_turn_it_off(tmp_path: Any) -> None:
    base, child = tmp_path / "base.yaml", tmp_path / "child.yaml"
    base.write_text("version: 1\nmodules: {up: colwise}\none_shot_all_reduce: 4096\n")
    for text, expected in (("", 4096), ("one_shot_all_reduce: 0\n", 0), ("one_shot_all_reduce: 8\n", 8)):
        child.write_text(f"version: 1\nextends: base.yaml\n{text}")
        assert load_plan(str(child)).one_shot == expected
        assert load_plan(load_plan(str(child)).to_dict()).one_shot == expected


def test_verify_tells_no_sums_apart() -> None:
    report = verify(made(), plan(RULES), 2, inputs=batch(4))
    assert report.dtype == "float64" and report.ok
    assert report.predicted == report.collectives == {"all-reduce": 2}
