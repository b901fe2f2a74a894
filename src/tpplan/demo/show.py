"""Showing the demo's result: what each run cost and how near it came, and what the embeddings are good for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from tpplan.cost.traffic import module_traffic
from tpplan.demo.comparison import TOLERANCE, Comparison, DemoRun
from tpplan.demo.embedding import MODEL_NAME
from tpplan.demo.sentences import SENTENCES, TOPICS
from tpplan.report.grid import TOTAL_STYLE, new_table
from tpplan.report.program_page import to_text
from tpplan.report.quantities import NOTHING, bytes_text


def render_comparison(found: Comparison, *, width: int = 100, color: bool = False) -> str:
    """The result as text of `width` columns."""
    return to_text(_parts(found), width, color)


def _parts(found: Comparison) -> Iterator[RenderableType]:
    sentences, length = found.batch_shape
    title = Text(f"{MODEL_NAME}: {found.parameters / 1e6:.1f} million parameters", style=TOTAL_STYLE)
    yield title.append(f"; {sentences} sentences of up to {length} tokens", style="not bold")
    yield _neighbour_table(found.sharded)
    yield _topic_table(found.sharded)
    yield _run_table(found)
    yield _verdict(found)


def _neighbour_table(embeddings: Tensor) -> Table:
    """For the first sentence of each topic, the sentence that is nearest to it."""
    table = new_table("sentence", "nearest to it", "cosine", right=(2,))
    for column in table.columns[:2]:
        column.no_wrap = False
    similarity = (embeddings @ embeddings.T).fill_diagonal_(-1)
    for index in _first_of_each_topic():
        value, other = similarity[index].max(0)
        table.add_row(SENTENCES[index], SENTENCES[int(other)], f"{float(value):.2f}")
    return table


def _first_of_each_topic() -> Iterator[int]:
    index = 0
    for sentences in TOPICS.values():
        yield index
        index += len(sentences)


def _topic_table(embeddings: Tensor) -> Table:
    """The mean cosine between the sentences of two topics; within one, of different sentences."""
    table = new_table("mean cosine", *TOPICS, right=tuple(range(1, len(TOPICS) + 1)))
    topic = torch.tensor([number for number, held in enumerate(TOPICS.values()) for _ in held])
    similarity = embeddings @ embeddings.T
    different = ~torch.eye(len(SENTENCES), dtype=torch.bool)
    for row, name in enumerate(TOPICS):
        cells: list[Text] = []
        for column in range(len(TOPICS)):
            chosen = (topic[:, None] == row) & (topic[None, :] == column) & different
            cells.append(Text(f"{float(similarity[chosen].mean()):.2f}", style="bold green" if row == column else ""))
        table.add_row(name, *cells)
    return table


def _run_table(found: Comparison) -> Table:
    headings = ("ranks", "plan", "difference", "parameters\non a rank", "collectives\nin a forward", "each rank\nsends")
    table = new_table(*headings, right=(2, 3, 5))
    table.columns[4].no_wrap = False
    table.add_row("1", NOTHING, NOTHING, bytes_text(found.parameter_bytes), NOTHING, NOTHING)
    for run in found.runs:
        table.add_row(
            str(run.program.size),
            run.program.plan,
            Text(f"{run.difference:.1e}", style="" if run.agrees else "bold red"),
            bytes_text(max(run.parameter_bytes)),
            _collectives(run),
            bytes_text(module_traffic(run.program.modules, run.program.size).forward.total),
        )
    return table


def _collectives(run: DemoRun) -> Text:
    if run.counted == run.predicted:
        return Text(_counts(run.counted))
    return Text(f"{_counts(run.counted)}\npredicted: {_counts(run.predicted)}", style="bold red")


def _counts(counted: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counted.items())) or "none"


def _verdict(found: Comparison) -> Text:
    differing = [run.difference for run in found.runs if not run.agrees]
    if differing:
        return Text(
            f"The sharded embeddings differ by {differing[0]:.1e}, more than {TOLERANCE:.0e}.", style="bold red"
        )
    if not found.ok:
        return Text("The collectives that ran aren't those that the program names.", style="bold red")
    worst = max(run.difference for run in found.runs)
    text = f"The same embeddings on every rank, to {worst:.1e} ({TOLERANCE:.0e} is allowed), "
    return Text(text + "and the very collectives that the programs name.", style="bold green")
