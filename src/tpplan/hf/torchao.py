"""Folders of torchao: weights of classes of its own, which the metadata of the files describes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.checkpoint.files import listed, problem
from tpplan.checkpoint.stored import Checkpoint
from tpplan.hf.library import first_line

_AGAIN = "write the folder again: quantise the model by transformers and torchao, and call its `save_pretrained`"


def put_weights(model: nn.Module, checkpoint: Checkpoint, said: Mapping[str, Any]) -> str:
    """Give a stock model the weights, without numbers, of the classes that a folder of torchao has; torchao makes them.

    Args:
        model: on `meta`; its config says afterwards how it is quantised, as transformers' own would.
        checkpoint: the folder's.
        said: its `quantization_config`.

    Returns:
        What the files say of their weights, by which ranks agree.

    Raises:
        CheckpointError: TP121, if the files say nothing of their weights, or of others than the model's; or torchao
            isn't installed, or can't make them.
    """
    kinds = _kinds(checkpoint)
    try:
        support: Any = importlib.import_module("torchao.prototype.safetensors.safetensors_support")
    except ImportError:
        message = f"`{checkpoint.path.parent}` is quantised by torchao, which isn't installed"
        raise problem(message, "pip install 'tpplan[torchao]'") from None
    stored = checkpoint.tensors.items()
    empty = {name: torch.empty(held.shape, dtype=held.torch_dtype, device="meta") for name, held in stored}
    configs: Any = importlib.import_module("transformers.quantizers.auto")
    try:
        config = configs.AutoQuantizationConfig.from_dict(dict(said))
        made: dict[str, Tensor] = support.unflatten_tensor_state_dict(empty, dict(checkpoint.metadata))[0]
    except Exception as error:  # what the config and the metadata say is made into objects
        message = f"torchao can't make the weights that `{checkpoint.path}` describes: {first_line(error)}"
        raise problem(message, "use the torchao that wrote it") from None
    parameters = dict(model.named_parameters())
    wrong = [f"`{name}`, a {kind}, isn't there as a whole" for name, kind in kinds.items() if name not in made]
    wrong += [f"`{name}`, a {kind}, isn't the model's" for name, kind in kinds.items() if name not in parameters]
    weights = {name: made[name] for name in kinds if name in made and name in parameters}
    for name, held in weights.items():
        if held.shape != parameters[name].shape:
            wrong.append(f"`{name}` has shape {list(held.shape)} there and {list(parameters[name].shape)} in the model")
    if wrong:
        message = f"{len(wrong)} of the weights that torchao has quantised can't be loaded"
        raise problem(message, "load the folder into the class that it was saved from, as a whole", *wrong[:20])
    others = [name for name, held in weights.items() if held.dtype != parameters[name].dtype]
    if others:
        ours, theirs = parameters[others[0]].dtype, weights[others[0]].dtype
        message = f"{listed(others)} were quantised for {theirs}, and are {ours} in the model"
        raise problem(message, f"ask for a model in {theirs}: `dtype`")
    for name, held in weights.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(held, requires_grad=False))
    if hasattr(model, "config"):  # the command takes any module
        model.config.quantization_config = config  # pyright: ignore
    return json.dumps(dict(checkpoint.metadata), sort_keys=True)


def _kinds(checkpoint: Checkpoint) -> dict[str, str]:
    """The classes of a checkpoint's weights, of those that have one, by the weights' names."""
    try:
        names: Any = json.loads(checkpoint.metadata["tensor_names"])
        kinds = {str(name): str(json.loads(checkpoint.metadata[name])["_type"]) for name in names}
    except (KeyError, TypeError, ValueError):
        message = (
            f"the files of `{checkpoint.path.parent}`, quantised by torchao, don't say of which classes its weights are"
        )
        raise problem(message, _AGAIN) from None
    return {name: kind for name, kind in kinds.items() if kind != Tensor.__name__}


__all__ = ["put_weights"]
