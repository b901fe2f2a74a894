"""Folders whose weights are quantised: what their config says, and their checkpoint as one of plain numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import nn

from tpplan.checkpoint.files import problem
from tpplan.checkpoint.formats import FORMATS, dequantised
from tpplan.checkpoint.meter import Meter
from tpplan.checkpoint.stored import Checkpoint
from tpplan.hf.configs import CONFIG
from tpplan.hf.torchao import put_weights

_BY_TRANSFORMERS = (
    "load it into the stock model by transformers, call that model's `dequantize()`, and write it by "
    "`tpplan.save_weights(model, folder)`"
)
_WAYS_OUT: Mapping[str, str] = {"bitsandbytes": _BY_TRANSFORMERS, "higgs": _BY_TRANSFORMERS}
_KEPT = "torchao"
"""What quantises weights into tensors of classes of their own, which compute by themselves."""
_OTHERS = "load the folder that it was quantised from, or dequantise it once by the library that has written it"


def as_plain(checkpoint: Checkpoint, dequantize: bool, meter: Meter) -> Checkpoint:
    """A checkpoint as one of plain numbers, if a config beside it says that it is quantised.

    Args:
        checkpoint: the checkpoint.
        dequantize: whether the user has asked for it.
        meter: counts what is read of the checkpoint.

    Raises:
        CheckpointError: TP121; it is quantised, and not to be dequantised, or can't be.
    """
    folder = checkpoint.path.parent
    said = _quantisation(folder / CONFIG)
    method = str(said.get("quant_method", "unknown"))
    if not said or (method == _KEPT and not dequantize):
        return checkpoint
    what = f"the checkpoint in `{folder}` is quantised ({method})"
    known = FORMATS.get(method)
    if method == _KEPT:
        raise problem(f"{what}, whose weights tpplan keeps as they are", "leave out `dequantize=True`")
    if known is None:
        methods = ", ".join(sorted([*FORMATS, _KEPT]))
        raise problem(f"{what}, which tpplan doesn't read", _WAYS_OUT.get(method, _OTHERS), f"it reads {methods}")
    refusal = known.refusal(said)
    if refusal is not None:
        raise problem(f"{what}, {refusal}, which tpplan doesn't read", _OTHERS)
    if not dequantize:
        raise problem(
            f"{what}; tpplan computes with floating-point numbers",
            "dequantise it while it is loaded: `dequantize=True`; each rank reads the codes and scales of its part",
        )
    return replace(checkpoint, tensors=dequantised(checkpoint.tensors, said, meter))


def keep_quantised(model: nn.Module, checkpoint: Checkpoint) -> str:
    """Give a stock model on `meta` the quantised weights of a folder that `as_plain` leaves as it is, if it has some.

    Returns:
        What the files say of them, by which ranks agree.

    Raises:
        CheckpointError: TP121, if they aren't the model's.
    """
    said = _quantisation(checkpoint.path.parent / CONFIG)
    return put_weights(model, checkpoint, said) if said.get("quant_method") == _KEPT else ""


def _quantisation(file: Path) -> Mapping[str, Any]:
    """What a config, or that of a part of the model, says of quantisation; nothing, if there is no config."""
    try:
        fields: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    parts: list[Any] = [fields, *cast("dict[str, Any]", fields).values()] if isinstance(fields, dict) else []
    for held in parts:
        said: Any = cast("dict[str, Any]", held).get("quantization_config") if isinstance(held, dict) else None
        if said:
            return cast("dict[str, Any]", said) if isinstance(said, dict) else {"quant_method": said}
    return {}


__all__ = ["as_plain", "keep_quantised"]
