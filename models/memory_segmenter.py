"""Segmenting objects through a video, from their masks in the first frame: backbone, memory attention, mask decoder.

    frame -> backbone -> features -> memory attention -> decoder -> mask -> memory encoder -> bank
                            |              ^                                     ^    |
                            |              +------------- what was seen ---------|----+
                            +----------------------------------------------------+

The semi-supervised setting of DAVIS and YouTube-VOS: the first mask is given, all others follow. Frames of any size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from axial_rope import Memory, MemoryAttention, MemoryBank

__all__ = ["ConvStem", "MemoryEncoder", "MemorySegmenter", "ViTFeatures"]


class ConvStem(nn.Module):
    """Small backbone of 3x3 convolutions, each but the first halving the frame; feature maps from fine to coarse.

    Offers what a timm model made with ``features_only=True`` does: ``feature_info.channels()`` and ``.reduction()``.
    """

    def __init__(self, in_channels: int = 1, widths: Sequence[int] = (16, 32, 64)) -> None:
        super().__init__()
        stages, before = [], in_channels
        for index, width in enumerate(widths):
            stages.append(
                nn.Sequential(
                    nn.Conv2d(before, width, 3, stride=1 if index == 0 else 2, padding=1),
                    nn.GroupNorm(1, width),
                    nn.GELU(),
                )
            )
            before = width
        stages[-1].append(nn.Conv2d(before, before, 3, padding=1))
        self.stages = nn.ModuleList(stages)
        self.widths = tuple(widths)

    def channels(self) -> list[int]:
        return list(self.widths)

    def reduction(self) -> list[int]:
        return [2**index for index in range(len(self.widths))]

    @property
    def feature_info(self) -> ConvStem:
        return self

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps


class ViTFeatures(nn.Module):
    """The patch tokens of a timm VisionTransformer, rotary or not, as a feature map for `MemorySegmenter`.

    Give the model ``dynamic_img_size=True`` for frames of any size.
    """

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit: Any = vit
        self.pretrained_cfg = getattr(vit, "pretrained_cfg", None)

    def channels(self) -> list[int]:
        return [self.vit.embed_dim]

    def reduction(self) -> list[int]:
        return [self.vit.patch_embed.patch_size[0]]

    @property
    def feature_info(self) -> ViTFeatures:
        return self

    def forward(self, x: Tensor) -> list[Tensor]:
        patch = self.reduction()[0]
        tokens = self.vit.forward_features(x)[:, self.vit.num_prefix_tokens :]
        return [tokens.mT.unflatten(2, (x.shape[-2] // patch, x.shape[-1] // patch))]


class MemoryEncoder(nn.Module):
    """Features of a frame and a mask become the tokens that are remembered: (B, h * w, memory_dim)."""

    def __init__(self, dim: int, memory_dim: int, reduction: int) -> None:
        super().__init__()
        steps = int(math.log2(reduction))
        widths = [1, *(max(dim // 2 ** (steps - step), 4) for step in range(1, steps)), dim]
        layers: list[nn.Module] = []
        for before, width in itertools.pairwise(widths):
            layers += [nn.Conv2d(before, width, 3, stride=2, padding=1), nn.GroupNorm(1, width), nn.GELU()]
        self.down = nn.Sequential(*layers)
        self.features = nn.Conv2d(dim, dim, 1)
        self.mix = nn.Sequential(
            nn.Conv2d(dim, dim, 7, padding=3, groups=dim), nn.GroupNorm(1, dim), nn.Conv2d(dim, 2 * dim, 1), nn.GELU(),
            nn.Conv2d(2 * dim, dim, 1),
        )  # fmt: skip
        self.out = nn.Conv2d(dim, memory_dim, 1)

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        """Features (B, dim, h, w) and masks (B, 1, H, W) in [0, 1]."""
        x = self.features(features) + self.down(2 * mask - 1)
        return self.out(x + self.mix(x)).flatten(2).mT


class MaskDecoder(nn.Module):
    """Features become mask logits at the frame's size, by pixel shuffles with skips from finer maps of the backbone."""

    def __init__(self, dim: int, channels: Sequence[int], reductions: Sequence[int]) -> None:
        super().__init__()
        self.reduction = reductions[-1]
        self.skips, self.ups, self.mixes = nn.ModuleDict(), nn.ModuleList(), nn.ModuleList()
        width, scale = dim, self.reduction
        while scale > 1:
            scale //= 2
            narrow = max(width // 2, 16)
            self.ups.append(nn.Sequential(nn.Conv2d(width, 4 * narrow, 1), nn.PixelShuffle(2)))
            self.mixes.append(nn.Conv2d(narrow, narrow, 3, padding=1))
            if scale in reductions[:-1]:
                self.skips[str(scale)] = nn.Conv2d(channels[list(reductions).index(scale)], narrow, 1)
            width = narrow
        self.out = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: Tensor, maps: Mapping[int, Tensor]) -> Tensor:
        scale = self.reduction
        for up, mix in zip(self.ups, self.mixes, strict=True):
            scale //= 2
            x = up(x)
            if str(scale) in self.skips:
                x = x + self.skips[str(scale)](maps[scale])
            x = F.gelu(mix(F.gelu(x)))
        return self.out(x)


