"""Plans that write themselves are right for every architecture of the zoo, and shard what docs/coverage.md says."""

from __future__ import annotations

import re

import pytest

from tests.marking import in_thirds
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.page import PAGE, row
from tests.zoo.sweep import Outcome, run

QUICK = ("llama", "gpt2", "falcon_alibi")
# Of each kind some, and what has no plan among the shipped ones, which tests/plans tries.
SLOW = (
    "codegen", "gpt_bigcode_mha", "diffllama", "switch_transformers", "mamba2", "jamba", "lfm2", "seed_oss",
    "experts_in_lists", "deberta-v2", "bloom", "phi3", "mixtral", "gemma3_text", "deepseek_v3", "t5", "whisper", "clip",
    "qwen3_next", "nanogpt",
)  # fmt: skip
_SHARE = re.compile(r"^\| (?P<name>[\w-]+) \| (?P<two>[\d.]+)%.*? \| (?P<four>[\d.]+)%", re.MULTILINE)


def documented() -> dict[str, float]:
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    return {found["name"]: float(found["four"]) for found in _SHARE.finditer(text)}


def check(outcome: Outcome) -> None:
    assert outcome.ok, str(outcome)
    promised = documented().get(outcome.name)
    if promised is not None and outcome.size == 4:
        assert outcome.blocks is not None and outcome.blocks.percent >= promised - 0.05, str(outcome)


@pytest.mark.parametrize("name", in_thirds(QUICK, SLOW, ARCHITECTURES))
def test_every_architecture_is_right_or_refused(name: str) -> None:
    check(run(name, 4, sequence=True))


@pytest.mark.sweep
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_right_or_refused_on_two_ranks(name: str) -> None:
    check(run(name, 2, sequence=False))


def test_the_page_has_a_row_for_every_architecture() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in ARCHITECTURES if f"\n| {name} |" not in text] == []


def test_a_refusal_is_a_row_too() -> None:
    refused = [Outcome("x", size, sequence, refused=("no",)) for size in (2, 4) for sequence in (False, True)]
    assert row(refused) == "| x | refused | refused | – | – | – |"
