"""Formats of quantised checkpoints: which stored tensors a weight consists of, and how its numbers are packed.

in:  a checkpoint's tensors, and what its config says of their quantisation
out: the same with one tensor for each weight, which answers with numbers

A new format is one more entry of `FORMATS`. What is taken from shapes isn't taken from configs: those are often wrong
about single layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from tpplan.checkpoint.assembled import Source, Sources
from tpplan.checkpoint.dequantised import Dequantised, Ingredient, Picked
from tpplan.checkpoint.files import CheckpointError, finding, unreadable
from tpplan.checkpoint.header import Stored
from tpplan.checkpoint.meter import Meter
from tpplan.checkpoint.reading import Files
from tpplan.runtime.parameters.pieces import whole_box

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGNED = (*_E2M1, *(-number for number in _E2M1))
_BYTES = [(_SIGNED[byte & 15], _SIGNED[byte >> 4]) for byte in range(256)]
_PAIRS = torch.tensor(_BYTES, dtype=torch.float32, device="cpu").view(torch.int64).flatten()
"""The two numbers in a byte, as one: a pair is looked up ten times faster so."""
_SHOWN = 20
_FLOATS = {"F16", "BF16", "F32", "F64"}
_FLOAT8 = {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
_EXPONENTS = {"U8", "F8_E8M0"}
_BITS = (2, 4, 8)
_COMPLETE = (
    "complete the checkpoint: copy or download it again; or load the folder that it was quantised from, if the library "
    "that has written it stores weights otherwise"
)
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Of eight columns, where AWQ has each in a word of 32 bits."""
_USUAL_BLOCK = (128, 128)
"""Of `fp8`, where the config doesn't say it."""


