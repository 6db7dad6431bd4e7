"""Training clips from folders of videos: a random object, a random stretch of annotated frames, a random crop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from train.errors import Refusal
from train.video.engine import Batch
from train.video.folders import Video, read_frame, read_labels


class Clips:
    """Batches of clips from videos whose frames are annotated, for `train.video.engine.train`.

    Args:
        videos: Those with fewer than `frames` annotated frames are left out.
        size: Side of the square crops, in pixels.
        frames: Frames of a clip.
        strides: Annotated frames are skipped so that one in 1 .. strides is taken.
    """

    def __init__(self, videos: list[Video], *, size: int, frames: int, strides: int) -> None:
        self.videos = [video for video in videos if len(video.masks) >= frames]
        self.size, self.frames, self.strides = size, frames, strides
        if not self.videos:
            longest = max(len(video.masks) for video in videos)
            raise Refusal(
                f"data must hold a video with {frames} annotated frames: the longest of {len(videos)} has {longest}"
            )

    def __call__(self, args: Any, step: int) -> Batch:
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        stride = int(torch.randint(1, self.strides + 1, (1,), generator=generator))
        clips = [self.clip(stride, generator) for _ in range(args.batch_size)]
        frames, masks, steps = zip(*clips, strict=True)
        return Batch(torch.stack(frames), torch.stack(masks), round(sum(steps) / len(steps)))

    def clip(self, stride: int, generator: torch.Generator) -> tuple[Tensor, Tensor, int]:
        """Frames (T, 3, size, size), masks (T, size, size), and the frames of video from one to the next."""

        def draw(high: int) -> int:
            return int(torch.randint(high, (1,), generator=generator))

        for _ in range(20):  # until the first frame shows something of an object
            video = self.videos[draw(len(self.videos))]
            shown = sorted(video.masks)
            step = min(stride, (len(shown) - 1) // (self.frames - 1))
            start = draw(len(shown) - step * (self.frames - 1))
            chosen = shown[start : start + step * (self.frames - 1) + 1 : step]
            labels = torch.stack([read_labels(video.masks[index]) for index in chosen])
            present = [label for label in labels[0].unique().tolist() if label not in (0, 255)]
            if present:
                break
        else:
            raise Refusal(f"data must show objects: 20 draws from {len(self.videos)} videos found none")
        masks = (labels == present[draw(len(present))]).float()
        frames = torch.stack([read_frame(video.frames[index]) for index in chosen])
        frames, masks = self.crop(frames, masks, draw)
        return frames, masks, max(1, round((chosen[-1] - chosen[0]) / (self.frames - 1)))

    def crop(self, frames: Tensor, masks: Tensor, draw: Any) -> tuple[Tensor, Tensor]:
        """A square that holds a pixel of the first mask, after the shorter side was brought to `size`."""
        height, width = frames.shape[-2:]
        scale = self.size / min(height, width)
        size = (max(self.size, round(height * scale)), max(self.size, round(width * scale)))
        frames = F.interpolate(frames, size=size, mode="bilinear", antialias=True)
        masks = F.interpolate(masks[:, None], size=size, mode="nearest")[:, 0]
        corner = []
        inside = masks[0].nonzero()
        pixel = inside[draw(len(inside))].tolist() if len(inside) else [size[0] // 2, size[1] // 2]
        for place, side in zip(pixel, size, strict=True):
            low, high = max(0, place - self.size + 1), min(place, side - self.size)
            corner.append(low + draw(high - low + 1))
        y, x = (slice(start, start + self.size) for start in corner)
        return frames[..., y, x], masks[..., y, x]
