"""Hub: models that lie in the cache of the Hugging Face hub on this machine. Nothing is downloaded."""

from __future__ import annotations

import re
from pathlib import Path

from tpplan.hf.library import UnusableError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")


def cached_model(name: str) -> Path | None:
    """The folder of a model such as `meta-llama/Llama-3.2-1B` in the cache; None if its config isn't there."""
    if _ID.fullmatch(name) is None:
        return None
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
    except (ImportError, ValueError):  # ValueError: no name that a model may have
        return None
    return Path(found).parent if isinstance(found, str) else None


def not_cached(name: str) -> UnusableError:
    """What is said of a model's name that leads to nothing on this machine."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return UnusableError(
            f"`{name}` is no file or folder, and without huggingface_hub there is no cache to look in",
            "pip install 'tpplan[hf]'",
        )
    return UnusableError(
        f"`{name}` is no file or folder, and no model of that name is in the cache of the Hugging Face hub, "
        f"{HF_HUB_CACHE}",
        f"for the config alone run `hf download {name} config.json`, with weights `hf download {name}`; "
        "tpplan downloads nothing. HF_HOME says where the cache is, and `hf auth login` opens models that ask for it",
    )


def may_be_id(name: str) -> bool:
    """Whether a text reads like the name of a model on the hub with its owner's."""
    return "/" in name and _ID.fullmatch(name) is not None


__all__ = ["cached_model", "may_be_id", "not_cached"]
