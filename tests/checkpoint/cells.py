"""What users do with the state of a model, each as a cell of a table: whole, in stock order and bit-equal, or refused.

Nothing here depends on how parameters are stored. Gradients that a stock model could have are the parameters of a
second model of the same plan.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tpplan
from tests.checkpoint.subjects import subject
from tests.plans.parity import tolerance, whole
from tests.runtime.world import Member
from tpplan.rehearsal.prove import prove

State = dict[str, Any]
MADE = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


_proofs: dict[tuple[str, int], Any] = {}


def _proved(name: str, request: Any) -> Any:
    """Proves each subject once, as a table needs many models of it."""
    if (name, request.size) not in _proofs:
        _proofs[name, request.size] = prove(request)
    return _proofs[name, request.size]


class Bench:
    """Stock and sharded models of one subject, on one mesh."""

    def __init__(self, member: Member, name: str, shape: tuple[int, ...], folder: Path) -> None:
        self.name, self.folder = name, folder
        self.mesh = member.mesh(*shape, names=("dp", "tp")[-len(shape) :])
        self.two_dim = len(shape) == 2

    def stock(self, seed: int = 0) -> nn.Module:
        return subject(self.name, seed).model

    def sharded(self, seed: int = 0) -> nn.Module:
        held = subject(self.name, seed)
        with mock.patch("tpplan.api.prove", functools.partial(_proved, self.name)):
            model = tpplan.parallelize(held.model, held.plan, self.mesh, held.inputs, broadcast=False)
        if self.two_dim:
            fully_shard(model, mesh=self.mesh["dp"])
        return model

    def stepped(
        self, optimizer: str = "AdamW", steps: int = 2, before: Callable[[nn.Module], object] | None = None
    ) -> tuple[tuple[nn.Module, Any], tuple[nn.Module, Any]]:
        """The sharded and the stock model with their optimizers, after steps with the same gradients."""
        found: list[tuple[nn.Module, Any]] = []
        for make in (self.sharded, self.stock):
            model, other = make(0), make(1)
            made = MADE[optimizer](list(model.parameters()))
            for _ in range(steps):
                for parameter, gradient in zip(model.parameters(), other.parameters(), strict=True):
                    parameter.grad = gradient.detach().clone()
                if before is not None:
                    before(model)
                made.step()
            found.append((model, made))
        return found[0], found[1]


def full(value: Any) -> Any:
    return whole(value) if isinstance(value, Tensor) else value


def same(ours: Any, theirs: Any, where: str, loose: bool = False) -> None:
    ours, theirs = full(ours), full(theirs)
    if isinstance(theirs, Tensor):
        assert isinstance(ours, Tensor), f"{where}: {type(ours)}"
        assert ours.shape == theirs.shape, f"{where}: {tuple(ours.shape)} is not {tuple(theirs.shape)}"
        error = (ours.double() - theirs.double()).abs().max().item() if theirs.numel() else 0.0
        scale = max(theirs.double().abs().max().item(), 1.0) if theirs.numel() and loose else 0.0
        bound = tolerance(theirs.dtype) * scale if theirs.is_floating_point() else 0.0
        assert error <= bound, f"{where}: off by {error:.1e}"
    elif isinstance(theirs, dict):
        assert set(ours) == set(theirs), f"{where}: {set(ours) ^ set(theirs)}"
        for key in theirs:
            same(ours[key], theirs[key], f"{where}.{key}", loose)
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), where
        for place, held in enumerate(theirs):
            same(ours[place], held, f"{where}.{place}", loose)
    else:
        assert ours == theirs, f"{where}: {ours} is not {theirs}"


def _same_models(ours: nn.Module, theirs: nn.Module, loose: bool = False) -> None:
    same(ours.state_dict(), theirs.state_dict(), "state_dict", loose)
    same(dict(ours.named_parameters()), dict(theirs.named_parameters()), "parameters", loose)


def values(bench: Bench) -> None:
    _same_models(bench.sharded(), bench.stock())


def gradients(bench: Bench) -> None:
    held = subject(bench.name)
    found = []
    for model in (bench.sharded(), held.model):
        for _ in range(2):  # the second is added to the first
            result = model(**held.inputs)
            (result if isinstance(result, Tensor) else result[0]).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found.append(({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, norm))
    scale = float(found[1][1])
    ours, theirs = ({n: full(g) / scale for n, g in held.items()} for held, _ in found)
    same(ours, theirs, "gradient", loose=True)
    same(found[0][1], found[1][1], "norm", loose=True)


def _steps(optimizer: str) -> Callable[[Bench], None]:
    def cell(bench: Bench) -> None:
        (model, ours), (stock, theirs) = bench.stepped(optimizer)
        loose = "fused" in optimizer  # whose last numbers round otherwise than those before
        _same_models(model, stock, loose)
        same(ours.state_dict()["state"], theirs.state_dict()["state"], "state", loose)

    return cell


def _clipped(kind: float, foreach: bool) -> Callable[[Bench], None]:
    def cell(bench: Bench) -> None:
        norms: list[Any] = []

        def clip(model: nn.Module) -> None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, kind, foreach=foreach or None))

        (model, _), (stock, _) = bench.stepped("SGD", 1, clip)
        same(norms[0], norms[1], "norm", loose=True)
        for (name, ours), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
            same(ours.grad, theirs.grad, f"gradient of {name}", loose=True)

    return cell


def loads(bench: Bench) -> None:
    """A sharded state into a sharded model, and a stock state; and the whole of it into a stock model."""
    model = bench.sharded(1)
    model.load_state_dict(bench.sharded().state_dict())
    _same_models(model, bench.stock())
    stock = bench.stock(1)
    stock.load_state_dict({name: full(held) for name, held in model.state_dict().items()})
    _same_models(stock, bench.stock())
    stock = bench.stock(1)
    stock.load_state_dict(model.state_dict())
    _same_models(stock, bench.stock())


def loads_stock(bench: Bench) -> None:
    for assign in (False, True):
        if assign and bench.two_dim:
            continue  # FSDP's own matter
        model, stock = bench.sharded(1), bench.stock(1)
        for held in (model, stock):
            held.load_state_dict(bench.stock().state_dict(), assign=assign)
        _same_models(model, stock)


def _gets(**options: bool) -> Callable[[Bench], None]:
    def cell(bench: Bench) -> None:
        (model, ours), (stock, theirs) = bench.stepped()
        chosen = StateDictOptions(**options)  # pyright: ignore[reportArgumentType]
        held = get_model_state_dict(model, options=chosen), get_optimizer_state_dict(model, ours, options=chosen)
        wanted = get_model_state_dict(stock), get_optimizer_state_dict(stock, theirs)
        if options.get("full_state_dict"):
            assert not any(isinstance(tensor, DTensor) for tensor in held[0].values())
            if options.get("cpu_offload") and torch.distributed.get_rank():
                return  # only the first rank has it
        same(held[0], wanted[0], "model")
        same(held[1], wanted[1], "optimizer")

    return cell


def _sets(what: str, full_state: bool, broadcast: bool) -> Callable[[Bench], None]:
    def cell(bench: Bench) -> None:
        (model, ours), (stock, theirs) = bench.stepped()
        other = bench.sharded(1)
        fresh = MADE["AdamW"](list(other.parameters()))
        options = StateDictOptions(full_state_dict=full_state, broadcast_from_rank0=broadcast)
        of, by = (stock, theirs) if full_state else (model, ours)
        given: Any = get_model_state_dict(of) if what == "model" else get_optimizer_state_dict(of, by)
        given = copy.deepcopy(given)
        if broadcast and torch.distributed.get_rank():
            given = {}
        if what == "model":
            set_model_state_dict(other, given, options=options)
            _same_models(other, stock)
            return
        other.load_state_dict(model.state_dict())
        set_optimizer_state_dict(other, fresh, given, options=options)
        same(fresh.state_dict()["state"], theirs.state_dict()["state"], "state")
        save(get_optimizer_state_dict(other, fresh), checkpoint_id=f"{bench.folder}/optimizer")
        for held, optimizer, seed in ((other, fresh, bench.sharded(2)), (stock, theirs, bench.stock(2))):
            for parameter, gradient in zip(held.parameters(), seed.parameters(), strict=True):
                parameter.grad = gradient.detach().clone()
            optimizer.step()
        _same_models(other, stock)
        same(fresh.state_dict()["state"], theirs.state_dict()["state"], "state after a step")

    return cell


def saves(bench: Bench) -> None:
    (model, ours), _ = bench.stepped()
    held = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, ours)}
    save(held, checkpoint_id=bench.folder)


def reads(bench: Bench) -> None:
    """Load what `saves` wrote, in whatever world that was."""
    model = bench.sharded(1)
    optimizer = MADE["AdamW"](list(model.parameters()))
    held: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    load(held, checkpoint_id=bench.folder)
    set_model_state_dict(model, held["model"])
    set_optimizer_state_dict(model, optimizer, held["optimizer"])
    stock = bench.stock(0)
    theirs = MADE["AdamW"](list(stock.parameters()))
    for _ in range(2):
        for parameter, gradient in zip(stock.parameters(), bench.stock(1).parameters(), strict=True):
            parameter.grad = gradient.detach().clone()
        theirs.step()
    _same_models(model, stock)
    same(optimizer.state_dict()["state"], theirs.state_dict()["state"], "state")


def copies(bench: Bench) -> None:
    if bench.two_dim:
        return  # FSDP refuses copies
    model = bench.sharded()
    _same_models(copy.deepcopy(model), bench.stock())
    held = subject(bench.name)
    for one in (model, held.model):
        result = one(**held.inputs)
        (result if isinstance(result, Tensor) else result[0]).square().mean().backward()
    again = copy.deepcopy(model)
    _same_models(again, bench.stock())
    with torch.no_grad():
        theirs, ours = held.model(**held.inputs), again(**held.inputs)
    if not isinstance(ours, Tensor):
        theirs, ours = theirs[0], ours[0]
    same(ours / theirs.abs().max(), theirs / theirs.abs().max(), "result", loose=True)


def pickles(bench: Bench) -> None:
    file = io.BytesIO()
    model = bench.sharded()
    torch.save(model.state_dict(), file)
    file.seek(0)
    same(torch.load(file), bench.stock().state_dict(), "loaded")
    other = bench.sharded(1)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=False))
    _same_models(other, bench.stock())


def casts(bench: Bench) -> None:
    if bench.two_dim:
        return
    model, stock = bench.sharded(), bench.stock()
    for change in (lambda m: m.requires_grad_(False), lambda m: m.half(), lambda m: m.to(torch.float32)):
        _same_models(change(model), change(stock))


def moves(bench: Bench) -> None:
    """The optimizer's state through torch.save and back."""
    (model, ours), (_, theirs) = bench.stepped()
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    fresh = MADE["AdamW"](list(model.parameters()))
    fresh.load_state_dict(torch.load(file))
    same(fresh.state_dict()["state"], theirs.state_dict()["state"], "state")


