"""Which implementation a call takes, what it does without a GPU or without triton, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tpplan import kernels
from tpplan.kernels import argument_checks as arguments
from tpplan.kernels import backend
from tpplan.plan import TpplanError

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")


@no_gpu
def test_without_a_gpu_torch_is_taken_and_the_reason_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "TRITON_INSTALLED", True)
    monkeypatch.setattr(backend, "INTERPRETED", False)
    assert kernels.available("cpu") == kernels.Backend("torch", "no GPU")
    assert kernels.choose("gelu", "cpu", backend="triton") == kernels.Backend("torch", "no GPU")


def test_without_triton_torch_is_taken_and_the_reason_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "TRITON_INSTALLED", False)
    assert kernels.choose("gelu", "cuda").reason == "triton isn't installed"
    assert not backend.runs_kernels(torch.empty(1))


@pytest.fixture
def triton_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "TRITON_INSTALLED", True)
    monkeypatch.setattr(backend, "INTERPRETED", False)


@pytest.mark.usefixtures("triton_there")
def test_on_a_gpu_the_size_decides_for_auto_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "minimum_elements", lambda *asked: 1000)
    small = 999
    assert kernels.choose("layer_norm", "cuda", elements=small).name == "torch"
    assert "of 999 elements; it pays from 1,000" in kernels.choose("layer_norm", "cuda", elements=small).reason
    assert kernels.choose("layer_norm", "cuda", elements=small + 1).name == "triton"
    assert kernels.choose("layer_norm", "cuda", elements=small, backend="triton").name == "triton"
    assert kernels.choose("layer_norm", "cuda", elements=small + 1, backend="torch").reason == "asked for"


@pytest.mark.usefixtures("triton_there")
def test_a_dtype_without_a_kernel_takes_torch() -> None:
    assert "float64" in kernels.choose("gelu", "cuda", torch.float64, backend="triton").reason


def test_the_interpreter_takes_cpu_tensors_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "TRITON_INSTALLED", True)
    monkeypatch.setattr(backend, "INTERPRETED", True)
    assert kernels.choose("layer_norm", "cpu", elements=1).name == "triton"


def test_importing_and_calling_need_no_triton() -> None:
    program = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == 'triton' else found(name, *more)
import torch
before = 'triton' in sys.modules
from tpplan import kernels
x = torch.randn(3, 8, requires_grad=True)
kernels.layer_norm(x, (8,), backend='triton').sum().backward()
assert before or 'triton' not in sys.modules
print(kernels.available('cpu').reason, '|', kernels.choose('gelu', 'cuda', backend='triton').name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "triton isn't installed | torch"


def _torch_calls() -> dict[str, tuple[Any, Any]]:
    """Each function, and what it is on a CPU, in torch's operators."""
    weight, bias = torch.randn(8), torch.randn(8)
    target = torch.tensor([1, 5, -100])
    f = functional
    return {
        "layer_norm": (
            lambda x: kernels.layer_norm(x, (8,), weight, bias),
            lambda x: f.layer_norm(x, (8,), weight, bias),
        ),
        "rms_norm": (lambda x: kernels.rms_norm(x, (8,), weight), lambda x: f.rms_norm(x, (8,), weight)),
        "gemma": (
            lambda x: kernels.rms_norm(x, (8,), weight, 1e-6, offset=1.0),
            lambda x: f.rms_norm(x, (8,), 1 + weight, 1e-6),
        ),
        "llama": (
            lambda x: kernels.rms_norm(x, (8,), weight, 1e-6, cast="before"),
            lambda x: weight * f.rms_norm(x, (8,), None, 1e-6),
        ),
        "residual_layer_norm": (
            lambda x: kernels.residual_layer_norm(x, x.sin(), (8,), weight)[0],
            lambda x: f.layer_norm(x + x.sin(), (8,), weight),
        ),
        "residual_rms_norm": (
            lambda x: kernels.residual_rms_norm(x, x.sin(), (8,), weight)[0],
            lambda x: f.rms_norm(x + x.sin(), (8,), weight),
        ),
        "gelu": (lambda x: kernels.gelu(x, "tanh"), lambda x: f.gelu(x, approximate="tanh")),
        "bias_gelu": (lambda x: kernels.bias_gelu(x, bias), lambda x: f.gelu(x + bias)),
        "swiglu": (lambda x: kernels.swiglu(x, x.cos()), lambda x: f.silu(x) * x.cos()),
        "geglu": (lambda x: kernels.geglu(x, x.cos()), lambda x: f.gelu(x) * x.cos()),
        "cross_entropy": (lambda x: kernels.cross_entropy(x, target), lambda x: f.cross_entropy(x, target)),
    }


