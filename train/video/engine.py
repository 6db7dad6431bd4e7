"""Training a memory segmenter on clips and measuring it on moving digits."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from axial_rope import MemoryAttention, MemoryBank
from models.memory_segmenter import ConvStem, MemorySegmenter
from train.errors import Stopped
from train.video.digits import moving_digits

# What the memory knows of where and when its tokens were.
VARIANTS: dict[str, dict[str, Any]] = {
    "rotary": {"family": "axial+time"},  # rows, columns and time are axes of the rotation
    "rotary-age": {"family": "axial", "age_slots": 7},  # rows and columns are; a learned age embedding
    "sine-age": {"family": None, "age_slots": 7, "sine": ("input", "keys")},  # an added embedding instead of a rotation
    "no-positions": {"family": None, "age_slots": 7},
    "no-memory": {"family": None},
}
VISIBLE = 10  # pixels of the target from which on a frame counts
TESTS = {"32x32": (32, 32), "32x64": (32, 64), "48x48": (48, 48)}


class Batch(NamedTuple):
    """Clips (B, T, channels, H, W), the target's masks (B, T, H, W) and the frames of video from one to the next."""

    frames: Tensor
    masks: Tensor
    stride: int


def make_model(variant: str, *, backbone: torch.nn.Module | None = None, dim: int = 64) -> MemorySegmenter:
    """The segmenter of a variant; small, on a stem of three convolutions, unless there is a backbone."""
    attention = MemoryAttention(dim, dim // 2, depth=2, heads=dim // 32, mlp_dim=4 * dim, dropout=0.0, **VARIANTS[variant])
    return MemorySegmenter(ConvStem(1) if backbone is None else backbone, attention)


def new_bank() -> MemoryBank:
    return MemoryBank(pointers=0)


def digit_batch(args: Any, step: int) -> Batch:
    """Clips of step `step`: first short ones, then longer ones, then ones half of which skip frames.

    Tracking over long clips is learned from tracking to the next frame, and not without it: from 8 frames with strides at
    the start, no attention to places emerges in 400 steps.
    """
    progress = step / args.steps
    length = 2 if progress < 0.2 else args.frames // 2 if progress < 0.4 else args.frames
    stride = 1 if progress < 0.4 or step % 2 else step // 2 % args.strides + 1
    clips = moving_digits(args.batch_size, length, seed=args.seed * 1_000_003 + step + 1, stride=stride)
    return Batch(clips.frames, (clips.labels == 1).float(), stride)


def loss_of(logits: Tensor, present: Tensor, masks: Tensor) -> Tensor:
    """Cross-entropy and Dice of the masks, and cross-entropy of the object's presence; the first frames are given."""
    logits, present, masks = logits[:, 1:], present[:, 1:], masks[:, 1:]
    probability = logits.sigmoid()
    overlap = (probability * masks).flatten(2).sum(-1)
    total = (probability + masks).flatten(2).sum(-1)
    dice = 1 - ((2 * overlap + 1) / (total + 1)).mean()
    there = (masks.flatten(2).sum(-1) > 0).to(present.dtype)
    entropy = F.binary_cross_entropy_with_logits
    return 5 * entropy(logits, masks) + dice + 0.1 * entropy(present, there)


def train(
    model: MemorySegmenter, args: Any, batches: Callable[[Any, int], Batch], *, remember: bool = True, name: str = ""
) -> list[float]:
    """Train in place; the losses of all steps.

    Raises:
        Stopped: The loss isn't finite.
    """
    device = model.mean.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps, pct_start=0.1)
    losses, start = [], time.process_time()
    model.train()
    for step in range(args.steps):
        batch = batches(args, step)
        frames, masks = batch.frames.to(device), batch.masks.to(device)
        logits, present = model(frames, masks[:, 0][:, None], bank=new_bank(), stride=batch.stride, remember=remember)
        loss = loss_of(logits, present, masks)
        if not loss.isfinite():
            raise Stopped(f"the loss of step {step} must be finite: got {loss.item()}; a smaller lr may help")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 50 == 49:
            mean, spent = sum(losses[-50:]) / 50, time.process_time() - start
            print(f"{name} step {step + 1}/{args.steps}  loss {mean:.3f}  {spent:.0f} CPU s", file=sys.stderr, flush=True)
    return losses


@torch.no_grad()
def digit_scores(model: MemorySegmenter, *, remember: bool = True, clips: int = 96, frames: int = 24) -> dict[str, float]:
    """Mean IoU of the visible target on held-out digits, early (frames 1-7) and late (12-23), at each test size."""
    model.eval()
    device, scores = model.mean.device, {}
    for name, size in TESTS.items():
        test = moving_digits(clips, frames, size=size, seed=10**9, split="test")
        truth = test.labels == 1
        masks = []
        for part, given in zip(test.frames.split(32), truth.split(32), strict=True):
            first = given[:, 0][:, None].float().to(device)
            logits, _ = model(part.to(device), first, bank=new_bank(), remember=remember)
            masks.append(logits.cpu() > 0)
        iou, shown = overlaps(torch.cat(masks), truth)
        for when, span in (("early", slice(1, 8)), ("late", slice(12, None))):
            scores[f"{name} {when}"] = iou[:, span][shown[:, span]].mean().item()
    return scores


def overlaps(masks: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """IoU of boolean masks (B, T, H, W) in each frame, and which frames show enough of the target to count."""
    union = (masks | truth).flatten(2).sum(-1)
    return (masks & truth).flatten(2).sum(-1) / union.clamp(min=1), truth.flatten(2).sum(-1) >= VISIBLE


def table(rows: Mapping[str, Mapping[int, Mapping[str, float]]]) -> str:
    """Scores as text: a row for each variant, a column for each test, the seeds side by side.

    >>> print(table({"rotary": {0: {"32x32 early": 0.91, "32x32 late": 0.6}, 1: {"32x32 early": 0.9, "32x32 late": 0.65}}}))
    mean IoU        32x32 early  32x32 late
    rotary            .91 / .90   .60 / .65
    """
    tests = list(next(iter(next(iter(rows.values())).values())))
    lines = ["mean IoU".ljust(14) + "".join(name.rjust(13) for name in tests)]
    for variant, seeds in rows.items():
        cells = [" / ".join(f"{scores[test]:.2f}".removeprefix("0") for scores in seeds.values()) for test in tests]
        lines.append(variant.ljust(14) + "".join(cell.rjust(13) for cell in cells))
    return "\n".join(lines)
