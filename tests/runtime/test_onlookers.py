"""A user's tools around calls of a sharded model: they see each forward once, and what they change is no secret."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional
from torch.nn.modules import module as of_all
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import tpplan
from tests.models.tiny import tiny_model
from tests.runtime.test_ambience import Functions, Operations
from tests.runtime.test_recompute import whole
from tests.runtime.world import Member, world

pytestmark = pytest.mark.processes

PLAN = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}
TOLERANCE = 1e-12
EVERYWHERE: Any = of_all
Shown = list[Tensor]


class Body(nn.Module):
    """A column and a row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Branching(Body):
    """By the numbers, features are needed whole."""

    def forward(self, x: Tensor) -> Tensor:
        h = functional.gelu(self.up(x))
        if x.amax() > 100:
            h = h.softmax(-1)
        return self.down(h)


def stock(kind: type[nn.Module] = Body) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def x(batch: int = 2) -> Tensor:
    return torch.randn(batch, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(batch))


def step(model: nn.Module, given: Tensor, **keywords: Any) -> dict[str, Tensor]:
    """The result of a call, and all gradients."""
    for parameter in model.parameters():
        parameter.grad = None
    made = model(given, **keywords)
    made = made if isinstance(made, Tensor) else made.logits
    made.square().mean().backward()
    return {"": made.detach()} | {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - held).abs().max() / held.abs().max()) for name, held in theirs.items())


def parallel(model: nn.Module, member: Member, plan: Any = PLAN, inputs: Any = None) -> nn.Module:
    return tpplan.parallelize(copy.deepcopy(model), plan, member.mesh(), x() if plan is PLAN else inputs)


# -- counters ---------------------------------------------------------------------------------------------------------
class Norms(TorchFunctionMode):
    """Computes something of its own of each result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if type(made) is Tensor and made.is_floating_point():
            made.detach().norm().item()
            self.seen += 1
        return made


class Total(TorchDispatchMode):
    """Adds results up, in place, in a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.seen = torch.zeros((), dtype=torch.float64), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if type(made) is Tensor and made.is_floating_point():
            self.total.add_(made.sum())
            self.seen += 1
        return made


class OwnFlops(FlopCounterMode):
    """A user's, whose work is torch's."""

    def __init__(self) -> None:
        super().__init__(display=False)

    seen = property(FlopCounterMode.get_total_flops)


def count(member: Member, kind: Callable[[], Any], grad: bool) -> tuple[float, list[Any]]:
    """The worst error, and what counters have seen in calls of one kind and of two, and around `parallelize`."""
    model, errors, seen = stock(), list[float](), list[Any]()
    with kind() as mode:
        own = parallel(model, member)
    for batch in (2, 2, 2, 1):
        with kind() as mode, torch.inference_mode(not grad):
            if grad:
                ours, theirs = step(own, x(batch)), step
            else:
                ours, theirs = {"": own(x(batch))}, lambda model, given: {"": model(given)}
        seen.append(mode.seen)
        errors.append(error(ours, theirs(model, x(batch))))
    return max(errors), seen[:3]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", [Functions, Operations, Norms, Total, OwnFlops])
@pytest.mark.one_in(5)
def test_a_mode_that_only_looks_sees_each_call_alike(kind: Callable[[], Any], grad: bool) -> None:
    for worst, seen in world(2).run(count, kind, grad):
        assert worst < TOLERANCE
        assert seen[1] == seen[2]
        assert not grad or seen[0] == seen[1]


