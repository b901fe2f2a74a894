"""`tpplan verify` from the outside."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import tpplan.rehearsal.prove
from tests.parity.subjects import with_module
from tpplan.cli.main import main

MODEL = "tests.parity.subjects:torch_transformer"


def test_a_right_program_exits_with_0(capsys):
    assert main(["verify", "torch_transformer", "--model", MODEL, "--tp", "2"]) == 0
    shown = capsys.readouterr()
    assert "computes the same" in shown.out
    assert not shown.err  # progress is for terminals


def test_json_is_all_there_is_on_standard_output(capsys):
    arguments = ["--dtype", "float32", "--seed", "7", "--format", "json"]
    assert main(["verify", "torch_transformer", "--model", MODEL, *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["dtype"], report["seed"], report["size"]) == (True, "float32", 7, 2)


def test_a_divergence_exits_with_1_and_names_the_module(capsys, monkeypatch):
    prove = tpplan.rehearsal.prove.prove

    def miscompiled(request):
        compiled = prove(request)
        program = with_module(compiled.program, "blocks.1.mlp.down", lambda module: replace(module, exits=()))
        return replace(compiled, program=program)

    monkeypatch.setattr("tpplan.parity.verification.prove", miscompiled)
    assert main(["verify", "torch_transformer", "--model", MODEL]) == 1
    assert "diverges, first in the output of blocks.1.mlp.down" in " ".join(capsys.readouterr().out.split())


def test_a_plan_that_does_not_fit_exits_with_1(capsys, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text("version: 1\nmodules: {blocks.*.nothing: colwise}\n")
    assert main(["verify", str(plan), "--model", MODEL]) == 1
    assert "nothing" in capsys.readouterr().err


def test_a_model_that_cannot_run_exits_with_2(capsys):
    assert main(["verify", "torch_transformer", "--model", "tests.parity.subjects:half_baked"]) == 2
    assert "half-baked" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--dtype", "int8"], ["--seed", "x"], ["--format", "yaml"]])
def test_wrong_options_exit_with_2(wrong, capsys):
    assert main(["verify", "torch_transformer", "--model", MODEL, *wrong]) == 2