def loosely(bench: Bench) -> None:
    model, stock = bench.sharded(1), bench.stock(1)
    for held, given in ((model, bench.sharded()), (stock, bench.stock())):
        state = given.state_dict()
        first = next(iter(dict(held.named_parameters())))
        del state[first]
        held.load_state_dict({**state, "nothing": torch.zeros(1)}, strict=False)
    _same_models(model, stock)


def sums(bench: Bench) -> None:
    """What users compute of parameters outside of a forward."""
    for (name, ours), theirs in zip(bench.sharded().named_parameters(), bench.stock().parameters(), strict=True):
        with torch.no_grad():
            for how in (Tensor.sum, Tensor.mean, Tensor.std, Tensor.max, lambda t: (t * 2 + t.exp()).tanh()):
                same(how(ours), how(theirs), f"{name}: {how}", loose=True)
            same(ours.isnan().any(), theirs.isnan().any(), name)
            same(torch.linalg.vector_norm(ours), torch.linalg.vector_norm(theirs), name, loose=True)
        ours.square().sum().backward()
        theirs.square().sum().backward()
        same(ours.grad, theirs.grad, f"gradient of {name}", loose=True)


def infinite_norm(bench: Bench) -> None:
    (model, _), (stock, _) = bench.stepped("SGD", 1)
    ours, theirs = (
        torch.nn.utils.get_total_norm([p.grad for p in m.parameters() if p.grad is not None], float("inf"))
        for m in (model, stock)
    )
    same(ours, theirs, "norm")