@pytest.mark.parametrize("name", list(_torch_calls()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_on_the_cpu_a_function_is_what_torch_has(name: str, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        ours, stock = _torch_calls()[name]
        x = torch.randn(3, 8, requires_grad=True)
        torch.testing.assert_close(ours(x), stock(x))
        (mine,), (its,) = torch.autograd.grad(ours(x).sum(), x), torch.autograd.grad(stock(x).sum(), x)
        torch.testing.assert_close(mine, its)
    finally:
        torch.set_default_dtype(torch.float32)


def test_second_derivatives_are_there_in_torchs_operators() -> None:
    x = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: kernels.layer_norm(x, (8,), backend="torch"), x)


_UNCHECKED: Any = kernels
MISTAKES: dict[str, tuple[Any, str]] = {
    "normalized_shape": (lambda x: _UNCHECKED.layer_norm(x, (7,)), r"\[7\].*last dims.*\[3, 8\]"),
    "no normalized_shape": (lambda x: _UNCHECKED.layer_norm(x, ()), "last dims"),
    "too many dims": (lambda x: _UNCHECKED.rms_norm(x, (1, 3, 8)), "last dims"),
    "weight": (lambda x: _UNCHECKED.layer_norm(x, (8,), x[0, :7]), r"weight has the shape \[7\]"),
    "bias": (lambda x: _UNCHECKED.layer_norm(x, (8,), None, x), r"bias has the shape \[3, 8\]"),
    "cast": (lambda x: _UNCHECKED.rms_norm(x, (8,), cast="never"), "'before' or 'after'"),
    "integers": (lambda x: _UNCHECKED.rms_norm(x.long(), (8,)), "floating-point"),
    "residual": (lambda x: _UNCHECKED.residual_layer_norm(x, x[:1], (8,)), "one shape"),
    "approximate": (lambda x: _UNCHECKED.gelu(x, "erf"), "'none' for erf"),
    "bias of gelu": (lambda x: _UNCHECKED.bias_gelu(x, x), "last dim"),
    "bias of a scalar": (lambda x: _UNCHECKED.bias_gelu(x[0, 0], x[0, 0]), "last dim"),
    "gate and up": (lambda x: _UNCHECKED.swiglu(x, x[:, :4]), "gate and up need one shape"),
    "target": (lambda x: _UNCHECKED.cross_entropy(x, torch.zeros(4, dtype=torch.long)), "a target for each row"),
    "probabilities": (lambda x: _UNCHECKED.cross_entropy(x, x[:, 0]), "class numbers"),
    "reduction": (
        lambda x: _UNCHECKED.cross_entropy(x, torch.zeros(3).long(), reduction="average"),
        "mean, sum or none",
    ),
    "smoothing": (lambda x: _UNCHECKED.cross_entropy(x, torch.zeros(3).long(), label_smoothing=2), "within 0 to 1"),
    "no classes": (lambda x: _UNCHECKED.cross_entropy(x[:, :0], torch.zeros(3).long()), "a target for each row"),
    "backend": (lambda x: _UNCHECKED.gelu(x, backend="cuda"), "auto, triton, torch"),
    "kernel": (lambda x: _UNCHECKED.choose("conv", "cpu"), "there is no kernel 'conv'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_argument_is_refused_with_what_to_pass(mistake: str) -> None:
    call, message = MISTAKES[mistake]
    with pytest.raises(kernels.KernelArgumentError, match=message) as raised:
        call(torch.randn(3, 8))
    assert isinstance(raised.value, TpplanError)
    assert isinstance(raised.value, ValueError)


class _OnCuda:
    is_cuda = True


def test_under_cudas_autocast_a_norm_gives_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor: Any = _OnCuda()
    assert arguments.autocast_dtype("layer_norm", tensor, torch.bfloat16) == torch.bfloat16
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    assert arguments.autocast_dtype("layer_norm", tensor, torch.bfloat16) == torch.float32
    assert arguments.autocast_dtype("layer_norm", torch.empty(1), torch.bfloat16) == torch.bfloat16


def test_an_operator_writes_the_dtype_that_autocast_asks_for() -> None:
    x = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
    y: Tensor = torch.ops.tpplan.layer_norm.default(x, None, None, 1, 1e-5, torch.float32)[0]
    torch.testing.assert_close(y, functional.layer_norm(x.float(), (8,)))
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    assert dx.dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_on_a_gpu_autocast_gives_what_torch_gives(name: str) -> None:
    x = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16):
        ours = getattr(kernels, name)(x, (64,), backend="triton")
        assert ours.dtype == getattr(functional, name)(x, (64,)).dtype
