"""``python -m benchmarks``: measure, print tables, write JSON and a picture.

On one CPU core it takes a few minutes; ``--quick`` runs every part at sizes too small to mean anything. The numbers are
medians over rounds in which the alternatives take turns, so that a busy machine slows all of them; ratios are what counts.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import timm
import torch

from benchmarks import models, rotation
from benchmarks.timing import Timing

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    torch.manual_seed(0)
    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    report: dict[str, Any] = {"machine": machine(options), "parts": {}}
    print("\n".join(f"{name}: {value}" for name, value in report["machine"].items()))
    for title, rows in measure(options):
        report["parts"][title] = rows
        show(title, rows)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "benchmarks.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(report, options.out / "benchmarks.png")
    print(f"\nwrote {options.out / 'benchmarks.json'} and {options.out / 'benchmarks.png'}")


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parse.add_argument("--quick", action="store_true", help="run everything once, at toy sizes")
    parse.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parse.add_argument("--threads", type=int, default=1, help="CPU threads")
    parse.add_argument("--sizes", nargs="+", default=["S"], choices=["S", "B"], help="ViT sizes")
    parse.add_argument("--modes", nargs="+", default=["float32", "bf16 AMP"], choices=models.MODES)
    parse.add_argument("--batch", type=int, help="images; 8 on a CPU, 64 on a GPU")
    parse.add_argument("--rounds", type=int, default=7, help="rounds of the models; the small parts take 15")
    parse.add_argument("--compiled", action="store_true", help="time compiled models too, which takes minutes to compile")
    parse.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the JSON and the picture")
    return parse


def machine(options: argparse.Namespace) -> dict[str, str]:
    names = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "CPU": f"{names[0] if names else platform.processor()}, {options.threads} thread(s), "
        f"{torch.backends.cpu.get_cpu_capability()}",
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, timm {timm.__version__}",
        "quick": str(options.quick),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def measure(options: argparse.Namespace) -> Any:
    """(title, rows) of each part as it is done; a row is name -> numbers."""
    small, device = (2, options.device) if options.quick else (15, options.device)
    batch = 1 if options.quick else options.batch or (64 if device == "cuda" else 8)
    for name, dtype in DTYPES.items():
        for grid in [(4, 4)] if options.quick else [(14, 14), (64, 64)]:
            timings = rotation.rotation_alone(grid, 1 if grid[0] > 14 else batch, dtype, device, small)
            yield f"rotation of q and k, {name}, {grid[0] * grid[1]} + 1 tokens", as_rows(timings)
    yield "tables of 12 blocks", as_rows(rotation.tables(device, small))
    grids = [(2, 2), (4, 4)] if options.quick else [(14, 14), (32, 32), (64, 64), (128, 128)]
    for tokens, timings in rotation.against_tokens(grids[: 3 if device == "cpu" else 4], torch.float32, device, 3).items():
        yield f"rotation against attention, {tokens} tokens", as_rows(timings)
    for size in ["tiny"] if options.quick else options.sizes:
        yield from measure_models(size, batch, options)


def measure_models(size: str, batch: int, options: argparse.Namespace) -> Any:
    image, rounds = (32, 2) if options.quick else (224, options.rounds)
    vits = models.vits(size, image, options.device)
    x = torch.randn(batch, 3, image, image, device=options.device)
    for mode in options.modes:
        for part, measure_bytes in {"kept for backward": models.saved_bytes, "peak of a step": models.peak_bytes}.items():
            sizes = {name: measure_bytes(model, x, "float32" if mode == "bf16" else mode) for name, model in vits.items()}
            rows = {name: {"MB": value / 1e6, "ratio": value / sizes["no RoPE"]} for name, value in sizes.items()}
            yield f"ViT-{size}, {mode}: {part}", rows
        for training in (False, True):
            for compiled in (False, True) if options.compiled else (False,):
                timings = models.time_models(vits, x, mode, training=training, rounds=rounds, compiled=compiled)
                kind = f"{'compiled ' if compiled else ''}{'training step' if training else 'forward'}"
                yield f"ViT-{size}, {mode}: {kind}", as_rows(timings)


def as_rows(timings: dict[str, Timing]) -> dict[str, dict[str, float]]:
    return {name: asdict(timing) for name, timing in timings.items()}


def show(title: str, rows: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}")
    for name, row in rows.items():
        amount = f"{row['seconds'] * 1e3:10.3f} ms" if "seconds" in row else f"{row['MB']:10.2f} MB"
        spread = f" +- {row['spread']:.3f}" if "spread" in row else ""
        print(f"  {name:36s}{amount}  {row['ratio']:8.3f}{spread}", flush=True)


def draw(report: dict[str, Any], path: Path) -> None:
    """Bars of the ratios of all parts that are about models, and of the rotation alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = {title: rows for title, rows in report["parts"].items() if not title.startswith(("tables", "rotation against"))}
    figure, axes = pyplot.subplots(len(parts), 1, figsize=(8, 1.7 * len(parts)), squeeze=False, layout="constrained")
    for axis, (title, rows) in zip(axes[:, 0], parts.items(), strict=True):
        colors = ["tab:blue" if name.startswith("ours") else "tab:gray" for name in rows]
        axis.barh(list(rows), [row["ratio"] for row in rows.values()], color=colors)
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.invert_yaxis()
        axis.set_title(f"{title} (ratio)", fontsize=9)
        axis.tick_params(labelsize=7)
        if title.startswith("ViT"):
            axis.set_xlim(left=0.9)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
