"""The report of a check as a self-contained page for a browser."""

from __future__ import annotations

import math
from html import escape

from .page import Report
from .run import Line

STYLE = """
:root { color-scheme: light dark; --text: #1d232b; --soft: #667; --line: #d8dde3; --paper: #fff; --good: #2c7a4b;
        --bad: #b3261e; --dot: #2f6fb0; --band: #eef3f8; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e8eb; --soft: #9aa4af; --line: #39414b; --paper: #14181d; --good: #67c48b; --bad: #ff8a80;
          --dot: #7fb4ea; --band: #1d252e; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--paper); max-width: 60rem;
       margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } td { padding: .3rem .6rem .3rem 0; vertical-align: top;
        border-top: 1px solid var(--line); }
td:first-child { white-space: nowrap; } .ok { color: var(--good); } .FAIL { color: var(--bad); font-weight: 600; }
.skip, .note, .soft { color: var(--soft); }
pre { background: var(--band); padding: .8rem; overflow-x: auto; font-size: .85rem; border-radius: 4px; }
svg text { fill: var(--text); font: 13px system-ui, sans-serif; } svg .soft { fill: var(--soft); }
"""
LEFT, WIDTH, ROW = 190, 760, 22


def html(report: Report) -> str:
    """The page."""
    tone = "FAIL" if report.failed() or not report.compared() else "ok"
    parts = [
        f"<h1 class='{tone}'>{escape(report.headline())}</h1>",
        f"<p class='soft'>{escape(report.where)}, {escape(', '.join(report.dtypes))}, seed {report.seed}, "
        f"{report.seconds:.0f} s. Called as {escape(report.style)}; declares {escape(', '.join(report.features))}.</p>",
        "<h2>Errors beside rounding</h2>",
        "<p class='soft'>The worst row of each kind of call, as a share of the error that rounding explains. A dot to "
        "the right of the line is a fault.</p>",
        drawing([line for line in report.lines if line.share is not None]),
    ]
    for section in dict.fromkeys(line.section for line in report.lines):
        rows = "".join(row(line, report) for line in report.lines if line.section == section)
        parts.append(f"<h2>{escape(section[0].upper() + section[1:])}</h2><table>{rows}</table>")
    if report.failures():
        parts.append("<h2>Programs that reproduce the failures</h2>")
    for line, failure in report.failures():
        code = f"<pre>{escape(failure.code)}</pre>" if failure.code else ""
        parts.append(f"<p><b>{escape(line.name)}</b>: {escape(failure.what)}</p>{code}")
    if report.unseen:
        parts.append("<h2>Not checked</h2><ul>" + "".join(f"<li>{escape(x)}</li>" for x in report.unseen) + "</ul>")
    title = f"Check of {escape(report.target)}"
    head = f"<meta charset='utf-8'><title>{title}</title><meta name='viewport' content='width=device-width'>"
    head += f"<style>{STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def row(line: Line, report: Report) -> str:
    """A line as a row of the table."""
    status = "allowed" if line.status == "FAIL" and line.name in report.allowed else line.status
    return f"<tr><td class='{line.status}'>{status}</td><td>{escape(line.name)}</td><td>{escape(line.detail)}</td></tr>"


def drawing(lines: list[Line]) -> str:
    """Dots on a logarithmic axis, one for each line that measured an error."""
    if not lines:
        return ""

    def place(share: float) -> float:
        power = min(math.log10(max(share, 0.01)), 4.0)  # 0.01 to 10,000
        return LEFT + (power + 2) / 6 * (WIDTH - LEFT - 20)

    height = ROW * len(lines) + 40
    parts = [f"<rect x='{LEFT}' y='4' width='{place(1) - LEFT:.0f}' height='{height - 34}' fill='var(--band)'/>"]
    for share, words in (
        (0.01, "0.01"),
        (0.1, "0.1"),
        (1, "1"),
        (10, "10"),
        (100, "100"),
        (1e3, "1,000"),
        (1e4, "more"),
    ):
        x = f"{place(share):.0f}"
        stroke = "var(--text)" if share == 1 else "var(--line)"
        parts.append(f"<line x1='{x}' x2='{x}' y1='4' y2='{height - 30}' stroke='{stroke}'/>")
        parts.append(f"<text class='soft' x='{x}' y='{height - 12}' text-anchor='middle'>{words}</text>")
    for n, line in enumerate(lines):
        y, share = ROW * n + 20, math.inf if line.share is None else line.share
        colour = "var(--dot)" if share <= 1 else "var(--bad)"
        parts.append(f"<text x='{LEFT - 10}' y='{y + 4}' text-anchor='end'>{escape(line.name)}</text>")
        parts.append(
            f"<circle cx='{place(share):.0f}' cy='{y}' r='5' fill='{colour}'><title>{share:.3g}</title></circle>"
        )
    return f"<svg viewBox='0 0 {WIDTH} {height}' role='img' aria-label='Errors beside rounding'>{''.join(parts)}</svg>"