def communicate(member: Member, masked: bool, sequence: bool) -> list[tuple[float, int]]:
    model = tiny_model("llama")[0].double()
    ids = torch.arange(16).reshape(2, 8)
    plan = tpplan.suggest_plan(model, 2, sequence_parallel=sequence)
    keywords = {"attention_mask": torch.ones_like(ids), "labels": ids} if masked else {}
    expected, found = step(model, ids, **keywords), list[tuple[float, int]]()
    with CommDebugMode() as mode:
        own = parallel(model, member, plan)
    assert not mode.get_total_counts()
    for _ in range(2):
        with CommDebugMode() as mode:
            ours = step(own, ids, **keywords)
        found.append((error(ours, expected), mode.get_total_counts()))
    with Functions() as first, torch.no_grad():
        own(ids[:, :6], **{name: held[:, :6] for name, held in keywords.items()})
    with Functions() as second, torch.no_grad():
        own(ids[:, :6], **{name: held[:, :6] for name, held in keywords.items()})
    assert first.seen <= second.seen * 2
    return found


@pytest.mark.one_in(9)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
def test_collectives_of_a_first_call_are_counted_as_of_a_later_one(masked: bool, sequence: bool) -> None:
    for (first, counted), (later, again) in world(2).run(communicate, masked, sequence):
        assert max(first, later) < TOLERANCE
        assert counted == again > 0


def depart(member: Member) -> list[tuple[float, tuple[int, int], tuple[int, int]]]:
    """Errors of calls, of which some need another program, with what counters see of ours and of the stock model."""
    model, found = stock(Branching), list[tuple[float, tuple[int, int], tuple[int, int]]]()
    own = parallel(model, member)
    for given in (x(), x(), x() * 1000, x(), x() * 1000):
        (ours, mine), (theirs, its) = counted(own, given), counted(model, given)
        found.append((error(ours, theirs), mine, its))
    return found


def counted(model: nn.Module, given: Tensor) -> tuple[dict[str, Tensor], tuple[int, int]]:
    packed = [0]

    def pack(tensor: Tensor) -> Tensor:
        packed[0] += 1
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), FlopCounterMode(display=False) as flops:
        made = step(model, given)
    return made, (packed[0], flops.get_total_flops())


def test_a_call_that_needs_another_program_is_counted_once() -> None:
    for calls in world(2).run(depart):
        for worst, (packed, flops), (its_packed, its_flops) in calls:
            assert worst < TOLERANCE
            assert packed == its_packed
            assert 2 * flops == its_flops


