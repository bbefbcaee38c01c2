"""Puts report.html together, and writes it.

a finished result      run.json, traffic.npz    --+
                                                  +-->  one file, script and style inside
a run that was killed  events.rank<r>.jsonl     --+
"""

from __future__ import annotations

import html
from importlib.resources import files
from pathlib import Path

from comm.report.page import figures, sections, unfinished
from comm.report.page.heat import pairs_section
from comm.report.page.html import Markup, element, join, paragraph, section
from comm.report.page.result import Result
from comm.report.store import write_whole

NAME = "report.html"
# Nothing may be fetched, whatever a name that gets into the page would like.
POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
    " base-uri 'none'; form-action 'none'"
)


def write_page(folder: Path) -> Path:
    """Write report.html of a result, or of what a killed run left, into its folder.

    Raises ValueError for a folder that has neither; ImportError without matplotlib.
    """
    finished = (folder / "run.json").is_file()
    text = page(Result.read(folder)) if finished else unfinished_page(folder)
    write_whole(folder / NAME, lambda file: file.write(text.encode()))
    return folder / NAME


def page(result: Result) -> str:
    """The page of a finished run."""
    record = result.record
    parts = {
        "verdicts": ("Verdicts", sections.verdicts(record)),
        "headline": ("Headline: from the formula to the count", sections.headline(record)),
        "layers": ("Layer by layer", figures.layers(result)),
        "pairs": ("Rank x rank", pairs_section(result)),
        "load": ("Load", figures.load(result)),
        "fan-out": ("Fan-out: ranks that a token reaches", figures.fan_out(result)),
        "full-size": ("Full size: the same routing on the real model", sections.full_scale(record)),
        "conventions": ("Conventions: what others would call it", sections.conventions(record)),
        "time": ("Time", figures.time(result)),
        "manifest": ("Manifest: what ran", sections.manifest(record)),
    }
    return document(sections.title_of(record), sections.heading(record), parts)


def unfinished_page(folder: Path) -> str:
    """The page of a run that did not end: what had been counted until then."""
    left = unfinished.Left.read(folder)
    return document(f"Unfinished run {folder.name}", unfinished.heading(left), left.parts())


def document(title: str, heading: Markup, parts: dict[str, tuple[str, Markup]]) -> str:
    """The whole file. parts: id -> title and content of each section"""
    links = (
        element("a", words.partition(":")[0], href=f"#{name}") for name, (words, _) in parts.items()
    )
    body = join(
        [
            element("header", heading, element("nav", join(links, " "), aria_label="Contents")),
            element("main", *(section(name, *part) for name, part in parts.items())),
            element("footer", paragraph(
                "WideEP. Traffic in decimal units: 1 kB is 1,000 B. docs/report.md explains"
                " the pictures, docs/reading_a_run.md the figures."
            )),
        ]
    )  # fmt: skip
    style, script = (
        files("comm.report.page").joinpath(f"page.{kind}").read_text() for kind in ("css", "js")
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{html.escape(title)} - WideEP</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n{body}\n<script>\n{script}</script>\n</body>\n</html>\n"
    )
