"""GeLU, SwiGLU, GeGLU and bias + GeLU in plain torch, forward and backward: the reference of their kernels.

They are also what the operators run where there is no GPU.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Kind = Literal["none", "tanh", "silu"]
"""GeLU with erf ("none", as torch calls it), GeLU by tanh, or SiLU."""


def value(x: Tensor, kind: Kind) -> Tensor:
    """act(x), elementwise, for any floating dtype and shape.

    GeLU is x·Φ(x), with Φ the normal distribution function; by tanh, x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2. Source:
    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016. SiLU is x·s(x) with the logistic function
    s(x) = 1/(1 + e^-x); the same paper, and Elfwing, Uchibe and Doya, "Sigmoid-Weighted Linear Units", 2017.
    """
    return functional.silu(x) if kind == "silu" else functional.gelu(x, approximate=kind)


def slope(x: Tensor, kind: Kind) -> Tensor:
    """act'(x), elementwise: the derivatives of the formulas of `value`.

    With s the logistic function, s + x·s·(1 - s) for SiLU. Φ + x·φ with the normal density φ for GeLU; by tanh, with s
    at 2·√(2/π)·(x + 0.044715·x³), it is s + x·s·(1 - s)·2·√(2/π)·(1 + 3·0.044715·x²).
    """
    if kind == "silu":
        gate = torch.sigmoid(x)
        return gate * (1 + x * (1 - gate))
    if kind == "tanh":
        scale = 2 * math.sqrt(2 / math.pi)
        gate = torch.sigmoid(scale * (x + 0.044715 * x**3))
        return gate + x * gate * (1 - gate) * scale * (1 + 3 * 0.044715 * x * x)
    below = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    return below + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def forward(x: Tensor, up: Tensor | None, bias: Tensor | None, kind: Kind, dtype: torch.dtype) -> Tensor:
    """The result y = act(x + b)·up, in float32, rounded once.

    With SiLU and `up` it is SwiGLU, with GeLU and `up` GeGLU. Source: Shazeer, "GLU Variants Improve Transformer",
    2020.

    Args:
        x, up: (*leading, columns), float32, bfloat16 or float16; no `up` stands for 1.
        bias: (columns), or None.
        kind: the activation.
        dtype: of the result.
    """
    wide = x.float() if bias is None else x.float() + bias.float()
    y = value(wide, kind)
    return (y if up is None else y * up.float()).to(dtype).contiguous()


def backward(dy: Tensor, x: Tensor, up: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """The gradients dx = dy·up·act'(x) and dup = dy·act(x), of x's and up's dtype.

    Derived from the formula of `forward`.
    """
    wide, g = x.float(), dy.float()
    dx = g * up.float() * slope(wide, kind)
    return dx.to(x.dtype).contiguous(), (g * value(wide, kind)).to(up.dtype).contiguous()


def bias_backward(dy: Tensor, x: Tensor, bias: Tensor | None, kind: Kind) -> tuple[Tensor, Tensor]:
    """The gradients dx = dy·act'(x + b) of x's dtype, and db = Σ dx of unrounded dx, float32."""
    wide = x.float() if bias is None else x.float() + bias.float()
    dx = dy.float() * slope(wide, kind)
    return dx.to(x.dtype).contiguous(), dx.reshape(-1, x.shape[-1] if x.dim() else 1).sum(0)
