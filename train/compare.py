"""Top-1 of several runs side by side: `python -m train.compare FOLDER ...` prints a table, means over seeds.

python -m train.compare output/*
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

Rows = dict[tuple[str, str], list[dict[str, float]]]


def read_summaries(folders: Sequence[str]) -> list[dict[str, Any]]:
    """The summaries that runs left in their output folders.

    Raises
    ------
    ValueError
        If a folder holds no summary, or the runs are of different data, models or test sizes.
    """
    missing = [folder for folder in folders if not (Path(folder) / "summary.json").is_file()]
    if missing:
        raise ValueError(f"folders must hold a finished run's summary.json: {missing[0]} has none")
    summaries = [json.loads((Path(folder) / "summary.json").read_text()) for folder in folders]
    for key in ("data", "model", "image_size"):
        kinds = sorted({str(summary[key]) for summary in summaries})
        if len(kinds) > 1:
            raise ValueError(f"folders must hold runs of one {key}: got {' and '.join(kinds)}")
    return summaries


def compare(summaries: Sequence[dict[str, Any]]) -> str:
    """A Markdown table: a row for each encoding and rule, the mean over seeds (lowest - highest) for each size.

    Examples
    --------
    >>> runs = [{"encoding": "axial", "seed": s, "top1": {"raw": {"8": 95.0 + s}}} for s in (0, 1)]
    >>> print(compare(runs))
    | encoding | positions | seeds | 8 px |
    |---|---|---|---|
    | axial | raw | 2 | 95.5 (95.0 - 96.0) |
    """
    rows: Rows = defaultdict(list)
    for summary in summaries:
        for rule, values in summary["top1"].items():
            rows[summary["encoding"], rule].append(values)
    sizes = sorted({size for runs in rows.values() for values in runs for size in values}, key=int)
    lines = ["| encoding | positions | seeds | " + " | ".join(f"{size} px" for size in sizes) + " |"]
    lines.append("|---" * (3 + len(sizes)) + "|")
    for (encoding, rule), runs in rows.items():
        cells = [cell([values[size] for values in runs if size in values]) for size in sizes]
        lines.append(f"| {encoding} | {rule} | {len(runs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(values: Sequence[float]) -> str:
    return f"{mean(values):.1f} ({min(values):.1f} - {max(values):.1f})" if values else ""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m train.compare", description="Compare finished runs.")
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="output folders of runs")
    try:
        print(compare(read_summaries(parser.parse_args(argv).folders)))
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
