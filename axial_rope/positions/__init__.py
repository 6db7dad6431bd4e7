"""Where tokens are: functions that give each token a position on every axis.

Positions are float32 tensors of shape (tokens, axes), or (batch, tokens, axes) where samples differ. The columns stand in
the order (t, y, x): a video has three, an image two (y, x), a text one. Tokens are in row-major order, frames first. A grid
is always (height, width), or (frames, height, width); nothing is ever inferred from a number of tokens.

    grid_positions         0, 1, 2, ... ; counted from 1; interpolated to a reference grid
    centered_positions     cell centres in (-1, 1)                       DINOv3
    pixel_positions        -1 to 1 with both ends                        timm, lucidrains
    cropped_positions      a grid laid over a part of another            CogVideoX
    axis_positions         any coordinates per axis
    frame_times            times of video frames in seconds, for `axis_positions`
    augment_positions      shift, jitter and rescale in training         DINOv3
    merged_positions       a grid in 2 x 2 blocks                        Qwen-VL's vision towers
    merge_order, window_order, block_order   the orders of tokens themselves
    packed_positions       several grids in one sequence
    multimodal_positions   text, images and videos in one sequence       Qwen-VL's language models

Plain tensor arithmetic does the rest: ``grid_positions(4, 6) + 1``, ``grid_positions(4, 6) * torch.tensor([2.0, 1.0])``,
``grid_positions(4, 6)[kept]``, ``torch.stack([sample_a, sample_b])``.
"""

from axial_rope.positions.augment import augment_positions
from axial_rope.positions.grid import (
    axis_positions,
    centered_positions,
    cropped_positions,
    grid_positions,
    pixel_positions,
)
from axial_rope.positions.multimodal import Image, Part, Text, Video, multimodal_parts, multimodal_positions
from axial_rope.positions.order import block_order, merge_order, merged_positions, window_order
from axial_rope.positions.sequence import frame_times, packed_mask, packed_positions

__all__ = [
    "Image",
    "Part",
    "Text",
    "Video",
    "augment_positions",
    "axis_positions",
    "block_order",
    "centered_positions",
    "cropped_positions",
    "frame_times",
    "grid_positions",
    "merge_order",
    "merged_positions",
    "multimodal_parts",
    "multimodal_positions",
    "packed_mask",
    "packed_positions",
    "pixel_positions",
    "window_order",
]
