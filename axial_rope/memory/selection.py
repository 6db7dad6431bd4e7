"""Which stored frames and pointers a frame of a video looks back at: a pure function of integers.

recent=4, stride=1, frame 9:    conditioning 0   recent 5 6 7 8         slots 0, 4 3 2 1
recent=4, stride=3, frame 9:    conditioning 0   recent 0 3 6 8
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

__all__ = ["Selection", "select_frames"]


class Selection(NamedTuple):
    """What a frame looks back at.

    Attributes
    ----------
    frames
        (frame, slot) in the order in which they are read: conditioning frames with slot 0, then recent ones, the oldest
        first, with slot n for the n-th before the reader.
    pointers
        (frame, frames since then): the conditioning frames', then the recent ones', the latest first.
    """

    frames: tuple[tuple[int, int], ...]
    pointers: tuple[tuple[int, int], ...]


def select_conditioning(frame: int, conditioning: Collection[int], most: int | None) -> list[int]:
    """The conditioning frames to read: all, or the nearest before, the nearest at or after, then the next nearest."""
    if most is None or len(conditioning) <= most:
        return list(conditioning)
    before = [t for t in conditioning if t < frame]
    after = [t for t in conditioning if t >= frame]
    chosen = ([max(before)] if before else []) + ([min(after)] if after else [])
    rest = sorted((t for t in conditioning if t not in chosen), key=lambda t: abs(t - frame))
    return (chosen + rest)[: max(most, len(chosen))]


def recent_frames(frame: int, recent: int, stride: int, reverse: bool) -> list[int]:
    """The frames that fill the slots 1 .. recent: the last one, then every stride-th before it.

    >>> recent_frames(20, recent=4, stride=5, reverse=False)
    [19, 15, 10, 5]
    """
    sign = -1 if reverse else 1
    nearest = sign * ((sign * frame - 2) // stride) * stride
    return [frame - sign, *(nearest - sign * stride * k for k in range(recent - 1))][:recent]


def fill(frame: int, stored: Collection[int], recent: int, stride: int, reverse: bool) -> list[int]:
    """The last stored frame, then the latest others that are multiples of `stride`.

    >>> fill(20, [2, 3, 5, 6, 9, 13], recent=3, stride=3, reverse=False)
    [13, 9, 6]
    """
    sign = -1 if reverse else 1
    past = sorted((t for t in stored if sign * t < sign * frame), key=lambda t: -sign * t)
    return (past[:1] + [t for t in past[1:] if t % stride == 0])[:recent]


def select_frames(
    frame: int,
    stored: Collection[int],
    conditioning: Collection[int],
    *,
    recent: int = 6,
    stride: int = 1,
    max_conditioning: int | None = None,
    pointers: int = 16,
    reverse: bool = False,
    fill_gaps: bool = False,
    clip_length: int | None = None,
    future_pointers: bool = False,
) -> Selection:
    """What `frame` looks back at, as SAM 2 chooses it (facebookresearch/sam2, modeling/sam2_base.py).

    Parameters
    ----------
    frame
        The frame that reads.
    stored, conditioning
        Frames in memory: tracked ones, and those with a mask or a click of the user, in the order in which they came.
    recent
        Slots for tracked frames.
    stride
        Frames between two slots, except the first, which is the last frame.
    max_conditioning
        Conditioning frames to read at most, the closest; at least 2. Others count as tracked frames.
    pointers
        Pointers of conditioning frames, and of fewer than this many frames before.
    reverse
        Whether the video is tracked backwards.
    fill_gaps
        Whether an older frame takes the slot of one that isn't stored; SAM 2 leaves the slot out.
    clip_length
        Frames of the whole video if it is known: SAM 2 reads no more pointers than it has frames.
    future_pointers
        Whether conditioning frames to come give their pointers too.

    Examples
    --------
    >>> select_frames(5, stored=[1, 2, 4], conditioning=[0], recent=3)
    Selection(frames=((0, 0), (2, 3), (4, 1)), pointers=((0, 5), (4, 1), (2, 3), (1, 4)))
    """
    sign = -1 if reverse else 1
    chosen = select_conditioning(frame, conditioning, max_conditioning)
    others = set(stored) | (set(conditioning) - set(chosen))
    slots = fill(frame, others, recent, stride, reverse) if fill_gaps else recent_frames(frame, recent, stride, reverse)
    tracked = [(t, slot) for slot, t in enumerate(slots, start=1) if t in others]
    reach = pointers if clip_length is None else min(pointers, clip_length)
    past = [t for t in chosen if future_pointers or sign * (frame - t) >= 0]
    behind = [(frame - sign * n, n) for n in range(1, reach) if frame - sign * n in others]
    if pointers == 0:
        past = []
    return Selection(
        tuple((t, 0) for t in chosen) + tuple(reversed(tracked)),
        tuple((t, sign * (frame - t)) for t in past) + tuple(behind),
    )


def still_read(
    newest: int,
    stored: Collection[int],
    conditioning: Collection[int],
    *,
    recent: int,
    stride: int,
    max_conditioning: int | None,
    fill_gaps: bool,
) -> set[int]:
    """The frames that a forward stream may still read, from the frame `newest` on, which may be read once more.

    >>> sorted(still_read(20, range(1, 21), [0], recent=3, stride=5, max_conditioning=None, fill_gaps=False))
    [0, 10, 15, 19, 20]
    """
    kept = set(conditioning)
    if max_conditioning is not None:
        kept = set(sorted(conditioning)[-max_conditioning:])
    if not recent:
        return kept
    others = (set(stored) | set(conditioning)) - kept
    if fill_gaps:
        window = [newest, newest - 1, *fill(newest, others, recent, stride, False)]
    else:
        window = [newest, newest - 1, *recent_frames(newest, recent, stride, False)]
    oldest = min(window)
    return kept | {t for t in others if t in window or (t >= oldest and t % stride == 0)}
