"""Build: the stock model that a config describes, on `meta`, in the dtype that transformers would give it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tpplan.hf.library import UnusableError, first_line, transformers_for

_HEADS = ("Seq2SeqLM", "SpeechSeq2Seq", "MaskedLM", "CausalLM")


def named_class(config: Any) -> Any:
    """The class that a config names as its architecture; None if it names none, or none that there is."""
    transformers = transformers_for(config.model_type)
    name = str((config.architectures or [""])[0])
    if not name:
        return None
    found = getattr(transformers, name, None)
    if found is None:  # a class that the user has registered
        registered = (maker._model_mapping.get(type(config), None) for maker in _auto_classes(transformers))
        found = next((kind for kind in registered if getattr(kind, "__name__", "") == name), None)
    return found if callable(getattr(found, "_from_config", None)) else None


def usual_class(config: Any) -> Any:
    """The class with a head that transformers' auto classes have for a config, else its base model."""
    transformers = transformers_for(config.model_type)
    makers = [*(getattr(transformers, f"AutoModelFor{head}") for head in _HEADS), transformers.AutoModel]
    return next((maker for maker in makers if type(config) in maker._model_mapping), makers[-1])


def build_stock(kind: Any, config: Any, dtype: torch.dtype | None = None) -> nn.Module:
    """A model on `meta`, without numbers, and not quantised, whatever the config says.

    Args:
        kind: its class, or an auto class.
        config: its config, of which what it says of quantisation is taken out.
        dtype: of its parameters; None for the config's.

    Raises:
        UnusableError: it can't be built.
    """
    make = getattr(kind, "_from_config", None) or kind.from_config
    every: list[Any] = [config, *vars(config).values()]
    for held in every:
        getattr(held, "__dict__", {}).pop("quantization_config", None)
    given = {} if dtype is None else {"dtype": dtype}
    try:
        with torch.device("meta"), _safe_on_meta():
            model: nn.Module = make(config, **given)
    except Exception as error:  # a config's values may be anything, and so is what a model makes of them
        raise UnusableError(
            f"`{getattr(kind, '__name__', kind)}` can't be built: {first_line(error)}", "check the config's values"
        ) from None
    _keep_wide(model, dtype or config.dtype)
    return model


def _keep_wide(model: Any, dtype: Any) -> None:
    """Give those parameters another dtype that transformers' `from_pretrained` keeps in float32."""
    planned: Any = getattr(model, "_get_dtype_plan", None)
    plan: dict[str, torch.dtype] = planned(dtype) if planned is not None and isinstance(dtype, torch.dtype) else {}
    patterns = [(re.compile(pattern.replace("*", ".*")), wide) for pattern, wide in plan.items()]
    for name, tensor in model.state_dict(keep_vars=True).items():
        wide = next((wide for pattern, wide in patterns if pattern.search(name)), None)
        if wide is not None and tensor.is_floating_point():
            tensor.data = tensor.data.to(wide)


@contextmanager
def _safe_on_meta() -> Generator[None]:
    """What transformers does around a model that it builds on `meta`."""
    initialization = importlib.import_module("transformers.initialization")
    around = getattr(initialization, "meta_device_safe_creation_ops", None)
    if around is None:
        yield
        return
    with around():
        yield


def _auto_classes(transformers: Any) -> list[Any]:
    names = [name for name in dir(transformers) if name.startswith("AutoModel")]
    found = [getattr(transformers, name, None) for name in names]
    return [kind for kind in found if getattr(kind, "_model_mapping", None) is not None]


__all__ = ["build_stock", "named_class", "usual_class"]
