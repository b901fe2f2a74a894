"""The page on inference: what is summed, what is said once for equal layers, and what is said in words."""

from __future__ import annotations

import json
from dataclasses import replace

from tests.report.toy_program import one_module, parameter
from tpplan.compiler.ir.program import ModuleProgram
from tpplan.cost.traffic import Traffic
from tpplan.report.inference_tables import Inference, Kept, KeptTensor, inference_json, render_inference

PARTS = (*(((1, 2, 64, 8),) * 3), (1, 0, 64, 8))
LAYERS = tuple(KeptTensor(f"cache.layers.{i}.keys", "bfloat16", 2, (1, 6, 64, 8), PARTS) for i in range(2))
STATE = KeptTensor("cache.state", "float32", 4, (1, 16), ((1, 16),) * 4)
PROGRAM = one_module(
    ModuleProgram("", "Model", None, "inferred", 1),
    parameter("up", shape=(64, 32), dim=0, dtype="bfloat16"),
    parameter("norm", shape=(32,), dtype="float32"),
)
VIEW = Inference(
    program=PROGRAM,
    settings={"use_cache": True},
    buffers=256,
    prefill=Traffic({"all-reduce": 4}, {"all-reduce": 4096}),
    decode=Traffic({"all-reduce": 4}, {"all-reduce": 64}),
    kept=Kept((*LAYERS, STATE), (8192,) * 4, (64, 64, 64, 0)),
    unknown={},
)


def lines(view: Inference, width: int = 100) -> list[str]:
    return [" ".join(line.split()) for line in render_inference(view, width=width).splitlines()]


def test_memory_is_by_dtype_and_summed_for_the_rank_that_holds_most() -> None:
    shown = lines(VIEW)
    assert "sharded parameters, bfloat16 1 tensor 4.0 KiB 1.0 KiB 25.0%" in shown
    assert "replicated parameters, float32 1 tensor 128 B 128 B 100.0%" in shown
    assert "buffers 256 B 256 B 100.0%" in shown
    # Of 2 · 6 · 64 · 8 numbers of two bytes the first rank has a third; each has the state.
    assert "cache 3 tensors 12.1 KiB 4.1 KiB 33.7%" in shown
    assert "together 16.4 KiB 5.4 KiB 33.1%" in shown
    assert "By rank, the cache takes 4.1 KiB, 4.1 KiB, 4.1 KiB, 64 B." in shown


def test_equal_layers_are_in_one_row() -> None:
    shown = lines(VIEW)
    assert "cache.layers.*.keys × 2 (1, 6, 64, 8) → (1, 2, 64, 8) or (1, 0, 64, 8) bfloat16 4.0 KiB" in shown
    assert "cache.state (1, 16) float32 64 B" in shown


def test_what_is_odd_is_said_in_words() -> None:
    text = " ".join(lines(VIEW))
    assert "The ranks hold 1.02 times the whole cache together" in text
    assert "One token more for each sequence adds 64 B to a rank's cache." in text
    assert "its tensors are views of 8.0 KiB, until the next token." in text
    assert VIEW.kept is not None
    full = replace(VIEW, kept=replace(VIEW.kept, growth=(0,) * 4, storage=VIEW.kept.bytes_by_rank))
    assert "adds nothing to a rank's cache" in (text := " ".join(lines(full))) and "views" not in text


def test_what_isn_t_known_has_no_row() -> None:
    reasons = {"cache": "The cache can't be told without numbers: it reads one."}
    unknown = replace(VIEW, kept=None, decode=None, unknown=reasons)
    shown = lines(unknown)
    assert reasons["cache"] in shown and not any(line.startswith(("cache", "one token")) for line in shown)
    plain = json.loads(inference_json(unknown))
    assert plain["cache"] is plain["decode"] is None and plain["unknown"] == reasons


def test_json_has_what_the_page_has() -> None:
    plain = json.loads(inference_json(VIEW))
    assert plain["settings"] == {"use_cache": True} and plain["buffers"] == 256
    assert plain["cache"]["bytes"] == 12352 and plain["cache"]["bytes_by_rank"] == [4160, 4160, 4160, 64]
    assert plain["decode"] == {"collectives": {"all-reduce": 4}, "sent": {"all-reduce": 64}, "bytes": 64}


def test_it_is_as_wide_as_it_may_be() -> None:
    assert max(map(len, render_inference(VIEW, width=100).splitlines())) <= 100
