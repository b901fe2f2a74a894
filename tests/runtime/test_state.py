"""What steers a forward may sit anywhere: a change is another call, whose proof is kept beside that of the first."""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.compiler import toys
from tests.compiler.toys import HIDDEN, MLP, Mlp
from tests.runtime.simulated import on_ranks, plan_of, worst
from tpplan.calls.guard import CallGuard

TOLERANCE = 1e-12
EXAMPLE = ((torch.zeros(3, 12, HIDDEN, dtype=torch.float64),), {})
toys.STEEP = False  # pyright: ignore
OWN = {"on": False}
NUMBER = 1


def x() -> Tensor:
    generator = torch.Generator().manual_seed(1)  # ranks are threads
    return torch.randn(3, 12, HIDDEN, dtype=torch.float64, generator=generator)


class Settings:
    """A class that is used as settings, and an object that takes a flag from it."""

    on = False


class Slotted:
    __slots__ = ("__on",)

    def __init__(self) -> None:
        self.__on = False

    def put(self, on: bool) -> None:
        self.__on = on

    def __bool__(self) -> bool:
        return self.__on


class Level(Enum):
    """A member that can change inside."""

    LOW = [False]  # noqa: RUF012


class Grows(dict[str, bool]):
    """A dict with an attribute."""

    on = False


def closed() -> list[Callable[..., Any]]:
    on = False

    def get() -> bool:
        return on

    def put(value: bool) -> None:
        nonlocal on
        on = value

    return [get, put]


def helper() -> bool:
    return OWN["on"]


def nested() -> dict[str, Any]:
    return {"a": {"b": {"c": {"d": {"e": {"f": {"on": False}}}}}}}


def read_default(on: list[bool] = [False]) -> bool:  # noqa: B006
    return on[0]


def looped() -> list[Any]:
    made: list[Any] = [False]
    made.append(made)
    return made


class Flagged(Mlp):
    """A forward whose path `held` decides on, as `flag` reads it."""

    def __init__(self, held: Any = None, flag: Callable[[Any], Any] = bool) -> None:
        super().__init__()
        self.held, self.flag = held, flag

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        h = self.up(x)
        return self.down(h.softmax(-1) if self.flag(self.held if given is None else given) else h)


PROXIED = Grows(on=False)
Put = Callable[[Any, bool], Any]
HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Put]] = {
    "array": (lambda: np.zeros(3), lambda h: h[1] > 0, lambda h, on: h.__setitem__(1, on)),
    "large array": (lambda: np.zeros(9999), lambda h: h[77] > 0, lambda h, on: h.__setitem__(77, on)),
    "array of objects": (lambda: np.array([0, {}], object), lambda h: h[1].get(0), lambda h, on: h[1].update({0: on})),
    "bytearray": (lambda: bytearray(3), lambda h: h[1] > 0, lambda h, on: h.__setitem__(1, on)),
    "deque": (lambda: deque([False]), lambda h: h[0], lambda h, on: (h.clear(), h.append(on))),
    "deep": (nested, lambda h: h["a"]["b"]["c"]["d"]["e"]["f"]["on"],
             lambda h, on: h["a"]["b"]["c"]["d"]["e"]["f"].update(on=on)),
    "long": (lambda: dict.fromkeys(range(1000), False), lambda h: h[777], lambda h, on: h.update({777: on})),
    "slots": (Slotted, bool, lambda h, on: h.put(on)),
    "slots in a tuple": (lambda: (Slotted(),), lambda h: bool(h[0]), lambda h, on: h[0].put(on)),
    "set": (lambda: {1}, lambda h: 2 in h, lambda h, on: h.add(2) if on else h.discard(2)),
    "namespace": (lambda: SimpleNamespace(on=False), lambda h: h.on, lambda h, on: setattr(h, "on", on)),
    "partial": (lambda: functools.partial(dict, on=False), lambda h: h()["on"],
                lambda h, on: h.keywords.update(on=on)),
    "bound method": (lambda: SimpleNamespace(on=False).__getattribute__, lambda h: h("on"),
                     lambda h, on: setattr(h.__self__, "on", on)),
    "method of a list": (lambda: [False].__getitem__, lambda h: h(0), lambda h, on: h.__self__.__setitem__(0, on)),
    "attribute of a dict": (Grows, lambda h: h.on, lambda h, on: setattr(h, "on", on)),
    "class": (lambda: Settings, lambda h: h.on, lambda h, on: setattr(Settings, "on", on)),
    "class of an object": (Settings, lambda h: h.on, lambda h, on: setattr(Settings, "on", on)),
    "closure": (closed, lambda h: h[0](), lambda h, on: h[1](on)),
    "default": (lambda: read_default, lambda h: h(), lambda h, on: read_default.__defaults__[0].__setitem__(0, on)),  # pyright: ignore
    "global": (lambda: helper, lambda h: h(), lambda h, on: OWN.update(on=on)),
    "enum": (lambda: Level.LOW, lambda h: h.value[0], lambda h, on: Level.LOW.value.__setitem__(0, on)),
    "proxy": (lambda: weakref.proxy(PROXIED), lambda h: h["on"], lambda h, on: PROXIED.update(on=on)),
    "cycle": (looped, lambda h: h[1][0], lambda h, on: h.__setitem__(0, on)),
}  # fmt: skip
SHARED = ("class", "class of an object", "default", "global", "enum", "proxy")
"""What a copy of a model has in common with the model."""


