"""Linear layers as libraries quantise them: codes, and scales by output, channel, tensor, group or block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

Layer = Callable[[int, int], nn.Module]


class Quantised(nn.Module):
    """Multiplies by the weight that it computes of what it stores, which are buffers unless `PARAMETERS` is set."""

    PARAMETERS: bool = False
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    smooth: Tensor | None
    blocks: Tensor
    table: Tensor
    qweight: Tensor
    qzeros: Tensor
    g_idx: Tensor
    shifts: Tensor
    absmax: Tensor
    input_scale: Tensor
    bias: Tensor

    def store(self, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            if self.PARAMETERS:
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            else:
                self.register_buffer(name, tensor)

    def weight(self, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight(x.dtype))


def int8(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def bytes_of(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def nibbles(codes: Tensor) -> Tensor:
    """Two numbers of each byte, the lower four bits first."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


class Int8(Quantised):
    """Scales by output (`rows`), by input (`columns`), or `one`; `after` the product; a bias that is trained."""

    def __init__(self, inputs: int, outputs: int, by: str = "rows") -> None:
        super().__init__()
        self.by, self.bias = by, nn.Parameter(torch.randn(outputs))  # pyright: ignore
        shape = {"rows": (outputs, 1), "columns": (inputs,), "one": (), "after": (outputs,)}[by]
        self.store(codes=int8(outputs, inputs), scales=torch.rand(shape) / 100)

    def forward(self, x: Tensor) -> Tensor:
        codes = self.codes.to(x.dtype)
        if self.by == "after":
            return functional.linear(x, codes) * self.scales + self.bias
        return functional.linear(x, codes * self.scales, self.bias)


