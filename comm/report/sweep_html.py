"""sweep.html: the curves and the table of a sweep in one file that needs no network."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from comm.report.curves import axis_of, draw
from comm.report.layout import plain_text
from comm.report.sweep_page import sweep_page

WIDTH = 100
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
figure { margin: 0; background: #fff; color: #000; border-radius: 6px; padding: .5rem; }
figure svg { max-width: 100%; height: auto; }
figcaption { padding: .5rem; }
pre { overflow-x: auto; font-size: .8rem; }
@media print { pre { white-space: pre-wrap; font-size: 6pt; } }
"""
CAPTION = (
    "What one token puts on the network in a forward pass of the full model, over {axis}."
    " Points: {points}. Lines: what the law of the router lets one expect; shaded, or bars: two"
    " standard deviations either way, for as many tokens as the run had. The table has the same"
    " numbers."
)


def sweep_html(record: Mapping[str, Any]) -> str:
    """The page. Raises ImportError without matplotlib, ValueError where no curve can be drawn."""
    points = "counted in runs" if record["job"] == "emulate" else "computed, no run was made"
    caption = html.escape(CAPTION.format(axis=axis_of(record), points=points))
    text = "\n".join(plain_text(line) for line in sweep_page(record, WIDTH))
    name = html.escape(f"WideEP sweep: {', '.join(record['axes'])}")
    picture = draw(record).replace("<svg ", f'<svg role="img" aria-label="{caption}" ', 1)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{name}</h1>
<figure>
{picture}
<figcaption>{caption}</figcaption>
</figure>
<pre>{html.escape(text)}</pre>
</body>
</html>
"""
