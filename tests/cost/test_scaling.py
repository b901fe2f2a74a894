"""docs/scaling.md is what its rows give, and its rows are what programs of the same models give."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from tests.cost import scaling

pytest.importorskip("transformers")


def test_the_page_is_what_its_rows_give() -> None:
    rows, told = scaling.read()
    assert scaling.page(rows, told) == scaling.PAGE.read_text(encoding="utf-8")
    assert scaling.plot(rows) == scaling.PLOT.read_text(encoding="utf-8")
    assert {(row.model, row.tp) for row in rows} == {(name, tp) for name in scaling.MODELS for tp in scaling.DEGREES}
    assert all(step.memory <= 78.7e9 for row in rows for step in row.steps if step.fits)


def test_the_models_are_as_large_as_they_are_called() -> None:
    billions = {row.model: row.billions for row in scaling.read()[0]}
    for name, number in billions.items():
        (told,) = [word for word in name.replace("-A22B", "").split() if word.endswith("B")]
        assert number == pytest.approx(float(told[:-1]), rel=0.01)


def test_more_replicas_than_sequences_are_no_choice() -> None:
    assert [scaling._sequences(gpus, 4) for gpus in (2, 8, 2048, 8192, 16384)] == [0, 4, 4, 1, 0]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "tp"), [("Llama 3.1 8B", 8), ("Llama 3.1 8B", 64)])
def test_a_row_is_what_its_program_gives(name: str, tp: int) -> None:
    (row,) = [row for row in scaling.read()[0] if (row.model, row.tp) == (name, tp)]
    found = replace(scaling.row_of(name, tp, scaling.model_of(name)), compiling=row.compiling)
    assert scaling._rounded(asdict(found)) == scaling._rounded(asdict(row))
