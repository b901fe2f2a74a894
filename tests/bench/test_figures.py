"""The benchmarks of time, in a form so small that only the shape of what they give can be checked."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tpplan.bench import (
    BENCHMARKS,
    alternative_ranks,
    compile_time,
    decode,
    forms,
    loop,
    overhead,
    overlap_times,
    requests,
    slow_link,
)
from tpplan.bench.child import measure
from tpplan.bench.environment import describe_environment
from tpplan.bench.page import render_page, write_page
from tpplan.bench.plots_page import html_of
from tpplan.bench.rank_processes import peak_mib
from tpplan.bench.result_tables import Table, show, tables_of, verdicts
from tpplan.bench.rounds import time_interleaved
from tpplan.bench.running import BenchmarkError, measurements, run, run_in_process
from tpplan.compat.process_groups import fake_process_group
from tpplan.compiler import search
from tpplan.compiler.check import local_run
from tpplan.compiler.ir.layout import Collective
from tpplan.runtime.ranks.communicator import ProcessGroupCommunicator

IN_PLACE = (local_run.check, search.assign)


@pytest.fixture(scope="module")
def overhead_result() -> dict[str, Any]:
    return _result("overhead", overhead.measure(rounds=2, calls=1, kind="plain"))


@pytest.fixture(scope="module")
def loop_result() -> dict[str, Any]:
    return _result("loop", loop.measure(rounds=1, calls=1, kind="plain"))


@pytest.fixture(scope="module")
def compile_result() -> dict[str, Any]:
    return _result("compile", compile_time.measure(layers=2, size=2, reduced=True))


def _result(name: str, measured: dict[str, Any]) -> dict[str, Any]:
    return {"benchmark": name, "environment": describe_environment().to_dict(), **json.loads(json.dumps(measured))}


def test_ratios_are_taken_within_a_round_against_the_first_subject() -> None:
    slow = iter([9.0] * 3 + [1.0, 2.0, 4.0])
    slower = iter([9.0] * 3 + [2.0, 4.0, 8.0])
    timed = time_interleaved({"one": lambda: next(slow), "two": lambda: next(slower)}, rounds=3, calls=1)
    assert (timed["one"].milliseconds, timed["one"].ratio) == (2000.0, 1.0)
    assert (timed["two"].milliseconds, timed["two"].ratio) == (4000.0, 2.0)


def test_overhead_has_a_row_for_each_form_and_way(overhead_result: dict[str, Any]) -> None:
    names = (forms.UNSHARDED, forms.TPPLAN, forms.SEQUENCE, forms.TORCH, overhead.WATCHED, overhead.BY_HAND)
    forward, backward = overhead.FORWARD, overhead.BACKWARD
    expected = [*((forward, form) for form in (*names, overhead.GUARD)), *((backward, form) for form in names)]
    assert [(row["way"], row["form"]) for row in overhead_result["rows"]] == expected
    assert all(row["milliseconds"] > 0 and row["ratio"] > 0 for row in overhead_result["rows"])


@pytest.mark.sweep
def test_overhead_is_measured_beside_transformers_own_and_of_generation() -> None:
    pytest.importorskip("accelerate")
    result = _result("overhead", overhead.measure(rounds=1, calls=1))
    names = (forms.UNSHARDED, forms.TPPLAN, forms.SEQUENCE, forms.TORCH, forms.HUB)
    rows = {(row["way"], row["form"]) for row in result["rows"]}
    ways = (overhead.FORWARD, overhead.BACKWARD, decode.PROMPT, decode.TOKEN)
    assert rows >= {(way, form) for way in ways for form in names}
    assert rows >= {(overhead.NEW_LENGTH, form) for form in (forms.UNSHARDED, forms.TPPLAN, forms.SEQUENCE)}
    assert any("less than transformers' own" in line for line in verdicts(result))
    assert "WORLD_SIZE" not in os.environ


def test_the_loop_has_a_row_for_each_way_and_is_shown_and_judged(loop_result: dict[str, Any]) -> None:
    names = {forms.UNSHARDED, forms.TPPLAN, forms.SEQUENCE}
    rows = {(row["way"], row["form"]): row for row in loop_result["rows"]}
    for way in (loop.FRESH, loop.ADDED, loop.CLIPPING, "AdamW step", "AdamW step, foreach", "AdamW step, fused"):
        own = set() if way in (loop.FRESH, loop.ADDED) else {loop.OWN}
        assert {form for held, form in rows if held == way} == names | own
    assert all(row["milliseconds"] > 0 and row["ratio"] > 0 for row in rows.values())
    console = Console(width=160, record=True)
    show(loop_result, console)
    assert all("met" in line or "missed" in line for line in verdicts(loop_result))
    assert "AdamW step, foreach" in console.export_text()


@pytest.mark.slow
def test_compile_times_every_pass_and_puts_the_pipeline_back(compile_result: dict[str, Any]) -> None:
    (row,) = compile_result["rows"]
    assert set(row["passes"]) == {name.strip("_") for name in compile_time.PASSES}
    assert row["peak_gib"] >= row["peak_before_gib"] > 0
    assert (local_run.check, search.assign) == IN_PLACE


def test_a_pass_that_calls_itself_is_counted_once(compile_result: dict[str, Any]) -> None:
    (row,) = compile_result["rows"]
    assert sum(row["passes"].values()) <= row["processor_seconds"] + 0.01 * len(row["passes"])


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_quick_form_measures_the_same_things(name: str) -> None:
    assert len(measurements(name, quick=True)) <= len(measurements(name, quick=False))


def test_results_are_shown_and_judged(overhead_result: dict[str, Any], compile_result: dict[str, Any]) -> None:
    console = Console(width=200, record=True)
    for result in (overhead_result, compile_result):
        show(result, console)
        assert all("met" in line or "missed" in line for line in verdicts(result))
    text = console.export_text()
    assert "parallelize_module, forward and backward" in text
    assert "build_regions" in text


def test_a_table_in_markdown_aligns_figures_right() -> None:
    table = Table("Title", ("", "ms"), (("a", "1.0"),))
    assert table.markdown() == "**Title**\n\n|  | ms |\n| --- | --: |\n| a | 1.0 |"


def test_the_page_keeps_the_figures_of_benchmarks_that_did_not_run(
    tmp_path: Path, overhead_result: dict[str, Any], compile_result: dict[str, Any]
) -> None:
    write_page(tmp_path, [overhead_result])
    page = write_page(tmp_path, [compile_result]).read_text()
    assert page.index("## Overhead") < page.index("## Compile time")
    assert json.loads((tmp_path / "benchmarks" / "overhead.json").read_text()) == overhead_result


def test_the_shipped_page_is_what_its_figures_give() -> None:
    folder = Path(__file__).parents[2] / "docs"
    results = [json.loads((folder / "benchmarks" / f"{name}.json").read_text()) for name in BENCHMARKS]
    assert render_page(results) == (folder / "benchmarks.md").read_text()
    assert not any(result["quick"] for result in results)
    assert all(tables_of(result) for result in results)


def test_a_failure_in_a_measurement_says_which_and_why() -> None:
    with pytest.raises(BenchmarkError, match=r"(?s)compile failed with .*unheard_of.*TypeError"):
        run_in_process("compile", {"unheard_of": 1})


@pytest.mark.sweep
def test_each_plan_compiles_in_processes_of_its_own() -> None:
    result = run("compile", quick=True)
    assert [row["plan"] for row in result["rows"]] == ["llama", "llama-sequence"]
    assert result["environment"]["versions"]["torch"]


@pytest.mark.sweep
def test_alternatives_are_held_against_a_floor_written_by_hand() -> None:
    result = run("alternatives", quick=True)
    by = {(row["part"], row["way"], row["form"]): row for row in result["rows"]}
    ways = (alternative_ranks.FORWARD, alternative_ranks.BACKWARD, alternative_ranks.STEP)
    names = (alternative_ranks.FLOOR, forms.TPPLAN, forms.TORCH)
    for way in ways:
        floor, ours, theirs = (by["steps", way, form] for form in names)
        assert (ours["collectives"], ours["mib"]) == (floor["collectives"], floor["mib"])
        assert theirs["collectives"] > ours["collectives"] and theirs["mib"] > ours["mib"]
        assert ours["peak_mib"] == pytest.approx(floor["peak_mib"], rel=0.1) and ours["parallelize_seconds"] > 0
    for part in ("host", "layer"):
        assert all(by[part, way, form]["milliseconds"] > 0 for way in ways[:2] for form in names)
    assert by["layer", ways[0], forms.TPPLAN]["peak_mib"] < by["layer", ways[0], forms.UNSHARDED]["peak_mib"] / 2
    assert result["quick"] and len(verdicts(result)) == 1 and len(tables_of(result)) == 4
    assert len(verdicts({**result, "quick": False})) == 3


def test_the_page_of_plots_shows_every_row_and_loads_nothing() -> None:
    folder = Path(__file__).parents[2] / "docs" / "benchmarks"
    results = [json.loads((folder / f"{name}.json").read_text()) for name in BENCHMARKS]
    results[0]["environment"]["processor"] = "<i>&"
    text = html_of(results)
    assert "&lt;i&gt;&amp;" in text and "<i>&" not in text and "http" not in text.replace("http-equiv", "")
    ways = {(result["benchmark"], *(row.get(key) for key in ("part", "model", "way", "batch")))
            for result in results for row in result["rows"] if "milliseconds" in row}  # fmt: skip
    assert text.count("<svg") == len(ways) > 10
    assert text.count("<table") == sum(len(tables_of(result)) for result in results)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_quick_run_has_no_verdicts(name: str) -> None:
    folder = Path(__file__).parents[2] / "docs" / "benchmarks"
    result = json.loads((folder / f"{name}.json").read_text())
    assert verdicts(result) or name == "loss"
    console = Console(width=200, record=True)
    show(result | {"quick": True}, console)
    assert verdicts(result | {"quick": True}) == ["A quick run: its figures mean nothing."]
    for told in (console.export_text(), html_of([result | {"quick": True}]), render_page([result | {"quick": True}])):
        assert "figures mean nothing" in told and not re.search(r": (met|missed)\)", told)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_in_a_browser_the_page_of_alternatives_loads_and_sorts(
    browser: Any, width: int, scheme: str, tmp_path: Path
) -> None:
    """By a click and by keyboard, without a script from elsewhere or a line that is cut off."""
    folder = Path(__file__).parents[2] / "docs" / "benchmarks"
    path = tmp_path / "bench.html"
    results = [json.loads((folder / f"{name}.json").read_text()) for name in ("alternatives", "overhead", "overlap")]
    path.write_text(html_of(results), encoding="utf-8")
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    wrong, asked = list[str](), list[str]()
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("h1").inner_text() == "tpplan bench"

    # Each text of a plot lies inside of it, and no bar reaches another's text.
    assert page.locator(".plot svg").count() > 3
    outside = """[...document.querySelectorAll('.plot svg')].flatMap(plot => {
        const box = plot.getBoundingClientRect(), bars = [...plot.querySelectorAll('rect')]
        const left = Math.min(...bars.map(bar => bar.getBoundingClientRect().left))
        return [...plot.querySelectorAll('text')].filter(text => {
            const held = text.getBoundingClientRect()
            const covered = held.left < left && held.right > left
            return held.left < box.left - 1 || held.right > box.right + 1 || covered
        }).map(text => text.textContent)
    })"""
    assert page.evaluate(outside) == []

    tables = page.locator("table")
    for number in range(tables.count()):
        table = tables.nth(number)
        heading = table.locator("th").last
        table.locator("th button").last.click()
        assert heading.get_attribute("aria-sort") == "ascending"
        table.locator("th button").last.press("Enter")
        assert heading.get_attribute("aria-sort") == "descending"
        cells = table.locator("tbody tr")
        sorted_by = "rows => rows.map(row => Number(row.cells[row.cells.length - 1].dataset.v))"
        found = [value for value in cells.evaluate_all(sorted_by) if value == value]
        assert found == sorted(found, reverse=True)
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert wrong == [] and asked == [path.as_uri()]
    page.close()


def test_the_most_memory_is_what_there_is_at_once() -> None:
    def run() -> None:
        one = torch.ones(2**18)
        two = one + 1
        del one
        two.mul(2)

    assert peak_mib(run) == pytest.approx(2, abs=0.01)


@pytest.mark.sweep
def test_overlap_is_measured_with_the_same_bytes() -> None:
    result = run("overlap", quick=True)
    by = {(row["model"], row["link"], row["form"]): row for row in result["rows"]}
    for plan in overlap_times.PLANS:
        for link in ("own", "slow", "fake"):
            assert all(by[plan, link, form]["milliseconds"] > 0 for form in overlap_times.FORMS)
        plain, auto, every, again = (by[plan, "slow", form]["sent"] for form in overlap_times.FORMS)
        assert plain == auto == pytest.approx(every, rel=0.01)
        assert again == plain if plan == "llama" else again > plain


class Clock:
    """A clock that sleeping alone moves."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_slow_link_takes_its_time_and_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 bytes on two ranks, at 1,600 bytes a second; what is begun together comes one after another."""
    before, clock = vars(ProcessGroupCommunicator).copy(), Clock()
    monkeypatch.setattr(slow_link, "time", clock)
    with fake_process_group(2):
        axis, ones = ProcessGroupCommunicator(torch.distributed.group.WORLD), torch.ones(4)  # pyright: ignore
        for work, seconds in (
            (lambda: axis.all_reduce(ones), 0.01),
            (lambda: axis.reduce_scatter(ones, 0), 0.005),
            (lambda: axis.all_gather(ones, 0), 0.01),
            (lambda: axis.begin_collective(Collective.ALL_REDUCE, ones)(), 0.01),
        ):
            with slow_link.SlowLink(1600.0) as link:
                work()
            assert (link.sent, link.waited) == pytest.approx((seconds, seconds))
        with slow_link.SlowLink(1600.0) as link:
            waits = [axis.begin_collective(Collective.ALL_REDUCE, ones) for _ in range(3)]
            clock.sleep(0.012)  # what is computed meanwhile
            for wait in waits:
                wait()
        assert (link.sent, link.waited) == pytest.approx((0.03, 0.018))
    assert vars(ProcessGroupCommunicator) == before


