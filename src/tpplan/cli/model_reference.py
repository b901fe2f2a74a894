"""Loading the model that `--model` names, on the meta device. What leads nowhere is told before torch is imported."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpplan.cli.model_callable import from_callable, require_module
from tpplan.cli.model_problem import first_line, problem
from tpplan.hf.configs import StoredConfig, default_config, known_types, read_config, read_fields, require_type
from tpplan.hf.hub import cached_model, may_be_id, not_cached
from tpplan.hf.library import UnusableError
from tpplan.plan.nearest import nearest_words
from tpplan.plan.wording import all_of

if TYPE_CHECKING:
    from torch import nn

    _Made = Callable[[dict[str, Any], bool], tuple[nn.Module, Any]]


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
        reference: a folder or file with a transformers config.json, the name of a model in the cache of the Hugging
            Face hub, `hf:MODEL_TYPE`, or `package.module:callable`; the callable takes no arguments and returns a
            model, or a model and its inputs.
        overrides: config fields to replace; values are read as JSON where that works.
        batch, sequence: sizes of the example inputs of transformers models.
        float32: whether to build transformers models in float32, whatever config and overrides say.

    Raises:
        PlanError: TP122, if there is no such model.
    """
    model, inputs = named_model(reference)({key: _value(text) for key, text in overrides.items()}, float32)
    if inputs is None and (batch is not None or sequence is not None):
        from tpplan.inputs import BATCH, example_call

        _, inputs = example_call(model, 8, None, batch=batch or BATCH, sequence=sequence)
    return model, inputs


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def named_model(reference: str) -> _Made:
    """What makes the model that `reference` names, of overrides and of whether it's to be in float32.

    Raises:
        PlanError: TP122, where that can be told without importing torch.
    """
    prefix, colon, name = reference.partition(":")
    path = Path(reference)
    try:
        if colon and prefix.lower() == "hf":
            require_type(name, reference)
            return _of_transformers(reference, lambda: default_config(name, reference))
        held = path if reference and path.exists() else cached_model(reference)
        if held is not None:
            read_fields(held)
            return _of_transformers(reference, lambda: _of_folder(held))
        if may_be_id(reference):
            raise not_cached(reference)
    except UnusableError as error:
        raise problem(error.message, error.way_out) from None
    if colon and prefix and name:
        require_module(prefix, name, reference)
        return lambda overrides, _: from_callable(prefix, name, overrides, reference)
    forms = "no file or folder, no `hf:MODEL_TYPE`, no `package.module:callable` and no `FILE.py:callable`"
    raise problem(f"`{reference}` is {forms}", _meant(reference))


def _of_transformers(reference: str, read: Callable[[], StoredConfig]) -> _Made:
    return lambda overrides, float32: (_transformers_model(reference, read, overrides, float32), None)


def _meant(reference: str) -> str:
    """What a reference of no known form may have been meant for."""
    close = nearest_words(reference.strip(":"), known_types(), 1, 0.8)
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


def _of_folder(path: Path) -> StoredConfig:
    import torch

    from tpplan.cli.model_dtype import stored_dtype, with_dtype

    stored = read_config(path, lambda fields, file: with_dtype(fields, f"`{file}`"))
    if stored.config.dtype is None:
        name = stored_dtype(path)
        if name is not None:
            stored.config.dtype = getattr(torch, name)
            stored.fields["dtype"] = name
    return stored


def _transformers_model(
    reference: str, read: Callable[[], StoredConfig], overrides: dict[str, Any], float32: bool
) -> nn.Module:
    import torch

    from tpplan.cli.model_dtype import with_dtype
    from tpplan.hf.build import build_stock, named_class, usual_class

    given = with_dtype(overrides, "--set")
    try:
        config = _overridden(read(), given, reference)
        if float32:
            config.dtype = torch.float32
        return build_stock(named_class(config) or usual_class(config), config)
    except UnusableError as error:
        raise problem(error.message, _check(overrides) if overrides else error.way_out) from None


def _check(overrides: Mapping[str, Any]) -> str:
    return f"check {all_of(f'--set {key}={value}' for key, value in overrides.items())}"


def _overridden(stored: StoredConfig, overrides: dict[str, Any], reference: str) -> Any:
    for key in overrides:
        if not hasattr(stored.config, key) and key != "attn_implementation":  # which `to_dict` doesn't show
            close = nearest_words(key, list(stored.config.to_dict()), 1)
            hint = f"did you mean `{close[0]}`?" if close else "see the config's fields"
            raise problem(f"the config of `{stored.config.model_type}` has no field `{key}`", hint)
    try:
        # Built anew: some fields follow from others, such as a head's size from the hidden size.
        return stored.config.__class__.from_dict({**stored.fields, **overrides}) if overrides else stored.config
    except Exception as error:
        raise problem(f"`{reference}` can't be built: {first_line(error)}", _check(overrides)) from None
