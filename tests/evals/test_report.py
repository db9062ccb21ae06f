"""The page of results, in a real browser: what it shows is what the results file says, and nothing in it runs."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext.assets import MODEL, PERSUASION
from ctxext.evals import report
from ctxext.evals.choice import recommended
from ctxext.evals.haystack import Haystack
from ctxext.evals.perplexity import Perplexity
from ctxext.evals.prompts import Prompter
from ctxext.evals.report import write_report
from ctxext.evals.results import Header, Record, Results, checked_line, read_results
from ctxext.evals.runner import Grid, Runner
from ctxext.evals.samples import make_task
from ctxext.evals.statistics import wilson
from ctxext.evals.summary import Summary
from ctxext.evals.targets import LiveModel, Variant

PHONE = {"width": 360, "height": 740}
EVIL = "</script><script>window.ran = true</script><img src=x onerror='window.ran = true'>"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The bundled model, as it is and extended, on a small grid."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    prompter, haystack = Prompter(tokenizer), Haystack.from_file(PERSUASION, tokenizer)
    grid = Grid(
        retrieval=(make_task("passkey"),),
        texts=(Perplexity(),),
        lengths=(512, 1024),
        depths=(0.0, 0.5, 1.0),
        trials=3,
        windows=2,
        gate=(512,),
    )
    runner = Runner(LiveModel(model, prompter, "austen-4m"), haystack, grid, beyond=True)
    path = tmp_path_factory.mktemp("results") / "small.jsonl"
    runner.run(path, [Variant(), Variant("yarn", {"method": "yarn", "factor": 4.0})])
    return read_results(path)


@pytest.fixture(scope="module")
def mixed(measured: Results, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The same, but for the last sample of each cell at 1,024 tokens, which missed by one digit."""
    path = tmp_path_factory.mktemp("mixed") / "mixed.jsonl"
    lines = [measured.header.line()]
    for record in measured.records:
        if "score" in record and record["length"] == 1024 and record["trial"] == 2:
            got = " " + record["expected"][0][:-1] + "x"
            record = record | {"hit": False, "score": 0.0, "digits": 0.8, "logprob": -7.25, "got": got}
        lines.append(checked_line(record))
    path.write_text("\n".join([*lines, ""]))
    return read_results(path)


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Writes the report of some results and opens it; whatever it complains about or asks for fails the test."""
    said: list[str] = []

    def opened(*results: Results, scheme: str = "light", size: dict[str, int] | None = None) -> Any:
        path = tmp_path / "report.html"
        write_report(results, path)
        page = browser.new_page(viewport=size or {"width": 1280, "height": 900}, color_scheme=scheme)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: request.url == path.as_uri() or said.append(request.url))
        page.goto(path.as_uri())
        pages.append(page)
        return page

    pages: list[Any] = []
    yield opened
    for page in pages:
        page.close()
    assert said == []


def cells_of(results: Results) -> dict[tuple[str, int, float], list[Record]]:
    """The passkey samples of the file itself, by variant, length and depth."""
    cells = defaultdict(list)
    for line in results.path.read_text().splitlines()[1:]:
        record = json.loads(line)
        if record["task"] == "passkey":
            cells[record["variant"], record["length"], record["depth"]].append(record)
    return cells


def failed_of(results: Results) -> list[Record]:
    return [record for records in cells_of(results).values() for record in records if record["score"] < 1]


def pick(page: Any, results: Results, variant: str, length: int, depth: float) -> Any:
    """The cell of the map."""
    index = list(results.header.variants).index(variant)
    for cell in page.locator(".map button").all():
        if json.loads(cell.get_attribute("data-pick")) == [index, "passkey", length, depth]:
            return cell
    raise AssertionError("no such cell")


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.slow
def test_page_says_model_recommendation_and_settings(measured: Results, open_page: Callable[..., Any]) -> None:
    page = open_page(measured)
    text = page.locator("main").inner_text()
    assert "austen-4m, trained at 512 tokens" in text
    assert recommended(Summary(measured)).text in text
    for fact in (*measured.header.identity.values(), *(v["fingerprint"] for v in measured.header.variants.values())):
        assert str(fact) in text
    for heading in ("Comparison", "Retrieval by length and depth", "Failed samples", "Perplexity by position"):
        assert page.get_by_role("heading", name=heading).count() == 1


def test_comparison_holds_the_figures_of_each_variant(measured: Results, open_page: Callable[..., Any]) -> None:
    page, cells = open_page(measured), cells_of(measured)
    for variant, name in (("none", "baseline"), ("yarn", "yarn")):
        rows = page.locator(".figures tbody tr", has=page.get_by_role("rowheader", name=name))
        row = " ".join(rows.all_inner_texts())
        for length in (512, 1024):
            scores = [r["score"] for depth in (0.0, 0.5, 1.0) for r in cells[variant, length, depth]]
            assert f"{mean(scores):.0%}" in row
            assert f"n = {len(scores)}" in row
            assert f"{Summary(measured).perplexity(variant, length, length - 512):.1f}" in row
    gate = Summary(measured).gate("yarn")
    assert f"{gate.loss.value:+.3f}" in row
    assert f"{gate.agreement.value:.1%}" in row


def test_every_number_of_a_map_is_that_of_the_file(measured: Results, open_page: Callable[..., Any]) -> None:
    page, cells = open_page(measured), cells_of(measured)
    assert page.locator(".map button").count() == len(cells) == 12
    for (variant, length, depth), records in cells.items():
        number = pick(page, measured, variant, length, depth).inner_text()
        assert number == f"{100 * mean([record['score'] for record in records]):.0f}"


def test_hover_and_focus_show_the_figures_of_a_cell(measured: Results, open_page: Callable[..., Any]) -> None:
    page, records = open_page(measured), cells_of(measured)["none", 1024, 0.0]
    share = wilson(sum(record["score"] for record in records), len(records))
    cell, tip = pick(page, measured, "none", 1024, 0.0), page.locator("#tip")
    assert not tip.is_visible()
    cell.hover()
    assert tip.is_visible()
    assert tip.inner_text().splitlines() == [
        "baseline: passkey",
        "1,024 tokens, depth 0%",
        f"accuracy {share.percent()}",
        f"digit accuracy {mean([record['digits'] for record in records]):.0%}",
        f"mean log-probability {mean([record['logprob'] for record in records]):.2f}",
    ]
    page.mouse.move(0, 0)
    assert not tip.is_visible()
    cell.focus()
    assert tip.is_visible()
    page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_click_lists_the_samples_of_a_cell_failed_ones_first(mixed: Results, open_page: Callable[..., Any]) -> None:
    page, cells = open_page(mixed), cells_of(mixed)
    for place in (("none", 1024, 0.0), ("yarn", 1024, 1.0), ("yarn", 512, 0.5)):
        pick(page, mixed, *place).click()
        samples, records = page.locator(".picked details"), cells[place]
        shown = samples.all_inner_texts()
        assert len(shown) == len(records)
        verdicts = ["hit" in text.splitlines()[0] for text in shown]
        assert verdicts == sorted(verdicts)
        assert sum(verdicts) == sum(record["hit"] for record in records)
        for record in records:
            sample = page.locator(".picked details", has_text=record["expected"][0])
            assert sample.locator("code").all_inner_texts() == [record["expected"][0], record["got"].strip()]
            if not record["hit"]:
                assert f"{record['logprob']:.2f}" in sample.inner_text()
                before, needle, after = record["contexts"][0]
                assert sample.locator("mark").inner_text() == needle
                around = " ".join(sample.locator("blockquote").inner_text().split())
                assert " ".join((before + needle + after).split()) in around
                assert "What is the pass key?" in sample.inner_text()


def test_failed_samples_are_all_there_and_can_be_filtered(mixed: Results, open_page: Callable[..., Any]) -> None:
    page, failed = open_page(mixed), failed_of(mixed)
    assert failed, "the unextended model is to fail beyond its trained length"
    samples = page.locator(".failed details")
    assert samples.count() == len(failed)
    assert f"{len(failed)} of 36 samples failed." in page.locator("main").inner_text()
    at_once = [record for record in failed if record["depth"] == 0.0]
    page.get_by_role("combobox", name="Depth").select_option("0%")
    assert samples.count() == len(at_once) < len(failed)
    page.get_by_role("combobox", name="Variant").select_option("yarn")
    assert samples.count() == sum(record["variant"] == "yarn" for record in at_once) > 0
    page.get_by_role("combobox", name="Variant").select_option("all")
    page.get_by_role("combobox", name="Depth").select_option("all")
    page.get_by_role("searchbox").fill("1234567890")
    assert samples.count() == 0
    assert page.get_by_role("status").inner_text() == f"0 of {len(failed)} match."
    page.get_by_role("searchbox").fill(at_once[0]["expected"][0])
    assert samples.count() == 1
    samples.locator("summary").click()
    assert samples.locator("mark").inner_text() == at_once[0]["contexts"][0][1]
    assert samples.locator("mark").is_visible()


def test_more_samples_of_a_cell_than_fit_are_said(
    mixed: Results, open_page: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "SAMPLES", 2)
    page = open_page(mixed)
    assert "This page has up to 2 samples per cell, failed ones first; mixed.jsonl has all of them." in page.content()
    pick(page, mixed, "yarn", 1024, 0.0).click()
    assert page.locator(".picked .verdict").all_inner_texts() == ["✗ miss", "✓ hit"]
    assert pick(page, mixed, "yarn", 512, 0.0).get_attribute("aria-label").count("n=3") == 1


def test_chart_shows_position_and_values_under_the_pointer(measured: Results, open_page: Callable[..., Any]) -> None:
    page = open_page(measured)
    chart = page.locator(".chart")
    chart.scroll_into_view_if_needed()
    curves = {variant: Summary(measured).curve(variant) for variant in ("none", "yarn")}
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 13, box["y"] + 100)
    lines = page.locator("#tip").inner_text().splitlines()
    assert lines[0] == f"position {curves['yarn'][-1][0]:,.0f}"
    assert set(lines[1:]) == {f"baseline: {curves['none'][-1][1]:.1f}", f"yarn: {curves['yarn'][-1][1]:.1f}"}
    chart.focus()
    page.keyboard.press("Home")
    assert page.locator("#tip").inner_text().splitlines()[0] == f"position {curves['yarn'][0][0]:,.0f}"
    assert f"yarn: {curves['yarn'][0][1]:.1f}" in chart.get_attribute("aria-valuetext")


def test_chart_is_of_log_scale(measured: Results, open_page: Callable[..., Any]) -> None:
    page = open_page(measured)
    ticks = page.locator(".chart text[text-anchor=end]").evaluate_all(
        "all => all.filter(t => +t.getAttribute('x') < 60).map(t => [+t.textContent, +t.getAttribute('y') - 4])"
    )
    (a, y_a), (b, y_b), (c, y_c) = ticks[:3]
    assert (y_a - y_b) / (y_b - y_c) == pytest.approx(math.log(b / a) / math.log(c / b), rel=1e-3)


def test_legend_toggles_a_line(measured: Results, open_page: Callable[..., Any]) -> None:
    page = open_page(measured)
    button, points = page.get_by_role("button", name="yarn", exact=True), ".chart polyline[data-variant=yarn]"
    assert page.locator(points).get_attribute("points")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert not page.locator(points).get_attribute("points")
    page.locator(".chart").hover()
    assert "yarn" not in page.locator("#tip").inner_text()
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert page.locator(points).get_attribute("points")


def test_maps_need_no_mouse(measured: Results, open_page: Callable[..., Any]) -> None:
    page = open_page(measured)
    # One stop for the tabulator a map, the arrows from there.
    assert page.locator(".map button[tabindex='0']").count() == 2
    page.locator(".map button").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.locator("#tip").inner_text().splitlines()[1] == "1,024 tokens, depth 50%"
    page.keyboard.press("Enter")
    assert page.locator(".picked details").count() == 3


def test_phone_scrolls_no_way_but_down(measured: Results, open_page: Callable[..., Any]) -> None:
    page = open_page(tampered(measured, got="9" * 400), size=PHONE)
    page.locator(".map button").nth(1).click()
    page.locator(".failed summary").first.click()
    for state in ("as opened", "with samples open"):
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, state
        assert page.evaluate("document.body.scrollWidth") <= 360, state


# Boxes whose content is wider than they are.
CUT_OFF = """() => [...document.querySelectorAll("main *")].filter(node =>
  !node.closest("svg") && node.checkVisibility() && node.clientWidth && node.scrollWidth > node.clientWidth + 1
).map(node => node.outerHTML.slice(0, 100))"""


@pytest.mark.parametrize("width", [360, 1200, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off(width: int, scheme: str, measured: Results, open_page: Callable[..., Any]) -> None:
    """Of five variants at six lengths, with every kind of column."""
    names = {"none": "none", **{name: "yarn" for name in ("yarn", "ntk_by_parts", "dynamic_yarn", "self_extend")}}
    lengths = [512 * 2**k for k in range(6)]
    cost = {"prefill_seconds": 12.34, "decode_seconds": 0.0123, "kv_bytes": 2**29, "peak_bytes": 2**31, "tokens": 512}
    records: list[Record] = []
    for name, of in names.items():
        for record in (record for record in measured.records if record["variant"] == of):
            for n in (scale * record["length"] for scale in ((1, 8, 32) if "score" in record else (1,))):
                records.append(record | {"variant": name, "length": n, "key": f"{n} {record['key']}"})
        place = {"variant": name, "task": "cost", "depth": None, "trial": 0, "seed": 0}
        records += [{**place, "length": n, "key": f"cost {n}", **cost, "tokens": n} for n in lengths]
    header = measured.header
    variants = {name: header.variants[of] for name, of in names.items()}
    header = Header(header.identity, {**header.tasks, "cost": {}}, variants, header.about)
    page = open_page(Results(measured.path, header, records), scheme=scheme, size={"width": width, "height": 900})
    page.locator(".map button").nth(1).click()
    page.locator(".failed summary").first.click()
    assert page.evaluate(CUT_OFF) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if os.environ.get("CTXEXT_SCREENSHOTS"):  # a folder, to look at the page
        folder = Path(os.environ["CTXEXT_SCREENSHOTS"])
        page.screenshot(path=folder / f"report-{width}-{scheme}.png", full_page=True)


def test_a_link_shows_the_same_view(mixed: Results, open_page: Callable[..., Any]) -> None:
    page = open_page(mixed)
    pick(page, mixed, "yarn", 1024, 0.5).click()
    page.get_by_role("combobox", name="Variant").select_option("yarn")
    page.get_by_role("searchbox").fill("pass")
    page.get_by_role("button", name="yarn", exact=True).click()
    shown = page.locator(".picked details").all_inner_texts()
    page.get_by_role("button", name="Copy link").click()
    page.locator("#share + span", has_text="same cell").wait_for()
    url = page.url
    assert "#view=" in url
    page.goto("about:blank")
    page.goto(url)
    assert page.locator(".picked details").all_inner_texts() == shown
    assert page.get_by_role("combobox", name="Variant").input_value() == "1"
    assert page.get_by_role("searchbox").input_value() == "pass"
    assert page.get_by_role("button", name="yarn", exact=True).get_attribute("aria-pressed") == "false"
    assert not page.locator(".chart polyline[data-variant=yarn]").get_attribute("points")


@pytest.mark.parametrize("view", ["%", "null", "3", '{"results-1":{"pick":7,"filters":3,"hidden":{}}}'])
def test_a_broken_link_shows_the_page_as_it_is(view: str, measured: Results, open_page: Callable[..., Any]) -> None:
    page = open_page(measured)
    url = page.url
    page.goto("about:blank")
    page.goto(f"{url}#view={view}")
    assert page.locator(".picked details").count() == 0
    assert page.locator(".chart polyline").count() == 2


def test_two_files_are_compared_on_their_common_samples(
    measured: Results, mixed: Results, open_page: Callable[..., Any]
) -> None:
    text = open_page(measured, mixed).locator("section[aria-labelledby=between]").inner_text()
    assert "1 is small.jsonl, 2 is mixed.jsonl." in text
    one, two = (cells_of(each) for each in (measured, mixed))
    for variant, name in (("none", "baseline"), ("yarn", "yarn")):
        row = next(line for line in text.split(name)[1:])
        found = [
            mean([r["score"] for depth in (0.0, 0.5, 1.0) for r in cells[variant, 1024, depth]]) for cells in (one, two)
        ]
        assert f"{100 * (found[1] - found[0]):+.1f}" in row
        assert "n = 9" in row
    assert "nats per token up to 1,024" in text
    header = replace(measured.header, identity={**measured.header.identity, "text": "another"})
    other = Results(measured.path, header, [r | {"key": f"other {r['key']}"} for r in measured.records])
    assert "no samples in common" in open_page(measured, other).locator("main").inner_text()


def test_every_table_says_what_it_means(measured: Results, tmp_path: Path) -> None:
    tables = report._comparison(Summary(measured))
    assert [table["title"] for table in tables] == [
        "passkey: accuracy by length", "perplexity of tokens", "effective length (tokens)",
        "short-context regression (windows of 512 tokens)",
    ]  # fmt: skip
    assert all(len(table["meaning"]) > 60 for table in tables)


def test_a_map_of_many_lengths_keeps_its_rows_on_a_phone(measured: Results, open_page: Callable[..., Any]) -> None:
    many = [
        record | {"length": scale * record["length"], "key": f"{scale} {record['key']}"}
        for record in measured.records
        if "score" in record
        for scale in (1, 4, 16, 64)
    ]
    page = open_page(Results(measured.path, measured.header, many), size=PHONE)
    rows = page.locator(".map").first.locator("tbody tr").all()
    assert [row.locator("button").count() for row in rows] == [8, 8, 8]
    assert max(row.bounding_box()["height"] for row in rows) < 40
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


# Text whose contrast with what is behind it is below WCAG's 4.5.
FAINT = """() => {
  const rgb = color => color.match(/[\\d.]+/g).map(Number);
  const light = color => {
    const [r, g, b] = rgb(color).map(c => c / 255).map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const behind = node => {
    const color = node ? getComputedStyle(node).backgroundColor : "rgb(255, 255, 255)";
    return node && rgb(color)[3] === 0 ? behind(node.parentElement) : color;
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), faint = [];
  let seen = 0;
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility()) continue;
    const style = getComputedStyle(node);
    const color = node.closest("svg") ? style.fill : style.color;
    const [low, high] = [light(color), light(behind(node))].sort((a, b) => a - b);
    seen += 1;
    if ((high + .05) / (low + .05) < 4.5) faint.push([walker.currentNode.data.trim(), color, behind(node)]);
  }
  return [seen, faint];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible_in_both_schemes(scheme: str, measured: Results, open_page: Callable[..., Any]) -> None:
    page = open_page(measured, scheme=scheme)
    pick(page, measured, "none", 1024, 0.0).click()
    page.get_by_role("button", name="yarn", exact=True).click()
    seen, faint = page.evaluate(FAINT)
    assert seen > 200
    assert faint == []
    page_color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (page_color == "rgb(255, 255, 255)") == (scheme == "light")


