"""`from_pretrained`: from a transformers folder to a sharded model with numbers, in one call.

The model is built on `meta`, compiled and rewritten there, and each rank then reads the bytes of its own parts.
Whatever can be wrong with the folder is looked for before that, on all ranks, which agree on what they found.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpplan.api import Inputs, axis_mesh, axis_name, parallelize
from tpplan.asked import AskedPlan, found_plan, known_plan
from tpplan.checkpoint.agreed import AgreeingRanks
from tpplan.checkpoint.dequantised import Dequantised
from tpplan.checkpoint.files import CheckpointError, problem
from tpplan.checkpoint.loading import load
from tpplan.checkpoint.meter import Meter
from tpplan.checkpoint.opened import Opened, open_checkpoint
from tpplan.checkpoint.stored import Checkpoint, read_checkpoint
from tpplan.checkpoint.told_bytes import Progress
from tpplan.checkpoint.wanted import match
from tpplan.hf.build import build_stock, named_class
from tpplan.hf.configs import CONFIG, GENERATION, StoredConfig, read_config, read_generation_config
from tpplan.hf.hub import cached_model
from tpplan.hf.library import UnusableError
from tpplan.hf.quantised import as_plain, keep_quantised
from tpplan.initialize import init_weights
from tpplan.plan import ArgumentError, Plan, Severity
from tpplan.plan.taken import FLAG, FOLDER, PROGRESS, RANKS, TEXTS, optional, takes
from tpplan.plan.vocabulary import AUTO
from tpplan.plan.warned import warn_user
from tpplan.runtime.parameters.taken_apart import taken_apart
from tpplan.taken_models import DTYPE_OR_NAME, INPUTS, MESH

_BY_HAND = "build the model under `torch.device('meta')`, then call `tpplan.parallelize` and `tpplan.load_weights`"


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the user asked for; see `from_pretrained`."""

    source: str | os.PathLike[str]
    folder: Path
    plan: AskedPlan
    mesh: DeviceMesh
    dtype: torch.dtype | str | None
    inputs: Inputs
    sequence_parallel: bool
    rename: Mapping[str, str] | None
    strict: bool
    dequantize: bool


@dataclass(frozen=True, slots=True)
class _Ready:
    """What is ready to be sharded and loaded.

    Attributes:
        model: on `meta`, in evaluation mode, with its generation config.
        plan: the user's, or the one that was found.
        opened: the checkpoint.
        digests: of what must be the same on all ranks.
    """

    model: nn.Module
    plan: Plan
    opened: Opened
    digests: Mapping[str, str]


def _tell(given: Mapping[str, Any], error: Exception) -> None:
    known, _ = _known_plan(given.get("plan", AUTO), False)
    mesh = given.get("mesh")
    tp = None if mesh is not None and mesh.ndim == 1 else given.get("tp")
    AgreeingRanks(nn.Module(), _ranks(mesh, known, tp)).settle(str(given["folder"]), None, (), error)


