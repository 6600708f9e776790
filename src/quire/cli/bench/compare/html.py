"""One page with all results: inline style and charts, light and dark, no script, nothing from a network."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from quire.cli.bench.compare.charts import STYLE as CHART_STYLE
from quire.cli.bench.compare.charts import svg
from quire.cli.bench.compare.result import Result, counted
from quire.cli.bench.compare.surroundings import in_words

STYLE = """
:root{color-scheme:light dark;--ink:#1f2937;--soft:#6b7280;--line:#e5e7eb;--page:#f8fafc;--card:#fff;--accent:#2563eb;
--code:#f1f5f9}
@media(prefers-color-scheme:dark){:root{--ink:#e5e7eb;--soft:#9ca3af;--line:#374151;--page:#0b1120;--card:#111827;
--accent:#60a5fa;--code:#1e293b}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:980px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:26px;margin:0 0 4px}h2{font-size:19px;margin:0 0 6px}
p{margin:6px 0}a{color:var(--accent);text-decoration:none}a:hover{text-decoration:underline}
.soft{color:var(--soft)}.small{font-size:13px}
section,header,nav{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:20px 24px;
margin:0 0 20px}
.conclusion{font-size:16px;border-left:3px solid var(--accent);padding:2px 0 2px 12px;margin:10px 0 14px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
h2::first-letter,.conclusion::first-letter{text-transform:uppercase}
th,td{padding:6px 10px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th{color:var(--soft);font-weight:500;white-space:normal;vertical-align:bottom}
th:first-child,td:first-child{text-align:left}
td .range{color:var(--soft);font-size:12px}
table.facts td,table.facts th{text-align:left;white-space:normal;vertical-align:top}
table.facts th{width:110px}
nav ol{margin:0;padding-left:22px}nav li{margin:4px 0}
figure{margin:16px 0;overflow-x:auto}figure svg{width:100%;height:auto;min-width:540px;max-width:820px;display:block}
code{background:var(--code);border-radius:6px;padding:8px 12px;display:block;overflow-x:auto;white-space:pre;
font:13px ui-monospace,monospace;user-select:all}
ul.notes{margin:8px 0;padding-left:20px;color:var(--soft);font-size:13.5px}
details{margin-top:10px;font-size:13px;color:var(--soft)}summary{cursor:pointer}
details pre{overflow-x:auto;background:var(--code);padding:12px;border-radius:6px;max-height:300px}
"""


def page(results: Sequence[Result], skipped: Mapping[str, str], figures: dict[str, Any]) -> str:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    facts = "".join(f"<tr><th>{escape(n)}</th><td>{escape(v)}</td></tr>" for n, v in in_words(figures))
    body = [
        f"<header><h1>Comparisons of {escape(figures['model']['name'])}</h1>"
        f'<p class="soft">{now}. Both sides of a comparison took turns; a figure is the median of the rounds, with the '
        f'lowest and the highest behind it.</p><table class="facts">{facts}</table></header>',
        _contents(results, skipped),
        *map(_section, results),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Comparisons of {escape(figures['model']['name'])}</title>"
        f"<style>{STYLE}{CHART_STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _contents(results: Sequence[Result], skipped: Mapping[str, str]) -> str:
    rows = [
        f'<li><a href="#{escape(result.name)}">{escape(result.title)}</a>: {escape(result.conclusion)}</li>'
        for result in results
    ]
    left_out = "".join(
        f'<p class="soft small">{escape(name)} is skipped: {escape(reason)}</p>' for name, reason in skipped.items()
    )
    return f"<nav><h2>In short</h2><ol>{''.join(rows)}</ol>{left_out}</nav>"


def _section(result: Result) -> str:
    how = "computed, nothing was timed" if result.computed else f"measured in {counted(result.rounds, 'round')}"
    if result.interrupted:
        how += ", interrupted"
    notes = "".join(f"<li>{escape(note)}</li>" for note in result.notes)
    figures = escape(json.dumps(result.as_json()["rows"], indent=1))
    return (
        f'<section id="{escape(result.name)}"><h2>{escape(result.title)}</h2>'
        f'<p class="soft small">{how}, {result.seconds:.0f} s</p>'
        f'<p class="conclusion">{escape(result.conclusion)}.</p>'
        f'<div class="scroll">{_table(result)}</div>'
        f"<figure>{svg(result.charts, style=False)}</figure>"
        f'<p class="small"><b>Held fixed:</b> {escape(result.held_fixed)}.</p>'
        f'<ul class="notes">{notes}</ul>'
        f'<p class="small soft">Measure it again:</p><code>{escape(result.command)}</code>'
        f"<details><summary>figures</summary><pre>{figures}</pre></details></section>"
    )


def _table(result: Result) -> str:
    head, *rows = result.cells()
    titles = "".join(f"<th>{escape(label)}</th>" for label in head)
    lines = ["<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _cell(text: str) -> str:
    """The range behind a median is set back."""
    middle, parenthesis, rest = text.partition(" (")
    if parenthesis and " - " in rest:
        return f'{escape(middle)} <span class="range">({escape(rest)}</span>'
    return escape(text)
