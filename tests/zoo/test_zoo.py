"""Plans that write themselves are right for every architecture of the zoo, and shard what docs/coverage.md says."""

from __future__ import annotations

import re

import pytest

from tests.marking import in_thirds
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.page import PAGE, ROWS, Row, page, read_rows, written
from tests.zoo.subjects import SUBJECTS
from tests.zoo.sweep import Outcome, run

QUICK = ("llama", "gpt2", "falcon_alibi")
# Of each kind some, and what has no plan among the shipped ones, which tests/plans tries.
SLOW = (
    "codegen", "diffllama", "mamba2", "jamba", "lfm2", "experts_in_lists", "deberta-v2", "phi3", "deepseek_v3", "t5",
    "whisper", "qwen3_next",
)  # fmt: skip
QUICK_SUBJECTS = ("wav2vec2", "plain_talking_heads", "plain_adapted", "plain_tree", "timm_vit", "torchtune_llama3")
# Of each kind some.
SLOW_SUBJECTS = (
    "llava", "dinov2", "swin", "convnext", "flux", "litgpt_llama", "segformer", "wavlm", "speecht5", "blip2",
    "idefics3", "dit", "unet_2d_condition", "timm_swin", "torch_transformer", "torchvision_swin", "open_clip",
    "torchtune_llama3_lora", "plain_modulated", "plain_one_hot_experts",
)  # fmt: skip


def check(outcome: Outcome) -> None:
    assert outcome.ok, str(outcome)
    promised = read_rows().get(outcome.name)
    if promised is None:
        return
    held = promised.sharded.get(str(outcome.size))
    if held is not None:
        assert outcome.blocks is not None and outcome.blocks.percent >= held[0] - 0.05, str(outcome)
    if promised.seconds is not None:
        assert {*outcome.freedoms} <= {*promised.freedoms}, str(outcome)


@pytest.mark.parametrize("name", in_thirds(QUICK, SLOW, ARCHITECTURES))
@pytest.mark.one_in(3)
def test_every_architecture_is_right_or_refused(name: str) -> None:
    check(run(name, 4, sequence=True))


@pytest.mark.parametrize("name", in_thirds(QUICK_SUBJECTS, SLOW_SUBJECTS, SUBJECTS))
@pytest.mark.one_in(6)
def test_every_other_model_is_right_or_refused(name: str) -> None:
    if not SUBJECTS[name].installed:
        pytest.skip(f"needs {SUBJECTS[name].package}")
    check(run(name, 2, sequence=True))


@pytest.mark.sweep
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_right_or_refused_on_two_ranks(name: str) -> None:
    check(run(name, 2, sequence=False))


@pytest.mark.sweep
def test_where_nothing_can_be_sharded_the_first_cause_is_told() -> None:
    (reason,) = run("convnextv2", 2, sequence=False).refused
    assert reason.startswith("TP123")
    assert re.search(r"layers\.\d\.grn` needs its result whole: .*convnextv2\.py:\d+", reason)


def test_there_is_a_row_for_whatever_is_tried_by_default() -> None:
    assert not {*ARCHITECTURES, *QUICK_SUBJECTS} - read_rows().keys()


def test_the_page_and_the_file_are_of_the_same_rows() -> None:
    rows = read_rows()
    assert PAGE.read_text(encoding="utf-8") == page(rows)
    assert ROWS.read_text(encoding="utf-8") == written(rows)


def test_a_refusal_is_a_row_too() -> None:
    refused = [Outcome("x", size, sequence, refused=("no",)) for size in (2, 4) for sequence in (False, True)]
    assert Row.of(refused) == Row({}, {}, None, None, ["no"], seconds=0)
