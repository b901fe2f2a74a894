"""Keys and values in containers that the caller owns: later calls know a rank's part of them, and compute the same."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tests.marking import in_thirds, slow_but
from tests.runtime.world import Member, world
from tpplan.calls.call_arguments import LeftParts, Parts
from tpplan.calls.guard import CallGuard
from tpplan.compat.dtensors import local_of
from tpplan.compiler.ir.layout import REPLICATED
from tpplan.compiler.ir.program import Program
from tpplan.compiler.pipeline import Compiled, compile_call
from tpplan.compiler.request import Request
from tpplan.compiler.trace.skeleton import make_skeleton
from tpplan.parity.materialise import copy_structure
from tpplan.parity.rank import SimulatedDistributor
from tpplan.parity.threads import Rendezvous, ThreadCommunicator, run_ranks
from tpplan.plan import load_plan
from tpplan.runtime.lower import lower

HIDDEN, HEADS, VOCABULARY = 32, 4, 24
STEPS = ((0, 5), (5, 6), (6, 7), (7, 9))
RULES = {
    "table": "vocab",
    "layers.*.{q,k,v}": "colwise",
    "layers.*.out": "rowwise",
    "head": {"style": "colwise", "output": "replicate"},
}


@dataclass
class Slot:
    """A cache of one layer."""

    keys: Tensor | None = None
    values: Tensor | None = None


class Holder:
    """A cache of one layer, of a class that says nothing of itself."""

    def __init__(self) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.length = 0


class Nested:
    """A cache whose layers are made as they are needed, and know it."""

    def __init__(self) -> None:
        self.layers: list[Holder] = []
        self.own = self


def in_a_list(cache: list[Tensor], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if cache:
        k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
    cache[:] = [k, v]
    return k, v


def in_a_tuple(cache: list[tuple[Tensor, Tensor]], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if cache:
        k, v = torch.cat([cache[0][0], k], 1), torch.cat([cache[0][1], v], 1)
    cache[:] = [(k, v)]
    return k, v


def in_a_dict(cache: dict[str, Tensor], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if cache:
        k, v = torch.cat([cache["k"], k], 1), torch.cat([cache["v"], v], 1)
    cache.update(k=k, v=v)
    return k, v


def in_a_dataclass(cache: Slot, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if cache.keys is not None and cache.values is not None:
        k, v = torch.cat([cache.keys, k], 1), torch.cat([cache.values, v], 1)
    cache.keys, cache.values = k, v
    return k, v


def one_by_one(cache: list[tuple[Tensor, Tensor]], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    cache.append((k, v))
    return torch.cat([a for a, _ in cache], 1), torch.cat([b for _, b in cache], 1)


def in_an_object(cache: Nested, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if not cache.layers:
        cache.layers.append(Holder())
        cache.layers[0].keys, cache.layers[0].values = torch.tensor([]).to(k), torch.tensor([]).to(v)
    layer = cache.own.layers[0]
    layer.keys, layer.values = torch.cat([layer.keys, k], 1), torch.cat([layer.values, v], 1)
    return layer.keys, layer.values


def buffers(cache: Holder, k: Tensor, v: Tensor) -> tuple[int, int]:
    """Make the buffers of a cache when its first keys come; the places of these."""
    if cache.keys is None:
        shape = (k.shape[0], STEPS[-1][1] + 3, *k.shape[2:])
        cache.keys, cache.values = torch.zeros(shape, dtype=k.dtype, device=k.device), v.new_zeros(shape)
    start = cache.length
    cache.length += k.shape[1]
    return start, cache.length


def by_number(cache: Holder, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    start, end = buffers(cache, k, v)
    places = torch.arange(start, end, device=k.device)
    cache.keys.index_copy_(1, places, k)
    cache.values[:, places] = v
    return cache.keys[:, :end], cache.values[:, :end]


def by_slices(cache: Holder, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    start, end = buffers(cache, k, v)
    cache.keys[:, start:end] = k
    cache.values[:, start:end].copy_(v)
    return cache.keys[:, :end], cache.values[:, :end]


def rolled(cache: Holder, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    _, end = buffers(cache, k, v)
    for held, new in ((cache.keys, k), (cache.values, v)):
        held.copy_(torch.cat([held, new], 1)[:, -held.shape[1] :])
    return cache.keys[:, -end:], cache.values[:, -end:]


WRITTEN: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], Callable[[], Any]]] = {
    "by number": (by_number, Holder),
    "by slices": (by_slices, Holder),
    "rolled": (rolled, Holder),
}

KINDS: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], Callable[[], Any]]] = {
    "list": (in_a_list, list),
    "tuple": (in_a_tuple, list),
    "dict": (in_a_dict, dict),
    "dataclass": (in_a_dataclass, Slot),
    "one by one": (one_by_one, list),
    "object": (in_an_object, Nested),
}


class Attention(nn.Module):
    """Keys and values go into a container of the caller's."""

    def __init__(self, kind: str, shared: int) -> None:
        super().__init__()
        self.kind, self.groups, self.size = kind, HEADS // shared, HIDDEN // HEADS
        self.q, self.out = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.k, self.v = nn.Linear(HIDDEN, shared * self.size), nn.Linear(HIDDEN, shared * self.size)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, -1, self.size)
        k, v = (layer(x).view(batch, length, -1, self.size) for layer in (self.k, self.v))
        if cache is not None:
            k, v = (KINDS | WRITTEN)[self.kind][0](cache, k, v)
        k, v = (y.repeat_interleave(self.groups, 2).transpose(1, 2) for y in (k, v))
        mask = torch.ones(length, k.shape[2], dtype=torch.bool).tril(k.shape[2] - length)
        y = functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask.to(x.device))
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class Decoder(nn.Module):
    """Two layers, each with a container of its own."""

    def __init__(self, kind: str = "list", shared: int = HEADS) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList(Attention(kind, shared) for _ in range(2))

    def forward(self, ids: Tensor, caches: Any = None) -> Tensor:
        x = self.table(ids)
        for layer, cache in zip(self.layers, caches or (None, None), strict=True):
            x = x + layer(x, cache)
        return self.head(x)


