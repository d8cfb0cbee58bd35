"""What pages are made of: sections, tables, figures, and the page that holds them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from pdpsgd.reporting.charts import PAGE, styled

# The page may run its own script and nothing else; it cannot load or send anything.
SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)


def page(*, title: str, kind: str, verdict: str, sections: Iterable[Section]) -> str:
    """Return the whole file."""
    parts = list(sections)
    links = "".join(f'<li><a href="#{part.key}">{escape(part.short)}</a></li>' for part in parts)
    body = "".join(part.html() for part in parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{SECURITY_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{_file("page.css")}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<header>
<div class="bar"><span class="kind">{escape(kind)}</span>
<button type="button" id="theme" aria-live="polite">Dark</button></div>
<h1>{escape(title)}</h1>
{verdict}
<nav aria-label="Contents"><ul>{links}</ul></nav>
</header>
<main id="content">{body}</main>
<footer>
<div class="signed"><div>Reviewed by</div><div>Date</div><div>Signature</div></div>
<p>Made by pdpsgd. This file holds everything it shows: it loads and sends nothing.</p></footer>
<script>{_vega()}</script>
<script>{_file("page.js")}</script>
</body>
</html>
"""


class Section:
    """A titled part of the page, with a short name for the list of contents."""

    def __init__(self, short: str, title: str, *parts: str) -> None:
        self.key, self.short, self.title, self.parts = short.lower().replace(" ", "-"), short, title, parts

    def html(self) -> str:
        """Return the section with its heading."""
        heading = f'<h2 id="{self.key}-title">{escape(self.title)}</h2>'
        inside = "".join(self.parts)
        return f'<section id="{self.key}" aria-labelledby="{self.key}-title">{heading}{inside}</section>'


def verdict(good: bool, headline: str, text: str) -> str:
    """Return the first thing to read: whether all is well, in words and with a sign."""
    sign = "✓" if good else "!"
    state = "good" if good else "bad"
    return (
        f'<div class="verdict {state}"><span class="sign" aria-hidden="true">{sign}</span>'
        f"<div><strong>{escape(headline)}</strong><p>{escape(text)}</p></div></div>"
    )


def paragraph(text: str, *, kind: str = "") -> str:
    """Return a paragraph of plain text."""
    attribute = f' class="{kind}"' if kind else ""
    return f"<p{attribute}>{escape(text)}</p>"


def bullets(lines: Iterable[str]) -> str:
    """Return a list of plain sentences."""
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def figures(pairs: Iterable[tuple[str, str]]) -> str:
    """Return key figures, each with what it is."""
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="figures">{cells}</dl>'


def particulars(pairs: Iterable[tuple[str, str]]) -> str:
    """Return what a file is about, line by line, as on the first page of one on paper."""
    lines = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="particulars">{lines}</dl>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str) -> str:
    """Return a table; the first column names the row."""
    header = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row"{_words(name)}>{escape(name)}</th>'
        f"{''.join(f'<td{_words(cell)}>{escape(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _words(cell: str) -> str:
    """Mark a cell that may take two lines on a phone: of words, not of one number."""
    return ' class="words"' if " " in cell else ""


def series_table(
    rows: Iterable[Mapping[str, Any]], *, series: str, value: str, form: str, caption: str
) -> str:
    """Return values over the steps: a row per step, a column per series."""
    found = list(rows)
    names = list(dict.fromkeys(row[series] for row in found))
    by_step: dict[int, dict[str, str]] = {}
    for row in found:
        by_step.setdefault(row["step"], {})[row[series]] = format(row[value], form)
    lines = [(f"{step:,}", *(cells.get(name, "") for name in names)) for step, cells in by_step.items()]
    return table(("step", *names), lines, caption=caption)


def folded(summary: str, inside: str) -> str:
    """Return something to open."""
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>"


def code(text: str) -> str:
    """Return commands or Python, as they are typed."""
    return f'<pre tabindex="0"><code>{escape(text)}</code></pre>'


def chart(made: Any, *, title: str, describe: str, data: str = "") -> str:
    """Return an interactive chart with its caption, and its data as a table to open."""
    spec = styled(made.properties(width="container"), PAGE).properties(description=describe).to_dict()
    spec.pop("$schema", None)
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    text = json.dumps(spec).replace("<", "\\u003c")  # nothing in the data can end the script
    more = folded("The same as a table", data) if data else ""
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><div class="chart" tabindex="0" role="group" '
        f'aria-label="{escape(describe)} Arrow keys go through the points."></div>'
        f'<p class="reading" aria-live="polite"></p>'
        f'<script type="application/json">{text}</script>{more}</figure>'
    )


def settings_table(settings: Mapping[str, Any], *, caption: str) -> str:
    """Return names and values, nested ones with a dot."""
    return table(("setting", "value"), _flat(settings), caption=caption)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, (list, tuple)):
            yield f"{prefix}{name}", ", ".join(map(str, value)) or "none"
        else:
            yield f"{prefix}{name}", "none" if value is None else str(value)


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _vega() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script, bundled offline."""
    import vl_convert

    bundle: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]
    return bundle.replace("</script", "<\\/script")