def stock(kind: Callable[..., nn.Module], *arguments: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(*arguments).double()


def differing(
    model: nn.Module, put: Callable[[nn.Module, bool], Any], call: Callable[[nn.Module], Tensor], *given: Any
) -> tuple[list[float], int]:
    """The errors of calls in between which a flag is set and reset, on both ranks; and how often a call was proved."""
    toggled = (False, True, False, True)
    whole, expected, proved = copy.deepcopy(model), list[Tensor](), list[int]()
    for on in toggled:
        put(whole, on)
        expected.append(call(whole).detach())
    put(whole, False)
    example = ((*EXAMPLE[0], *given), {})
    together = threading.Barrier(2)

    def work(own: nn.Module, guard: CallGuard) -> list[float]:
        prove = guard._prove
        guard._prove = lambda call: (proved.append(1), prove(call))[1]  # pyright: ignore
        found: list[float] = []
        for on, whole in zip(toggled, expected, strict=True):
            together.wait()
            put(own, on)
            together.wait()
            found.append(float((call(own) - whole).abs().max()))
        return found

    try:
        return [error for found in on_ranks(model, MLP, 2, example, work) for error in found], len(proved) // 2
    finally:
        put(whole, False)


@pytest.mark.parametrize("name", HELD)
@pytest.mark.one_in(8)
def test_what_steers_may_sit_anywhere_in_an_attribute(name: str) -> None:
    make, flag, put = HELD[name]
    model = stock(Flagged, make(), flag)
    errors, proved = differing(model, lambda own, on: put(own.held, on), lambda own: own(x()))
    assert max(errors) < TOLERANCE and proved <= 2, (errors, proved)


@pytest.mark.parametrize("name", HELD)
@pytest.mark.one_in(8)
def test_what_steers_may_sit_anywhere_in_an_argument(name: str) -> None:
    make, flag, put = HELD[name]
    given = {threading.get_ident(): make()}  # each rank is a thread

    def own_of(model: nn.Module) -> Any:
        return given.setdefault(threading.get_ident(), make())

    model = stock(Flagged, None, flag)
    errors, proved = differing(model, lambda own, on: put(own_of(own), on), lambda own: own(x(), own_of(own)), make())
    assert max(errors) < TOLERANCE and proved <= 2, (errors, proved)


@pytest.mark.parametrize("name", HELD)
@pytest.mark.one_in(8)
def test_an_argument_that_has_changed_is_another_call_without_gradients_too(name: str) -> None:
    make, flag, put = HELD[name]
    given = {threading.get_ident(): make()}

    def own() -> Any:
        return given.setdefault(threading.get_ident(), make())

    @torch.no_grad()
    def twice(model: nn.Module) -> Tensor:
        model(x(), own())
        return model(x(), own())

    errors, proved = differing(stock(Flagged, None, flag), lambda _, on: put(own(), on), twice, make())
    assert max(errors) < TOLERANCE and proved <= 2, (errors, proved)


class ByParameter(Mlp):
    """What was set on a parameter decides."""

    def forward(self, x: Tensor) -> Tensor:
        h, weight = self.up(x), self.up.weight
        return self.down(h.softmax(-1) if getattr(weight, "on", False) or getattr(weight, "_on", False) else h)


class ByObject(Mlp):
    """An object decides that was set on a parameter, on a buffer, on a tensor in an attribute or on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.zeros(3))
        self.tensor = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        every = (self.up.weight, self.number, self.tensor, x)
        return self.down(h.softmax(-1) if any(getattr(held, "settings", OWN)["on"] for held in every) else h)


class ByBuffer(Mlp):
    """A number without dims decides, which a capture has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("on", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h.softmax(-1) if self.on else h)


class ByClass(Mlp):
    """An attribute of the module's own class decides."""

    on = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h.softmax(-1) if type(self).on else h)