def tampered(results: Results, **values: Any) -> Results:
    """The same results, with these values in every retrieval sample."""
    records = [record | values if "score" in record else record for record in results.records]
    return Results(results.path, results.header, records)


def test_nothing_from_the_results_runs(measured: Results, open_page: Callable[..., Any]) -> None:
    evil = tampered(measured, question=EVIL, got=EVIL, expected=[EVIL], contexts=[[EVIL, EVIL, "<b>after</b>"]])
    header = evil.header
    facts = {**header.identity, "text": EVIL, EVIL: EVIL}
    names = {"none": "none", "yarn": EVIL}
    variants = {names[name]: {**value, "model": EVIL} for name, value in header.variants.items()}
    records = [record | {"variant": names[record["variant"]]} for record in evil.records]
    header = Header(facts, header.tasks, variants, {**header.about, "machine": EVIL})
    page = open_page(Results(Path(EVIL.replace("/", "")), header, records))
    for cell in page.locator(".map button").all()[::5]:
        cell.click()
    for summary in page.locator(".failed summary").all()[:2]:
        summary.click()
    assert page.evaluate("window.ran") is None
    assert page.locator("img").count() == 0
    assert page.locator(".failed mark").first.inner_text() == EVIL
    assert page.locator(".failed blockquote").first.inner_text() == f"…{EVIL}{EVIL}<b>after</b>…"
    assert page.locator(".failed code").all_inner_texts()[:2] == [EVIL, EVIL]
    assert page.locator(".figures tbody th").last.inner_text() == EVIL


