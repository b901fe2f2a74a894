"""The dtype that a transformers model is built in: of `--set`, of its config, or of the checkpoint beside it.

As transformers' `from_pretrained` has it, so that what is estimated is what will be loaded.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from tpplan.checkpoint.stored import read_checkpoint
from tpplan.cli.model_problem import problem
from tpplan.plan import PlanError
from tpplan.plan.wording import one_of

NAMES = ("float32", "bfloat16", "float16", "float64")
_FIELDS = ("dtype", "torch_dtype")
"""What configs call it; the second is the older name."""


def with_dtype(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """`fields` of a config with the dtype under its present name, as transformers spells it.

    Args:
        fields: what a config.json or `--set` says.
        where: which of them, for a message.

    Raises:
        PlanError: TP122, if there is no such dtype.
    """
    others = {key: value for key, value in fields.items() if key not in _FIELDS}
    held = next((fields[key] for key in _FIELDS if fields.get(key) not in (None, "auto")), None)
    if held is None:
        return others
    return others | {"dtype": held if isinstance(held, dict) else _name(held, where)}  # one for each part of a model


def stored_dtype(path: Path) -> str | None:
    """The dtype of the first floating-point tensor of the checkpoint in a folder; None if there is none to be read."""
    if not path.is_dir():
        return None
    try:
        tensors = read_checkpoint(path).tensors
    except PlanError:
        return None
    names = (str(stored.torch_dtype).removeprefix("torch.") for stored in tensors.values())
    return next((name for name in names if name in NAMES), None)


def _name(held: object, where: str) -> str:
    text = str(held).removeprefix("torch.")
    dtype = getattr(torch, text, None)
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else ""  # `half` is float16
    if name in NAMES:
        return name
    close = get_close_matches(text, NAMES, 1, 0.5)
    way_out = f"did you mean `{close[0]}`?" if close else f"use {one_of(NAMES)}"
    message = f"{where}: {'no model can be built in' if name else 'there is no dtype'} `{text}`"
    raise problem(message, way_out)


__all__ = ["stored_dtype", "with_dtype"]
