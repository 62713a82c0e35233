"""A report for people: a table, a chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["draw", "print_table"]

_INPUTS = ("batch", "prompt_tokens", "decode_rows", "waiting", "concurrency", "rate", "runs", "requests")


def _flat(result: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in result.items():
        if isinstance(value, dict):
            flat.update({f"{name} {key}": inner for key, inner in value.items()})
        else:
            flat[name] = value
    return flat


def print_table(report: dict[str, Any]) -> None:
    """Print a report on standard output."""
    from rich.console import Console
    from rich.table import Table

    where = report["machine"]
    title = f"{report['bench']}, {report['model'] or 'no model'}, Octavo {report['version']}"
    caption = f"{where['processor']}, {where['cores']} cores, {where['isa']}, load {where['load_average']}"
    table = Table(title=title, caption=caption, show_header=False)
    # A column a result: there are more figures than results.
    results = [_flat(result) for result in report["results"]]
    table.add_column()
    for _ in results:
        table.add_column(justify="right")
    for name in dict.fromkeys(name for result in results for name in result):
        table.add_row(name, *[_shown(result.get(name)) for result in results])
    Console().print(table)


def _shown(value: Any) -> str:
    return f"{value:,.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else "" if value is None else str(value)


def draw(report: dict[str, Any], path: str) -> None:
    """Draw every figure of a report against its inputs, a panel a figure, into a file.

    Args:
        report: of `run_bench`.
        path: of the file; its ending says of what kind.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    rows = [_flat(result) for result in report["results"]]
    labels = [", ".join(f"{name} {row[name]}" for name in _INPUTS[:-2] if row.get(name) is not None) for row in rows]
    figures = [name for name, value in rows[0].items() if name not in _INPUTS and isinstance(value, int | float)]
    height = 1 + len(figures) * (0.6 + 0.25 * len(rows))
    fig, axes = pyplot.subplots(len(figures), 1, figsize=(8, height), squeeze=False)
    for name, axis in zip(figures, axes[:, 0], strict=True):
        values = [row.get(name) or 0.0 for row in rows]
        bars = axis.barh([label or report["bench"] for label in labels], values)
        axis.bar_label(bars, fmt="{:,.4g}", padding=2, fontsize=8)
        axis.margins(x=0.15)
        axis.set_title(name, loc="left", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.invert_yaxis()
    fig.suptitle(f"{report['bench']}, {report['model'] or 'no model'}, {report['machine']['processor']}", fontsize=10)
    fig.tight_layout()
    fig.savefig(path, format=Path(path).suffix[1:].lower(), dpi=150)
    pyplot.close(fig)