class Writing(Body):
    """It writes to its argument."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1))


def write(member: Member) -> list[float]:
    model, found = stock(Writing), list[float]()
    own = parallel(model, member)
    for grad in (True, False):
        for _ in range(2):
            with torch.inference_mode(not grad):
                ours, theirs = x(), x()
                with Operations(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                    made = own(ours)
                found += [error({"": made, "x": ours}, {"": model(theirs), "x": theirs})]
    return found


def test_what_a_call_writes_to_is_written_to_once() -> None:
    assert max(max(errors) for errors in world(2).run(write)) < TOLERANCE


# -- what changes something -------------------------------------------------------------------------------------------
class Doubles(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * 2 if func is functional.gelu else made


class DoublesInPlace(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is functional.gelu:
            with torch.no_grad():
                made.mul_(2)
        return made


class LeavesOut(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is functional.gelu else func(*args, **(kwargs or {}))


class Coarse(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.gelu.default:
            return func(*args, **(kwargs or {}))
        return func(args[0].bfloat16(), *args[1:], **(kwargs or {})).double()


class WritesToResults(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.mul_(2) if func is torch.ops.aten.gelu.default else made


class WritesToOperands(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.gelu.default:
            args[0].mul_(2)
        return func(*args, **(kwargs or {}))


class CoarseProducts(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.bfloat16().to(made.dtype) if func is functional.linear else made


def call_alone_under(member: Member) -> list[str]:
    own, messages = parallel(stock(), member), list[str]()
    with Functions(), Operations():
        assert error({"": own.get_submodule("up")(x())}, {"": stock().get_submodule("up")(x())}) < TOLERANCE
    try:
        with CoarseProducts():
            own.get_submodule("up")(x())
    except tpplan.TpplanError as raised:
        messages.append(str(raised))
    return messages


def test_so_it_is_around_a_module_that_is_called_by_itself() -> None:
    for (message,) in world(2).run(call_alone_under):
        assert message.startswith("TP131 departed-call: `CoarseProducts`, a function mode around the call")


def call_under(member: Member, kind: Callable[[], Any], grad: bool) -> list[str]:
    model, messages = stock(), list[str]()
    own = parallel(model, member)
    for _ in range(2):
        try:
            with kind(), torch.inference_mode(not grad):
                own(x())
            messages.append("")
        except tpplan.TpplanError as raised:
            messages.append(str(raised))
    assert error(step(own, x()), step(model, x())) < TOLERANCE
    return messages


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", [Doubles, DoublesInPlace, LeavesOut, Coarse, WritesToResults, WritesToOperands])
@pytest.mark.one_in(5)
def test_a_mode_that_changes_something_is_refused_by_name(kind: type, grad: bool) -> None:
    for messages in world(2).run(call_under, kind, grad):
        for message in messages:
            assert message.startswith("TP131 departed-call: ")
            assert f"`{kind.__name__}`" in message
            assert "gelu" in message


# -- hooks of all modules ---------------------------------------------------------------------------------------------
@contextmanager
def registered(register: Callable[..., Any], hook: Callable[..., Any], **options: Any) -> Iterator[None]:
    handle = register(hook, **options)
    try:
        yield
    finally:
        handle.remove()


def look(member: Member) -> list[tuple[float, list[bool], list[bool]]]:
    """Errors of calls, with what hooks saw of ours and of the stock model: whether tensors have no numbers."""
    seen: list[bool] = []

    def before(module: nn.Module, arguments: Any) -> None:
        seen.append(arguments[0].is_meta)

    def after(module: nn.Module, arguments: Any, keywords: Any, result: Tensor) -> None:
        seen.append(result.is_meta)

    def remember(module: Any, arguments: Any, result: Tensor) -> None:
        module.calls = getattr(module, "calls", 0) + 1
        module.last = result.detach()
        seen.append(module.last.is_meta)

    def backward(module: nn.Module, inputs: Any, outputs: Any) -> None:
        seen.append(outputs[0].is_meta)

    def drained() -> list[bool]:
        held = [*seen]
        seen.clear()
        return held

    model, found = stock(Branching), list[tuple[float, list[bool], list[bool]]]()
    with ExitStack() as hooks:
        hooks.enter_context(registered(EVERYWHERE.register_module_forward_pre_hook, before))
        hooks.enter_context(registered(EVERYWHERE.register_module_forward_hook, after, with_kwargs=True))
        hooks.enter_context(registered(EVERYWHERE.register_module_forward_hook, remember))
        hooks.enter_context(registered(EVERYWHERE.register_module_forward_hook, lambda *_: seen.append(False)))
        hooks.enter_context(registered(EVERYWHERE.register_module_full_backward_hook, backward))
        own = parallel(model, member)
        assert not drained()
        for given in (x(), x(), x(1), x() * 1000):
            ours, mine = step(own, given), drained()
            found.append((error(ours, step(model, given)), mine, drained()))
        for _ in range(2):
            with torch.no_grad():
                ours, mine = {"": own(x())}, drained()
                found.append((error(ours, {"": model(x())}), mine, drained()))
    return found


def test_hooks_that_only_look_are_called_as_of_the_stock_model() -> None:
    for calls in world(2).run(look):
        for worst, ours, theirs in calls:
            assert worst < TOLERANCE
            assert len(ours) == len(theirs)
            assert not any(ours)


def softened(module: nn.Module, arguments: Any, result: Tensor) -> Any:
    return result.softmax(-1) if isinstance(module, nn.Linear) else None


def centred(module: nn.Module, arguments: Any) -> Any:
    return (arguments[0] - arguments[0].mean(-1, keepdim=True),) if isinstance(module, nn.Linear) else None


def doubled(module: nn.Module, arguments: Any, result: Tensor) -> None:
    if isinstance(module, nn.Linear):
        result.mul_(2)


def shrunk(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if held is None else held / (1 + held.norm()) for held in inputs)


CHANGING = {
    softened: "register_module_forward_hook",
    centred: "register_module_forward_pre_hook",
    doubled: "register_module_forward_hook",
    shrunk: "register_module_full_backward_hook",
}


def change(member: Member, hook: Callable[..., Any], late: bool, grad: bool) -> list[float]:
    model = stock()
    own = None
    if late:
        own = parallel(model, member)
        step(own, x())
    with registered(getattr(EVERYWHERE, CHANGING[hook]), hook):
        own = parallel(model, member) if own is None else own
        found: list[float] = []
        for batch in (2, 2, 1):
            with torch.inference_mode(not grad):
                if grad:
                    found.append(error(step(own, x(batch)), step(model, x(batch))))
                else:
                    found.append(error({"": own(x(batch))}, {"": model(x(batch))}))
    return [*found, error(step(own, x()), step(model, x()))]


@pytest.mark.one_in(9)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("hook", [softened, centred, shrunk])
def test_a_hook_that_changes_something_is_followed(hook: Callable[..., Any], late: bool, grad: bool) -> None:
    for errors in world(2).run(change, hook, late, grad):
        assert max(errors) < TOLERANCE


@pytest.mark.parametrize("grad", [True, False])
def test_a_hook_that_writes_to_what_it_is_shown_is_followed(grad: bool) -> None:
    for errors in world(2).run(change, doubled, False, grad):
        assert max(errors) < TOLERANCE


def begin_late(member: Member) -> list[str]:
    """A hook that only looked in the first calls."""
    model, messages, changes = stock(), list[str](), [False]

    def hook(module: nn.Module, arguments: Any, result: Tensor) -> None:
        if changes[0] and isinstance(module, nn.Linear):
            result.mul_(2)

    with registered(EVERYWHERE.register_module_forward_hook, hook):
        own = parallel(model, member)
        step(own, x())
        changes[0] = True
        try:
            own(x())
        except tpplan.TpplanError as raised:
            messages.append(str(raised))
        assert error(step(own, x()), step(model, x())) < TOLERANCE
    return messages


def test_a_hook_that_begins_to_change_something_is_named_and_followed_from_then_on() -> None:
    for (message,) in world(2).run(begin_late):
        assert message.startswith("TP131 departed-call: `begin_late.hook`, a hook of all modules, changes what it is")


def look_on_one(member: Member) -> list[float]:
    """Calls on two ranks, of which one has tools."""
    model, seen = stock(), list[object]()
    own = parallel(model, member)

    def note(module: nn.Module, arguments: Any, result: Tensor) -> None:
        seen.append(module)

    found = [error(step(own, x()), step(model, x()))]
    with ExitStack() as tools:
        if member.rank == 0:
            tools.enter_context(registered(EVERYWHERE.register_module_forward_hook, note))
            tools.enter_context(Functions())
        found += [error(step(own, x(batch)), step(model, x(batch))) for batch in (2, 1)]
    assert bool(seen) == (member.rank == 0)
    return found


def test_one_rank_alone_may_look() -> None:
    assert max(max(errors) for errors in world(2).run(look_on_one)) < TOLERANCE


# -- states of autograd -----------------------------------------------------------------------------------------------
def build_under(member: Member, context: Callable[[], Any]) -> list[float]:
    model = stock()
    with context():
        own = parallel(model, member)
        found = [error({"": own(x())}, {"": model(x())})]
    found.append(error(step(own, x()), step(model, x())))
    if context is save_on_cpu:
        own = parallel(model, member)
        with context():
            found.append(error(step(own, x()), step(model, x())))
    return [*found, error(step(own, x(1)), step(model, x(1)))]


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, save_on_cpu])
def test_a_model_that_is_made_in_another_state_can_be_trained(context: Callable[[], Any]) -> None:
    assert max(max(errors) for errors in world(2).run(build_under, context)) < TOLERANCE
