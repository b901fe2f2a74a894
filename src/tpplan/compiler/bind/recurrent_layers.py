"""Recurrent: whether a module is one of torch's recurrent layers or cells, and what keeps it from being split.

in:  a module
out: its `Recurrence`; the reason why its hidden state can't be split, with the way out

    nn.LSTM(8, 16, num_layers=2)   ->   LSTM of 16 features, four gates, two layers
    nn.LSTM(8, 16, proj_size=4)    ->   "projects its state, …"
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from tpplan.compiler.ir.replaced_bodies import Recurrence

_LAYERS: dict[str, type[nn.RNNBase]] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN_TANH": nn.RNN, "RNN_RELU": nn.RNN}
_CELLS: dict[str, type[nn.RNNCellBase]] = {
    "LSTM": nn.LSTMCell, "GRU": nn.GRUCell, "RNN_TANH": nn.RNNCell, "RNN_RELU": nn.RNNCell
}  # fmt: skip


def is_recurrent(module: nn.Module) -> bool:
    """Whether it is one of torch's recurrent layers or cells, or derived from one."""
    return isinstance(module, (nn.RNNBase, nn.RNNCellBase))


def recurrence(module: nn.Module) -> Recurrence | None:
    """What recurrent layer a module is; None for any other."""
    if isinstance(module, nn.RNNBase):
        directions = 2 if module.bidirectional else 1
        return Recurrence(
            module.mode, module.hidden_size, module.bias, module.num_layers, directions, module.batch_first,
            float(module.dropout),
        )  # fmt: skip
    if not isinstance(module, nn.RNNCellBase):
        return None
    mode = next(mode for mode, kind in _CELLS.items() if isinstance(module, kind))
    if isinstance(module, nn.RNNCell):
        mode = f"RNN_{module.nonlinearity.upper()}"
    return Recurrence(mode, module.hidden_size, module.bias, cell=True)


def obstacle(module: nn.Module) -> str:
    """Why a recurrent layer's hidden state can't be split, as it could in torch's own; "" if nothing is in the way."""
    known = (*_LAYERS.values(), *_CELLS.values())
    if not any(isinstance(module, kind) and type(module).forward is kind.forward for kind in known):
        return "has a `forward` of its own, of which nothing is known"
    if isinstance(module, nn.RNNBase) and module.proj_size:
        return f"has `proj_size={module.proj_size}`: each step makes the state by one more product, over all features"
    return ""


def made_anew(recurrence: Recurrence, inputs: int) -> nn.Module:
    """Torch's own layer with these settings, without numbers."""
    features, device = recurrence.features, "meta"
    more = {"nonlinearity": recurrence.mode[4:].lower()} if recurrence.mode.startswith("RNN") else {}
    if recurrence.cell:
        cell = cast(Any, _CELLS[recurrence.mode])
        return cell(inputs, features, recurrence.bias, device=device, **more)
    layer = cast(Any, _LAYERS[recurrence.mode])
    return layer(
        inputs, features, recurrence.layers, bias=recurrence.bias, batch_first=recurrence.batch_first,
        dropout=recurrence.dropout if recurrence.layers > 1 else 0.0, bidirectional=recurrence.directions == 2,
        device=device, **more,
    )  # fmt: skip


__all__ = ["is_recurrent", "made_anew", "obstacle", "recurrence"]
