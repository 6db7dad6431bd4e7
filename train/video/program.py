"""`python -m train video`: learn to follow an object from its first mask, by memory attention.

python -m train video                                       moving digits, a few minutes on one CPU core
python -m train video --variants all --seeds 0 1            what memory, positions and time are worth, as a table
python -m train video --data DAVIS --backbone convnext_atto
python -m train video evaluate --weights output/video/rotary-0.safetensors --data DAVIS
python -m train video track clip.mp4 --mask first.png --weights output/video/rotary-0.safetensors
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.memory_segmenter import ConvStem, MemorySegmenter, ViTFeatures
from models.tracker import Tracker
from train.arguments import Parser, number
from train.checkpoint import save_weights, set_aside, write_atomic
from train.errors import Refusal, Stopped
from train.preflight import check_device, check_output
from train.report import write_summary
from train.video.clips import Clips
from train.video.digits import moving_digits
from train.video.engine import VARIANTS, digit_batch, digit_scores, make_model, new_bank, table
from train.video.engine import train as train_model
from train.video.folders import decode, find_videos, read_frame, read_labels, write_labels
from train.video.metrics import evaluate_video, summarize
from train.video.pictures import overlay, write_gif, write_sheet

COMMANDS = ("train", "evaluate", "track")
FILES = ("*.safetensors", "summary.json", "table.txt", "clips.png", "clips.gif")


def make_parser(command: str) -> Parser:
    """Flags of a command."""
    count = number(int, 1)
    prog = "python -m train video" + ("" if command == "train" else f" {command}")
    parser = Parser(prog=prog, allow_abbrev=False, description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--output", default="output/video", metavar="FOLDER", help="where results go")
    add("--device", default="cpu", help="cpu, cuda, mps, ...")
    add("--threads", type=count, default=1, help="CPU threads of torch")
    if command == "train":
        add("--data", metavar="FOLDER", help="DAVIS, YouTube-VOS or MOSE; without it: moving digits")
        add("--variants", nargs="+", default=["rotary"], choices=[*VARIANTS, "all"], help="what the memory knows")
        add("--seeds", type=number(int, 0), nargs="+", default=[0])
        add("--backbone", metavar="NAME", help="timm model instead of a stem of three convolutions")
        add("--steps", type=count, default=600)
        add("--batch-size", type=count, default=12)
        add("--frames", type=number(int, 2), default=8, help="frames of a training clip")
        add("--strides", type=count, default=3, help="clips skip up to this many frames less one")
        add("--size", type=count, default=128, help="side of the crops, with --data")
        add("--pretrained", action="store_true", help="start from timm's weights of the backbone")
        add("--test-clips", type=count, default=96, help="clips of digits to evaluate on")
        add("--lr", type=number(float, 0, above=True), default=2e-3)
        return parser
    add("--weights", required=True, metavar="FILE", help="safetensors file that training wrote")
    if command == "evaluate":
        add("--data", required=True, metavar="FOLDER", help="DAVIS, YouTube-VOS or MOSE")
        add("--split", default="val", choices=("val", "train", "test"))
        add("--gif", action="store_true", help="also write an overlay of each video")
    else:
        add("video", help="file to decode")
        add("--mask", required=True, metavar="FILE", help="PNG of the first frame's objects, with a palette or in grey")
        add("--limit", type=count, help="frames to track at most")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0, 1 (training had to stop) or 2 (the request was refused)."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = words.pop(0) if words and words[0] in COMMANDS else "train"
    args = make_parser(command).parse_args(words)
    try:
        torch.set_num_threads(args.threads)
        check_device(args.device)
        check_output(args.output)
        {"train": run_training, "evaluate": run_evaluation, "track": run_tracking}[command](args)
    except (Refusal, Stopped) as end:
        print(f"python -m train video: {end}", file=sys.stderr)
        return end.exit_code
    return 0


def make_backbone(name: str | None, *, colour: bool, pretrained: bool = False) -> nn.Module:
    """The convolution stem, or a timm model of that name that gives its feature maps."""
    if name is None:
        return ConvStem(3, (16, 24, 32, 48, 64)) if colour else ConvStem(1)
    import timm

    try:
        if name.startswith(("vit_", "deit")):
            return ViTFeatures(timm.create_model(name, pretrained=pretrained, dynamic_img_size=True, num_classes=0))
        return timm.create_model(name, features_only=True, pretrained=pretrained)
    except (RuntimeError, TypeError, AssertionError) as error:
        raise Refusal(f"backbone must be a timm model with feature maps of any size: {name} is not ({error})") from error


def run_training(args: Any) -> dict[str, Any]:
    """Train each variant with each seed; write weights, scores and, for digits, a table and pictures."""
    output = Path(args.output)
    variants = list(VARIANTS) if "all" in args.variants else list(dict.fromkeys(args.variants))
    if args.backbone and not args.data:
        raise Refusal(f"backbone must come with data, since digits are grey and small: got {args.backbone} alone")
    batches = digit_batch
    if args.data:
        batches = Clips(find_videos(args.data, "train"), size=args.size, frames=args.frames, strides=args.strides)
    check_training(args)
    output.mkdir(parents=True, exist_ok=True)
    set_aside(output, FILES)
    rows: dict[str, dict[int, dict[str, float]]] = {variant: {} for variant in variants}
    seconds, models = {}, {}
    for variant in variants:
        for seed in args.seeds:
            start = time.process_time()
            model, scores = train_one(variant, Namespace(**{**vars(args), "seed": seed}), batches)
            seconds[f"{variant}-{seed}"] = round(time.process_time() - start, 1)
            rows[variant][seed] = scores
            models.setdefault(variant, model)
            print(table({variant: {seed: scores}}).splitlines()[-1], f"  seed {seed}", flush=True)
    summary = {"settings": vars(args), "scores": rows, "cpu_seconds": seconds}
    write_summary(output / "summary.json", summary)
    text = table(rows)
    write_atomic(output / "table.txt", lambda file: file.write(f"{text}\n".encode()))
    if not args.data:
        draw_digits(output, models)
    print(text)
    return summary


def check_training(args: Any) -> None:
    """Refuse what training would stumble over, before anything is written."""
    backbone = make_backbone(args.backbone, colour=bool(args.data))
    try:
        model = make_model("rotary", backbone=backbone).eval()
        with torch.no_grad():
            model.features(torch.zeros(1, 3 if args.data else 1, 4 * model.reduction, 6 * model.reduction))
    except (ValueError, RuntimeError, AssertionError) as error:
        raise Refusal(f"backbone must give maps (B, C, h, w) of frames of any size: {error}") from error
    if args.data and args.size % model.reduction:
        raise Refusal(f"size must be a multiple of {model.reduction}, which the backbone divides by: got {args.size}")


def train_one(variant: str, args: Namespace, batches: Any) -> tuple[MemorySegmenter, dict[str, float]]:
    """Train, save and measure one variant with one seed."""
    torch.manual_seed(args.seed)
    colour, remember, name = bool(args.data), variant != "no-memory", f"{variant}-{args.seed}"
    backbone = make_backbone(args.backbone, colour=colour, pretrained=args.pretrained)
    model = make_model(variant, backbone=backbone).to(args.device)
    losses = train_model(model, args, batches, remember=remember, name=name)
    about = {"variant": variant, "backbone": args.backbone, "colour": colour, "settings": vars(args)}
    save_weights(Path(args.output) / f"{name}.safetensors", model.state_dict(), about)
    if colour:
        return model, {"loss": sum(losses[-50:]) / len(losses[-50:])}
    return model, digit_scores(model, remember=remember, clips=args.test_clips)


@torch.no_grad()
def draw_digits(output: Path, models: dict[str, MemorySegmenter]) -> None:
    """Two held-out clips with the masks of each variant, as clips.png, and the first variant's as clips.gif."""
    test = moving_digits(2, 24, seed=10**9 + 1, split="test")
    truth = test.labels == 1
    found = {}
    for variant, model in models.items():
        first = truth[:, 0][:, None].float()
        device = model.mean.device
        masks, _ = model(test.frames.to(device), first.to(device), bank=new_bank(), remember=variant != "no-memory")
        found[variant] = masks.cpu() > 0
    write_sheet(output / "clips.png", test.frames, truth, found)
    shown = next(iter(found.values()))
    write_gif(output / "clips.gif", [overlay(*pair) for pair in zip(test.frames[0], shown[0], strict=True)], scale=6)


