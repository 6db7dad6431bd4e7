"""What a run leaves to read: a table, summary.json, metrics.csv and two pictures."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from train.checkpoint import write_atomic

Top1 = dict[str, dict[int, float]]


def table(top1: Top1, trained: int) -> str:
    """Top-1 as text, a row for each rule and a column for each size.

    >>> print(table({"raw": {6: 55.0, 8: 94.25}, "interpolated": {6: 61.0, 8: 94.25}}, trained=8))
    top-1 in %      6 px    8 px*
    raw             55.0    94.2
    interpolated    61.0    94.2
    * trained at this size
    """
    sizes = list(next(iter(top1.values())))
    rows = ["top-1 in %".ljust(14) + "".join(f"{size:>4} px" + ("*" if size == trained else " ") for size in sizes)]
    rows += [rule.ljust(14) + "".join(f"{value:6.1f}  " for value in values.values()) for rule, values in top1.items()]
    return "\n".join([*(row.rstrip() for row in rows), "* trained at this size"])


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    text = json.dumps(summary, indent=2) + "\n"
    write_atomic(path, lambda file: file.write(text.encode()))


def write_metrics(path: Path, history: list[dict[str, Any]]) -> None:
    """One line an epoch; values that weren't measured in it are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(history[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(history)
    write_atomic(path, lambda file: file.write(text.getvalue().encode()))


def plot_resolution(path: Path, top1: Top1, trained: int, title: str) -> None:
    """Top-1 over the size of the test images, a line for each rule."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for rule, values in top1.items():
        axes.plot(list(values), list(values.values()), marker="o", label=f"{rule} positions")
    axes.axvline(trained, color="0.7", linestyle="--", label="training size")
    axes.set(xlabel="size of the test images in pixels", ylabel="top-1 in %", title=title)
    axes.legend()
    write_atomic(path, lambda file: figure.savefig(file, format="png", dpi=120))


def plot_training(path: Path, history: list[dict[str, Any]], title: str) -> None:
    """Losses and top-1 over the epochs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    epochs = [row["epoch"] for row in history]
    measured = [row for row in history if row["top1"] is not None]
    left.plot(epochs, [row["train_loss"] for row in history], label="training")
    left.plot([row["epoch"] for row in measured], [row["val_loss"] for row in measured], marker=".", label="validation")
    left.set(xlabel="epoch", ylabel="loss")
    left.legend()
    right.plot([row["epoch"] for row in measured], [row["top1"] for row in measured], marker=".")
    right.set(xlabel="epoch", ylabel="validation top-1 in %")
    figure.suptitle(title)
    write_atomic(path, lambda file: figure.savefig(file, format="png", dpi=120))
