"""Loading the model that `--model` names, on the meta device."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tpplan.inputs import BATCH, example_call
from tpplan.plan import Diagnostic, PlanError


def load_model(
    reference: str, overrides: Mapping[str, str], batch: int | None = None, sequence: int | None = None
) -> tuple[nn.Module, Any]:
    """The model that `reference` names, without numbers, and example inputs (None to have them made up).

    Args:
        reference: a folder or file with a transformers config.json, `hf:MODEL_TYPE`, or `package.module:callable`; the
            callable takes no arguments and returns a model, or a model and its inputs.
        overrides: config fields to replace; values are read as JSON where that works.
        batch, sequence: sizes of the example inputs of transformers models.

    Raises:
        PlanError: TP122, if there is no such model.
    """
    model, inputs = _build(reference, {key: _value(text) for key, text in overrides.items()})
    if inputs is None and (batch is not None or sequence is not None):
        _, inputs = example_call(model, 8, None, batch=batch or BATCH, sequence=sequence)
    return model, inputs


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _build(reference: str, overrides: dict[str, Any]) -> tuple[nn.Module, Any]:
    if reference.startswith("hf:"):
        return _transformers_model(_config_for_type(reference[3:], reference), {}, overrides, reference), None
    path = Path(reference)
    if path.exists():
        config, fields = _config_from_path(path, reference)
        return _transformers_model(config, fields, overrides, reference), None
    module, colon, name = reference.partition(":")
    if colon:
        return _from_callable(module, name, overrides, reference)
    raise _problem(
        f"`{reference}` is no file or folder, no `hf:MODEL_TYPE` and no `package.module:callable`",
        "for an architecture of transformers write `hf:llama`; for a model of your own `package.module:make_model`",
    )


def _transformers(reference: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise _problem(f"`{reference}` needs transformers, which isn't installed", "pip install 'tpplan[hf]'") from None


def _config_for_type(kind: str, reference: str) -> Any:
    transformers = _transformers(reference)
    known: list[str] = list(transformers.CONFIG_MAPPING.keys())
    if kind not in known:
        close = get_close_matches(kind, known, 3)
        raise _problem(
            f"transformers has no model type `{kind}`",
            f"did you mean {' or '.join(f'`hf:{name}`' for name in close)}?"
            if close
            else "see transformers' model types",
        )
    return transformers.CONFIG_MAPPING[kind]()


def _config_from_path(path: Path, reference: str) -> tuple[Any, dict[str, Any]]:
    transformers = _transformers(reference)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise _problem(f"`{path}` has no config.json", "name a folder that save_pretrained wrote, or its config.json")
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        return transformers.AutoConfig.from_pretrained(str(file), local_files_only=True), fields
    except (OSError, ValueError, KeyError) as error:
        raise _problem(f"`{file}` is no transformers config: {_first_line(error)}", "it needs a `model_type`") from None


def _transformers_model(config: Any, fields: dict[str, Any], overrides: dict[str, Any], reference: str) -> nn.Module:
    transformers = _transformers(reference)
    for key in overrides:
        if not hasattr(config, key):
            close = get_close_matches(key, list(config.to_dict()), 1)
            hint = f"did you mean `{close[0]}`?" if close else "see the config's fields"
            raise _problem(f"the config of `{config.model_type}` has no field `{key}`", hint)
    try:
        # Built anew: some fields follow from others, such as a head's size from the hidden size.
        changed: Any = config.__class__.from_dict({**fields, **overrides}) if overrides else config
    except Exception as error:
        raise _problem(f"`{reference}` can't be built: {_first_line(error)}", "check the values of --set") from None
    named: Any = getattr(transformers, str((changed.architectures or [""])[0]), None)
    kinds = ("Seq2SeqLM", "SpeechSeq2Seq", "MaskedLM", "CausalLM")
    makers = [getattr(transformers, f"AutoModelFor{kind}") for kind in kinds]
    try:
        with torch.device("meta"):
            if named is not None:
                return named(changed)
            for maker in makers:
                if changed.__class__ in maker._model_mapping:
                    return maker.from_config(changed)
            return transformers.AutoModel.from_config(changed)
    except Exception as error:
        raise _problem(f"`{reference}` can't be built: {_first_line(error)}", "check the config's values") from None


def _from_callable(module: str, name: str, overrides: dict[str, Any], reference: str) -> tuple[nn.Module, Any]:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _problem(f"`{reference}` can't be imported: {_first_line(error)}", "run tpplan where it can be") from None
    try:
        with torch.device("meta"):
            made = make(**overrides)
    except Exception as error:
        message = f"`{reference}` raised {type(error).__name__}: {_first_line(error)}"
        raise _problem(message, "it must build a model without arguments, also on the meta device") from None
    pair: tuple[Any, Any] = made if isinstance(made, tuple) else (made, None)  # pyright: ignore
    if not isinstance(pair[0], nn.Module):
        raise _problem(f"`{reference}` gave a {type(pair[0]).__name__}, not a module", "return a torch.nn.Module")
    return pair


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _problem(message: str, way_out: str) -> PlanError:
    return PlanError([Diagnostic(code="TP122", message=message, help=way_out)])