def load_model(path: str, device: str) -> MemorySegmenter:
    """The segmenter whose weights training wrote.

    Raises:
        Refusal: The file lacks or is none of this program.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise Refusal(f"weights must be a file: got {path}")
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {})["axial_rope"])
            weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  not a dict
        model = make_model(about["variant"], backbone=make_backbone(about["backbone"], colour=about["colour"]))
    except (SafetensorError, KeyError, ValueError) as error:
        raise Refusal(f"weights must be a file that python -m train video wrote: {path} is not") from error
    if about["variant"] == "no-memory":
        raise Refusal(f"weights must be of a model with memory: {path} is of the variant no-memory")
    model.load_state_dict(weights)
    return model.to(device)


def run_evaluation(args: Any) -> dict[str, float]:
    """Track all videos of a split, write their masks as the benchmarks want them, and J and F where the truth is there."""
    model, videos = load_model(args.weights, args.device), find_videos(args.data, args.split)
    output, scores = Path(args.output), {}
    for video in videos:
        prompts, truth = prompts_of(video)
        start = min(prompts)
        tracker = Tracker(model, new_bank())
        frames = [read_frame(path) for path in video.frames[start:]]
        later = {index - start: labels for index, labels in prompts.items() if index > start}
        labels = list(tracker.track(map(gray_if_needed(model), frames), prompts[start], prompts=later))
        for path, one in zip(video.frames[start:], labels, strict=True):
            write_labels(output / "Annotations" / video.name / f"{path.stem}.png", one)
        if args.gif:
            write_gif(output / f"{video.name}.gif", [overlay(*pair) for pair in zip(frames, labels, strict=True)])
        if len(truth) > 2:
            found = {index: labels[index - start].numpy() for index in truth}
            scores[video.name] = evaluate_video(found, truth)
            print(f"{video.name}  {json.dumps(rounded(summarize({video.name: scores[video.name]})))}", flush=True)
    result = rounded(summarize(scores))
    write_summary(
        output / "scores.json", {"all": result, "videos": {name: summarize({name: one}) for name, one in scores.items()}}
    )
    print(json.dumps(result) if scores else f"wrote masks of {len(videos)} videos; the split has no other to compare with")
    return result


def prompts_of(video: Any) -> tuple[dict[int, torch.Tensor], dict[int, Any]]:
    """For each frame in which objects first appear, their labels alone; and all annotated label maps."""
    known: set[int] = set()
    prompts, truth = {}, {}
    for index in sorted(video.masks):
        labels = read_labels(video.masks[index])
        fresh = set(labels.unique().tolist()) - known - {0, 255}
        if fresh:
            new = torch.isin(labels, torch.tensor(sorted(fresh), dtype=labels.dtype))
            prompts[index] = torch.where(new, labels, 0)
            known |= fresh
        if known:
            truth[index] = labels.numpy()
    if not prompts:
        raise Refusal(f"masks must show an object: {video.name} has {len(video.masks)} without any")
    return prompts, truth


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}


def gray_if_needed(model: MemorySegmenter) -> Any:
    """What turns a colour frame into what the model's backbone takes."""
    first = next(parameter for parameter in model.backbone.parameters() if parameter.dim() == 4)
    return (lambda frame: frame.mean(dim=0, keepdim=True)) if first.shape[1] == 1 else (lambda frame: frame)