class ByGlobal(Mlp):
    """A global decides that the forward reads."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h.softmax(-1) if NUMBER == 2 or OWN["on"] else h)


class ByModule(Mlp):
    """A flag of another module of Python, and one of a class that the forward names."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h.softmax(-1) if toys.STEEP or Settings.on else h)  # pyright: ignore


class ByProperty(Mlp):
    """A property, which reads an attribute that isn't there at first."""

    @property
    def on(self) -> bool:
        return getattr(self.up, "steep", False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h.softmax(-1) if self.on else h)


def with_hook() -> Mlp:
    """A forward hook that looks at what it closes over."""
    model, on = Mlp(), {"on": False}
    model.up.register_forward_hook(lambda _, given, h: h.softmax(-1) if on["on"] else h)
    return model


def set_in_hook(model: Any, on: bool) -> None:
    (hook,) = model.up._forward_hooks.values()
    hook.__closure__[0].cell_contents.update(on=on)


def set_number(on: bool) -> None:
    global NUMBER
    NUMBER = 2 if on else 1


WAYS: dict[str, tuple[Callable[[], nn.Module], Put]] = {
    "hook": (with_hook, set_in_hook),
    "another module": (ByModule, lambda own, on: setattr(toys, "STEEP", on)),
    "a class that is named": (ByModule, lambda own, on: setattr(Settings, "on", on)),
    "parameter": (ByParameter, lambda own, on: setattr(own.up.weight, "on", on)),
    "a parameter's private attribute": (ByParameter, lambda own, on: setattr(own.up.weight, "_on", on)),
    "buffer": (ByBuffer, lambda own, on: own.on.fill_(on)),
    "own class": (ByClass, lambda own, on: setattr(ByClass, "on", on)),
    "global": (ByGlobal, lambda own, on: set_number(on)),
    "what a global holds": (ByGlobal, lambda own, on: OWN.update(on=on)),
    "property": (ByProperty, lambda own, on: setattr(own.up, "steep", on)),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.one_in(5)
def test_what_a_model_is_made_of_may_steer(name: str) -> None:
    kind, put = WAYS[name]
    errors, proved = differing(stock(kind), put, lambda own: own(x()))
    assert max(errors) < TOLERANCE and proved <= 2, (errors, proved)


def test_what_is_replaced_by_its_equal_is_still_looked_at() -> None:
    model = stock(Flagged, SimpleNamespace(more={"on": False}), lambda held: held.more["on"])
    replaced = lambda own: setattr(own.held, "more", dict(own.held.more))  # noqa: E731
    calls = [((x(),), {}), replaced, ((x(),), {}), lambda own: own.held.more.update(on=True), ((x(),), {})]
    assert max(worst(model, MLP, 2, EXAMPLE, calls)) < TOLERANCE


def test_what_no_body_reads_is_no_premise() -> None:
    """As what `generate` notes on a model."""

    def work(own: Any, guard: CallGuard) -> int:
        before = own(x())
        for number in range(3):
            own._previous_max_cache_length = number
            own.up.noted = [number]
            assert torch.equal(own(x()), before)
        return guard.state

    assert on_ranks(stock(Flagged), MLP, 2, EXAMPLE, work) == [0, 0]


@pytest.mark.slow
def test_generating_with_a_static_cache_forgets_no_proof() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=16
    )
    model, ids = stock(lambda: transformers.LlamaForCausalLM(config)).eval(), torch.arange(6)[None]
    rules = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}
    rules["model.layers.*.mlp.gate_proj"] = "colwise"

    def work(own: Any, guard: CallGuard) -> tuple[int, int]:
        with torch.no_grad():
            own(input_ids=ids, use_cache=False)
            own.generate(ids, do_sample=False, max_new_tokens=3, pad_token_id=0, cache_implementation="static")
            assert own._previous_max_cache_length > 0
            before = len(guard._proofs._covered)
            own(input_ids=ids, use_cache=False)
        return guard.state, len(guard._proofs._covered) - before

    assert on_ranks(model, rules, 2, ((), {"input_ids": ids, "use_cache": False}), work) == [(0, 0), (0, 0)]


