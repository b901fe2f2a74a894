"""Liger's kernels run in Triton's interpreter, of which this mends what a compiled kernel has, and it hasn't."""

from __future__ import annotations

from typing import Any

from tpplan.kernels.backend import INTERPRETED

collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


def _mend() -> None:
    """Let arguments that are fractions be tensors, functions of libdevice compute, and one thread run at a time."""
    import threading

    import numpy
    import triton.language as tl
    from liger_kernel.ops import geglu, layer_norm, rms_norm
    from triton.runtime import interpreter

    converted: Any = interpreter._implicit_cvt

    def convert(argument: Any) -> Any:
        if not isinstance(argument, float):
            return converted(argument)
        return tl.tensor(interpreter.TensorHandle(numpy.array([argument], dtype=numpy.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = convert
    one_at_a_time, launched = threading.Lock(), interpreter.GridExecutor.__call__

    def launch(*args: Any, **kwargs: Any) -> Any:
        with one_at_a_time:
            return launched(*args, **kwargs)

    interpreter.GridExecutor.__call__ = launch
    geglu.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
    layer_norm.rsqrt = rms_norm.rsqrt = lambda x: tl.rsqrt(x)  # which the interpreter replaces in its module


if INTERPRETED:
    _mend()
