"""Triton kernels for what tensor-parallel models spend memory bandwidth on, each with its torch reference.

Every function runs anywhere: on a GPU as a kernel, elsewhere, or without triton, as torch's own operators.
`tpplan.kernels.backend.choose` says which, and why. All are differentiable, once; deterministic; and torch.library
operators, so that torch.compile, torch.export and DTensor know them.
"""

from tpplan.kernels.activations import bias_gelu, geglu, gelu, swiglu
from tpplan.kernels.backend import Backend, available, choose
from tpplan.kernels.cross_entropy import cross_entropy
from tpplan.kernels.kernel_errors import KernelArgumentError
from tpplan.kernels.norms import layer_norm, rms_norm
from tpplan.kernels.residual_norms import residual_layer_norm, residual_rms_norm

__all__ = [
    "Backend",
    "KernelArgumentError",
    "available",
    "bias_gelu",
    "choose",
    "cross_entropy",
    "geglu",
    "gelu",
    "layer_norm",
    "residual_layer_norm",
    "residual_rms_norm",
    "rms_norm",
    "swiglu",
]
