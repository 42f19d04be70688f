"""A run as one HTML file that opens without a network: tables, plots, configuration, environment, trials."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from experiments.analysis.paper_table import PaperTable
from experiments.analysis.run_files import RunFiles
from experiments.analysis.table_formats import as_grid
from experiments.analysis.tables import Table

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .4rem; }
th, td { padding: .2rem .7rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { border-top: 2px solid; border-bottom: 1px solid; }
tbody tr:last-child > * { border-bottom: 2px solid; }
tbody tr:nth-child(even) { background: #f4f6f8; }
tbody th { font-weight: 400; }
.best { font-weight: 700; }
.note { color: #444; font-size: .9rem; margin: .15rem 0; }
img { max-width: 100%; height: auto; }
@media print {
  body { font-size: 11px; margin: 0; max-width: none; padding: 0; }
  .scroll { overflow: visible; }
  th, td { padding: .1rem .35rem; white-space: normal; }
  tr, img { break-inside: avoid; }
}
pre { background: #f4f6f8; padding: .8rem; overflow-x: auto; font-size: .85rem; }
"""


def to_html(
    run: RunFiles,
    tables: Sequence[Table],
    plots: Sequence[Path],
    untold: Sequence[str],
    paper: PaperTable | None = None,
) -> str:
    """The whole page.

    Args:
        run: the directory.
        tables: one after the other.
        plots: PNG files, put into the page.
        untold: why other plots are not there.
        paper: the table that the run reproduces, with the paper's figures and claims.
    """
    body = [f"<h1>{_text(run.title)}</h1>", *map(_table, tables), *([] if paper is None else _paper(paper))]
    body.append("<h2>Plots</h2>")
    for plot in plots:
        data = base64.b64encode(plot.read_bytes()).decode()
        body.append(f'<p><img alt="{_text(plot.stem)}" src="data:image/png;base64,{data}"></p>')
    body += [f'<p class="note">{_text(why)}</p>' for why in untold]
    warnings = dict.fromkeys(w for summary in run.summaries for w in summary.get("workload", {}).get("warnings", ()))
    notes = [f'<p class="note">{_text(warning)}</p>' for warning in warnings]
    body += ["<h2>Trials</h2>", _trials(run), *notes, "<h2>Environment</h2>", _rows(_environment(run))]
    config = yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True)
    body += ["<h2>Configuration</h2>", f"<details><summary>config.yaml</summary><pre>{_text(config)}</pre></details>"]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{_text(run.config['name'])}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _table(table: Table) -> str:
    head, *rest = as_grid(table)
    lines = ['<div class="scroll"><table>', f"<caption>{_text(table.title)}</caption>"]
    columns = "".join(f'<th scope="col">{_text(text)}</th>' for text, _, _ in head)
    lines.append(f"<thead><tr>{columns}</tr></thead><tbody>")
    for row in rest:
        first = f'<th scope="row">{_text(row[0][0])}</th>'
        entries = "".join(
            f"<td{' class=best' if best else ''}>{_text(text)}{f'<sup>{mark}</sup>' if mark else ''}</td>"
            for text, best, mark in row[1:]
        )
        lines.append(f"<tr>{first}{entries}</tr>")
    notes = "".join(f'<p class="note">{_text(note)}</p>' for note in table.notes)
    return "\n".join([*lines, "</tbody></table></div>", notes])


def _paper(paper: PaperTable) -> list[str]:
    """The paper's figures beside ours, whether its claims hold, and what differs."""
    figures = [[label, *(text or "-" for pair in pairs for text in pair)] for label, pairs in paper.rows.items()]
    claims = [(verdict.text, verdict.word, verdict.figures) for verdict in paper.verdicts]
    return [
        f'<h2>Beside the paper</h2><p class="note">{_text(" ".join(paper.source.split()))}</p>',
        _rows_under(["", *paper.heads], figures),
        _rows_under(["claim", "", "our figures"], claims),
        f'<p class="note">What differs: {_text(" ".join(paper.differs.split()))}</p>',
    ]


def _rows_under(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in names)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{_body(rows)}</tbody></table></div>'


def _trials(run: RunFiles) -> str:
    rows: list[Sequence[Any]] = []
    for cell in run.cells:
        for (seed, repeat), summary in sorted(cell.summaries.items()):
            marks = ", ".join(name for name in ("void", "unstable", "disturbed") if summary[name]) or "ok"
            rows.append((cell.label, seed, repeat, summary["kind"], summary["machine"], marks))
        rows += [(name, "", "", "failed", "", why) for name, why in cell.holes.items()]
    return _rows_under(("cell", "seed", "repeat", "measured", "machine", "verdict"), rows)


def _rows(pairs: Iterable[tuple[str, Any]]) -> str:
    return f'<div class="scroll"><table><tbody>{_body(pairs)}</tbody></table></div>'


def _body(rows: Iterable[Sequence[Any]]) -> str:
    return "\n".join("<tr>" + "".join(f"<td>{_text(str(value))}</td>" for value in row) + "</tr>" for row in rows)


def _environment(run: RunFiles) -> list[tuple[str, Any]]:
    """Of the last start, and what the trials ran under."""
    start = {key: run.environment[key] for key in ("date", "command") if key in run.environment}
    pairs = {**start, **run.facts}.items()
    return [(key, " ".join(map(str, value)) if isinstance(value, list) else value) for key, value in pairs]


def _text(text: str) -> str:
    return html.escape(text, quote=True)
