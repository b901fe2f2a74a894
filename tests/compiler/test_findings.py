"""A bad plan for each code that concerns a plan and a model, and how it is reported. `UPDATE_SNAPSHOTS=1` rewrites."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tpplan
from tests.compiler import small_models as toys
from tpplan.plan import CATALOGUE, PlanError, Severity
from tpplan.report.diagnostics import render, summary

BAD = Path(__file__).parent / "bad"
IDS = (torch.zeros(toys.BATCH, toys.SEQUENCE, dtype=torch.long),)

Case = tuple[Callable[[], nn.Module], tuple[Any, ...] | None, int]
CASES: dict[str, Case] = {
    "TP101": (toys.Positions, IDS, 2),
    "TP102": (lambda: toys.Mlp(inner=3), toys.activations(), 4),
    "TP103": (lambda: toys.Attention(heads=2, literal=False), toys.activations(), 4),
    "TP104": (toys.LoneColwise, toys.activations(), 2),
    "TP105": (toys.Mlp, toys.activations(), 2),
    "TP106": (toys.Packed, toys.activations(), 2),
    "TP107": (toys.CountsItself, toys.activations(), 2),
    "TP108": (toys.Parallel, toys.activations(), 2),
    "TP109": (toys.Shared, toys.activations(), 2),
    "TP110": (toys.Raises, toys.activations(), 2),
    "TP111": (toys.Mlp, None, 2),
    "TP112": (lambda: toys.Table(max_norm=1.0), IDS, 2),
    "TP113": (toys.WritesThroughAView, toys.activations(), 2),
    "TP114": (toys.Mlp, toys.activations(), 3),
    "TP120": (toys.Block, toys.activations(), 2),
    "TP127": (toys.CallsBessel, toys.activations(), 2),
    "TP135": (toys.Attention, toys.activations(), 2),
    "TP149": (toys.Gated, toys.activations(), 2),
}


# What needs a running model, a checkpoint or a command: by the test that causes it.
ELSEWHERE = {
    "TP115": "compiler/test_findings.py",
    "TP116": "runtime/test_agreement.py",
    "TP195": "runtime/test_stages.py",
    "TP117": "runtime/test_guard.py",
    "TP118": "runtime/test_guard.py",
    "TP119": "runtime/test_mixed_draws.py",
    "TP121": "checkpoint/test_round_trip.py",
    "TP122": "cli/test_validate.py",
    "TP123": "suggest/test_suggest.py",
    "TP124": "compiler/test_replay.py",
    "TP125": "runtime/test_caller_containers.py",
    "TP126": "compiler/test_findings.py",
    "TP129": "parity/test_state.py",
    "TP130": "runtime/test_changes.py",
    "TP131": "runtime/test_watch.py",
    "TP132": "parity/test_uneven_heads.py",
    "TP140": "runtime/test_holders.py",
    "TP142": "checkpoint/test_save_pretrained.py",
    "TP143": "initialize/test_unknown.py",
    "TP144": "initialize/test_transformers.py",
    "TP145": "initialize/test_ranks.py",
    "TP170": "runtime/test_data_parallel.py",
    "TP171": "runtime/test_data_parallel.py",
    "TP172": "runtime/test_data_parallel.py",
    "TP173": "runtime/test_data_parallel.py",
    "TP137": "compiler/test_open_results.py",
    "TP136": "runtime/test_watch.py",
    "TP128": "parity/test_backward.py",
    "TP138": "parity/test_inner_gradients.py",
    "TP139": "runtime/test_watch.py",
    "TP175": "runtime/test_recompute.py",
    "TP176": "runtime/test_lost_ranks.py",
    "TP177": "runtime/test_lockstep.py",
    "TP178": "runtime/test_lockstep.py",
    "TP179": "runtime/test_lockstep.py",
    "TP165": "runtime/test_vocabulary_loss.py",
    "TP166": "parity/test_class_functions.py",
    "TP180": "runtime/test_compile.py",
    "TP181": "runtime/test_compile.py",
    "TP182": "runtime/test_compile.py",
    "TP183": "runtime/test_compile.py",
    "TP186": "runtime/test_values.py",
    "TP184": "runtime/test_compile.py",
    "TP190": "training/test_trainer.py",
    "TP191": "training/test_trainer.py",
    "TP192": "training/test_inputs.py",
    "TP193": "training/test_states.py",
    "TP194": "parity/test_failures.py",
    "TP146": "parity/test_whole_experts.py",
    "TP147": "parity/test_gathers.py",
    "TP148": "parity/test_expert_groups.py",
    "TP150": "compiler/test_unused_kernels.py",
    "TP152": "runtime/test_overlap.py",
    "TP151": "ops/test_declared.py",
    "TP153": "compiler/test_causes.py",
    "TP160": "adapters/test_plans.py",
    "TP185": "runtime/test_compile_calls.py",
    "TP199": "cli/test_main.py",
    **dict.fromkeys(("TP210", "TP211", "TP212", "TP213", "TP214"), "suggest/test_export.py"),
    **dict.fromkeys(("TP215", "TP216"), "suggest/test_import_deepspeed.py"),
    "TP217": "suggest/test_import_styles.py",
    **dict.fromkeys(("TP220", "TP222"), "cost/test_estimate.py"),
    "TP221": "cost/test_clusters.py",
    **dict.fromkeys(("TP230", "TP231"), "cli/test_diff.py"),
}


def test_every_code_about_a_plan_and_a_model_is_caused_by_a_test() -> None:
    assert sorted([*CASES, *ELSEWHERE]) == [code for code in CATALOGUE if code > "TP100"]
    for code, test in ELSEWHERE.items():
        assert code in (BAD.parents[1] / test).read_text(encoding="utf-8")


def rendered(code: str) -> str:
    make, inputs, size = CASES[code]
    try:
        found = tpplan.compile_plan(make(), f"{code}.yaml", tp=size, inputs=inputs).diagnostics
    except PlanError as error:
        found = error.diagnostics
    assert code in {diagnostic.code for diagnostic in found}, [str(d.headline) for d in found]
    text = f"{render(found)}\n\n{summary(found)}\n"
    return re.sub(r"(?<= at )\S*?/?([\w.-]+/[\w.-]+\.py):\d+", r"\1:…", text)


@pytest.mark.parametrize("code", sorted(CASES))
def test_a_bad_plan_is_reported_as_recorded(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BAD)
    text, path = rendered(code), BAD / f"{code}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


GATED = [
    ({"first": "colwise", "last": "rowwise"}, "it meets the whole result of `second`", "`second` `colwise` as well;"),
    ({"second": "colwise", "last": "rowwise"}, "it meets the whole result of `first`", "`first` `colwise` as well;"),
    ({"first": "colwise"}, "result of `second`", "make `second` `colwise` as well, and `last` `rowwise`;"),
    ({"{first,second}": "colwise"}, "`last` reads it and isn't `rowwise`", "make `last` `rowwise`;"),
]


@pytest.mark.parametrize(("rules", "why", "way_out"), GATED)
def test_a_gather_names_the_layers_that_would_save_it(rules: dict[str, str], why: str, way_out: str) -> None:
    plan = {"version": 1, "modules": rules}
    first, *_ = tpplan.compile_plan(toys.Gated(), plan, tp=2, inputs=toys.activations()).diagnostics
    assert first.code == "TP104" and first.message.endswith(why), first.message
    assert way_out in (first.help or ""), first.help


@pytest.mark.parametrize(("given", "named"), [((), "`first` and `second`, whose"), (("first",), "`second`, whose")])
def test_a_slice_names_the_layers_that_are_whole(given: tuple[str, ...], named: str) -> None:
    plan = {"version": 1, "modules": dict.fromkeys(given, "colwise") | {"last": "rowwise"}}
    *_, found = tpplan.compile_plan(toys.Gated(), plan, tp=2, inputs=toys.activations()).diagnostics
    assert found.code == "TP105" and (found.help or "").startswith(f"make {named}"), found.help


def test_a_gather_at_the_end_of_the_model_says_so() -> None:
    plan = {"version": 1, "modules": {"down": "colwise"}}
    (found,) = tpplan.compile_plan(toys.LoneColwise(), plan, tp=2, inputs=toys.activations()).diagnostics
    assert found.message.endswith("it leaves the model") and "`rowwise`" not in (found.help or "")


def test_the_layer_that_reads_heads_is_named_with_the_layers_that_meet_them() -> None:
    rules = {"q": "colwise"}
    (found,) = tpplan.compile_plan(
        toys.Attention(), {"version": 1, "modules": rules}, tp=2, inputs=toys.activations()
    ).diagnostics
    assert found.help is not None and found.help.startswith("make `k` and `v` `colwise` as well, and `o` `rowwise`;")


def test_a_forward_on_an_instance_is_refused() -> None:
    model = toys.Mlp()
    vars(model.up)["forward"] = lambda x: x
    with pytest.raises(tpplan.CompileError, match=r"TP112.*hides the class's"):
        tpplan.compile_plan(model, {"version": 1, "modules": {"up": "colwise"}}, tp=2, inputs=toys.activations())


def test_all_mistakes_are_reported_at_once() -> None:
    plan = {"version": 1, "modules": {"tokens": "rowwise", "block.norm": "rowwise", "nothing": "sequence"}}
    with pytest.raises(tpplan.CompileError) as caught:
        tpplan.compile_plan(toys.Positions(), plan, tp=2, inputs=IDS)
    assert sorted(d.code for d in caught.value.diagnostics) == ["TP012", "TP101", "TP101"]


def test_parallelize_without_torchrun_or_mesh_says_so() -> None:
    with pytest.raises(tpplan.CompileError, match=r"TP115.*torchrun"):
        tpplan.parallelize(toys.Mlp(), {"version": 1, "modules": {"up": "colwise"}}, inputs=toys.activations())


def test_a_misspelt_attribute_is_corrected_once_for_all_its_modules() -> None:
    model = nn.Sequential(toys.Attention(), toys.Attention())
    rules = {"*": {"style": "replicate", "local": ["num_heds", "head_dim"]}}
    with pytest.raises(tpplan.CompileError) as caught:
        tpplan.compile_plan(model, {"version": 1, "modules": rules}, tp=2, inputs=toys.activations())
    (found,) = [d for d in caught.value.diagnostics if d.code == "TP135"]
    assert found.help == "did you mean `num_heads`?" and found.notes[-1] == "the same holds for 1 more"


def test_an_attribute_of_the_module_around_is_found_there() -> None:
    rules = {"0.{q,k,v}": {"style": "colwise", "local": ["num_heads"]}, "0.o": "rowwise"}
    with pytest.raises(tpplan.CompileError) as caught:
        tpplan.compile_plan(
            nn.Sequential(toys.Attention()), {"version": 1, "modules": rules}, tp=2, inputs=toys.activations()
        )
    assert "`0` has it" in (caught.value.diagnostics[0].help or "")


def test_a_single_head_that_all_ranks_need_is_noted_and_no_warning() -> None:
    plan = 'version: 1\nmodules:\n  "{q,k,v}": colwise\n  o: rowwise\n'
    program = tpplan.compile_plan(toys.OneKeyHead(), plan, tp=2, inputs=toys.activations())
    (found,) = program.diagnostics
    assert (found.code, found.severity, found.notes) == ("TP126", Severity.NOTE, ("the same holds for 1 more",))
    meant = {"q": "colwise", "{k,v}": "replicate", "o": "rowwise"}
    quiet = tpplan.compile_plan(toys.OneKeyHead(), {"version": 1, "modules": meant}, tp=2, inputs=toys.activations())
    assert not quiet.diagnostics


USES_A_LIBRARY = """
import torch
from other import Doubled

import tpplan

plan = {"version": 1, "modules": {"linear": "colwise"}}
tpplan.compile_plan(Doubled(), plan, 2, (torch.empty(2, 4),))
"""
LIBRARY = """
from torch import nn

pages = (page for page in ())

def notes():
    return pages

class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * 2 if notes() else x
"""


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "code"), [("dist-packages", 0), ("mine", 1)])
def test_packages_of_another_folder_than_the_environments_own_are_libraries(
    folder: str, code: int, tmp_path: Path
) -> None:
    place = tmp_path / folder
    place.mkdir()
    (place / "other.py").write_text(LIBRARY)
    paths = os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run(
        [sys.executable, "-c", USES_A_LIBRARY], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert (ran.returncode, "TP129" in ran.stderr) == (code, bool(code)), ran.stderr
