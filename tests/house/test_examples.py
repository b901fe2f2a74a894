"""Every public function's docstring has an example, and each says what happens on two processes."""

from __future__ import annotations

import doctest
import importlib
import io
import os
import shutil
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import tpplan
from tests.runtime.world import Member, world


class MLP(nn.Module):
    """What `model` is in the examples; `x` are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def functions() -> list[str]:
    """The public functions, as `module:name`."""
    named = [(name, getattr(tpplan, name)) for name in tpplan.__all__]
    for module in (tpplan.loss, tpplan.generation):
        named += [(name, getattr(module, name)) for name in module.__all__]
    found = [f"{held.__module__}:{name}" for name, held in named if not isinstance(held, type) and callable(held)]
    return sorted(found)


def examples(function: str) -> list[doctest.DocTest]:
    module, _, name = function.partition(":")
    held: Any = getattr(importlib.import_module(module), name)
    return [test for test in doctest.DocTestFinder(recurse=False).find(held, name, globs={}) if test.examples]


def run_example(member: Member, function: str, folder: str) -> str:
    """What doesn't happen as it is shown; "" if all does."""
    torch.manual_seed(0)
    told = io.StringIO()
    with chdir(folder), redirect_stdout(told):
        for test in examples(function):
            test.globs = {"tpplan": tpplan, "torch": torch, "nn": nn, "os": os, "MLP": MLP}
            test.globs |= {"model": MLP(), "x": torch.randn(4, 8)}
            doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=told.write)
    tpplan.undo_process_changes()
    return told.getvalue()


@pytest.fixture(scope="module")
def folder() -> Any:
    """With a small Llama in it."""
    made = Path(tempfile.mkdtemp())
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    config = LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    LlamaForCausalLM(config).save_pretrained(made / "my-llama")
    yield made
    shutil.rmtree(made)


@pytest.mark.processes
@pytest.mark.parametrize("function", functions())
def test_each_public_function_has_an_example_that_runs(function: str, folder: Path) -> None:
    assert examples(function)
    for told in world(2).run(run_example, function, str(folder)):
        assert told == ""
