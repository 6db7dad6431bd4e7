"""Positions of sequences that mix text, images and videos: the ids of Qwen-VL's language models.

    text     t = y = x, one step per token
    image    starts at s: t = s,          y = s + 0 .. height - 1,  x = s + 0 .. width - 1
    video    starts at s: t = s + times,  y and x as for an image
    next     the greatest position on any axis, plus 1

An image of 2 x 3 tokens after four text tokens therefore moves the following text on by 3, not by 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from axial_rope.positions.grid import axis_positions


@dataclass(frozen=True)
class Text:
    """A run of text tokens."""

    tokens: int


@dataclass(frozen=True)
class Image:
    """An image, its grid in patches."""

    height: int
    width: int


@dataclass(frozen=True)
class Video:
    """A video, its grid in patches, and the seconds from one frame of the grid to the next where times are used.

    For Qwen2.5-VL, `seconds_per_frame` is the patch size in time divided by the frames per second.
    """

    frames: int
    height: int
    width: int
    seconds_per_frame: float | None = None


Part = Text | Image | Video


def multimodal_positions(
    parts: Sequence[Part],
    *,
    merge: int = 1,
    tokens_per_second: float | None = None,
    whole_times: bool = True,
    left_padding: int = 0,
    device: torch.device | str | None = None,
) -> tuple[Tensor, int]:
    """Positions of one sequence of text, images and videos, and the next free one.

    Equal to QwenLM's own rope2d.py (Qwen3-VL, qwen-vl-finetune) for the three generations:

    - Qwen2-VL: ``tokens_per_second=None``, the times of a video are its frame numbers.
    - Qwen2.5-VL: ``tokens_per_second=2``, its times are ``floor(frame * seconds_per_frame * tokens_per_second)``.
    - Qwen3-VL: a video is a sequence of `Image` parts, with the text of a timestamp before each.

    Parameters
    ----------
    parts
        `Text`, `Image` and `Video` in their order; `multimodal_parts` finds them in a tokenized sequence.
    merge
        Patches along each side of a token (2 in Qwen-VL).
    tokens_per_second
        Positions per second of video. None counts frames.
    whole_times
        Whether times are floored to integers; False keeps fractions of them.
    left_padding
        Padding tokens in front. They are at position 1, as in the reference; mask them in attention.
    device
        Where the positions are made.

    Returns
    -------
    positions : Tensor
        float32, (tokens, 3), columns (t, y, x). Batches are stacked: (batch, tokens, 3). The ids of transformers have the
        axes in front, (3, batch, tokens): ``positions.permute(2, 0, 1)``.
    next_position : int
        The position of the next token; a decoder goes on from here, at the same position on all axes. With fractional
        times it is the next integer.

    Raises
    ------
    ValueError
        If `tokens_per_second` is given and a video doesn't tell its `seconds_per_frame`, or a grid isn't a multiple of
        `merge`.
    TypeError
        If a part isn't one.

    Examples
    --------
    >>> positions, following = multimodal_positions([Text(1), Image(2, 3), Text(1)])
    >>> positions.int().T.tolist()
    [[0, 1, 1, 1, 1, 1, 1, 4], [0, 1, 1, 1, 2, 2, 2, 4], [0, 1, 2, 3, 1, 2, 3, 4]]
    >>> following
    5
    """
    if left_padding < 0:
        raise ValueError(f"left_padding must not be negative: got {left_padding}")
    pieces, start = [torch.ones(left_padding, 3, dtype=torch.float32, device=device)], 0
    for part in parts:
        if isinstance(part, Text):
            piece = torch.arange(part.tokens, dtype=torch.float32, device=device)[:, None].expand(-1, 3)
        else:
            piece = _vision(part, merge, tokens_per_second, whole_times, device)
        pieces.append(piece + start)
        if len(piece):
            start += math.floor(piece.max().item()) + 1
    return torch.cat(pieces), start


def multimodal_parts(
    token_types: Sequence[int] | Tensor,
    *,
    image_grids: Sequence[Sequence[int]] | Tensor = (),
    video_grids: Sequence[Sequence[int]] | Tensor = (),
    seconds_per_frame: Sequence[float] | None = None,
    merge: int = 1,
) -> list[Part]:
    """The parts of a tokenized sequence, from the type of each token and the grids of its images and videos.

    The grids say where one image ends and the next begins, also where no text stands between them.

    Parameters
    ----------
    token_types
        0 for text, 1 for an image, 2 for a video, for each token without padding (``mm_token_type_ids`` of transformers).
    image_grids, video_grids
        (frames, height, width) in patches, in the order of the sequence (``image_grid_thw``, ``video_grid_thw``). For
        Qwen3-VL, whose frames stand apart, give one row (1, height, width) per frame.
    seconds_per_frame
        One number per video (``second_per_grid_ts``).
    merge
        Patches along each side of a token.

    Raises
    ------
    ValueError
        If the tokens of a type aren't those of its grids, or there isn't one `seconds_per_frame` per video.

    Examples
    --------
    >>> multimodal_parts([0, 0, 1, 1, 1, 1, 0], image_grids=[(1, 4, 4)], merge=2)
    [Text(tokens=2), Image(height=4, width=4), Text(tokens=1)]
    """
    types = [int(kind) for kind in token_types]
    grids = {1: [tuple(map(int, g)) for g in image_grids], 2: [tuple(map(int, g)) for g in video_grids]}
    seconds = None if seconds_per_frame is None else list(seconds_per_frame)
    if seconds is not None and len(seconds) != len(grids[2]):
        raise ValueError(f"seconds_per_frame must be one per video: got {len(seconds)} for {len(grids[2])} videos")
    _check_groups(types, grids, merge)
    parts: list[Part] = []
    found, here = {1: 0, 2: 0}, 0
    while here < len(types):
        kind, run = types[here], 1
        if kind == 0:
            while here + run < len(types) and types[here + run] == 0:
                run += 1
            parts.append(Text(run))
        else:
            frames, height, width = grids[kind][found[kind]]
            run = frames * height * width // merge**2
            if types[here : here + run] != [kind] * run:
                raise ValueError(
                    f"token_types must have the {run} tokens of grid {(frames, height, width)} one after another: "
                    f"got {types[here : here + run].count(kind)} of type {kind} from token {here} on"
                )
            if kind == 1:
                parts.extend([Image(height, width)] * frames)
            else:
                parts.append(Video(frames, height, width, None if seconds is None else seconds[found[2]]))
            found[kind] += 1
        here += run
    return parts


def _check_groups(types: list[int], grids: dict[int, list[tuple[int, ...]]], merge: int) -> None:
    if not set(types) <= {0, 1, 2}:
        raise ValueError(f"token_types must be 0 (text), 1 (image) or 2 (video): got {sorted(set(types))}")
    for kind, name in ((1, "image"), (2, "video")):
        if any(len(grid) != 3 for grid in grids[kind]):
            raise ValueError(f"{name}_grids must hold (frames, height, width): got {grids[kind]}")
        expected, got = sum(t * h * w // merge**2 for t, h, w in grids[kind]), types.count(kind)
        if expected != got:
            raise ValueError(
                f"token_types must have the tokens of {name}_grids: got {got} {name} tokens, "
                f"and {len(grids[kind])} grids {grids[kind]} of {expected} tokens with merge={merge}"
            )


def _vision(
    part: Image | Video,
    merge: int,
    tokens_per_second: float | None,
    whole_times: bool,
    device: torch.device | str | None,
) -> Tensor:
    """Positions of an image or a video that starts at 0."""
    if not isinstance(part, Image | Video):
        raise TypeError(f"parts must be Text, Image or Video: got {part!r}")
    frames = part.frames if isinstance(part, Video) else 1
    if min(part.height, part.width, merge, frames) < 1 or part.height % merge or part.width % merge:
        raise ValueError(f"height and width must be multiples of merge={merge}: got {part}")
    times = torch.arange(frames, dtype=torch.float32, device=device)
    if isinstance(part, Video) and tokens_per_second is not None:
        if part.seconds_per_frame is None:
            raise ValueError(
                f"seconds_per_frame must be given for each video where tokens_per_second is: got {part} and "
                f"tokens_per_second={tokens_per_second}"
            )
        times = times * part.seconds_per_frame * tokens_per_second
        times = times.floor() if whole_times else times
    rows, columns = (torch.arange(n // merge, device=device) for n in (part.height, part.width))
    return axis_positions(times, rows, columns)