class _MisfitError(Exception):
    """The stored tensors of a weight don't fit together; why."""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """What is stored of a weight.

    Attributes:
        name: the weight's.
        codes, scales: the tensors.
        others: further ones, by what follows the weight's name in theirs.
        config: what the checkpoint's config says of its quantisation.
        numbers: reads the few numbers of a tensor.
    """

    name: str
    codes: Stored
    scales: Stored
    others: Mapping[str, Stored]
    config: Mapping[str, Any]
    numbers: Callable[[Stored], Tensor]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How checkpoints of a kind store weights.

    Attributes:
        scales: patterns of the scales' names, each with what it makes of the weight's, but for its `leaf`.
        codes: what may follow that name in the one of its codes.
        others: the same of further tensors.
        idle: a pattern of the names that a model without quantisation has no use for.
        weight: the weight that some stored tensors make; raises a `_MisfitError` if they make none.
        refusal: why a config of this kind can't be dequantised; None if it can.
        leaf: what ends the name of a weight, and of no tensor that is stored of it.
    """

    scales: tuple[tuple[str, str], ...]
    codes: tuple[str, ...]
    others: tuple[str, ...]
    idle: str
    weight: Callable[[StoredWeight], Dequantised]
    refusal: Callable[[Mapping[str, Any]], str | None] = lambda config: None
    leaf: str = ""


def dequantised(tensors: Sources, config: Mapping[str, Any], meter: Meter) -> dict[str, Source]:
    """A quantised checkpoint's tensors, with one for each weight in place of its codes and scales.

    Args:
        tensors: by their names in the checkpoint.
        config: the `quantization_config`, of a `quant_method` in `FORMATS`.
        meter: counts what is read: shapes that are stored as tensors.

    Raises:
        CheckpointError: TP121, with every weight whose parts don't fit together.
    """
    kind = FORMATS[config["quant_method"]]
    left, found, wrong = dict(tensors), dict[str, Source](), list[str]()
    with Files(meter) as files:

        def numbers(stored: Stored) -> Tensor:
            held = torch.empty(stored.shape, dtype=stored.torch_dtype, device="cpu")
            try:
                files.fill(held, whole_box(stored.shape), stored)
            except OSError as error:
                raise unreadable(stored.path, error) from None
            return held.flatten().long()

        for place in tensors:
            name = next((re.sub(p, weight, place) for p, weight in kind.scales if re.fullmatch(p, place)), None)
            codes = next((name + more for more in kind.codes if name + more in tensors), None) if name else None
            if name is None or codes not in left or tensors[codes].dtype in _FLOATS:
                continue
            others = {more: left.pop(name + more) for more in kind.others if name + more in tensors}
            members = [left.pop(codes), left.pop(place), *others.values()]
            if not all(isinstance(held, Stored) and not held.pickled for held in members):
                wrong.append(f"`{name}` is in chunks of torch.distributed.checkpoint, not in safetensors files")
                continue
            stored, name = cast("list[Stored]", members), name + kind.leaf
            parts = StoredWeight(
                name, stored[0], stored[1], dict(zip(others, stored[2:], strict=True)), config, numbers
            )
            try:
                found[name] = kind.weight(parts)
            except _MisfitError as error:
                wrong.append(f"`{name}`: {error}")
    plain = {name: held for name, held in left.items() if not re.fullmatch(kind.idle, name)}
    wrong += [f"`{name}` {fault}" for name, held in plain.items() if (fault := _fault(kind, name, held, found))]
    if wrong:
        message = f"{len(wrong)} of the checkpoint's quantised weights can't be dequantised"
        notes = wrong if len(wrong) <= _SHOWN else [*wrong[:_SHOWN], f"and {len(wrong) - _SHOWN} more"]
        raise CheckpointError([finding(message, _COMPLETE, *notes)])
    return found | plain


def _fault(kind: WeightFormat, name: str, held: Source, made: Sources) -> str | None:
    """Why a tensor that is no part of a weight should be one; None if it stands for itself."""
    owner = re.sub(r"(\.weight)_[^.]+", r"\1", name)
    if owner in made:
        return f"is there beside the codes and scales of `{owner}`, which have no use for it"
    if held.dtype in _FLOAT8 or any(more and name.endswith(more) for more in kind.codes):
        return "has no scales"
    unused = any(re.fullmatch(p, name) for p, _ in kind.scales if not p.endswith(r"\.scale"))
    return "has no codes" if unused else None


# --- The weights ------------------------------------------------------------------------------------------------------


def _fp8_weight(parts: StoredWeight) -> Dequantised:
    """Float8 with scales in blocks; or two numbers of four bits to a byte, as experts may have them.

    The blocks are the config's, where as many scales are there. Where the last block of a dim isn't full, transformers
    divides the dim evenly when it dequantises, and by the config's blocks when it doesn't.
    """
    codes, blocks = parts.codes, parts.config.get("weight_block_size", _USUAL_BLOCK)
    decode, count = (_pairs, 2) if codes.dtype == "I8" else (partial(_cast, dtype=torch.float32), 1)
    ingredient = _codes(codes, _FLOAT8 | {"I8"}, decode, count)
    shape = _numbers_of(ingredient)
    scales = _grid(shape, parts.scales, _scale_decoder(parts.scales), [blocks or ()])
    return _made(parts.name, shape, ingredient, scales)


def _mxfp4_weight(parts: StoredWeight) -> Dequantised:
    """Groups of 32 inputs, two numbers to a byte; the model has inputs before outputs."""
    codes, scales = parts.codes, parts.scales
    if scales.dtype != "U8" or len(codes.shape) < 3:
        raise _MisfitError(f"{_told(codes)} and {_told(scales)}, which should be bytes in groups")
    if codes.shape[:-1] != scales.shape:
        raise _MisfitError(f"{_told(scales)}; {_told(codes)}, and a scale for each group is {list(codes.shape[:-1])}")
    *outer, groups, width = codes.shape
    ingredient = _codes(replace(codes, shape=(*outer, groups * width)), {"U8"}, _pairs, 2)
    shape = _numbers_of(ingredient)
    order = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
    return _made(parts.name, shape, ingredient, _grid(shape, scales, _powers), order=order)


def _compressed_weight(parts: StoredWeight) -> Dequantised:
    """Integers or float8 as they are, or integers of 2, 4 or 8 bits in words of 32; in the scales' dtype."""
    codes, scales, others = parts.codes, parts.scales, parts.others
    dtype = scales.torch_dtype
    if scales.dtype not in _FLOATS or dtype is None:
        raise _MisfitError(f"{_told(scales)}, which should be floating-point numbers")
    if "_g_idx" in others:
        raise _MisfitError("its groups are in the order of activations (`weight_g_idx`)")
    zeros, bits = others.get("_zero_point"), 0
    if codes.name.endswith("_packed"):
        shape, bits = _packed_shape(parts)
        unpack = partial(_integers, bits=bits, dtype=dtype, least=-(1 << bits - 1))
        ingredient = _codes(codes, {"I32"}, partial(unpack, dim=-1), 32 // bits)
    else:
        shape, ingredient = codes.shape, _codes(codes, _kinds_of(parts.config), partial(_cast, dtype=dtype))
    blocks = [_blocks_of(held) for held in _schemes(parts.config)]
    made = [_grid(shape, scales, partial(_cast, dtype=dtype), blocks)]
    if zeros is not None and bits and zeros.dtype == "I32":
        of_rows, count = made[0].steps[-1], 32 // bits
        unpack = partial(_integers, bits=bits, dim=-2, dtype=dtype, least=-(1 << bits - 1))
        expected = (*shape[:-2], -(-shape[-2] // count), -(-shape[-1] // of_rows))
        if zeros.shape != expected:
            raise _MisfitError(f"{_told(zeros)}, which should be {list(expected)}")
        made.append(Ingredient(zeros, (*[1] * (len(shape) - 2), count, of_rows), unpack))
    elif zeros is not None:
        made.append(_grid(shape, zeros, partial(_cast, dtype=dtype), blocks))
    return _made(parts.name, shape, ingredient, *made)


def _linear_weight(parts: StoredWeight, packed: int, more: int = 0, order: Sequence[int] = ()) -> Dequantised:
    """Integers with zero points in words of 32 bits, inputs before outputs, in groups of inputs; in the scales' dtype.

    Args:
        parts: what is stored.
        packed: the dim along which codes lie in words; zero points do along outputs.
        more: what is added to stored zero points.
        order: where the numbers of a word lie in it, if not one after the other.
    """
    codes, scales, others = parts.codes, parts.scales, parts.others
    bits, dtype = parts.config.get("bits", 4), scales.torch_dtype
    if scales.dtype not in _FLOATS or dtype is None or len(scales.shape) != 2:
        raise _MisfitError(f"{_told(scales)}, which should be floating-point numbers of groups and outputs")
    if codes.dtype != "I32" or len(codes.shape) != 2 or ".qzeros" not in others:
        raise _MisfitError(f"{_told(codes)}, which should be I32 of two dims, with `qzeros` beside it")
    unpack = partial(_integers, bits=bits, dtype=dtype, order=order)
    count, zeros = 32 // bits, others[".qzeros"]
    ingredient = Ingredient(codes, (count, 1) if packed == -2 else (1, count), partial(unpack, dim=packed))
    shape = _numbers_of(ingredient)
    size: Any = parts.config.get("group_size")
    blocks = [(size, 1) if type(size) is int and size > 0 else ()]
    made = [_grid(shape, scales, partial(_cast, dtype=dtype), blocks)]
    expected = (scales.shape[0], -(-shape[1] // count))
    if zeros.dtype != "I32" or zeros.shape != expected:
        raise _MisfitError(f"{_told(zeros)}, which should be I32 of shape {list(expected)}")
    made.append(Ingredient(zeros, (made[0].steps[0], count), partial(unpack, dim=-1, more=more)))
    if ".g_idx" in others:
        groups = parts.numbers(others[".g_idx"])
        if len(groups) != shape[0] or not bool(((groups >= 0) & (groups < scales.shape[0])).all()):
            raise _MisfitError(f"{_told(others['.g_idx'])}, which isn't one of {scales.shape[0]} groups for each input")
        if not torch.equal(groups, torch.arange(shape[0], device="cpu") // made[0].steps[0]):
            made = [Picked(held.stored, (1, held.steps[1]), held.decode, groups) for held in made]
    return _made(parts.name, shape, ingredient, *made, order=(1, 0))


def _gptq_weight(parts: StoredWeight) -> Dequantised:
    """Zero points are stored less one, but for `gptq_v2`."""
    if parts.config.get("desc_act") and ".g_idx" not in parts.others:
        raise _MisfitError(
            f"{_told(parts.scales)}, of groups in the order of activations (`desc_act`) without a `g_idx`"
        )
    return _linear_weight(parts, -2, 0 if parts.config.get("checkpoint_format") == "gptq_v2" else 1)


def _made(name: str, shape: Sequence[int], *ingredients: Ingredient, order: Sequence[int] = ()) -> Dequantised:
    order = tuple(order) or tuple(range(len(shape)))
    return Dequantised(name, tuple(shape[dim] for dim in order), ingredients, order)


# --- Their parts ------------------------------------------------------------------------------------------------------


def _codes(stored: Stored, kinds: set[str], decode: Callable[[Tensor], Tensor], count: int = 1) -> Ingredient:
    """Codes of some dtypes, of which so many lie in one entry, along the last dim."""
    if stored.dtype not in kinds or not stored.shape:
        raise _MisfitError(f"{_told(stored)}, which should be {' or '.join(sorted(kinds)) or 'integers or float8'}")
    return Ingredient(stored, (*[1] * (len(stored.shape) - 1), count), decode)


def _numbers_of(codes: Ingredient) -> tuple[int, ...]:
    return tuple(count * step for count, step in zip(codes.stored.shape, codes.steps, strict=True))


def _grid(
    shape: Sequence[int], stored: Stored, decode: Callable[[Tensor], Tensor], every: Sequence[Sequence[int]] = ((),)
) -> Ingredient:
    """Scales or zero points of blocks: some of the config's, where as many are there, else of equal ones."""
    counts = stored.shape if math.prod(stored.shape) != 1 else (1,) * len(shape)
    blocks = next((sizes for sizes in every if sizes and _fit(shape, counts, sizes)), every[0])
    wanted = (*[0] * (len(shape) - len(blocks)), *blocks) if len(blocks) <= len(shape) else (0,) * len(shape)
    steps: list[int] = []
    for whole, count, block in zip(shape, counts, wanted, strict=False):
        if block and count == -(-whole // block):
            steps.append(block)
        elif count and whole % count == 0:
            steps.append(max(whole // count, 1))
    if len(counts) != len(shape) or len(steps) != len(shape):
        of_blocks = f" in blocks of {'×'.join(map(str, blocks))}" if blocks else ""
        raise _MisfitError(f"{_told(stored)}, which isn't a number for each block of {list(shape)}{of_blocks}")
    return Ingredient(replace(stored, shape=counts), tuple(steps), decode)


def _fit(shape: Sequence[int], counts: Sequence[int], blocks: Sequence[int]) -> bool:
    """Whether so many blocks of these sizes, along the last dims, hold a shape."""
    last = zip(reversed(shape), reversed(counts), reversed(blocks), strict=False)
    return all(count == -(-whole // size) for whole, count, size in last)


def _packed_shape(parts: StoredWeight) -> tuple[tuple[int, ...], int]:
    """The shape of packed integers, and their bits: those of the config's that fill the words."""
    codes, every = parts.codes, _bits_of(parts.config)
    if "_shape" not in parts.others:
        raise _MisfitError(f"there is no `{parts.name}_shape`, which says how many numbers `{codes.name}` holds")
    shape = tuple(cast("list[int]", parts.numbers(parts.others["_shape"]).tolist()))
    fit = [bits for bits in every if shape[1:] and codes.shape == (*shape[:-1], -(-shape[-1] * bits // 32))]
    if codes.dtype != "I32" or len(fit) != 1 or fit[0] not in _BITS:
        bits = " or ".join(map(str, sorted(every))) or "no"
        raise _MisfitError(
            f"{_told(codes)}, which isn't {list(shape)} at {bits} bits each; {', '.join(map(str, _BITS))} can be read"
        )
    return shape, fit[0]


def _told(stored: Stored) -> str:
    return f"`{stored.name}` is {stored.dtype} of shape {list(stored.shape)}"


# --- What is stored, as numbers ---------------------------------------------------------------------------------------


def _cast(held: Tensor, dtype: torch.dtype) -> Tensor:
    if held.itemsize > 1 or not held.is_floating_point():
        return held.to(dtype)
    return _look_up(_all_of(held.dtype, dtype), held).view(held.shape)


@cache
def _all_of(kind: torch.dtype, dtype: torch.dtype) -> Tensor:
    """The 256 numbers of a dtype of one byte; to look them up takes half of the time of a cast."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(kind).to(dtype)


def _look_up(table: Tensor, held: Tensor) -> Tensor:
    return table.index_select(0, held.view(torch.uint8).flatten().int())


def _pairs(held: Tensor) -> Tensor:
    """Two numbers of four bits (E2M1) to a byte, the lower bits first."""
    return _look_up(_PAIRS, held).view(torch.float32).view(*held.shape[:-1], -1)


def _powers(held: Tensor) -> Tensor:
    """Powers of two by their exponents."""
    return torch.exp2(held.to(torch.float32) - 127)


def _scale_decoder(scales: Stored) -> Callable[[Tensor], Tensor]:
    if scales.dtype not in _FLOATS | _EXPONENTS:
        raise _MisfitError(f"{_told(scales)}, which should be floating-point numbers or exponents")
    return _powers if scales.dtype == "U8" else partial(_cast, dtype=torch.float32)


def _integers(
    held: Tensor, bits: int, dim: int, dtype: torch.dtype, least: int = 0, more: int = 0, order: Sequence[int] = ()
) -> Tensor:
    """Integers of so many bits of each word, from the lowest ones on or in another order, as distances from `least`."""
    places = torch.tensor(order or range(32 // bits), dtype=torch.int32, device="cpu")
    numbers = (held.movedim(dim, -1)[..., None] >> places * bits) + more & (1 << bits) - 1
    return (numbers.flatten(-2) + least).movedim(-1, dim).to(dtype)


# --- Configs ----------------------------------------------------------------------------------------------------------


def _groups(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of a config of compressed-tensors."""
    groups: Any = config.get("config_groups")
    every = [*cast("dict[str, Any]", groups).values()] if isinstance(groups, dict) else []
    return [cast("dict[str, Any]", group) for group in every if isinstance(group, dict)]


def _schemes(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What they say of weights."""
    held = [group.get("weights") for group in _groups(config)]
    return [cast("dict[str, Any]", weights) for weights in held if isinstance(weights, dict)]


def _bits_of(config: Mapping[str, Any]) -> set[int]:
    every = [held.get("num_bits", 8) for held in _schemes(config) if held.get("type", "int") == "int"]
    return {bits for bits in every if isinstance(bits, int)}


def _blocks_of(scheme: Mapping[str, Any]) -> Sequence[int]:
    size: Any = scheme.get("group_size")
    return scheme.get("block_structure") or ((1, size) if isinstance(size, int) and size > 0 else ())


def _kinds_of(config: Mapping[str, Any]) -> set[str]:
    """The dtypes that codes have which aren't packed: a float8's bits aren't read as an integer, nor the other way."""
    types = [held.get("type", "int") for held in _schemes(config)]
    return ({"I8"} if "int" in types else set[str]()) | (_FLOAT8 if "float" in types else set[str]())


def _compressed_refusal(config: Mapping[str, Any]) -> str | None:
    formats = [config.get("format"), *(group.get("format") for group in _groups(config))]
    strange = dict.fromkeys(str(held) for held in formats if held is not None and str(held) not in _COMPRESSED)
    sparse: Any = config.get("sparsity_config") or {}
    sparse = cast("dict[str, Any]", sparse).get("format", "dense") if isinstance(sparse, dict) else sparse
    if strange:
        return f"in the format {' and '.join(strange)}"
    if not _schemes(config):
        return "by a config that names no scheme (`config_groups`)"
    if not all(_is_block(held.get("block_structure")) for held in _schemes(config)):
        return "by a config with a `block_structure` that isn't two sizes"
    if sparse != "dense":
        return f"sparse, in the format {sparse}"
    return "with weights that are rotated (`transform_config`)" if config.get("transform_config") else None


def _fp8_refusal(config: Mapping[str, Any]) -> str | None:
    fits = _is_block(config.get("weight_block_size"))
    return None if fits else "by a config with a `weight_block_size` that isn't two sizes"


def _linear_refusal(config: Mapping[str, Any], field: str, known: Sequence[str], bits: Sequence[int]) -> str | None:
    said = config.get(field) or known[0]
    if config.get("bits", 4) not in bits or config.get("pack_dtype", "int32") != "int32":
        return f"in {config.get('bits', 4)} bits, in words of {config.get('pack_dtype', 'int32')}"
    return None if said in known else f"in the format {said}"


def _is_block(sizes: Any) -> bool:
    if sizes is None:
        return True
    return isinstance(sizes, list) and [type(n) is int and n > 0 for n in cast("list[Any]", sizes)] == [True, True]


_COMPRESSED = {"dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision"}

_FP8 = WeightFormat(
    scales=(
        (r"(.+)_scale_inv", r"\1"),
        (r"(.+)\.qscale_weight", r"\1.weight"),
        (r"(.+)\.scale", r"\1.weight"),
        (r"(.+\.weight)_scale", r"\1"),
    ),
    codes=("",),
    others=(),
    idle=r".+[._](activation_scale|qscale_act|input_scale(_ub)?|(k|v|kv)_scale)",
    weight=_fp8_weight,
    refusal=_fp8_refusal,
)
FORMATS: Mapping[str, WeightFormat] = {
    "fp8": _FP8,
    "fbgemm_fp8": _FP8,
    "mxfp4": WeightFormat(
        scales=((r"(.+)_scales", r"\1"),),
        codes=("_blocks",),
        others=(),
        idle=r"(?!)",
        weight=_mxfp4_weight,
    ),
    "compressed-tensors": WeightFormat(
        scales=((r"(.+\.weight)_scale", r"\1"),),
        codes=("_packed", ""),
        others=("_zero_point", "_shape", "_g_idx"),
        idle=r".+[._](input|output|[qkv])_(global_)?(scale|zero_point)",
        weight=_compressed_weight,
        refusal=_compressed_refusal,
    ),
    "gptq": WeightFormat(
        scales=((r"(.+)\.scales", r"\1"),),
        codes=(".qweight",),
        others=(".qzeros", ".g_idx"),
        idle=r"(?!)",
        weight=_gptq_weight,
        refusal=partial(_linear_refusal, field="checkpoint_format", known=("gptq", "gptq_v2"), bits=_BITS),
        leaf=".weight",
    ),
    "awq": WeightFormat(
        scales=((r"(.+)\.scales", r"\1"),),
        codes=(".qweight",),
        others=(".qzeros",),
        idle=r"(?!)",
        weight=partial(_linear_weight, packed=-1, order=_PLACES),
        refusal=partial(_linear_refusal, field="version", known=("gemm",), bits=(4,)),
        leaf=".weight",
    ),
}
"""By `quant_method`."""


__all__ = ["FORMATS", "WeightFormat", "dequantised"]
