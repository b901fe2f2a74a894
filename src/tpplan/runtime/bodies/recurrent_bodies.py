"""Recurrent: bodies of recurrent layers of whose hidden state each rank computes its features.

in:  a `Recurrence`, and how a hidden state is gathered
out: a body that stands in for the module's own

    LSTM:  i, f, g, o = W_ih x + b_ih + W_hh h + b_hh;  c = s(f) c + s(i) tanh(g);  h = s(o) tanh(c)
    GRU:   r, z, n of W_ih x + b_ih, and of W_hh h + b_hh;  h = (1 - s(z)) tanh(n_x + s(r) n_h) + s(z) h
    RNN:   h = tanh(W_ih x + b_ih + W_hh h + b_hh), or relu

s is the sigmoid. Sources: Hochreiter & Schmidhuber 1997, Cho et al. 2014, Elman 1990, as torch has them. A rank has its
rows of each gate. The products with the input are one for all steps, also in the next layer, which reads what was
gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from tpplan.compat.dynamo import not_compiled
from tpplan.compat.modes import without_dispatch_modes, without_function_modes
from tpplan.compiler.bind.recurrent_layers import made_anew
from tpplan.compiler.ir.layout import Pack
from tpplan.compiler.ir.replaced_bodies import Recurrence
from tpplan.compiler.trace.signatures import argument_names
from tpplan.runtime.bodies.kernel_bodies import Stock
from tpplan.runtime.modules.writes import stock_class
from tpplan.runtime.ranks.communicator import Communicator
from tpplan.runtime.ranks.reshard import Move


class RecurrentBody:
    """The body of a recurrent layer, or of a cell."""

    def __init__(self, recurrence: Recurrence, module: nn.Module, axis: Communicator, gather: Move | None) -> None:
        """Stand in for a body.

        Args:
            recurrence: what it computes.
            module: the layer; its parameters are local while the body runs.
            axis: the ranks.
            gather: a hidden state, (batch, this rank's features), to all features; a cell needs none.
        """
        self._recurrence, self._module, self._gather = recurrence, module, gather
        self._names = argument_names(stock_class(module).forward)
        self._inputs = cast(int, module.input_size)
        self._start, self._count = Pack(recurrence.features).part(axis.size, axis.rank)

    def __call__(self, stock: Stock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the stock forward returns, of this rank's features."""
        return cast("Any", self._run)(args, kwargs)

    @not_compiled  # as torch.compile leaves recurrent layers of torch out of its graphs
    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given: dict[str, Any] = dict(zip(self._names, args, strict=False)) | kwargs
        x, hx = given["input"], given.get("hx")
        h, c = hx if self._recurrence.mode == "LSTM" and hx is not None else (hx, None)
        made = self._cell(x, h, c) if self._recurrence.cell else self._layers(x, h, c)
        device = x.device.type
        if device == "meta" or not torch.is_autocast_enabled(device):
            return made
        first = h.dtype if h is not None else None
        dtypes = _stock_dtypes(self._recurrence, device, x.dtype, first, torch.get_autocast_dtype(device))
        return _cast(made, iter(dtypes))

    def _cell(self, x: Tensor, h: Tensor | None, c: Tensor | None) -> Any:
        batch = x.shape[:-1]
        h, c = self._first(x, batch, h, c)
        _expect("input", x, (*batch, self._inputs))
        w_ih, w_hh, b_ih, b_hh = self._parameters("")
        made, c = self._step(functional.linear(x, w_ih, b_ih), functional.linear(h, w_hh, b_hh), self._own(h), c)
        return (made, c) if self._recurrence.mode == "LSTM" else made

    def _layers(self, x: Tensor, h: Tensor | None, c: Tensor | None) -> Any:
        recurrence, batched = self._recurrence, x.dim() == 3
        if x.dim() not in (2, 3):
            raise ValueError(f"{recurrence.mode}: Expected input to be 2D or 3D, got {x.dim()}D instead")
        _expect("input", x, (*x.shape[:-1], self._inputs))
        if batched and recurrence.batch_first:
            x = x.transpose(0, 1)
        number = recurrence.layers * recurrence.directions
        h, c = self._first(x, (number, x.shape[1]) if batched else (number,), h, c)
        if not batched:
            x, h, c = x.unsqueeze(1), h.unsqueeze(1), c.unsqueeze(1)
        states: list[tuple[Tensor, Tensor]] = []
        for layer in range(recurrence.layers):
            last = layer + 1 == recurrence.layers
            made: list[Tensor] = []
            for place in range(layer * recurrence.directions, (layer + 1) * recurrence.directions):
                output, state = self._direction(place, x, h[place], c[place], whole=not last)
                made.append(output)
                states.append(state)
            x = made[0] if len(made) == 1 else torch.cat(made, -1)
            if recurrence.dropout and self._module.training and not last:
                x = functional.dropout(x, recurrence.dropout)  # of all features, so that ranks draw the same
        h, c = (torch.stack(held) for held in zip(*states, strict=True))
        if not batched:
            x, h, c = x.squeeze(1), h.squeeze(1), c.squeeze(1)
        elif recurrence.batch_first:
            x = x.transpose(0, 1)
        return x, (h, c) if recurrence.mode == "LSTM" else h

    def _direction(
        self, place: int, x: Tensor, h: Tensor, c: Tensor, whole: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """All steps of a layer's direction: its output, of all features if it is to be `whole`, and its last state."""
        recurrence, gather = self._recurrence, self._gather
        assert gather is not None
        w_ih, w_hh, b_ih, b_hh = self._parameters(recurrence.suffixes()[place])
        products, own = functional.linear(x, w_ih, b_ih).unbind(0), self._own(h)
        made: list[Tensor] = []
        backwards = place % recurrence.directions == 1
        for number, product in enumerate(reversed(products) if backwards else products):
            own, c = self._step(product, functional.linear(h, w_hh, b_hh), own, c)
            if whole or number + 1 < len(products):
                h = gather(own)
            made.append(h if whole else own)
        return torch.stack(made[::-1] if backwards else made), (own, c)

    def _step(self, from_input: Tensor, from_state: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """The next hidden state and cell state, of this rank's features."""
        mode = self._recurrence.mode
        if mode == "LSTM":
            i, f, g, o = (from_input + from_state).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            return o.sigmoid() * c.tanh(), c
        if mode == "GRU":
            (rx, zx, nx), (rh, zh, nh) = from_input.chunk(3, -1), from_state.chunk(3, -1)
            n = (nx + (rx + rh).sigmoid() * nh).tanh()
            return (h - n) * (zx + zh).sigmoid() + n, c
        made = from_input + from_state
        return made.tanh() if mode == "RNN_TANH" else made.relu(), c

    def _first(self, x: Tensor, sizes: tuple[int, ...], h: Tensor | None, c: Tensor | None) -> tuple[Tensor, Tensor]:
        """The first states: the hidden one of all features, the cell's of this rank's."""
        whole = (*sizes, self._recurrence.features)
        h = x.new_zeros(whole) if h is None else h
        if h.shape[-1] != whole[-1] and self._gather is not None:
            _expect("hidden", h, (*sizes, self._count))
            h = self._gather(h.reshape(-1, self._count)).view(whole)
        _expect("hidden", h, whole)
        if c is None:
            return h, x.new_zeros((*sizes, self._count))
        c = self._own(c) if c.shape[-1] == self._recurrence.features else c
        _expect("cell", c, (*sizes, self._count))
        return h, c

    def _own(self, state: Tensor) -> Tensor:
        return state.narrow(-1, self._start, self._count)

    def _parameters(self, suffix: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        w_ih, w_hh, *biases = (getattr(self._module, name) for name in self._recurrence.parameters(suffix))
        b_ih, b_hh = biases or (None, None)
        return w_ih, w_hh, b_ih, b_hh


@functools.lru_cache(maxsize=64)
def _stock_dtypes(
    recurrence: Recurrence, device: str, dtype: torch.dtype, first: torch.dtype | None, autocast: torch.dtype
) -> tuple[torch.dtype, ...]:
    """The dtypes of the stock layer's results under autocast, by asking one of a single feature."""
    stock = made_anew(replace(recurrence, features=1, layers=1, dropout=0.0), 1).to_empty(device=device)
    steps = () if recurrence.cell else (1,)
    number = () if recurrence.cell else (recurrence.directions,)
    given: list[Any] = [torch.zeros(*steps, 1, 1, dtype=dtype, device=device)]
    if first is not None:
        state = torch.zeros(*number, 1, 1, dtype=first, device=device)
        given.append((state, state) if recurrence.mode == "LSTM" else state)
    with torch.no_grad(), without_function_modes(), without_dispatch_modes():
        made = stock(*given)
    return tuple(tensor.dtype for tensor in _flat(made))


def _flat(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else [tensor for held in made for tensor in _flat(held)]


def _cast(made: Any, dtypes: Iterator[torch.dtype]) -> Any:
    return made.to(next(dtypes)) if isinstance(made, Tensor) else tuple([_cast(held, dtypes) for held in made])


def _expect(what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise as torch does; broadcasting would hide another shape."""
    if tuple(tensor.shape) != shape:
        raise RuntimeError(f"Expected {what} size {shape}, got {[*tensor.shape]}")


__all__ = ["RecurrentBody"]
