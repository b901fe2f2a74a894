"""Loading the model that `--model` names, on the meta device."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from tpplan.cli.model_callable import from_callable
from tpplan.cli.model_dtype import keep_in_float32, stored_dtype, with_dtype
from tpplan.cli.model_problem import first_line, problem
from tpplan.inputs import BATCH, example_call
from tpplan.plan.wording import one_of

_COMMON_TYPES = ("llama", "qwen3", "gpt2", "bert")


def load_model(
    reference: str,
    overrides: Mapping[str, str],
    batch: int | None = None,
    sequence: int | None = None,
    *,
    float32: bool = False,
) -> tuple[nn.Module, Any]:
    """The model that `reference` names, without numbers, and example inputs (None to have them made up).

    A transformers model has the dtype that `from_pretrained` would load it in.

    Args:
        reference: a folder or file with a transformers config.json, `hf:MODEL_TYPE`, or `package.module:callable`; the
            callable takes no arguments and returns a model, or a model and its inputs.
        overrides: config fields to replace; values are read as JSON where that works.
        batch, sequence: sizes of the example inputs of transformers models.
        float32: whether to build transformers models in float32, whatever config and overrides say.

    Raises:
        PlanError: TP122, if there is no such model.
    """
    model, inputs = _build(reference, {key: _value(text) for key, text in overrides.items()}, float32)
    if inputs is None and (batch is not None or sequence is not None):
        _, inputs = example_call(model, 8, None, batch=batch or BATCH, sequence=sequence)
    return model, inputs


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _build(reference: str, overrides: dict[str, Any], float32: bool) -> tuple[nn.Module, Any]:
    prefix, colon, name = reference.partition(":")
    if colon and prefix.lower() == "hf":
        return _transformers_model(_config_for_type(name, reference), {}, overrides, reference, float32), None
    path = Path(reference)
    if reference and path.exists():
        config, fields = _config_from_path(path, reference)
        return _transformers_model(config, fields, overrides, reference, float32), None
    if colon and prefix and name:
        return from_callable(prefix, name, overrides, reference)
    raise problem(
        f"`{reference}` is no file or folder, no `hf:MODEL_TYPE` and no `package.module:callable`", _meant(reference)
    )


def _meant(reference: str) -> str:
    """What a reference of no known form may have been meant for."""
    kinds = list(_transformers(reference).CONFIG_MAPPING.keys()) if find_spec("transformers") is not None else []
    close = get_close_matches(reference.strip(":"), kinds, 1, 0.8)
    if close:
        return f"did you mean `hf:{close[0]}`?"
    if reference and not reference.startswith((".", ":")) and "/" not in reference and reference.isprintable():
        return (
            f"for an architecture of transformers write `hf:llama`; for a model of your own name what makes it: "
            f"`{reference.strip(':')}:make_model`"
        )
    return (
        "for an architecture of transformers write `hf:llama`; for a checkpoint the folder on this machine that holds "
        "its config.json; for a model of your own `package.module:make_model`"
    )


def _transformers(reference: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise problem(f"`{reference}` needs transformers, which isn't installed", "pip install 'tpplan[hf]'") from None


def _config_for_type(kind: str, reference: str) -> Any:
    transformers = _transformers(reference)
    known: list[str] = list(transformers.CONFIG_MAPPING.keys())
    if kind not in known:
        close = get_close_matches(kind, known, 3)
        raise problem(
            f"transformers has no model type `{kind}`",
            f"did you mean {one_of(f'hf:{name}' for name in close)}?"
            if close
            else f"use one of transformers' {len(known)} model types, such as {one_of(_COMMON_TYPES)}",
        )
    return transformers.CONFIG_MAPPING[kind]()


def _config_from_path(path: Path, reference: str) -> tuple[Any, dict[str, Any]]:
    transformers = _transformers(reference)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise problem(f"`{path}` has no config.json", "name a folder that save_pretrained wrote, or its config.json")
    if file.suffix == ".py":
        raise problem(f"`{path}` is Python, not a transformers config", f"name what makes the model: `{file.stem}:…`")
    try:
        fields: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"`{file}` is no transformers config, as it isn't JSON: {first_line(error)}"
        raise problem(message, "name a config.json, or the folder that holds it") from None
    kind = cast("dict[str, Any]", fields).get("model_type") if isinstance(fields, dict) else None
    if not isinstance(kind, str):
        raise problem(f"`{file}` is no transformers config: it has no `model_type`", "add one, such as `llama`")
    found = with_dtype(cast("dict[str, Any]", fields), f"`{file}`")
    try:
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
        if config.dtype is None:
            name = stored_dtype(path)
            config.dtype = None if name is None else getattr(torch, name)
            found |= {} if name is None else {"dtype": name}
        return config, found
    except (OSError, ValueError, KeyError) as error:
        if kind not in transformers.CONFIG_MAPPING:
            _config_for_type(kind, reference)
        message = f"`{file}` is no transformers config: {first_line(error)}"
        raise problem(message, "check its fields") from None


def _transformers_model(
    config: Any, fields: dict[str, Any], overrides: dict[str, Any], reference: str, float32: bool
) -> nn.Module:
    transformers = _transformers(reference)
    overrides = with_dtype(overrides, "--set")
    _refuse_unknown_fields(config, overrides)
    try:
        # Built anew: some fields follow from others, such as a head's size from the hidden size.
        changed: Any = config.__class__.from_dict({**fields, **overrides}) if overrides else config
    except Exception as error:
        raise problem(f"`{reference}` can't be built: {first_line(error)}", "check the values of --set") from None
    if float32:
        changed.dtype = torch.float32
    named: Any = getattr(transformers, str((changed.architectures or [""])[0]), None)
    kinds = ("Seq2SeqLM", "SpeechSeq2Seq", "MaskedLM", "CausalLM")
    makers = [getattr(transformers, f"AutoModelFor{kind}") for kind in kinds]
    maker = next((maker for maker in makers if changed.__class__ in maker._model_mapping), transformers.AutoModel)
    try:
        with torch.device("meta"):
            # A class's own constructor leaves the dtype aside.
            model: nn.Module = maker.from_config(changed) if named is None else named._from_config(changed)
        keep_in_float32(model)
        return model
    except Exception as error:
        raise problem(f"`{reference}` can't be built: {first_line(error)}", "check the config's values") from None


def _refuse_unknown_fields(config: Any, overrides: dict[str, Any]) -> None:
    for key in overrides:
        if not hasattr(config, key):
            close = get_close_matches(key, list(config.to_dict()), 1)
            hint = f"did you mean `{close[0]}`?" if close else "see the config's fields"
            raise problem(f"the config of `{config.model_type}` has no field `{key}`", hint)