class Int4(Quantised):
    """Two to a byte; a scale and a zero point for each group of inputs."""

    def __init__(self, inputs: int, outputs: int, group: int = 8, zeros: bool = True) -> None:
        super().__init__()
        self.group, scales = group, torch.rand(outputs, inputs // group) / 10
        self.store(codes=bytes_of(outputs, inputs // 2), scales=scales)
        self.zeros = None
        if zeros:
            del self.zeros
            self.store(zeros=bytes_of(*scales.shape) & 15)

    def weight(self, dtype: torch.dtype) -> Tensor:
        codes = nibbles(self.codes)
        groups = codes.view(codes.shape[0], -1, self.group).to(dtype)
        if self.zeros is not None:
            groups = groups - self.zeros[..., None].to(dtype)
        return (groups * self.scales[..., None]).flatten(1)


class Mxfp4(Quantised):
    """As gpt-oss stores it: blocks of a group each, an exponent for each group, numbers from a table."""

    NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    def __init__(self, inputs: int, outputs: int, group: int = 8) -> None:
        super().__init__()
        table = torch.tensor((*self.NUMBERS, *(-number for number in self.NUMBERS)))
        self.register_buffer("table", table, persistent=False)
        exponents = 120 + bytes_of(outputs, inputs // group) % 9
        self.store(blocks=bytes_of(outputs, inputs // group, group // 2), scales=exponents)

    def weight(self, dtype: torch.dtype) -> Tensor:
        numbers = self.table[nibbles(self.blocks).long()].to(dtype)
        return torch.ldexp(numbers, (self.scales.int() - 127)[..., None]).flatten(1)


class Nvfp4(Mxfp4):
    """With scales in float8 and one for all."""

    def __init__(self, inputs: int, outputs: int, group: int = 8) -> None:
        super().__init__(inputs, outputs, group)
        del self.scales
        scales = torch.rand(outputs, inputs // group).to(torch.float8_e4m3fn)
        self.store(scales=scales, input_scale=torch.tensor(0.3))

    def weight(self, dtype: torch.dtype) -> Tensor:
        scales = self.scales.to(dtype) * self.input_scale
        return (self.table[nibbles(self.blocks).long()].to(dtype) * scales[..., None]).flatten(1)


class Float8(Quantised):
    """Scales by `rows`, `one`, `blocks` of 8 by 8, or exponents alone (`e8m0`) by groups of 8 inputs."""

    def __init__(self, inputs: int, outputs: int, by: str = "rows", size: int = 8) -> None:
        super().__init__()
        self.by, self.size = by, size
        shapes = {"rows": (outputs, 1), "one": (), "blocks": (outputs // size, inputs // size)}
        if by == "e8m0":
            scales = (124 + bytes_of(outputs, inputs // size) % 5).view(torch.float8_e8m0fnu)
        else:
            scales = torch.rand(shapes[by]) + 0.1
        self.store(codes=torch.randn(outputs, inputs).to(torch.float8_e4m3fn), scales=scales)

    def weight(self, dtype: torch.dtype) -> Tensor:
        codes, scales = self.codes.to(dtype), self.scales.to(dtype)
        if self.by == "blocks":
            return codes * scales.repeat_interleave(self.size, 0).repeat_interleave(self.size, 1)
        if self.by == "e8m0":
            return (codes.view(codes.shape[0], -1, self.size) * scales[..., None]).flatten(1)
        return codes * scales


class Bytes8(Quantised):
    """Float8 that is stored as bytes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        codes = torch.randn(outputs, inputs).to(torch.float8_e4m3fn).view(torch.uint8)
        self.store(codes=codes, scales=torch.rand(outputs, 1))

    def weight(self, dtype: torch.dtype) -> Tensor:
        return self.codes.view(torch.float8_e4m3fn).to(dtype) * self.scales


class Turned8(Quantised):
    """Int8 that is stored by inputs and outputs, and multiplied with its bias in one operation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.store(codes=int8(inputs, outputs), scales=torch.rand(outputs) / 100, bias=torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.codes.to(x.dtype) * self.scales
        return torch.addmm(self.bias, x.flatten(0, 1), weight).view(*x.shape[:-1], -1)


class Signs(Quantised):
    """One bit for each number, kept as a boolean."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.store(codes=torch.rand(outputs, inputs) > 0.5, scales=torch.rand(outputs, 1) / 10)

    def weight(self, dtype: torch.dtype) -> Tensor:
        return torch.where(self.codes, self.scales, -self.scales).to(dtype)


class Experts8(Quantised):
    """Stacked int8 experts, whose mean is the result."""

    def __init__(self, inputs: int, outputs: int, experts: int = 4) -> None:
        super().__init__()
        self.store(codes=int8(experts, outputs, inputs), scales=torch.rand(experts, outputs, 1) / 100)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.codes.to(x.dtype) * self.scales
        made = torch.bmm(x.flatten(0, 1).expand(len(weights), -1, -1), weights.transpose(1, 2))
        return made.mean(0).view(*x.shape[:2], -1)


class Experts4(Int4):
    """Stacked int4 experts, whose sum is the result."""

    def __init__(self, inputs: int, outputs: int, experts: int = 4) -> None:
        super().__init__(inputs, outputs, zeros=False)
        del self.codes, self.scales
        shape = (experts, outputs, inputs // self.group)
        self.store(codes=bytes_of(experts, outputs, inputs // 2), scales=torch.rand(shape) / 10)

    def forward(self, x: Tensor) -> Tensor:
        groups = nibbles(self.codes).to(x.dtype).unflatten(-1, (-1, self.group)) - 8
        return torch.einsum("bsi,eoi->bso", x, (groups * self.scales[..., None]).flatten(2))


class Gptq(Quantised):
    """Eight to an int32 along the inputs, whose groups `g_idx` names, in order of activations or not."""

    def __init__(self, inputs: int, outputs: int, group: int = 8, ordered: bool = True) -> None:
        super().__init__()
        groups = torch.arange(inputs) // group
        words = partial(torch.randint, -(2**31), 2**31, dtype=torch.int32)
        self.register_buffer("shifts", torch.arange(0, 32, 4, dtype=torch.int32), persistent=False)
        self.store(
            qweight=words((inputs // 8, outputs)), qzeros=words((inputs // group, outputs // 8)),
            scales=torch.rand(inputs // group, outputs) / 10,
            g_idx=(groups if ordered else groups[torch.randperm(inputs)]).int(), bias=torch.randn(outputs),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        zeros = (self.qzeros[..., None] >> self.shifts).flatten(1) & 15
        codes = (self.qweight[:, None] >> self.shifts[:, None]).flatten(0, 1) & 15
        groups = self.g_idx.long()
        return x @ ((codes - zeros[groups]).to(x.dtype) * self.scales[groups]) + self.bias


class Nf4(Quantised):
    """As bitsandbytes stores it: flat, row after row, with a scale for each block of the flat numbers."""

    def __init__(self, inputs: int, outputs: int, block: int = 16) -> None:
        super().__init__()
        self.shape, self.block = (outputs, inputs), block
        self.register_buffer("table", torch.linspace(-1, 1, 16))
        self.store(codes=bytes_of(outputs * inputs // 2, 1), absmax=torch.rand(outputs * inputs // block))

    def weight(self, dtype: torch.dtype) -> Tensor:
        numbers = self.table[nibbles(self.codes).flatten().long()].to(dtype)
        return (numbers.view(-1, self.block) * self.absmax[:, None]).view(self.shape)


class W8A8(Quantised):
    """Rounds its input, too: by `token`, by `tensor`, with a `static` scale, or after `smooth` factors by input."""

    def __init__(self, inputs: int, outputs: int, by: str = "token", kernel: bool = False) -> None:
        super().__init__()
        self.by, self.kernel, self.smooth = by, kernel, None
        self.store(codes=int8(outputs, inputs), scales=torch.rand(outputs) / 100)
        if by == "static":
            self.store(input_scale=torch.tensor(0.02))
        if by == "smooth":
            del self.smooth
            self.store(smooth=torch.rand(inputs) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        given = x if self.smooth is None else x / self.smooth
        rows = given.reshape(-1, given.shape[-1])
        if self.by == "static":
            scale = self.input_scale
        else:
            largest = rows.abs().max() if self.by == "tensor" else rows.abs().amax(-1, keepdim=True)
            scale = largest.clamp(min=1e-5) / 127
        rounded = (rows / scale).round().clamp(-128, 127)
        if self.kernel:
            product = torch.ops.aten._int_mm.default(rounded.to(torch.int8), self.codes.t()).to(x.dtype)
        else:
            product = rounded @ self.codes.to(x.dtype).t()
        return (product * scale * self.scales).view(*x.shape[:-1], -1)


class Scaled8(Quantised):
    """Float8 times float8 with a scale for each row of both (`rows`), for each tensor (`one`), or `static`."""

    def __init__(self, inputs: int, outputs: int, by: str = "rows", listed: bool = False) -> None:
        super().__init__()
        self.by, self.listed, rows = by, listed, by == "rows"
        codes = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
        self.store(codes=codes, scales=torch.rand((outputs, 1) if rows else ()) / 100)
        if by == "static":
            self.store(input_scale=torch.tensor(0.02))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if self.by == "static":
            scale = self.input_scale
        else:
            largest = rows.abs().amax(-1, keepdim=True) if self.by == "rows" else rows.abs().max()
            scale = (largest.clamp(min=1e-5) / 448).float()
        codes = (rows / scale).to(torch.float8_e4m3fn)
        if self.listed:
            kind = functional.ScalingType.RowWise if self.by == "rows" else functional.ScalingType.TensorWise
            given = (codes, self.codes.t(), scale, kind, self.scales.t(), kind)
            made = functional.scaled_mm(*given, output_dtype=torch.float32)
        else:
            given = (codes, self.codes.t(), scale, self.scales.t())
            made = torch.ops.aten._scaled_mm.default(*given, out_dtype=torch.float32)
        return made.to(x.dtype).unflatten(0, x.shape[:-1])


class Apart(Quantised):
    """As LLM.int8(): inputs with large entries aren't rounded."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.store(codes=int8(outputs, inputs), scales=torch.rand(outputs, 1) / 100)

    def forward(self, x: Tensor) -> Tensor:
        weight, large = self.codes.to(x.dtype) * self.scales, (x.abs() > 2).flatten(0, 1).any(0)
        rounded = torch.where(large, 0, x)
        scale = rounded.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
        product = functional.linear((rounded / scale).round(), weight) * scale
        return product + functional.linear(torch.where(large, x, 0), weight)


class Mlp(nn.Module):
    """Two layers of a kind."""

    def __init__(self, layer: Layer, width: int = 32, inner: int = 64) -> None:
        super().__init__()
        self.up, self.down = layer(width, inner), layer(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


EXACT: dict[str, Layer] = {
    "int8, a scale by output": Int8,
    "int8, a scale by input": partial(Int8, by="columns"),
    "int8, one scale": partial(Int8, by="one"),
    "int8, scaled after the product": partial(Int8, by="after"),
    "int8, transposed, with a bias": Turned8,
    "int4 in groups, two to a byte": Int4,
    "signs and a scale": Signs,
    "int4 in groups, symmetric": partial(Int4, zeros=False),
    "MXFP4": Mxfp4,
    "NVFP4": Nvfp4,
    "float8, a scale by output": Float8,
    "float8, one scale": partial(Float8, by="one"),
    "float8 in blocks": partial(Float8, by="blocks"),
    "float8, stored as bytes": Bytes8,
    "MXFP8 (e8m0 scales)": partial(Float8, by="e8m0"),
    "GPTQ": Gptq,
    "GPTQ, in order of activations": partial(Gptq, ordered=False),
    "int8 experts, stacked": Experts8,
    "int4 experts, stacked": Experts4,
    "W8A8, static": partial(W8A8, by="static"),
    "float8 times float8, static": partial(Scaled8, by="static"),
    "`scaled_mm`, static": partial(Scaled8, by="static", listed=True),
}
"""By the names of docs/quantisation.md: what sends nothing more than a plain layer does."""
WITH_MAXIMA: dict[str, Layer] = {
    "W8A8, by token": W8A8,
    "W8A8, by token, in int8": partial(W8A8, kernel=True),
    "W8A8, by tensor": partial(W8A8, by="tensor"),
    "SmoothQuant": partial(W8A8, by="smooth"),
    "LLM.int8()": Apart,
    "float8 times float8, by token": Scaled8,
    "float8 times float8, by tensor": partial(Scaled8, by="one"),
    "`scaled_mm`, by token": partial(Scaled8, listed=True),
    "`scaled_mm`, by tensor": partial(Scaled8, by="one", listed=True),
}
"""What sends the largest entries of a row-wise layer's input as well."""
