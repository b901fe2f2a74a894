"""`tpplan explain` as a page and as a diagram: with a GPU or without, and what can't be shown so."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.cli.test_diff import MLP, MODEL, mlp
from tpplan.cli.main import main

EVALUATED = ["--model", f"{__name__}:evaluated", "--tp", "2"]


def evaluated() -> tuple[nn.Module, torch.Tensor]:
    """A model that isn't trained: there is no backward to estimate."""
    model, inputs = mlp()
    return model.eval().requires_grad_(False), inputs


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlp.yaml").write_text(f"# <script>alert('…')</script>\n{MLP}")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["--format", "html"], 0, "a step on h100"),
        (["--format", "html", "--gpu", "a100", "--dp", "2", "--optimizer", "sgd"], 0, "sgd, checkpointing none, dp 2"),
        (["--format", "html"], 0, "# &lt;script&gt;alert(&#x27;…&#x27;)&lt;/script&gt;"),
        (["--format", "html"], 0, '<a href="#plan0-6">rowwise down (mlp.yaml:6)</a>'),
        (["--format", "svg", "--gpu", "h100"], 0, "µs</text>"),
        (["--format", "mermaid"], 0, "forward all-reduce 256 B"),
        (["--format", "html", "--gpu", "h1000"], 2, "TP220"),
        (["--format", "html", "--tp", "4"], 2, "--format html is one file; give --tp one number"),
        (["up", "--why"], 0, "  up, output: next is `replicate`, +"),
        (["down", "--why"], 0, "  down, input: no other placement compiles (TP114: "),
        (["--why"], 2, "--why is about a module; give MODULE"),
        (["--format", "html", "down"], 2, "--format html is the whole program; leave out MODULE"),
        (["--format", "svg", "--premises"], 2, "--format svg shows a step; leave out --premises"),
        (["--format", "mermaid", "--inference"], 2, "--format mermaid shows a step; leave out --premises"),
    ],
)
def test_a_picture_of_two_layers(options: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "mlp.yaml", *MODEL, *options]) == code
    out, chatter = capsys.readouterr()
    assert told in (out or chatter) and bool(out) == (code == 0)
    if "svg" in options and not code:
        ElementTree.fromstring(out)


@pytest.mark.parametrize(
    ("options", "code", "told"), [([], 0, "There is no estimate: "), (["--gpu", "h100"], 1, "TP222")]
)
def test_a_page_without_an_estimate_says_why(
    options: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "mlp.yaml", *EVALUATED, "--format", "html", *options]) == code
    assert told in "".join(capsys.readouterr())


def test_rich_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for shown in ("text", "rich"):
        assert main(["explain", "mlp.yaml", *MODEL, "--format", shown]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("Sequential with plan mlp on 2 ranks")