def run_tracking(args: Any) -> int:
    """Track a video file from a mask of its first frame; its masks as PNGs and an overlay as GIF."""
    from tqdm import tqdm

    model, first, output = load_model(args.weights, args.device), read_labels(Path(args.mask)), Path(args.output)
    if not ((first > 0) & (first < 255)).any():
        found = "255, which stands for void" if first.any() else "none"
        raise Refusal(f"mask must show an object with a label from 1 to 254: got {found} in {args.mask}")
    frames = islice(decode(args.video), args.limit)
    head = next(frames, None)
    if head is None:
        raise Refusal(f"video must have a frame: got none in {args.video}")
    if head.shape[-2:] != first.shape:
        raise Refusal(f"mask must have the size {tuple(head.shape[-2:])} of the video: got {tuple(first.shape)}")
    fit, pictures = gray_if_needed(model), []
    tracker, stem = Tracker(model, new_bank()), Path(args.video).stem
    for number_, frame in enumerate(tqdm(chain([head], frames), desc="track", total=args.limit, unit="frame")):
        labels = tracker.step(fit(frame), first if number_ == 0 else None)
        write_labels(output / stem / f"{number_:05d}.png", labels)
        pictures.append(overlay(frame, labels))
    write_gif(output / f"{stem}.gif", pictures)
    print(f"tracked {len(pictures)} frames of {pictures[0].shape[0]} x {pictures[0].shape[1]}: {output / stem}.gif")
    return len(pictures)