@takes(
    _tell,
    folder=FOLDER,
    mesh=MESH,
    dtype=DTYPE_OR_NAME,
    tp=optional(RANKS),
    inputs=INPUTS,
    sequence_parallel=FLAG,
    rename=optional(TEXTS),
    strict=FLAG,
    dequantize=FLAG,
    progress=PROGRESS,
)
def from_pretrained(
    folder: str | os.PathLike[str],
    plan: AskedPlan = AUTO,
    mesh: DeviceMesh | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    tp: int | None = None,
    inputs: Inputs = None,
    sequence_parallel: bool = False,
    rename: Mapping[str, str] | None = None,
    strict: bool = True,
    dequantize: bool = False,
    progress: bool | Progress | None = None,
) -> nn.Module:
    """Load a transformers folder into a sharded model: each rank holds its own parts, and reads nothing else.

    Every rank of the mesh must call this alike. The result is in evaluation mode, on the mesh's device, with the
    folder's config and generation config, as transformers' `from_pretrained` would return the stock model.

    Args:
        folder: with config.json and safetensors files, as `save_pretrained` and `tpplan.save_weights` write it; or the
            name of a model that lies in the cache of the Hugging Face hub, such as `meta-llama/Llama-3.2-1B`.
        plan: as for `parallelize`; "auto" is what `suggest_plan` finds.
        mesh: as for `parallelize`; None takes torchrun's processes, as one axis or in groups of `tp`.
        dtype: of the parameters; None or "auto" for the config's, or else the checkpoint's.
        tp: as for `parallelize`: without a mesh, the number of ranks on the plan's axis.
        inputs: an example call; see `compile_plan`.
        sequence_parallel: with "auto", whether the stream between the blocks is to be split along the sequence.
        rename: regular expressions with what replaces their matches in the checkpoint's names; see `load_weights`.
        strict: whether the checkpoint must have every tensor of the model; if not, those that it hasn't are initialised
            as the stock model's are. All ranks must be seeded alike then; see `init_weights`.
        dequantize: whether a folder of quantised weights makes a plain model: each rank reads the codes and scales of
            its parts, and makes numbers in the model's dtype of them. It changes nothing for plain folders.
        progress: True for a bar on the first rank's terminal, or a function; see `load_weights`.

    Returns:
        The model.

    Warns:
        UserWarning: as `load_weights`.

    Raises:
        CheckpointError: with everything that is wrong with the folder (TP121) or the plan, the same on all ranks.
        CompileError: the plan doesn't fit the model and the mesh.
        ArgumentError: an argument is of another kind.

    Example:
        >>> model = tpplan.from_pretrained("my-llama", "llama", tp=2)
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4).shape
        torch.Size([1, 7])
    """
    folder = _found_folder(folder)
    known, error = _known_plan(plan, sequence_parallel)
    here = _ranks(mesh, known, tp)
    ready: _Ready | None = None
    if error is None:
        asked = _Asked(
            folder,
            Path(folder),
            plan if known is None else known,
            here,
            dtype,
            inputs,
            sequence_parallel,
            rename,
            strict,
            dequantize,
        )
        try:
            ready = _made_ready(asked)
        except UnusableError as raised:
            error = problem(raised.message, raised.way_out)
        except Exception as raised:  # whatever a rank fails with, the others must not wait for it
            error = raised
    AgreeingRanks(nn.Module(), here).settle(os.fspath(folder), None if ready is None else ready.digests, (), error)
    assert ready is not None
    model = parallelize(ready.model, ready.plan, here, inputs)
    with taken_apart(model):
        loaded = load(model, ready.opened, strict=strict, progress=progress)
    for held in loaded.warnings:
        warn_user(held.text)
    return init_weights(model, missing=True) if loaded.missing else model


def _ranks(mesh: DeviceMesh | None, known: Plan | None, tp: int | None) -> DeviceMesh:
    """The ranks that load together: all of the user's mesh, or those of an axis."""
    return mesh if mesh is not None and tp is None else axis_mesh(mesh, known.axis if known else None, tp)


