"""The few pieces of HTML that the page is made of. Every text that comes in is escaped here.

A `Markup` is a text that is HTML already; whatever else reaches these functions is not.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence


class Markup(str):
    """HTML, made by one of these functions; it is put into the page as it is."""

    __slots__ = ()

    def __add__(self, other: object) -> Markup:
        return Markup(str(self) + str(text(other)))


def text(value: object) -> Markup:
    """Any value as text of the page; a Markup stays what it is."""
    return value if isinstance(value, Markup) else Markup(html.escape(str(value)))


def join(parts: Iterable[object], between: str = "\n") -> Markup:
    return Markup(between.join(text(part) for part in parts))


def element(tag: str, /, *inside: object, **attributes: object) -> Markup:
    """<name ...>inside</name>; `class_` is class, `data_key` is data-key, None leaves one out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{tag}{written}>{join(inside, '')}</{tag}>")


def paragraph(*inside: object, class_: str | None = None) -> Markup:
    return element("p", *inside, class_=class_)


def table(header: Sequence[object], rows: Iterable[Sequence[object]], words: int = 1) -> Markup:
    """A table that scrolls sideways where it is too wide.

    words: columns from the left that hold words, the first of which names the row; numbers follow
    """

    def row(cells: Sequence[object]) -> str:
        first, *more = cells
        others = (
            f"<td class=w>{text(cell)}</td>" if i < words else f"<td>{text(cell)}</td>"
            for i, cell in enumerate(more, 1)
        )
        return f"<tr><th>{text(first)}</th>{''.join(others)}</tr>"

    head = "".join(
        f"<th scope=col{' class=w' if i < words else ''}>{text(cell)}</th>"
        for i, cell in enumerate(header)
    )
    body = "\n".join(map(row, rows))
    return Markup(
        f"<div class=scroll tabindex=0><table><thead><tr>{head}</tr></thead>\n"
        f"<tbody>{body}</tbody></table></div>"
    )


def folded(summary: object, *inside: object) -> Markup:
    """What is there to be opened."""
    return element("details", element("summary", summary), *inside)


def figure(picture: Markup, caption: object, numbers: Markup) -> Markup:
    """A picture, what it shows, and the same numbers as a table."""
    shown = element("figcaption", caption)
    return element("figure", picture, shown, folded("Table of these numbers", numbers))


def section(name: str, title: str, *inside: object) -> Markup:
    """A part of the page that its contents link to."""
    return element("section", element("h2", title), *inside, id=name)


def facts(entries: Mapping[str, object]) -> Markup:
    """Names and what they are."""
    pairs = (element("dt", name) + element("dd", value) for name, value in entries.items())
    return Markup(f"<dl>{''.join(pairs)}</dl>")
