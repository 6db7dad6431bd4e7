"""Command line and YAML file of the training program, under timm's flag names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from models.rope_vit import ROPES

# Defaults that depend on the data: (digits, image folder).
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "model": ("N/2", "S/16"),
    "img_size": (8, 224),
    "batch_size": (64, 128),
    "epochs": (38, 90),
    "warmup_epochs": (2.0, 5.0),
    "lr": (2e-3, 5e-4),
    "clip_grad": (None, 1.0),
    "scale": ([0.7, 1.0], [0.08, 1.0]),
    "hflip": (0.0, 0.5),
    "color_jitter": (0.0, 0.3),
    "aa": (None, "3a"),
    "interpolation": ("bilinear", "bicubic"),
    "crop_pct": (1.0, 0.875),
    "val_interval": (2, 1),
    "workers": (0, 4),
    "threads": (1, None),
}
NONE = ("aa", "clip_grad")  # may be switched off by the word none


class Parser(argparse.ArgumentParser):
    """Argument parser whose refusals are one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def number(kind: type, low: float, high: float = float("inf"), *, above: bool = False):
    """Type of a flag that takes a number in [low, high], or in (low, high] with `above`."""

    def parse(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not (low <= value <= high) or value == float("inf") or (above and value == low):
            rule = f"{'above' if above else 'at least'} {low}" + (f" and at most {high}" if high < float("inf") else "")
            name = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"must be a {name} {rule}: got {text!r}")
        return value

    return parse


def make_parser() -> Parser:
    """The program's flags. Flags with a default that depends on the data have None here and are filled in later."""
    count, positive, fraction = number(int, 1), number(float, 0, above=True), number(float, 0, 1)
    parser = Parser(prog="python -m train", allow_abbrev=False, description="Train a RoPE-ViT and its resolution curve.")
    add = parser.add_argument
    add("-c", "--config", metavar="FILE", help="YAML file of flags; flags given on the command line win")
    add("--data", metavar="FOLDER", help="folder with train/CLASS and val/CLASS images; without it: scikit-learn's digits")
    add("--subset", nargs="+", metavar="CLASS", help="classes to keep: names, or a text file with one a line")
    add("--verify", action=argparse.BooleanOptionalAction, default=True, help="decode every image first, skip broken ones")
    add("--output", default="output", metavar="FOLDER", help="where results go")
    add("--resume", metavar="FILE", help="last.pt of a run to continue; 'auto' takes the one in the output folder, if any")
    add("--seed", type=number(int, 0), default=0)

    add("--model", help="size/patch: N, Ti, S, B or L with any patch, e.g. S/16")
    add("--rope", choices=ROPES, default="axial", help="position encoding")
    add("--img-size", type=count, help="training size in pixels")
    add("--eval-sizes", type=count, nargs="+", help="sizes to evaluate at; default: 3/4, 1, 5/4, 3/2 and 2 times img-size")
    add("--class-token", action=argparse.BooleanOptionalAction, default=False, help="class token instead of mean pooling")
    add("--drop-path", type=fraction, default=0.0)

    add("--epochs", type=count)
    add("-b", "--batch-size", type=count, help="images a step and process")
    add("--grad-accum-steps", type=count, default=1)
    add("--opt", default="adamw")
    add("--lr", type=positive)
    add("--weight-decay", type=number(float, 0), default=0.05)
    add("--layer-decay", type=number(float, 0, 1, above=True))
    add(
        "--clip-grad",
        type=lambda text: text if text == "none" else positive(text),
        help="largest norm of the gradient, or none",
    )
    add("--sched", choices=("cosine", "tanh", "step", "poly", "wsd", "rsqrt", "constant"), default="cosine")
    add("--warmup-epochs", type=number(float, 0))
    add("--min-lr", type=number(float, 0), default=0.0)

    add("--scale", type=number(float, 0, 1, above=True), nargs=2, metavar=("LOW", "HIGH"), help="area of the random crop")
    add("--hflip", type=fraction)
    add("--color-jitter", type=number(float, 0))
    add("--aa", metavar="POLICY", help="timm's automatic augmentation, e.g. 3a, rand-m9-mstd0.5-inc1 or none")
    add("--reprob", type=fraction, default=0.0, help="probability of random erasing")
    add("--mixup", type=number(float, 0), default=0.0)
    add("--cutmix", type=number(float, 0), default=0.0)
    add("--smoothing", type=number(float, 0, 1), default=0.1, help="label smoothing")
    add("--interpolation", choices=("bilinear", "bicubic"))
    add("--crop-pct", type=number(float, 0, 1, above=True), help="part of the image that evaluation sees")

    add("--amp", choices=("auto", "none", "bf16", "fp16"), default="auto", help="auto: none on a CPU")
    add("--model-ema", action=argparse.BooleanOptionalAction, default=False)
    add("--model-ema-decay", type=fraction, default=0.9998)
    add("--val-interval", type=count, help="epochs between two evaluations")
    add("--workers", type=number(int, 0), help="processes that load images")
    add("--threads", type=count, help="CPU threads of torch")
    add("--device", default="auto", help="auto, cpu, cuda, mps, ...")
    for action in parser._actions:
        if action.dest in DEFAULTS:
            digits, folder = (word(value) for value in DEFAULTS[action.dest])
            action.help = f"{action.help or ''} [digits: {digits}; folder: {folder}]".lstrip()
    return parser


def word(value: Any) -> str:
    """A default as the help shows it."""
    return " ".join(map(str, value)) if isinstance(value, list) else str("none" if value is None else value)


def config_flags(parser: Parser, path: str) -> list[str]:
    """The entries of a YAML file as command-line words, so that they meet the same checks as flags do."""
    try:
        import yaml
    except ImportError:
        parser.error('config needs the package pyyaml: pip install -e ".[train]"')
    try:
        entries = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        parser.error(f"config must be a readable YAML file: {path} is not ({' '.join(str(error).split())})")
    if not isinstance(entries, dict):
        parser.error(f"config must hold 'flag: value' lines: {path} holds a {type(entries).__name__}")
    options = {action.dest: action for action in parser._actions if action.dest not in ("help", "config")}
    unknown = sorted(str(key) for key in entries if str(key).replace("-", "_") not in options)
    if unknown:
        parser.error(f"config must hold known flags only: {path} also has {', '.join(unknown)}")
    words: list[str] = []
    for key, value in entries.items():
        name, flag = str(key).replace("-", "_"), "--" + str(key).replace("_", "-")
        if isinstance(options[name], argparse.BooleanOptionalAction):
            if not isinstance(value, bool):
                parser.error(f"config must give {key} as true or false: got {value!r} in {path}")
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        elif value is not None or name in NONE:
            words.append(f"{flag}={'none' if value is None else value}")
        elif options[name].default is not None or name in DEFAULTS:
            parser.error(f"config must give {key} a value: got null in {path}")
    return words


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Settings of a run: command line, then YAML file, then the defaults of the data; values are plain types.

    A word that is unknown or breaks its rule ends the program with one sentence on stderr and exit code 2.

    >>> settings = parse(["--rope", "mixed", "--lr", "1e-3"])
    >>> settings.rope, settings.lr, settings.model, settings.img_size
    ('mixed', 0.001, 'N/2', 8)
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    args = parser.parse_args(words)
    if args.config:
        args = parser.parse_args(config_flags(parser, args.config) + words)
    for name, defaults in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, defaults[args.data is not None])
    for name in NONE:
        if getattr(args, name) in ("none", ""):
            setattr(args, name, None)
    return args
