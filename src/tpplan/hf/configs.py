"""Configs: of a folder, a file, or a model type; and the generation config beside one."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from tpplan.hf.library import UnusableError, first_line, transformers_for
from tpplan.plan.nearest import nearest_words
from tpplan.plan.wording import one_of

CONFIG = "config.json"
GENERATION = "generation_config.json"
_TABLES = ("auto_mappings.py", "configuration_auto.py")
_ENTRY = re.compile(r"""["'](?![A-Z_]+["'])([^"'\s]+)["'][\]\s]*[:,=]\s*["']\w*Config["']""")
_COMMON_TYPES = ("llama", "qwen3", "gpt2", "bert")


@dataclass(frozen=True, slots=True)
class StoredConfig:
    """A config as it lies on the disk.

    Attributes:
        path: the file; None for the library's default.
        fields: what it says.
        config: what transformers makes of that.
    """

    path: Path | None
    fields: dict[str, Any]
    config: Any


def known_types() -> tuple[str, ...]:
    """Every model type that transformers has: before it's imported, which takes seconds, those that its tables name."""
    listed = () if "transformers" in sys.modules else _listed_types()
    if not listed and find_spec("transformers") is not None:
        return tuple(transformers_for("a model type").CONFIG_MAPPING.keys())
    return listed


@cache
def _listed_types() -> tuple[str, ...]:
    spec = find_spec("transformers")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    tables = [Path(folder, "models", "auto", name) for folder in folders for name in _TABLES]
    found = dict.fromkeys(e for t in tables if t.is_file() for e in _ENTRY.findall(t.read_text(encoding="utf-8")))
    return tuple(found) if set(_COMMON_TYPES) <= set(found) else ()


def require_type(kind: str, what: str) -> None:
    """Raise an `UnusableError` if transformers has no such model type; it says which is meant."""
    known = known_types()
    if not known:
        transformers_for(what)
    if kind not in known:
        close = nearest_words(kind, known)
        raise UnusableError(
            f"transformers has no model type `{kind}`",
            f"did you mean {one_of(f'hf:{name}' for name in close)}?"
            if close
            else f"use one of transformers' {len(known)} model types, such as {one_of(_COMMON_TYPES)}",
        )


def default_config(kind: str, what: str) -> StoredConfig:
    """The default config of a model type.

    Raises:
        UnusableError: there is none; it says which is meant.
    """
    require_type(kind, what)
    return StoredConfig(None, {}, transformers_for(what).CONFIG_MAPPING[kind]())


def read_config(path: Path, adapted: Callable[[dict[str, Any], Path], dict[str, Any]] | None = None) -> StoredConfig:
    """The config in a folder or a file. No code that a folder brings along is run.

    Args:
        path: the folder or the file.
        adapted: checks what the file says, and makes the `fields` of it that are returned.

    Raises:
        UnusableError: there is none, or transformers can't read it.
    """
    file, fields = read_fields(path)
    if adapted is not None:
        fields = adapted(fields, file)
    transformers = transformers_for(str(path))
    try:
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers' classes check their fields, and raise whatever they like
        raise UnusableError(f"`{file}` is no transformers config: {first_line(error)}", "check its fields") from None
    return StoredConfig(file, fields, config)


def read_fields(path: Path) -> tuple[Path, dict[str, Any]]:
    """The config file in a folder, or that file, and what it says. transformers isn't imported for it.

    Raises:
        UnusableError: there is none, or none of a model that transformers has.
    """
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        raise UnusableError(
            f"`{path}` has no config.json", "name a folder that save_pretrained wrote, or its config.json"
        )
    if file.suffix == ".py":
        raise UnusableError(
            f"`{path}` is Python, not a transformers config", f"name what makes the model: `{file.stem}:…`"
        )
    fields = _fields(file, CONFIG)
    kind = fields.get("model_type")
    if not isinstance(kind, str):
        raise UnusableError(f"`{file}` is no transformers config: it has no `model_type`", "add one, such as `llama`")
    if kind not in known_types():
        if fields.get("auto_map"):
            raise UnusableError(
                f"`{file}` names code of its own (`auto_map`), which tpplan doesn't run: transformers has no model "
                f"type `{kind}`",
                "build the model from that code on `meta`, then call `tpplan.parallelize` and `tpplan.load_weights`",
            )
        require_type(kind, str(path))
    return file, fields


def read_generation_config(folder: Path) -> Any:
    """The generation config of a folder; without a file of its own, what the config says of generation.

    Raises:
        UnusableError: the file can't be read, which transformers takes for none.
    """
    kind = transformers_for(str(folder)).GenerationConfig
    file = folder / GENERATION
    if not file.is_file():
        return kind.from_pretrained(
            str(folder), config_file_name=CONFIG, _from_model_config=True, local_files_only=True
        )
    _fields(file, GENERATION)
    try:
        return kind.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise UnusableError(
            f"`{file}` is no generation config: {first_line(error)}", "check its fields, or remove it"
        ) from None


def _fields(file: Path, named: str) -> dict[str, Any]:
    try:
        fields: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = "it isn't JSON" if isinstance(error, ValueError) else "it can't be read"
        message = f"`{file}` is no transformers config, as {reason}: {first_line(error)}"
        raise UnusableError(message, f"name a {named}, or the folder that holds it") from None
    if not isinstance(fields, dict):
        raise UnusableError(
            f"`{file}` is no transformers config: it holds no object, so that it has no `model_type`",
            f"name a {named} that save_pretrained wrote",
        )
    return cast("dict[str, Any]", fields)


__all__ = [
    "CONFIG",
    "GENERATION",
    "StoredConfig",
    "default_config",
    "known_types",
    "read_config",
    "read_fields",
    "read_generation_config",
    "require_type",
]