def _found_folder(folder: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """What a model of the hub's name stands for, if it's in the cache here; else the folder itself."""
    held = None if Path(folder).exists() else cached_model(os.fspath(folder))
    return folder if held is None else held


def _known_plan(plan: AskedPlan, sequence_parallel: bool) -> tuple[Plan | None, Exception | None]:
    """The plan, or None if it takes the model; and why it can't be read."""
    if sequence_parallel and not (isinstance(plan, str) and plan == AUTO):
        return None, ArgumentError('sequence_parallel=True goes with plan="auto"; a plan says itself what it splits')
    try:
        return known_plan(plan, None)[0], None
    except Exception as error:
        return None, error


def _made_ready(asked: _Asked) -> _Ready:
    """Everything that can be wrong with the folder is found here, before anything is compiled for long."""
    meter = Meter()
    checkpoint = read_checkpoint(asked.source, meter)
    stored = _config(asked.folder)
    kind = _class(stored)
    checkpoint = as_plain(checkpoint, asked.dequantize, meter)
    dtype = _dtype(asked.dtype, stored.config, checkpoint)
    model: Any = build_stock(kind, stored.config, dtype)
    model.config.name_or_path = os.fspath(asked.folder)
    kept = keep_quantised(model, checkpoint)
    with taken_apart(model):
        opened = open_checkpoint(model, asked.folder, asked.rename, checkpoint, meter)
        matched = match(model, opened.tensors, asked.strict)
    wrong = [held for held in matched.findings if held.severity is Severity.ERROR]
    if wrong:
        raise CheckpointError(wrong)
    if callable(getattr(model, "can_generate", None)) and model.can_generate():
        model.generation_config = read_generation_config(asked.folder)
    model.eval()
    digests = {"configs": _digest(asked.folder), "dtypes": str(dtype), "checkpoints": opened.checkpoint.digest}
    digests["classes of weights"] = kept
    known, _ = known_plan(asked.plan, model, axis_name(asked.mesh))
    return _Ready(model, _found_plan(model, asked) if known is None else known, opened, digests)


def _config(folder: Path) -> StoredConfig:
    if not folder.is_dir():
        raise problem(f"`{folder}` is a file, which has no config.json", "name the folder that holds it")
    if not (folder / CONFIG).is_file():
        adapter = (folder / "adapter_config.json").is_file()
        message = f"`{folder}` has no config.json" + (": it holds an adapter for another model" if adapter else "")
        raise problem(message, f"name a folder that `save_pretrained` wrote; or {_BY_HAND}")
    return read_config(folder)


def _class(stored: StoredConfig) -> Any:
    kind = named_class(stored.config)
    names: list[str] = stored.config.architectures or []
    if kind is not None:
        return kind
    if not names:
        raise problem(
            f"`{stored.path}` doesn't say which class the model is of: it has no `architectures`",
            'add the class that the folder was saved from, such as `"architectures": ["LlamaForCausalLM"]`',
        )
    if stored.fields.get("auto_map"):
        raise problem(
            f"`{stored.path}` names code of its own (`auto_map`) for `{names[0]}`, which tpplan doesn't run",
            f"import the class from that code; {_BY_HAND}",
        )
    raise problem(
        f"`{stored.path}` names the class `{names[0]}`, which this transformers doesn't have",
        f"correct `architectures`, or install the transformers that has it; or {_BY_HAND}",
    )


def _dtype(asked: torch.dtype | str | None, config: Any, checkpoint: Checkpoint) -> torch.dtype:
    """As transformers decides: what was asked for, the config's, or the first of the checkpoint's."""
    if asked in (None, AUTO):
        asked = getattr(config, "dtype", None)
    if isinstance(asked, dict):  # a dtype for each part of a model; transformers takes the main one for all
        asked = cast("dict[str, Any]", asked).get("") or torch.get_default_dtype()
    if asked is None:
        kinds = (held.torch_dtype for held in checkpoint.tensors.values() if not isinstance(held, Dequantised))
        floats = (kind for kind in kinds if kind is not None and kind.is_floating_point and kind.itemsize > 1)
        return next(floats, torch.get_default_dtype())
    dtype = getattr(torch, asked.removeprefix("torch."), None) if isinstance(asked, str) else asked
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize == 1:
        raise problem(f"a model can't have the dtype {asked!r}", "use a floating-point one, such as torch.bfloat16")
    return dtype


def _found_plan(model: nn.Module, asked: _Asked) -> Plan:
    over = axis_mesh(asked.mesh, None)
    return found_plan(model, over.size(), asked.inputs, asked.sequence_parallel, axis_name(over))


def _digest(folder: Path) -> str:
    """Of the configs, but for the place that they came from."""
    digest = hashlib.sha256()
    for name in (CONFIG, GENERATION):
        fields: Any = json.loads((folder / name).read_text(encoding="utf-8")) if (folder / name).is_file() else {}
        digest.update(json.dumps({**fields, "_name_or_path": ""}, sort_keys=True).encode())
    return digest.hexdigest()


__all__ = ["from_pretrained"]
