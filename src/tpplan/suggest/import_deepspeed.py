r"""Import: an AutoTP config of DeepSpeed, in tpplan's words.

in:  a stock model, and DeepSpeed's JSON
out: the text of a plan file

    {"patterns": [".*\\.o_proj\\.weight$"], "partition_type": "row"}           ->   ….o_proj: rowwise
    {"patterns": [".*\\.gate_up_proj\\.weight$"], "partition_type": "column",
     "shape": [2, -1], "partition_dim": 0}                                     ->   {style: colwise, packed: …}
    "injection_policy": {"BertLayer": ["attention.output.dense"]}              ->   rowwise, and colwise beside it

As DeepSpeed does, each linear layer takes the first entry one of whose expressions matches the name of its weight.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from torch import nn

from tpplan.compat.modules import named_modules
from tpplan.compiler.queries import linear_form
from tpplan.plan import CompileError, Diagnostic
from tpplan.plan.written import schema_comment
from tpplan.suggest.import_hf import brought_plan, import_plan
from tpplan.suggest.patterns import patterns_for

_SPEC_KEYS: Final = frozenset({"patterns", "partition_type", "gather_output", "shape", "partition_dim", "model_types"})
_HELP: Final = "see `tpplan rule TP216` for what is read"


def import_deepspeed(model: nn.Module, file: Path, name: str) -> str:
    """The text of a plan file with what `file` says of `model`.

    Raises:
        CompileError: TP215, if the file doesn't say how layers are sharded; TP216, with each entry that can't be said.
    """
    settings = _settings(file)
    errors: list[Diagnostic] = []
    found = _entries(model, settings, file, errors)
    if errors:
        raise CompileError(errors)
    if found is None:
        return import_plan(model, name)
    if not found:
        raise _no_config(file, f"nothing in it matches a linear layer of `{type(model).__name__}`")
    names = [name for name, _ in named_modules(model, remove_duplicate=False)]
    ranks = settings.get("autotp_size") or settings.get("tp_size")
    head = f"# {type(model).__name__}: imported from `{file.name}` of DeepSpeed" + (
        f", for {ranks} ranks." if ranks else "."
    )
    lines = [f"  {pattern}: {style}" for pattern, style in patterns_for(found, names)]
    return schema_comment() + "\n".join([head, "version: 1", f"name: {name}", "axis: tp", "modules:", *lines]) + "\n"


def _settings(file: Path) -> dict[str, Any]:
    """What the file says of tensor parallelism: in its own section, and for inference beside it."""
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _no_config(file, f"can't be read: {error.strerror}") from None
    except ValueError as error:
        raise _no_config(file, f"isn't JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(read, dict):
        raise _no_config(file, "isn't a JSON object")
    whole = cast("dict[str, Any]", read)
    section: Any = whole.get("tensor_parallel", whole.get("tp", {}))
    inner = cast("dict[str, Any]", section) if isinstance(section, dict) else {"tp_size": section}
    return {**whole, **inner}


def _entries(
    model: nn.Module, settings: Mapping[str, Any], file: Path, errors: list[Diagnostic]
) -> dict[str, str] | None:
    """A style for each linear layer that is sharded; None if the model's own plan is meant."""
    partition, policy, plan = (settings.get(key) for key in ("partition_config", "injection_policy", "tp_plan"))
    if settings.get("preset_model") and not (
        isinstance(partition, dict) and partition.get("use_default_specs") is False
    ):
        errors.append(
            _unsaid("preset_model", f"the preset {settings['preset_model']!r} is a table inside of DeepSpeed")
        )
    if isinstance(partition, dict):
        return _of_specs(model, cast("dict[str, Any]", partition), errors)
    if isinstance(policy, dict) and policy:
        return _of_policy(model, cast("dict[str, Any]", policy), errors)
    if isinstance(plan, dict) and plan:
        # Its styles are transformers': the same reading of them serves.
        return _of_plan(model, cast("dict[str, Any]", plan), errors)
    if settings.get("autotp_size") or settings.get("tp_size"):
        if brought_plan(model):
            return None
        raise _no_config(file, f"leaves the choice of layers to DeepSpeed, and `{type(model).__name__}` brings no plan")
    raise _no_config(file, "has no `tensor_parallel` section, and no `injection_policy`")


def _of_specs(model: nn.Module, partition: Mapping[str, Any], errors: list[Diagnostic]) -> dict[str, str]:
    specs = [_Spec(number, spec, errors) for number, spec in enumerate(partition.get("layer_specs") or ())]
    kind = getattr(getattr(model, "config", None), "model_type", None)
    found: dict[str, str] = {}
    for name in _linears(model):
        spec = next((spec for spec in specs if spec.matches(f"{name}.weight", kind)), None)
        if spec is not None and spec.style:
            found[name] = spec.style
    return found