class MemorySegmenter(nn.Module):
    """A backbone, memory attention, a memory encoder and a mask decoder.

    Args:
        backbone: Returns feature maps from fine to coarse, the coarsest for the memory: `ConvStem`, `ViTFeatures`, or a
            convolutional timm model made with ``features_only=True``.
        attention: Memory attention of ``dim`` channels.

    >>> model = MemorySegmenter(ConvStem(3), MemoryAttention(64, 32, depth=1, heads=2, mlp_dim=128))
    >>> frames, first = torch.rand(2, 4, 3, 32, 48), torch.zeros(2, 1, 32, 48)
    >>> masks, present = model(frames, first)
    >>> masks.shape, present.shape
    (torch.Size([2, 4, 32, 48]), torch.Size([2, 4]))
    """

    def __init__(self, backbone: nn.Module, attention: MemoryAttention) -> None:
        super().__init__()
        info: Any = backbone.feature_info
        channels, reductions = list(info.channels()), list(info.reduction())
        self.reductions, self.reduction = reductions, reductions[-1]
        if any(step < 1 or step & (step - 1) for step in reductions) or self.reduction < 2:
            raise ValueError(f"backbone must halve frames once or more, reductions 1, 2, 4, ...: got {reductions}")
        dim = attention.dim
        self.backbone, self.attention = backbone, attention
        self.project = nn.Conv2d(channels[-1], dim, 1)
        self.encoder = MemoryEncoder(dim, attention.memory_dim, self.reduction)
        self.decoder = MaskDecoder(dim, channels, reductions)
        self.present = nn.Linear(dim, 1)
        config = getattr(backbone, "pretrained_cfg", None) or {"mean": (0.0,), "std": (1.0,)}
        self.register_buffer("mean", torch.tensor(config["mean"])[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(config["std"])[:, None, None], persistent=False)

    def features(self, frames: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """The coarsest map, (B, dim, h, w), and the finer ones by their reduction."""
        height, width = frames.shape[-2:]
        if height % self.reduction or width % self.reduction:
            raise ValueError(f"frames must have sides that are multiples of {self.reduction}: got {height} x {width}")
        maps = self.backbone((frames - self.mean) / self.std)
        return self.project(maps[-1]), dict(zip(self.reductions[:-1], maps[:-1], strict=True))

    def segment(self, features: Tensor, maps: Mapping[int, Tensor], memory: Memory | None) -> tuple[Tensor, Tensor]:
        """Mask logits (B, H, W) and logits of the object's presence (B,) for features (B, dim, h, w)."""
        grid = features.shape[-2], features.shape[-1]
        seen = self.attention(features.flatten(2).mT, memory, grid=grid)
        logits = self.decoder(seen.mT.unflatten(2, grid), maps)[:, 0]
        return logits, self.present(seen.amax(dim=1))[:, 0]

    def forward(
        self, frames: Tensor, first: Tensor, *, bank: MemoryBank | None = None, stride: int = 1, remember: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Masks of one object in each clip of a batch, for training and evaluation.

        Args:
            frames: (B, T, channels, H, W).
            first: (B, 1, H, W), the masks of the first frames.
            bank: An empty bank; by default of six recent frames, with the first one kept.
            stride: Frames of the video between two frames of the clips: the unit of the memories' ages.
            remember: False leaves the bank empty.

        Returns:
            Mask logits (B, T, H, W), those of the first frame being its mask, and logits of presence (B, T).

        Raises:
            ValueError: The first masks aren't of the frames' batch and size.
        """
        if frames.dim() != 5 or first.shape != (len(frames), 1, *frames.shape[-2:]):
            raise ValueError(
                f"first must have shape (B, 1, H, W) for frames (B, T, channels, H, W): got {tuple(first.shape)} for "
                f"{tuple(frames.shape)}"
            )
        bank = MemoryBank() if bank is None else bank
        batch, length = frames.shape[:2]
        coarse, fine = self.features(frames.flatten(0, 1))
        grid = coarse.shape[-2], coarse.shape[-1]
        steps = coarse.unflatten(0, (batch, length)).unbind(1)
        fine_steps = {scale: features.unflatten(0, (batch, length)).unbind(1) for scale, features in fine.items()}
        mask = first
        masks, present = [torch.where(first[:, 0] > 0.5, 10.0, -10.0)], [first.flatten(1).amax(1) * 20 - 10]
        for t in range(length):
            if t:
                memory = bank.read(time=float(t * stride)) if remember else None
                logits, there = self.segment(steps[t], {scale: maps[t] for scale, maps in fine_steps.items()}, memory)
                masks.append(logits)
                present.append(there)
                mask = logits.sigmoid()[:, None]
            if remember and t + 1 < length:
                tokens = self.encoder(steps[t], mask)
                bank.write(tokens, grid=grid, time=float(t * stride), conditioning=t == 0)
        return torch.stack(masks, dim=1), torch.stack(present, dim=1)