def build(kind: str, shared: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Decoder(kind, shared).double().eval(), torch.randint(VOCABULARY, (3, STEPS[-1][1]))


def decoded(model: nn.Module, kind: str, ids: Tensor) -> list[Tensor]:
    """The results of all steps."""
    caches = [(KINDS | WRITTEN)[kind][1]() for _ in range(2)]
    return [model(ids[:, start:end], caches) for start, end in STEPS]


def stepped(model: nn.Module, kind: str, ids: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The results of all steps, and the gradients of a loss on all of them."""
    results = decoded(model, kind, ids)
    for parameter in model.parameters():
        parameter.grad = None
    sum((result.square().sum() for result in results), torch.zeros(())).backward()
    return [r.detach() for r in results], {n: local_of(p.grad) for n, p in model.named_parameters()}  # pyright: ignore


def simulated(kind: str, shared: int, tp: int) -> tuple[Program, list[tuple[list[Tensor], dict[str, Tensor]]]]:
    model, ids = build(kind, shared)
    plan = load_plan({"version": 1, "modules": RULES})
    proved = compile_call(Request(model, plan, tp, (ids,), {}))
    program = proved.program

    def work(axis: ThreadCommunicator) -> tuple[list[Tensor], dict[str, Tensor]]:
        guard = CallGuard(
            make_skeleton(model).model, plan, Compiled(program, {}, (), results=proved.results), (ids,), {}
        )
        own = lower(copy_structure(model), program, SimulatedDistributor(axis), guard)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return stepped(own.eval(), kind, ids)

    return program, run_ranks(tp, work)


def worst(kind: str, shared: int, tp: int) -> float:
    model, ids = build(kind, shared)
    results, gradients = stepped(model, kind, ids)
    program, ranks = simulated(kind, shared, tp)
    distributors = [SimulatedDistributor(ThreadCommunicator(Rendezvous(tp), rank)) for rank in range(tp)]
    scale = float(max(g.abs().max() for g in gradients.values()))
    errors: list[float] = []
    for distributor, (ours, mine) in zip(distributors, ranks, strict=True):
        errors += [float((a - b).abs().max()) for a, b in zip(ours, results, strict=True)]
        for placement in program.parameters:
            part = local_of(distributor.distribute(gradients[placement.name], placement))
            errors.append(float((mine[placement.name] - part).abs().max()) / scale)
    return max(errors)


QUICK = [("object", 2), ("one by one", 4)]
SLOW = [*((kind, 2) for kind in KINDS), ("object", 4)]


@pytest.mark.parametrize(("kind", "tp"), in_thirds(QUICK, SLOW, [(kind, tp) for kind in KINDS for tp in (2, 4)]))
@pytest.mark.one_in(3)
def test_keys_and_values_in_any_container_are_decoded_with(kind: str, tp: int) -> None:
    assert worst(kind, HEADS, tp) < 1e-12


@pytest.mark.parametrize(("shared", "tp"), slow_but([(1, 4), (2, 2)], [(2, 2), (1, 2), (2, 4), (1, 4)]))
@pytest.mark.one_in(3)
def test_heads_that_several_ranks_hold_are_known_too(shared: int, tp: int) -> None:
    assert worst("list", shared, tp) < 1e-12


@pytest.mark.parametrize(
    ("kind", "tp"), slow_but([("by number", 2)], [(kind, tp) for kind in WRITTEN for tp in (2, 4)])
)
def test_buffers_that_a_cache_makes_and_writes_in_place_are_parts(kind: str, tp: int) -> None:
    model, ids = build(kind, HEADS)
    plan = load_plan({"version": 1, "modules": RULES})
    proved = compile_call(Request(model, plan, tp, (ids,), {}))
    program = proved.program

    def work(axis: ThreadCommunicator) -> tuple[list[Tensor], list[Holder]]:
        guard = CallGuard(
            make_skeleton(model).model, plan, Compiled(program, {}, (), results=proved.results), (ids,), {}
        )
        own = lower(copy_structure(model), program, SimulatedDistributor(axis), guard).eval()
        caches = [Holder(), Holder()]
        with torch.no_grad():
            return [own(ids[:, start:end], caches) for start, end in STEPS], caches

    with torch.no_grad():
        expected = decoded(model, kind, ids)
    for results, caches in run_ranks(tp, work):
        assert max(float((a - b).abs().max()) for a, b in zip(results, expected, strict=True)) < 1e-12
        assert {cache.keys.shape[2] for cache in caches} == {HEADS // tp}


class Slotted:
    """A cache that nobody can look into."""

    __slots__ = ("keys", "length", "values")

    def __init__(self) -> None:
        self.keys: Any = torch.zeros(1)
        self.values: Any = None
        self.length = 0


def test_a_cache_that_hides_its_tensors_is_refused() -> None:
    model, ids = build("by number", HEADS)
    plan = load_plan({"version": 1, "modules": RULES})
    compiled = compile_call(Request(model, plan, 2, (ids,), {}))
    guard = CallGuard(make_skeleton(model).model, plan, compiled, (ids,), {})
    with pytest.raises(tpplan.TpplanError, match=r"TP117.*`caches` is or has an object that keeps tensors"):
        guard(False, (ids, [Slotted(), Slotted()]), {})


def test_parts_that_pass_for_whole_tensors_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeftParts, "parts_of", lambda *_: Parts())
    with pytest.raises(tpplan.TpplanError, match="TP117"):
        simulated("list", HEADS, 2)


# -- real processes ---------------------------------------------------------------------------------------------------
def sorted_anew(member: Member) -> tuple[float, list[str]]:
    """The error of a step after the caller has sorted, cut and copied the cache; and what the caller was told."""
    stock, ids = build("list", HEADS)
    plan = {"version": 1, "modules": RULES}
    model = tpplan.parallelize(copy.deepcopy(stock), plan, member.mesh(), (ids,))
    found: list[Tensor] = []
    with warnings.catch_warnings(record=True) as told, torch.no_grad():
        warnings.simplefilter("always")
        for one in (stock, model):
            caches: list[list[Tensor]] = [[], []]
            one(ids[:, :5], caches)
            one(ids[:, 5:6], caches)
            caches = [[held[[2, 0, 1]][:, :4].clone() for held in cache] for cache in caches]
            found.append(one(ids[:, 6:8], caches))
    return float((found[0] - found[1]).abs().max()), [str(w.message) for w in told if "TP" in str(w.message)]


def whole_again(member: Member) -> float:
    """The error of a call that is given keys and values that the stock model has left."""
    stock, ids = build("list", HEADS)
    model = tpplan.parallelize(copy.deepcopy(stock), {"version": 1, "modules": RULES}, member.mesh(), (ids,))
    caches: list[list[Tensor]] = [[], []]
    with torch.no_grad():
        model(ids[:, :5], [[], []])
        stock(ids[:, :5], caches)
        ours = model(ids[:, 5:6], [list(cache) for cache in caches])
        return float((ours - stock(ids[:, 5:6], caches)).abs().max())


@pytest.mark.processes
def test_a_cache_may_be_sorted_and_cut_between_calls_and_the_caller_is_told_once() -> None:
    for error, told in world(2).run(sorted_anew):
        assert error < 1e-12
        assert len(told) == 1 and told[0].startswith("note TP125 part-with-the-caller: ")
        assert "`caches[0][0]`" in told[0]


@pytest.mark.processes
def test_whole_keys_and_values_are_not_taken_for_parts() -> None:
    assert max(world(2).run(whole_again)) < 1e-12


# -- the compiler ------------------------------------------------------------------------------------------------------
class Collects(nn.Module):
    """Puts one of its values into a list of the caller's."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which
        self.up, self.norm, self.down = nn.Linear(16, 24), nn.LayerNorm(24), nn.Linear(24, 16)
        self.last = nn.LayerNorm(16)

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        wide = self.up(x)
        y = self.down(wide)
        z = self.last(y)
        seen.append({"features": wide, "stream": y, "sequence": z}[self.which])
        return z.relu()


@functools.cache
def program_of(which: str) -> Program:
    rules: dict[str, Any] = {"up": "colwise", "down": "rowwise"} | ({"last": "sequence"} if which == "sequence" else {})
    example = (torch.zeros(3, 8, 16), [])
    return tpplan.compile_plan(Collects(which), {"version": 1, "modules": rules}, 2, example)


def test_a_program_says_what_it_leaves_with_the_caller() -> None:
    (held,) = program_of("features").left
    assert (held.path, held.shape, str(held.layout)) == (("seen", 0), (3, 8, 24), "S(2)")
    (note,) = (d for d in program_of("features").diagnostics if d.code == "TP125")
    assert "such as `seen[0]`" in note.message
    assert Program.from_dict(program_of("features").to_dict()).left == (held,)


def test_what_is_whole_is_no_matter() -> None:
    assert program_of("stream").left == ()
    assert not [d for d in program_of("stream").diagnostics if d.code == "TP125"]


def test_a_part_of_a_sequence_is_refused_since_no_later_call_could_know_it() -> None:
    with pytest.raises(tpplan.CompileError, match=r"TP107.*S\(1\) in the caller.s `seen\[0\]`"):
        program_of("sequence")


def test_a_single_token_does_not_pass_for_a_single_head() -> None:
    model, ids = build("list", HEADS)
    program = compile_call(Request(model, load_plan({"version": 1, "modules": RULES}), 2, (ids[:, :1],), {})).program
    layouts = {p.name: p.layout for p in program.parameters}
    assert all(layouts[f"layers.0.{name}.weight"] != REPLICATED for name in "qkv")
