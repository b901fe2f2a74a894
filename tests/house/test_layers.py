"""The house rules hold for src/tpplan, and the checks of them do find what they look for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.house import layers

PACKAGE = Path(__file__).parents[2] / "src" / "tpplan"
CHECKS = (
    layers.upward_imports,
    layers.upward_stages,
    layers.unknown_stages,
    layers.compat_outsiders,
    layers.unversioned_compat,
    layers.report_outsiders,
    layers.suggest_outsiders,
    layers.private_torch_names,
    layers.torch_in_torch_free,
    layers.mutations,
)
WITHOUT_TORCH = ("tpplan", "tpplan.plan", "tpplan.report.diagnostics", "tpplan.cli.main")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_package_keeps_the_rule(check):
    assert layers.sources(PACKAGE), f"no sources under {PACKAGE}"
    findings = check(PACKAGE)
    assert not findings, "\n" + "\n".join(findings)


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_importing_it_loads_no_torch(module):
    program = f"import sys, {module}; print(*sorted({set(layers.HEAVY_PACKAGES)} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split() == []


@pytest.fixture
def package(tmp_path):
    """Writes a small tpplan, a file per argument, and returns its folder."""

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / "tpplan" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(text), encoding="utf-8")
        return tmp_path / "tpplan"

    return write


@pytest.mark.parametrize("end", ["", " For every torch", " For torch before.", " For some torch."])
def test_functions_of_compat_say_which_versions_of_torch_need_them(package, end):
    code = 'def seen() -> None:\n    """See.{}"""\n\n\ndef _own() -> None: ...\n'
    (finding,) = layers.unversioned_compat(package({"compat/a.py": code.format(end)}))
    assert "`seen`" in finding
    assert layers.unversioned_compat(package({"compat/a.py": code.format(" For torch since 2.13.")})) == []


@pytest.mark.parametrize(
    "statement",
    [
        "import tpplan.runtime.lower",
        "from tpplan.runtime import lower",
        "from tpplan import runtime",
        "from ..runtime import lower",
        "from .. import runtime",
        "from tpplan import parallelize",
        "def place():\n    from tpplan.runtime import lower",
    ],
)
def test_import_of_a_higher_layer_is_found(package, statement):
    root = package({"compiler/place.py": statement, "runtime/__init__.py": "", "runtime/lower.py": ""})
    (finding,) = layers.upward_imports(root)
    assert finding.startswith("tpplan/compiler/place.py:")


@pytest.mark.parametrize(
    "statement",
    [
        "from tpplan.plan import Plan",
        "from ..plan import Plan",
        "from .ir import Program",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tpplan.runtime import lower",
    ],
)
def test_import_of_a_lower_layer_or_for_typing_is_allowed(package, statement):
    assert layers.upward_imports(package({"compiler/place.py": statement})) == []


def test_import_of_a_later_stage_is_found(package):
    root = package({"compiler/ir/layout.py": "from tpplan.compiler.place.solution import Constraints"})
    (finding,) = layers.upward_stages(root)
    assert finding.startswith("tpplan/compiler/ir/layout.py:1:")


def test_layers_side_by_side_stay_apart(package):
    root = package({"report/html.py": "import tpplan.parity", "parity/verification.py": "import tpplan.report"})
    assert len(layers.upward_imports(root)) == 2


def test_file_outside_every_layer_is_found(package):
    assert "no layer" in layers.upward_imports(package({"utils.py": ""}))[0]


def test_compat_is_for_the_layers_that_need_it(package):
    root = package(
        {"compat.py": "", "compiler/a.py": "from tpplan import compat", "cost/a.py": "from tpplan import compat"}
    )
    (finding,) = layers.compat_outsiders(root)
    assert finding.startswith("tpplan/cost/a.py:1:")


def test_report_uses_only_the_plan_and_the_program(package):
    root = package(
        {"report/tree.py": "from tpplan.compiler.ir.program import Program\nfrom tpplan.compiler import bind"}
    )
    (finding,) = layers.report_outsiders(root)
    assert finding.startswith("tpplan/report/tree.py:2:")


def test_suggest_asks_the_compiler_through_its_queries(package):
    allowed = "from tpplan.compiler.queries import Study\nfrom tpplan.compiler.ir.trace import Trace\n"
    root = package({"suggest/flow.py": f"{allowed}from tpplan.compiler.rules.propagate import Propagator"})
    (finding,) = layers.suggest_outsiders(root)
    assert finding.startswith("tpplan/suggest/flow.py:3:")


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch.distributed._tensor import DTensor",
        "from torch.distributed import _functional_collectives",
        "from torch.distributed.tensor._ops import strategy",
        "import torch\ntorch._C._get_tracing_state()",
        "import torch.distributed as dist\ndist._local_tensor",
        "from torch.distributed.tensor import DTensor\nDTensor._op_dispatcher",
        "import torch\ntorch.ops._c10d_functional.all_reduce",
    ],
)
def test_private_name_of_torch_is_found_outside_compat(package, code):
    assert layers.private_torch_names(package({"compiler/capture.py": code}))
    assert layers.private_torch_names(package({"compiler/capture.py": "", "compat.py": code})) == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.__version__",
        "import torch\ntorch.ops.aten._softmax.default",
        "import ours\nours._private",
        "import torch.nn as nn\nnn.Linear",
    ],
)
def test_public_name_of_torch_is_allowed(package, code):
    assert layers.private_torch_names(package({"compiler/capture.py": code})) == []


def test_torch_is_found_where_it_must_not_be(package):
    root = package(
        {
            "plan/parse.py": "def parse():\n    import torch.nn",
            "report/diagnostics_html.py": "import torch",
            "report/tree.py": "import torch",
        }
    )
    assert [finding.partition(" ")[0] for finding in layers.torch_in_torch_free(root)] == [
        "tpplan/plan/parse.py:2:",
        "tpplan/report/diagnostics_html.py:1:",
    ]


@pytest.mark.parametrize(
    "code",
    [
        "module.__class__ = Sharded",
        "a, module.__class__ = 1, Sharded",
        "setattr(module, '__class__', Sharded)",
        "module.register_parameter('weight', weight)",
        "module._parameters['weight'] = weight",
        "del module._buffers['mask']",
        "model.get_submodule('a')._modules.pop('b')",
    ],
)
def test_change_to_a_module_is_found_outside_lower(package, code):
    assert layers.mutations(package({"compiler/bind.py": code}))
    assert layers.mutations(package({"compiler/bind.py": "", "runtime/lower.py": code})) == []


def test_module_may_register_its_own_parameters(package):
    assert layers.mutations(package({"verify/toy.py": "self.register_buffer('mask', mask)"})) == []