CELLS: dict[str, Callable[[Bench], None]] = {
    "values": values,
    "gradients": gradients,
    **{name: _steps(name) for name in MADE},
    "clip": _clipped(2.0, False),
    "clip foreach": _clipped(2.0, True),
    "clip inf": _clipped(float("inf"), False),
    "clip 3": _clipped(3.0, False),
    "load_state_dict": loads,
    "load stock": loads_stock,
    "get sharded": _gets(),
    "get sharded cpu": _gets(cpu_offload=True),
    "get full": _gets(full_state_dict=True),
    "get full cpu": _gets(full_state_dict=True, cpu_offload=True),
    "set model": _sets("model", False, False),
    "set model full": _sets("model", True, False),
    "set model broadcast": _sets("model", True, True),
    "set optimizer": _sets("optimizer", False, False),
    "set optimizer full": _sets("optimizer", True, False),
    "set optimizer broadcast": _sets("optimizer", True, True),
    "copy": copies,
    "pickle": pickles,
    "cast": casts,
    "move": moves,
    "loosely": loosely,
    "sums": sums,
    "infinite norm": infinite_norm,
}


@contextlib.contextmanager
def _caught(found: dict[str, str], cell: str) -> Iterator[None]:
    try:
        yield
        found[cell] = ""
    except tpplan.TpplanError as error:
        found[cell] = f"refused: {str(error).splitlines()[0]}"
    except AssertionError as error:
        found[cell] = f"WRONG {str(error)[:200]}"
    except (Exception, CheckpointException) as error:  # the latter is none of the former
        found[cell] = f"{type(error).__name__}: {str(error)[:300]}"


def run_cells(member: Member, name: str, shape: tuple[int, ...], cells: list[str], folder: str) -> dict[str, str]:
    """What came of each cell on this rank: nothing, a refusal, or what is wrong."""
    bench = Bench(member, name, shape, Path(folder))
    found: dict[str, str] = {}
    for cell in cells:
        with _caught(found, cell):
            {**CELLS, "save": saves, "read": reads}[cell](bench)
        outcome: list[Any] = [None] * member.size
        torch.distributed.all_gather_object(outcome, bool(found[cell]))
        assert all(held == outcome[0] for held in outcome), f"{name}, {cell}: {found[cell]!r} on one rank, not on all"
    return found