class _Spec:
    """One of `layer_specs`."""

    def __init__(self, number: int, spec: Any, errors: list[Diagnostic]) -> None:
        where = f"layer_specs[{number}]"
        fields: dict[str, Any] = cast("dict[str, Any]", spec) if isinstance(spec, dict) else {}
        self._expressions: list[re.Pattern[str]] = []
        self._kinds = [str(kind).lower() for kind in fields.get("model_types") or ()]
        for text in fields.get("patterns") or ():
            try:
                self._expressions.append(re.compile(str(text)))
            except re.error as error:
                errors.append(_unsaid(where, f"{text!r} is no regular expression: {error}"))
        for key in fields.keys() - _SPEC_KEYS if isinstance(spec, dict) else ["(no object)"]:
            errors.append(_unsaid(where, f"nothing is known of `{key}`"))
        self.style = self._style(where, fields, errors)

    def matches(self, name: str, kind: str | None) -> bool:
        """Whether it is for the parameter `name` of such a model."""
        fits = not self._kinds or str(kind).lower() in self._kinds
        return fits and any(expression.match(name) for expression in self._expressions)

    def _style(self, where: str, fields: Mapping[str, Any], errors: list[Diagnostic]) -> str:
        kind = str(fields.get("partition_type", "column")).lower()
        if kind not in ("row", "column", "skip"):
            errors.append(_unsaid(where, f"there is no partition type {kind!r}"))
        if kind not in ("row", "column"):
            return ""
        options = [f"style: {'rowwise' if kind == 'row' else 'colwise'}"]
        packs = _packs(fields.get("shape"), fields.get("partition_dim"), int(kind == "row"))
        if packs is None:
            errors.append(_unsaid(where, f"a plan has packs of the split dim alone, and not {fields.get('shape')}"))
        elif packs:
            options.append(f"packed: {packs}")
        if fields.get("gather_output"):
            options.append("output: replicate")
        return "{" + ", ".join(options) + "}" if len(options) > 1 else options[0].removeprefix("style: ")


def _packs(shape: Any, dim: Any, usual: int) -> str | None:
    """The option `packed` for a shape; "" for none, None if it can't be said."""
    if shape is None:
        return "" if dim in (None, usual) else None
    if dim not in (None, usual) or not isinstance(shape, list):
        return None
    whole = cast("list[Any]", shape)
    if len(whole) != 2 or whole[1 - usual] != -1:
        return None
    sizes = cast("list[Any] | Any", whole[usual])
    if isinstance(sizes, list):
        numbers = cast("list[Any]", sizes)
        fits = bool(numbers) and all(type(size) is int and size > 0 for size in numbers)
        return "{" + ", ".join(f"p{i}: {size}" for i, size in enumerate(numbers)) + "}" if fits else None
    if type(sizes) is not int or sizes < -1 or sizes == 0:
        return None
    return "" if sizes in (-1, 1) else "[" + ", ".join(f"p{i}" for i in range(sizes)) + "]"


def _of_policy(model: nn.Module, policy: Mapping[str, Any], errors: list[Diagnostic]) -> dict[str, str]:
    """Of each layer of such a class: those whose results are summed, and all others beside them."""
    modules, found = dict(named_modules(model, remove_duplicate=False)), dict[str, str]()
    for kind, rows in policy.items():
        ends: list[str] = [rows] if isinstance(rows, str) else list(rows or ())
        inside = [name for name, module in modules.items() if type(module).__name__ == kind.rpartition(".")[2]]
        if not inside:
            errors.append(_unsaid(f"injection_policy[{kind!r}]", f"the model has no module of the class `{kind}`"))
        for name in _linears(model):
            if any(name.startswith(f"{layer}.") for layer in inside):
                row = any(name == end or name.endswith(f".{end}") for end in ends)
                found[name] = "rowwise" if row else "colwise"
        for end in ends:
            if inside and not any(name.endswith(f".{end}") for name in found):
                errors.append(_unsaid(f"injection_policy[{kind!r}]", f"no linear layer is called `{end}`"))
    return found


def _of_plan(model: nn.Module, plan: Mapping[str, Any], errors: list[Diagnostic]) -> dict[str, str]:
    """Of a plan in transformers' words: DeepSpeed reads three styles, from any start of a name."""
    styles = {"colwise": "colwise", "colwise_rep": "{style: colwise, output: replicate}", "rowwise": "rowwise"}
    styles["colwise_gather_output"] = styles["colwise_rep"]
    found: dict[str, str] = {}
    for text, style in plan.items():
        expression = re.compile(r"(.*\.)?" + re.escape(text).replace(r"\*", ".*"))
        if str(style).lower() not in styles:
            errors.append(_unsaid(f"tp_plan[{text!r}]", f"DeepSpeed doesn't read the style {style!r}"))
            continue
        matched = [name for name in _linears(model) if expression.fullmatch(name)]
        found |= {name: styles[str(style).lower()] for name in matched if name not in found}
    return found


def _linears(model: nn.Module) -> Iterator[str]:
    for name, module in named_modules(model, remove_duplicate=False):
        if not isinstance(module, nn.Embedding) and linear_form(module) is not None:
            yield name


def _unsaid(where: str, why: str) -> Diagnostic:
    return Diagnostic("TP216", f"`{where}` has no counterpart: {why}", help=_HELP, subject=where)


def _no_config(file: Path, why: str) -> CompileError:
    way_out = "leave out --from-deepspeed: `tpplan suggest` then finds a plan from the model itself"
    return CompileError.of("TP215", f"`{file}` {why}", help=way_out, subject=str(file))


__all__ = ["import_deepspeed"]
