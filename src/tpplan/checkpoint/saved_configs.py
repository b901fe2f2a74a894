"""What makes a folder with numbers one of transformers': its config, and its generation config."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from tpplan.checkpoint.files import problem
from tpplan.checkpoint.writer import sync
from tpplan.runtime.modules.writes import stock_class


def write_configs(model: nn.Module, folder: Path) -> None:
    """Write config.json and generation_config.json as the model's `save_pretrained` does, where it has them.

    Raises:
        CheckpointError: TP121, if transformers refuses to write them.
    """
    held: Any = model
    config: Any = getattr(held, "config", None)
    if not callable(getattr(config, "save_pretrained", None)):
        return
    config = copy.deepcopy(config)
    config.architectures = [stock_class(model).__name__.removeprefix("FSDP")]
    dtype = getattr(held, "dtype", None)
    if dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    try:
        config.save_pretrained(folder)
        generation: Any = getattr(held, "generation_config", None)
        if generation is not None and (not hasattr(held, "can_generate") or held.can_generate()):
            generation.save_pretrained(folder)
    except (ValueError, TypeError) as error:
        raise problem(
            "transformers refuses to write the model's config",
            "mend `model.config` or `model.generation_config`",
            *str(error).splitlines()[:5],
        ) from None
    for path in sorted(folder.iterdir()):
        sync(path)


__all__ = ["write_configs"]