class Counts(Mlp):
    """A forward that writes to what its module holds, beside a flag of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, Any] = {"calls": 0, "on": False}

    def forward(self, x: Tensor) -> Tensor:
        self.notes["calls"] += 1
        h = self.up(x)
        return self.down(h.softmax(-1) if self.notes["on"] else h)


def test_a_flag_beside_what_a_forward_counts_is_followed() -> None:
    errors, proved = differing(stock(Counts), lambda own, on: own.notes.update(on=on), lambda own: own(x()))  # pyright: ignore
    assert max(errors) < TOLERANCE and proved <= 3, (errors, proved)


def generated() -> Iterator[int]:
    yield from range(3)


@pytest.mark.parametrize("make", [generated, lambda: iter([1]), lambda: zip([1], [2], strict=False)])
def test_what_can_be_read_only_once_is_refused_by_name(make: Callable[[], Any]) -> None:
    with pytest.raises(tpplan.CompileError, match=r"which can be read only once|takes from a generator that it keeps"):
        on_ranks(stock(Flagged, [make()], lambda held: next(held[0], 0) == 5), MLP, 2, EXAMPLE, lambda *_: None)

    def work(own: Any, _: CallGuard) -> list[str]:
        found = [refusal(own, x(), [make()])]
        own.held = [make()]
        found.append(refusal(own, x()))
        own.held = None
        own.up.register_forward_hook(functools.partial(lambda hook, *_: None, make()))
        return [*found, refusal(own, x()), refusal(own, x())]

    for texts in on_ranks(stock(Flagged), MLP, 2, EXAMPLE, work):
        assert "TP117 unproved-call: an argument of this call is or holds a `" in texts[0]
        assert "TP130 changed-model: `held` is or holds a `" in texts[1]
        assert all("TP130 changed-model: `up._forward_hooks" in text for text in texts[2:]), "at each call"


def refusal(own: Any, *arguments: Any) -> str:
    with pytest.raises(tpplan.UnprovedCallError) as raised:
        own(*arguments)
    return str(raised.value)


class OfClass(Flagged):
    """What can be read only once stands in its class."""

    once: Any = iter([1])

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        return super().forward(x) if type(self).once is not None else x


def hooked() -> Mlp:
    model = Mlp()
    model.up.register_forward_hook(functools.partial(lambda hook, *_: None, iter([1])))
    return model


def with_settings(where: Callable[[Any], Tensor]) -> nn.Module:
    model = stock(ByObject)
    where(model).settings = {"on": True}  # pyright: ignore
    return model


UNSEEN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "class": (OfClass, r"TP129 .*OfClass\.once` is or holds a `list_iterator`"),
    "hook": (hooked, "TP129 .*`a hook of up` is or holds a `list_iterator`"),
    "parameter": (lambda: with_settings(lambda model: model.up.weight), "TP129 .*`up.weight` is or holds a tensor on"),
    "buffer": (lambda: with_settings(lambda model: model.number), "TP129 .*`number` is or holds a tensor on"),
    "tensor": (lambda: with_settings(lambda model: model.tensor), "TP129 .*`tensor` is or holds a tensor on"),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_cannot_be_seen_around_modules_is_refused_by_name(name: str) -> None:
    make, message = UNSEEN[name]
    with pytest.raises(tpplan.CompileError, match=message):
        tpplan.compile_plan(make().double() if name in ("class", "hook") else make(), plan_of(MLP), 2, EXAMPLE[0])


def test_an_object_on_a_tensor_is_refused_at_a_later_call() -> None:
    def work(own: Any, _: CallGuard) -> list[str]:
        given = x()
        given.settings = {"on": True}  # pyright: ignore
        found = [refusal(own, given)]
        own.number.settings = {"on": True}
        return [*found, refusal(own, x()), refusal(own, x())]

    for texts in on_ranks(stock(ByObject), MLP, 2, EXAMPLE, work):
        assert "TP117" in texts[0] and "`x` is or holds a tensor on which an object, `settings`, was set" in texts[0]
        assert all("TP130 changed-model: `number` is a tensor on which an object" in text for text in texts[1:])


class Refuses(Flagged):
    """The flagged path can't be proved."""

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        if self.held["deep"]["scale"] > 2:
            x = x * float(x.sum())
        return super().forward(x)


