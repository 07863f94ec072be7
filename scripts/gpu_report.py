"""Tables and a plot of what `check_gpu` has found."""

from pathlib import Path
from typing import Any

from gpu_records import Record
from rich.console import Console
from rich.table import Table

_WIDTH = 110
_MOST_LINES = 40  # of failures that are printed; JSON has all


def print_report(data: dict[str, Any]) -> None:
    """A table a part, what failed behind it, and the total time."""
    console = Console(width=_WIDTH)
    machine, limits = data["machine"], data["limits"]
    console.print(
        f"{machine.get('device')}, jax {machine.get('jax')}, {machine.get('platform_version')}, "
        f"driver {machine.get('driver')}, {machine.get('date')}; {data['implementation']}",
        highlight=False,
    )
    if limits:
        console.print(
            f"copy {limits['copy_bytes_per_s'] / 1e9:,.0f} GB/s (read + written), "
            f"read {limits['read_bytes_per_s'] / 1e9:,.0f} GB/s, "
            f"product {limits['product_flops_per_s'] / 1e12:,.1f} TFLOP/s",
            highlight=False,
        )
    makers = {
        "numerics": numerics_table,
        "speed": speed_table,
        "engine": engine_table,
    }
    for part in ("numerics", "speed", "references", "engine"):
        if part not in data:
            continue
        records = data[part]
        if part == "references":
            console.print(references_table(records, data.get("speed", [])))
        else:
            console.print(makers[part](records))
        lines = problems(records)
        for line in lines[:_MOST_LINES]:
            console.print(line, highlight=False, markup=False)
        if len(lines) > _MOST_LINES:
            console.print(f"and {len(lines) - _MOST_LINES} more")
    console.print(f"total {data['seconds']:.0f} s", highlight=False)


def problems(records: list[Record]) -> list[str]:
    """A line for each piece that failed, does not run, or was not reached."""
    lines = []
    for record in records:
        if "error" in record:
            lines.append(f"  {record['name']}: {record['error']}")
        elif record.get("faults"):
            lines.append(f"  {record['name']}: {'; '.join(record['faults'])}")
        elif "does not run" in record:
            lines.append(f"  {record['name']}: does not run: {record['does not run']}")
    skipped = [record for record in records if "skipped" in record]
    if skipped:
        first, reason = skipped[0]["name"], skipped[0]["skipped"]
        lines.append(f"  skipped: {len(skipped)} from {first} on, {reason}")
    return lines


def numerics_failed(records: list[Record]) -> bool:
    """Whether something went wrong, or nothing was checked at all."""
    checked = [record for record in records if "skipped" not in record]
    return not checked or not all(record.get("ok") for record in checked)


def numerics_table(records: list[Record]) -> Table:
    table = _table("numerics", "pool", "programs", "right", "wrong", "worst error", "tolerance")
    kinds: dict[str, list[Record]] = {}
    for record in records:
        if "ok" in record:
            kinds.setdefault(record["pool"], []).append(record)
    for name, own in kinds.items():
        right = sum(record["ok"] for record in own)
        table.add_row(
            name,
            str(len(own)),
            str(right),
            str(len(own) - right),
            f"{max(record['worst'] for record in own):.2g}",
            f"{own[0]['tolerance']:.2g}",
        )
    raised = sum("error" in record for record in records)
    if raised:
        table.add_row("raised an error", str(raised), "0", str(raised), "", "")
    return table


def speed_table(records: list[Record]) -> Table:
    table = _table("speed", "work", "microseconds", "GB/s or TFLOP/s", "of copy", "of product")
    for record in measured(records):
        rate = record.get("bytes_per_s", 0) / 1e9 or record["flops_per_s"] / 1e12
        table.add_row(
            record["name"],
            f"{record['seconds'] * 1e6:,.1f}",
            f"{rate:,.1f}",
            share(record.get("of_copy")),
            share(record.get("of_product")),
        )
    return table


def references_table(records: list[Record], speed: list[Record]) -> Table:
    """Shares of copy or product, by piece of work; `speed`: of the kernel itself."""
    ways = ("kernel", "triton", "cudnn", "xla")
    table = _table("references: share of copy or product", "work", *ways)
    rows: dict[str, dict[str, float | None]] = {}
    kernel = {record["name"]: best_share(record) for record in measured(speed)}
    for record in records:
        if "by" not in record:
            continue
        work = record["name"].removeprefix(f"{record['by']}: ")
        row = rows.setdefault(work, {"kernel": kernel.get(work)})
        row[record["by"]] = best_share(record)
    for work, row in rows.items():
        table.add_row(work, *(share(row.get(way)) for way in ways))
    return table


def engine_table(records: list[Record]) -> Table:
    columns = ("tokens/s", "floor tokens/s", "of floor", "compiled meanwhile")
    table = _table("engine: Llama 3.1 8B's shape, random weights", "work", *columns)
    for record in measured(records):
        table.add_row(
            record["name"],
            f"{record['tokens_per_s']:,.0f}",
            f"{record['tokens'] / record['floor_s']:,.0f}",
            share(record["of_floor"]),
            str(record["compiled_meanwhile"]),
        )
    return table


def measured(records: list[Record]) -> list[Record]:
    return [record for record in records if "seconds" in record]


def best_share(record: Record) -> float | None:
    """Of copy or product, whichever the record has."""
    return record.get("of_copy", record.get("of_product"))


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", width=_WIDTH)
    table.add_column(first, ratio=1)
    for name in columns:
        table.add_column(name, justify="right")
    return table


Line = tuple[str, bool, list[int], list[float]]


def plot_lines(data: dict[str, Any]) -> list[Line]:
    """`(label, dashed, contexts, shares of copy)` of decodes over the pool of most of them."""
    lines: dict[tuple[str, int], dict[int, float]] = {}
    for record in (*data.get("speed", []), *data.get("references", [])):
        plain = record.get("kv") == "bfloat16" and record.get("block_size") == 16
        if record.get("kind") == "decode" and "of_copy" in record and plain:
            by = record.get("by", "kernel")
            points = lines.setdefault((by, record["batch"]), {})
            points[record["context"]] = record["of_copy"]
    return [
        (
            f"{by}, batch {batch}",
            by != "kernel",
            sorted(points),
            [points[c] for c in sorted(points)],
        )
        for (by, batch), points in lines.items()
    ]


def write_plot(data: dict[str, Any], path: Path) -> None:
    """Share of the copy bandwidth by context: a line for each batch, references dashed."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for label, dashed, contexts, shares in plot_lines(data):
        axes.plot(contexts, shares, "--" if dashed else "-", marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("share of copy bandwidth")
    axes.set_title(f"decode attention on {data['machine'].get('device')}, bfloat16")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