@pytest.mark.sweep
def test_serving_is_measured_for_every_form() -> None:
    result = run("serving", quick=True)
    speed = {(row["way"], row["form"]): row for row in result["rows"]}
    for way in (decode.PROMPT, decode.TOKEN):
        whole, ours, theirs = (speed[way, form] for form in (forms.UNSHARDED, forms.TPPLAN, forms.TORCH))
        assert whole["ratio"] == 1 and not whole["collectives"]
        assert ours["collectives"] == 2 * 4 + 2 < theirs["collectives"]
        assert ours["tokens_per_second"] > 0 and (way, forms.SEQUENCE) in speed
    assert len(verdicts(result | {"quick": False})) == 2 and all(tables_of(result))


@pytest.mark.sweep
def test_first_requests_are_measured_beside_later_ones() -> None:
    result = run("requests", quick=True)
    assert [row["way"] for row in result["rows"]] == ["greedy", "prompt lookup"]
    for row in result["rows"]:
        seconds = row["seconds"]
        assert seconds[requests.FIRST] > seconds[requests.LATER] > 0 and seconds[requests.WARMED] > 0
    assert len(verdicts(result | {"quick": False})) == 2 * len(result["rows"]) and all(tables_of(result))


@pytest.mark.slow
def test_a_measurement_can_be_asked_for_by_name() -> None:
    assert measure("collectives", {"plans": ["opt"]})["rows"][0]["plan"] == "opt"