def test_several_results_have_a_section_each(measured: Results, open_page: Callable[..., Any]) -> None:
    other = Results(Path("other.jsonl"), measured.header, [r for r in measured.records if r["variant"] == "none"])
    page = open_page(measured, other)
    assert page.locator(".results").count() == 2
    page.get_by_role("link", name="other.jsonl").click()
    assert page.locator(".results:target h2").count() == 1
    page.locator(".results").last.locator(".map button").last.click()
    assert page.locator(".results").last.locator(".picked details").count() == 3
    assert page.locator(".results").first.locator(".picked details").count() == 0


@pytest.mark.parametrize(
    ("task", "parts"),
    [
        ("passkey", ["Comparison", "Retrieval by length and depth", "Failed samples", "Settings"]),
        ("perplexity", ["Comparison", "Perplexity by position", "Settings"]),
    ],
)
def test_page_holds_what_was_measured(
    task: str, parts: list[str], measured: Results, open_page: Callable[..., Any]
) -> None:
    """Of one task alone: the other's parts are not there, and nothing complains or links to them."""
    page = open_page(Results(measured.path, measured.header, [r for r in measured.records if r["task"] == task]))
    assert page.locator("h3").all_inner_texts() == parts
    assert page.locator(".figures").first.locator("tbody tr").count() == 2
    dead = "links => links.filter(link => !document.querySelector(link.getAttribute('href'))).length"
    assert page.locator("a").evaluate_all(dead) == 0


def test_page_asks_nothing_of_the_network_and_keeps_no_losses(measured: Results, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report([measured], path)
    text = path.read_text()
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    assert "default-src 'none'" in text
    assert not any(record["losses"] in text for record in measured.records if "losses" in record)
    assert len(text) < 100_000


def test_no_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs results, got none"):
        write_report([], tmp_path / "report.html")


def test_settings_and_effective_lengths_are_in_words(measured: Results, tmp_path: Path) -> None:
    write_report([measured], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "maximum context length" in text
    assert "with 95% confidence: none" in text
    assert ">reach<" not in text