def test_a_refusal_names_the_place_and_both_values() -> None:
    def work(own: Any, _: CallGuard) -> str:
        own(x())
        own.held["deep"]["scale"] = 3
        with pytest.raises(tpplan.UnprovedCallError) as raised:
            own(x())
        own.held["deep"]["scale"] = 2
        own(x())
        return str(raised.value)

    model = stock(Refuses, {"deep": {"scale": 2}}, lambda held: False)
    for text in on_ranks(model, MLP, 2, EXAMPLE, work):
        assert "`held['deep']['scale']` was 2 in the proof and is 3 now" in text, text


@pytest.mark.slow
def test_a_cache_of_which_a_call_reads_a_part_only_may_come_under_another_name() -> None:
    """`past_key_values` for `cache`: what the decoder has of the encoder's keys isn't written to again."""
    transformers = pytest.importorskip("transformers")
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 1) | dict.fromkeys(
        ("encoder_attention_heads", "decoder_attention_heads"), 4
    )
    config = transformers.BartConfig(
        d_model=16, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=24, max_position_embeddings=32, **sizes
    )
    model = stock(lambda: transformers.BartForConditionalGeneration(config)).eval()
    ids = torch.arange(4, 16)[None]
    example = {"input_ids": ids, "decoder_input_ids": ids[:, :6]}

    def work(own: Any, _: Any = None) -> Tensor:
        with torch.no_grad():
            found = own(input_ids=ids, decoder_input_ids=ids[:, :3], use_cache=True)
            cache, shown = found.past_key_values, [found.logits]
            for number in (3, 4):
                step = {"input_ids": ids, "decoder_input_ids": ids[:, number : number + 1], "past_key_values": cache}
                shown.append(own(**step, use_cache=True).logits)
        return torch.cat(shown, 1)

    expected = work(copy.deepcopy(model))
    for found in on_ranks(model, "plans/bart.yaml", 2, ((), example), work):
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
