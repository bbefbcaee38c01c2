"""report.html: what it holds, that its figures are the record's, that it needs nothing else."""

from __future__ import annotations

import base64
import json
import re
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from chromium import WHY_NOT, chromium
from command_line import wideep
from page_results import (
    DEFAULT,
    EXTRA,
    Outline,
    faulty,
    large,
    renamed,
    result_of,
    sample_page,
)
from report_samples import sample, sample_inputs

from comm.report.events import EventLog
from comm.report.page import charts
from comm.report.page.document import page, write_page
from comm.report.page.heat import between_nodes
from comm.report.page.png import RAMP, SHADES, data_uri, palette, shades
from comm.report.page.result import Result
from comm.report.record import build_record
from comm.report.store import write_result
from moe.config import compose
from moe.jobs import report
from moe.settings import ConfigError, UnfitError

MB = 1e6
SECTIONS = (
    *("verdicts", "headline", "layers", "pairs", "load", "fan-out", "full-size", "conventions"),
    *("time", "manifest"),
)
QUICK = ("default", "no tokens", "training", "72 ranks", "groups", "one rank", "balanced")


# -- what every page keeps -------------------------------------------------------------------------


@pytest.mark.parametrize("name", QUICK)
def test_a_page_is_well_formed_and_whole(name):
    text = sample_page(name)
    outline = Outline(text)
    assert outline.problems == []
    ids = [attrs["id"] for _, attrs, _ in outline.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert [attrs["id"] for tag, attrs, _ in outline.all("section")] == list(SECTIONS)
    links = {attrs["href"].removeprefix("#") for _, attrs, _ in outline.all("use", "a")}
    assert links <= set(ids)
    clips = set(re.findall(r"url\(#([^)]*)\)", text))
    assert clips <= set(ids)


@pytest.mark.parametrize("name", QUICK)
def test_every_picture_is_in_words_and_in_a_table(name):
    text = sample_page(name)
    for tag, attrs, _ in Outline(text).all("svg", "img"):
        hidden = attrs.get("aria-hidden") == "true"
        assert hidden or (attrs["role"] == "img" and len(attrs["aria-label"]) > 20), (tag, attrs)
    figures = re.findall(r"<figure>.*?</figure>", text, re.S)  # the charts; maps share a table
    assert figures and all("<table>" in one and "<summary>Table" in one for one in figures)
    panels = re.findall(
        r'<details class="panel".*?(?=<details class="panel"|</section>)', text, re.S
    )
    assert panels and all("<table>" in one for one in panels)


@pytest.mark.parametrize("name", QUICK)
def test_a_page_asks_for_nothing(name):
    outline = Outline(sample_page(name))
    for tag, attrs, _ in outline.elements:
        for key in ("src", "href", "srcset", "action", "data", "poster"):
            assert attrs.get(key, "#")[:1] == "#" or attrs[key].startswith("data:"), (tag, attrs)
    assert "@import" not in sample_page(name) and not re.search(r"url\((?!#)", sample_page(name))
    policy = next(a["content"] for _, a, _ in outline.all("meta") if "http-equiv" in a)
    assert policy.startswith("default-src 'none'")


def test_verdicts_come_first_and_in_words():
    text = sample_page("default")
    record = sample("default")
    order = [text.index(f'<section id="{name}">') for name in SECTIONS]
    assert order == sorted(order)
    plain = " ".join(part for _, _, parts in Outline(text).elements for part in parts)
    for verdict in record["verdicts"]:
        assert verdict["reason"] in plain and verdict["name"] in plain
    assert "everything that was checked agrees (status 0)" in plain
    bad = page(faulty())
    assert "COUNTED BYTES DIFFER from a prediction (status 3)" in bad
    assert 'class="answer bad"' in bad and 'class="state outside">OUTSIDE<' in bad


def test_names_that_users_give_stay_text():
    name = "</title><script>alert(1)</script><img src=http://x.invalid/y onerror='z'>\"&amp;"
    text = page(result_of(renamed(sample_inputs(layers=1), name)))
    outline = Outline(text)
    assert outline.problems == []
    assert len(outline.all("script")) == 1 and not outline.all("img")
    shown = [part for _, _, parts in outline.elements for part in ["".join(parts)] if name in part]
    assert len(shown) >= 6  # title, heading, manifest, notes, hosts, environment
    assert not any("onerror" in attrs for _, attrs, _ in outline.elements)


# -- figures ---------------------------------------------------------------------------------------


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table, rows of texts."""
    found = []
    for table in re.findall(r"<table>.*?</table>", text, re.S):
        rows = re.findall(r"<tr>(.*?)</tr>", table, re.S)
        found.append([re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in rows])
    return found


def table_with(text: str, *header: str) -> list[list[str]]:
    return next(rows[1:] for rows in tables(text) if rows[0][: len(header)] == list(header))


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


def panel_of(text: str, phase: str, layer: str) -> str:
    start = text.index(f'data-phase="{phase}" data-layer="{layer}"')
    return text[start : text.find('<details class="panel"', start)]


def pixels(text: str, name: str) -> np.ndarray:
    """The picture of that id, decoded by hand: uint8 [height, width] indices of its colours."""
    code = re.search(rf'id="{name}" href="data:image/png;base64,([^"]*)"', text)
    data, at, idat, size = base64.b64decode(code[1]), 8, b"", (0, 0)
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        (check,) = struct.unpack(">I", data[at + 8 + length : at + 12 + length])
        assert check == zlib.crc32(kind + body)
        size = struct.unpack(">II", body[:8]) if kind == b"IHDR" else size
        idat += body if kind == b"IDAT" else b""
        at += 12 + length
    rows = np.frombuffer(zlib.decompress(idat), np.uint8).reshape(size[1], size[0] + 1)
    assert not rows[:, 0].any()
    return rows[:, 1:]


def test_the_pairs_are_those_of_the_record():
    inputs = sample_inputs(**DEFAULT)
    text = sample_page("default")
    for p, phase in enumerate(("dispatch", "combine")):
        for layer in ("all layers", "0", "3"):
            chosen = slice(None) if layer == "all layers" else slice(int(layer), int(layer) + 1)
            cells = inputs.traffic.bytes[chosen, 0, p].sum(axis=(0, 1))
            panel = panel_of(text, phase, layer)
            rows = table_with(panel, "from rank / to")
            assert [[number(cell) for cell in row[1:]] for row in rows] == cells.tolist()
            nodes = table_with(panel, "from node / to")
            of = cells.reshape(2, 4, 2, 4).sum(axis=(1, 3))
            assert [[number(cell) for cell in row[1:]] for row in nodes] == of.tolist()
            shown = pixels(panel, f"c-{phase}-{layer.replace(' ', '-')}")
            assert (shown == np.rint(1 + cells / cells.max() * (SHADES - 1))).all()
            assert f'href="#c-{phase}-{layer.replace(" ", "-")}"' in panel  # predicted alike
            assert "no pair differs" in panel


def test_a_difference_is_shown_where_it_is():
    text = page(faulty())
    panel = panel_of(text, "dispatch", "2")
    shown = pixels(panel, "d-dispatch-2")
    assert np.argwhere(shown).tolist() == [[1, 6]] and shown[1, 6] == SHADES
    assert "1 of 64 pairs differ" in panel and "no pair differs" in panel_of(text, "dispatch", "1")
    counted, exact = (rows[1:] for rows in tables(panel) if rows[0][0] == "from rank / to")
    assert number(counted[1][7]) == number(exact[1][7]) + EXTRA
    cells = faulty().counted[2, 0, 0]
    predicted = cells - EXTRA * (shown > 0)
    drawn = np.rint(1 + predicted / cells.max() * (SHADES - 1))
    assert (pixels(panel, "p-dispatch-2") == drawn).all()


def test_the_kernels_bytes_are_beside_the_counted_ones():
    panel = panel_of(sample_page("default"), "whole run", "all layers")
    rows = table_with(panel, "from -&gt; to")
    assert len(rows) == 56
    counted = sample_inputs(**DEFAULT).traffic.bytes.sum(axis=(0, 1, 2, 3))
    for pair, away, acked, more, adds, left in rows:
        src, dst = map(int, pair.split(" -&gt; "))
        assert number(away) == counted[src, dst] and number(acked) == number(away) + 144
        assert (more, adds, left) == ("144", "144", "0")
    assert "no pair differs" in panel and pixels(panel, "k-whole")[0, 0] == 0
    assert "whole run" not in sample_page("72 ranks")  # nobody asked the kernel


def test_layers_headline_load_fan_out_and_time_are_the_records():
    inputs = sample_inputs(**DEFAULT)
    text, record = sample_page("default"), sample("default")
    rows = table_with(text, "layer", "phase", "counted, bytes")
    assert len(rows) == len(record["layers"]) == 8
    for row, entry in zip(rows, record["layers"], strict=True):
        figures = entry["network"]
        assert row[:2] == [str(entry["layer"]), entry["phase"]]
        assert [number(cell) for cell in row[2:5]] == [
            *(figures["measured_bytes"], figures["exact_bytes"], entry["differing_bytes"])
        ]
        assert row[5] == f"{figures['expected_bytes']:,.0f} +- {figures['expected_std']:,.0f}"
        assert row[6] == f"{figures['z']:+.2f}"
    assert number(rows[0][7]) == record["headline"]["headline_bytes"] / 4
    steps = table_with(text, "factor", "what it is")
    factors = [f"x {one['value']:.4f}" for one in record["headline"]["factors"]]
    assert [row[2] for row in steps] == ["", *factors, f"= {record['headline']['ratio']:.4f}"]
    received = inputs.traffic.rows[:, 0, 0].sum(axis=(0, 1))
    assert [number(row[1]) for row in table_with(text, "rank", "rows received")] == list(received)
    hottest = table_with(text, "expert", "layer", "choices")
    assert number(hottest[0][2]) == inputs.expert_rows.max()
    for row in hottest:
        assert number(row[2]) == inputs.expert_rows[int(row[1]), int(row[0])]
    fan_out = table_with(text, "ranks", "tokens, counted")
    assert [number(row[1]) for row in fan_out] == record["fan_out"]["tokens"]
    assert [float(row[2].replace(",", "")) for row in fan_out] == pytest.approx(
        record["fan_out"]["expected"], abs=0.006
    )
    assert all(row[1:] == ["100.0 ms", "200.0 ms"] for row in table_with(text, "rank", "dispatch"))


def test_the_charts_are_drawn_from_the_same_figures():
    """Bars in the picture have heights in proportion to the counted bytes."""
    text, record = sample_page("default"), sample("default")
    chart = re.search(r'<svg class=chart [^>]*aria-label="Bars of the network.*?</svg>', text, re.S)
    paths = re.findall(r'<path d="([^"]*)" clip-path="[^"]*" style="fill: var\(--c1\)', chart[0])
    heights = []
    for path in paths:
        ys = [float(y) for y in re.findall(r"[ML] [\d.-]+ ([\d.-]+)", path)]
        heights.append(max(ys) - min(ys))
    counted = [entry["network"]["measured_bytes"] for entry in record["layers"]]
    for phase in (0, 1):
        bars = np.array(heights[4 * phase : 4 * phase + 4])
        figures = np.array(counted[phase::2])
        assert bars / bars.max() == pytest.approx(figures / figures.max(), abs=1e-4)


def test_pictures_have_the_pages_colours_and_letters():
    text = sample_page("default")
    drawn = re.findall(r"<svg class=chart.*?</svg>", text, re.S)
    assert len(drawn) == 6
    for one in drawn:
        assert "#0000" not in one and "var(--c1)" in one and "<text" in one
        assert "DejaVu" not in one and "<metadata" not in one
    variables = set(re.findall(r"var\((--[\w]+)\)", text))
    style = re.search(r"<style>(.*?)</style>", text, re.S)[1]
    light, dark, paper = re.split(r"@media \(prefers-color-scheme: dark\)|@media print", style)[:3]
    for variable in variables:
        assert all(f"{variable}: " in part for part in (light, dark, paper)), variable


def test_shades_and_palette():
    cells = np.array([[0, 1], [50, 100]])
    assert shades(cells, 0, 100).tolist() == [[0, 2], [33, 64]]
    assert shades(np.array([[-4, 0, 4]]), -4, 4).tolist() == [[1, 0, SHADES]]
    colours = palette(RAMP)
    assert tuple(colours[1]) == RAMP[0] and tuple(colours[-1]) == RAMP[-1]
    assert data_uri(shades(cells, 0, 100), colours).startswith("data:image/png;base64,iVBOR")
    assert between_nodes(np.ones((3, 3), int), np.array([0, 1, 0])).tolist() == [[4, 2], [2, 1]]


# -- sizes -----------------------------------------------------------------------------------------


def test_a_page_is_small():
    assert len(sample_page("default")) < 0.5 * MB
    text = page(large())
    assert 1 * MB < len(text) < 5 * MB
    outline = Outline(text)
    assert outline.problems == []
    panels = [one for one in outline.all("details") if one[1].get("class") == "panel"]
    assert len(panels) == 2 * 93 and sum("open" in attrs for _, attrs, _ in panels) == 1
    assert len(outline.all("select")) == 2  # one choice list for the phase, one for the layer


def test_an_older_record_has_a_page_too():
    inputs = sample_inputs(**DEFAULT)
    result = result_of(inputs)
    record = {name: value for name, value in result.record.items() if name != "fan_out"}
    names = ("bytes", "rows", "layers", "directions", "phases", "kinds")
    text = page(Result(record, {name: result.arrays[name] for name in names}))
    assert Outline(text).problems == [] and "Predicted:" not in text


# -- files -----------------------------------------------------------------------------------------


def save(folder: Path, inputs) -> Path:
    folder.mkdir()
    result = result_of(inputs)
    axes = ("bytes", "rows", "layers", "directions", "phases", "kinds")
    more = {name: array for name, array in result.arrays.items() if name not in axes}
    write_result(folder, build_record(inputs), inputs.traffic, arrays=more)
    return folder


def killed(folder: Path) -> Path:
    """Three ranks that counted; rank 2 ended fewer phases, and its last line is cut off."""
    folder.mkdir()
    for rank in range(3):
        with EventLog(folder, rank, [0, 1, 2], ("hidden", "ids")) as log:
            for layer in range(2):
                for phase in ("dispatch", "combine"):
                    if (rank, layer, phase) == (2, 1, "combine"):
                        break
                    log.append(
                        step=0,
                        layer=layer,
                        phase=phase,
                        rows=np.array([1, 2, 3]),
                        sent=np.array([[10, 200, 3000 + rank], [1, 2, 3]]),
                        seconds=0.25,
                    )
    with (folder / "events.rank2.jsonl").open("ab") as file:
        file.write(b'{"step": 0, "lay')
    return folder


def test_the_page_of_a_killed_run_says_so_and_has_what_was_counted(tmp_path):
    text = write_page(killed(tmp_path / "killed")).read_text()
    outline = Outline(text)
    assert outline.problems == []
    assert "This run did not finish" in text and "Nothing below was checked" in text
    phases = table_with(text, "phase", "ended")
    assert phases[0][:3] == ["dispatch", "6", "36"] and phases[1][:3] == ["combine", "5", "30"]
    layers = table_with(text, "layer", "dispatch, bytes", "combine, bytes")
    away = [3205 + rank for rank in range(3)]
    assert [number(cell) for cell in layers[0][1:]] == [sum(away)] * 2
    assert [number(cell) for cell in layers[1][1:]] == [sum(away), sum(away[:2])]
    last = table_with(text, "rank", "last phase that it ended")
    assert last[1][1] == "step 0, layer 1, forward combine"
    assert last[2][1:3] == ["step 0, layer 1, forward dispatch", "3"]
    for _, attrs, _ in outline.all("svg"):
        assert len(attrs["aria-label"]) > 20


def test_report_rebuilds_the_same_page(tmp_path, capsys):
    folder = save(tmp_path / "run", sample_inputs(**DEFAULT))
    assert report.launch(compose(["job=report", f"result={folder}"])) == 0
    said = "".join(line.strip() for line in capsys.readouterr().out.splitlines())
    assert f"REPORT         {folder}/report.html" in said  # a long path goes over two lines
    first = (folder / "report.html").read_bytes()
    assert first.decode() == page(result_of(sample_inputs(**DEFAULT)))
    assert report.launch(compose(["job=report", f"result={folder}/run.json"])) == 0
    assert (folder / "report.html").read_bytes() == first
    assert report.launch(compose(["job=report", f"result={killed(tmp_path / 'gone')}"])) == 0
    assert "the run did not finish" in capsys.readouterr().out


def test_what_is_no_result_is_refused_in_one_line(tmp_path, monkeypatch):
    def refusal(*words):
        with pytest.raises(ConfigError) as caught:
            report.launch(compose(["job=report", *words]))
        return str(caught.value)

    folder = save(tmp_path / "run", sample_inputs(layers=1))
    assert refusal() == "job=report: needs result=DIR, the folder of a result"
    assert refusal(f"result={tmp_path}") == (
        f"result={tmp_path}: has neither a run.json nor events.rank<r>.jsonl"
    )
    (folder / "events.rank0.jsonl").touch()
    missing = refusal(f"result={tmp_path}/runn")
    assert missing == f"result={tmp_path}/runn: is no folder; nearest: result={folder}"
    assert "does not use it; it uses result" in refusal_of("job=report", "tokens=3")
    assert "belongs to job=export or job=report" in refusal_of(f"result={folder}")
    (folder / "run.json").write_text(json.dumps({"schema": "wideep.run/2"}))
    assert "schema='wideep.run/2' must be 'wideep.run/1'" in refusal(f"result={folder}")
    (killed(tmp_path / "odd") / "events.rank1.jsonl").write_text("[1]\n")
    assert "is not an event of this program" in refusal(f"result={tmp_path}/odd")
    monkeypatch.setattr(report, "library_is_there", lambda: False)
    with pytest.raises(UnfitError, match=r"pip install 'wideep\[plots\]'"):
        report.launch(compose(["job=report", f"result={folder}"]))


def refusal_of(*words) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(list(words))
    return str(caught.value)


def test_matplotlib_is_loaded_by_a_chart_and_by_nothing_else(tmp_path):
    done = wideep(tmp_path, "--help")
    assert done.returncode == 0 and "report.html" in done.stdout
    assert charts.library_is_there() and "matplotlib.pyplot" not in sys.modules


def test_a_run_writes_its_page(tmp_path):
    """The whole program; tests/test_emulate.py has runs of every shape without the page."""
    words = ("ranks=2", "layers=1", "tokens=8", "warmup=0", "scale.hidden_size=64")
    done = wideep(tmp_path, *words, "output_dir=run")
    assert done.returncode == 0, done.stderr
    assert "report.html: this page in pictures, for a browser" in done.stdout
    text = (tmp_path / "run" / "report.html").read_text()
    result = Result.read(tmp_path / "run")
    assert text == page(result) and Outline(text).problems == []
    assert result.arrays["differing"].shape == (0, 7)
    assert result.arrays["seconds"].shape == (2, 1, 1, 2)
    assert result.arrays["expert_choices"].sum() == result.record["choices"]["chosen"]
    assert sum(result.record["fan_out"]["tokens"]) == 16
    if "acked" in result.arrays:
        assert (result.arrays["acked"] == result.arrays["acked_expected"]).all()


# -- in a browser ----------------------------------------------------------------------------------

PROBE = """<script>
const seen = {svgs: [], shown: 0, wide: 0};
const note = () => {
  const panels = [...document.querySelectorAll("details.panel")];
  seen.shown = panels.filter((panel) => !panel.hidden).length;
  for (const svg of document.querySelectorAll("svg[role=img]")) {
    const box = svg.getBoundingClientRect();
    if (box.width) seen.svgs.push([svg.ariaLabel.slice(0, 30), box.width, box.height]);
  }
  seen.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const form = document.querySelector("form.choose");
  seen.listed = !form.hidden;
  form.elements.layer.value = "2";
  form.elements.layer.dispatchEvent(new Event("change", {bubbles: true}));
  seen.then = panels.filter((panel) => !panel.hidden).map((panel) => panel.dataset.layer);
  document.body.dataset.seen = JSON.stringify(seen);
};
note();
</script>"""


def probed(dom: str) -> dict:
    found = re.search(r'data-seen="([^"]*)"', dom)
    return json.loads(found[1].replace("&quot;", '"'))


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_a_browser_shows_every_figure_and_complains_of_nothing(tmp_path):
    file = tmp_path / "report.html"
    file.write_text(sample_page("default").replace("</body>", PROBE + "</body>"))
    dom, console = chromium(file, "--dump-dom", "--window-size=1100,900")
    assert console == []
    seen = probed(dom)
    assert seen["listed"] and seen["shown"] == 1 and seen["then"] == ["2"] and seen["wide"] == 0
    names = " ".join(name for name, _, _ in seen["svgs"])
    for figure in ("Waterfall", "Bars of the", "Rows received", "Histogram", "Bars: formula",
                   "Stacked", "Counted", "Predicted", "Difference", "Node x node"):  # fmt: skip
        assert figure in names
    assert all(width > 150 and height > 60 for _, width, height in seen["svgs"])


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_a_browser_would_tell_of_a_request(tmp_path):
    """The two tests around this one can fail."""
    file = tmp_path / "report.html"
    planted = "<img src='http://192.0.2.1/x.png'><script>console.error('planted')</script></body>"
    file.write_text(sample_page("default").replace("</body>", planted))
    _, console = chromium(file, "--dump-dom")
    assert any("planted" in line for line in console)
    assert any("Content Security Policy" in line and "192.0.2.1" in line for line in console)


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_a_phone_scrolls_down_only(tmp_path):
    """The window of a browser may not be as narrow as a phone, a frame may."""
    inside = sample_page("default").replace("</body>", PROBE + "</body>")
    quoted = inside.replace("&", "&amp;").replace('"', "&quot;")
    after = "frames[0].document.body.dataset.seen"
    file = tmp_path / "phone.html"
    file.write_text(
        f'<!DOCTYPE html><body><iframe width=390 height=800 srcdoc="{quoted}"></iframe><script>'
        f"onload = () => document.body.dataset.seen = {after}</script></body>"
    )
    dom, console = chromium(file, "--dump-dom")
    assert console == []
    body = dom[dom.rindex("<body") if dom.count("<body data-seen") else 0 :]
    assert probed(body)["wide"] == 0


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_dark_pages_are_dark_and_paper_is_light(tmp_path):
    from PIL import Image

    file = tmp_path / "report.html"
    file.write_text(sample_page("default"))
    light = {}
    for name, scheme in (("dark", 0), ("light", 1)):
        shot = tmp_path / f"{name}.png"
        scheme = f"--blink-settings=preferredColorScheme={scheme}"
        chromium(file, scheme, f"--screenshot={shot}", "--window-size=900,1500")
        with Image.open(shot) as picture:
            light[name] = np.asarray(picture.convert("L")).mean()
    assert light["dark"] < 60 and light["light"] > 215
    chromium(file, "--blink-settings=preferredColorScheme=0", f"--print-to-pdf={tmp_path}/a.pdf")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
