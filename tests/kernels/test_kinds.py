"""The table of kinds: every kind of the plan language has a row, and every function a threshold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tpplan import kernels
from tpplan.compiler.ir.program import KernelUse
from tpplan.kernels.kinds import KINDS
from tpplan.kernels.thresholds import KERNELS
from tpplan.plan import KernelKind

DOCS = Path(__file__).parents[2] / "docs"
TENSORS = {
    KernelKind.LAYER_NORM: 3,
    KernelKind.RMS_NORM: 2,
    KernelKind.GELU: 1,
    KernelKind.BIAS_GELU: 2,
    KernelKind.SWIGLU: 2,
    KernelKind.GEGLU: 2,
    KernelKind.RESIDUAL_NORM: 4,
}
VARIANTS: list[dict[str, Any]] = [{}, {"offset": 1.0}, {"cast": "before"}, {"centred": True}]


def test_every_kind_has_a_row_and_every_function_one_threshold() -> None:
    assert list(KINDS) == list(KernelKind)
    assert sorted(name for kind in KINDS.values() for name in kind.guesses) == sorted(KERNELS)


def test_the_page_of_the_plan_language_names_every_kind() -> None:
    page = (DOCS / "plan-language.md").read_text()
    assert all(f"`{kind}`" in page for kind in KernelKind)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("kind", TENSORS)
def test_a_row_launches_the_function_whose_threshold_holds(
    kind: KernelKind, variant: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[str, Any]] = []
    for name in kernels.__all__:
        stock = getattr(kernels, name)
        if callable(stock) and name in KERNELS:

            def call(*given: Any, name: str = name, stock: Any = stock, **keywords: Any) -> Any:
                called.append((name, keywords["backend"]))
                return stock(*given, **keywords)

            monkeypatch.setattr(kernels, name, call)
    vectors = kind in (KernelKind.LAYER_NORM, KernelKind.RMS_NORM, KernelKind.BIAS_GELU)
    shapes = [(8,) if number and vectors else (3, 8) for number in range(TENSORS[kind])]
    shapes[2:] = [(8,) for _ in shapes[2:]]
    use = KernelUse("here", str(kind), "triton", "float32", eps=1e-6, **variant)
    row = KINDS[kind]
    assert row.launch is not None
    row.launch(use, *(torch.randn(shape) for shape in shapes))
    assert called == [(row.threshold(use).removesuffix("_variant"), "triton")]
