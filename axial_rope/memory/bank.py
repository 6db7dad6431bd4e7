"""MemoryBank: what is kept of the frames of a video, for each object, and handed out to the next frame.

Plain Python and tensors: it knows no model, no length of the video and no decoder. What a frame looks back at is decided by
`select_frames`; what no later frame can ask for is let go, so an endless stream runs in constant memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from axial_rope.memory.checks import check_objects, check_settings, check_state, check_tokens, scores_of
from axial_rope.memory.gather import Record, Sample, gather
from axial_rope.memory.selection import Selection, select_frames, still_read
from axial_rope.memory.tokens import Grid, Memory

__all__ = ["MemoryBank"]

SETTINGS = (
    "recent",
    "stride",
    "max_conditioning",
    "pointers",
    "fill_gaps",
    "min_score",
    "evict",
    "max_age",
    "conditioning_age",
)


class MemoryBank:
    """Memories of the objects of one video, or of the samples of a batch of clips.

    Tokens are stored as they are written, neither projected nor rotated. Gradients flow through them: write
    ``tokens.detach()`` where they shouldn't.

    Parameters
    ----------
    recent, stride, max_conditioning, pointers, fill_gaps
        See `select_frames`.
    min_score
        Tracked frames with a lower score aren't stored (SAM 3 asks for 0.01 of object score times IoU). Conditioning frames
        always are.
    evict
        "window" lets go of what no later frame of a forward stream reads; "never" keeps all, for reading any frame, in
        both directions.
    max_age
        Ages beyond it count as it: no key is then turned further in time than in training.
    conditioning_age
        The age of conditioning frames, whatever it really is; None leaves it.
    device, dtype
        Where and how tokens are stored; by default as they come. Read, they are as they came. On the CPU of a CUDA machine
        they lie in pinned memory, and `prefetch` copies them back beside other work.

    Raises
    ------
    ValueError
        If a number is out of range or `evict` is unknown.

    Examples
    --------
    >>> bank = MemoryBank(recent=2)
    >>> for frame in range(5):
    ...     bank.write(torch.full((1, 6, 4), float(frame)), grid=(2, 3), conditioning=frame == 0)
    >>> memory = bank.read()
    >>> memory.tokens[0, ::6, 0].tolist(), memory.ages[::6].tolist(), memory.slots[::6].tolist()
    ([0.0, 3.0, 4.0], [5.0, 2.0, 1.0], [0, 2, 1])
    """

    def __init__(
        self,
        recent: int = 6,
        *,
        stride: int = 1,
        max_conditioning: int | None = None,
        pointers: int = 16,
        fill_gaps: bool = False,
        min_score: float | None = None,
        evict: str = "window",
        max_age: float | None = None,
        conditioning_age: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.recent, self.stride, self.max_conditioning, self.pointers = recent, stride, max_conditioning, pointers
        self.fill_gaps, self.min_score, self.evict = fill_gaps, min_score, evict
        self.max_age, self.conditioning_age = max_age, conditioning_age
        self.device, self.dtype = None if device is None else torch.device(device), dtype
        check_settings(self.settings)
        self.reset()

    @property
    def settings(self) -> dict[str, Any]:
        """What decides on the frames that are kept and read."""
        return {name: getattr(self, name) for name in SETTINGS}

    def reset(self) -> None:
        """Forget everything, objects too."""
        self._records: dict[Hashable, dict[int, Record]] = {}
        self._newest: int | None = None
        self._like: Tensor | None = None  # no tokens, (0, C), of the dtype and device in which they came
        self._timed = False
        self._stream: torch.cuda.Stream | None = None

    @property
    def objects(self) -> tuple[Hashable, ...]:
        """Known objects, in the order in which they came."""
        return tuple(self._records)

    @property
    def newest(self) -> int | None:
        """The latest frame that was written, whether it was kept or not; None before the first."""
        return self._newest

    def frames(self, object: Hashable) -> tuple[int, ...]:
        """Frames whose tokens are kept of an object."""
        return tuple(sorted(frame for frame, record in self._track(object).items() if record.tokens is not None))

    def __len__(self) -> int:
        """Number of frames of which tokens are kept, of any object."""
        return len({frame for object in self._records for frame in self.frames(object)})

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        records = [record for track in self._records.values() for record in track.values()]
        return sum(t.nbytes for record in records for t in (record.tokens, record.pointer) if t is not None)

    def add(self, *objects: Hashable) -> None:
        """Make objects known that have no memory yet; writing does so too.

        Raises
        ------
        ValueError
            If one of them is known.
        """
        for object in objects:
            if object in self._records:
                raise ValueError(f"object must be new: got {object!r}, which the bank has among {len(self._records)}")
        self._records.update({object: {} for object in objects})

    def remove(self, *objects: Hashable) -> None:
        """Forget objects.

        Raises
        ------
        ValueError
            If one of them is unknown.
        """
        for object in objects:
            self._track(object)
        for object in objects:
            del self._records[object]

    def _track(self, object: Hashable) -> dict[int, Record]:
        if object not in self._records:
            raise ValueError(f"object must be one of the bank's {list(self._records)}: got {object!r}")
        return self._records[object]

    def write(
        self,
        tokens: Tensor,
        *,
        grid: Grid,
        frame: int | None = None,
        time: float | None = None,
        objects: Sequence[Hashable] | None = None,
        pointers: Tensor | None = None,
        conditioning: bool = False,
        score: float | Sequence[float] | Tensor | None = None,
        count: float = 1.0,
    ) -> None:
        """Store a frame.

        Parameters
        ----------
        tokens
            (B, h * w, C): B objects or samples.
        grid
            (h, w) of the stored tokens, which may be coarser than the frames'.
        frame
            Number of the frame; by default the one after the newest.
        time
            When it was, in seconds, say; by default its number. Given once, it must be given always.
        objects
            Names of the B objects, of which new ones are added; by default all that the bank knows, or 0 .. B - 1 at first.
        pointers
            (B, D), one pointer for each object.
        conditioning
            Whether the frame's mask came from the user; such frames are kept, and read whatever their age.
        score
            One number, or one for each object; see `min_score`.
        count
            How many tokens each stored token stands for, from `pool_frame`.

        Raises
        ------
        ValueError
            If tokens, grid, objects, pointers and scores don't fit together, or time is given in some calls only, or
            the tokens have other channels than those before.
        TypeError
            If the tokens have another dtype than those before, or `objects` are a tensor.
        """
        check_tokens(tokens, grid, count, pointers, self._like, self._pointer())
        objects = check_objects(objects, tokens.shape[0], self.objects)
        scores = scores_of(score, len(objects))
        if self._newest is not None and self._timed != (time is not None):
            raise ValueError(f"time must be given for all frames or for none: got {time}")
        self._timed = time is not None
        frame = (0 if self._newest is None else self._newest + 1) if frame is None else index(frame)
        self._newest = frame if self._newest is None else max(frame, self._newest)
        self._like = tokens.new_empty(0, tokens.shape[2])
        rows = [None] * len(objects) if pointers is None else pointers.unbind(0)
        for object, row, pointer, value in zip(objects, tokens.unbind(0), rows, scores, strict=True):
            track = self._records.setdefault(object, {})
            if not conditioning and self.min_score is not None and not value >= self.min_score:
                track.pop(frame, None)  # of a frame that is written again
                continue
            track[frame] = Record(
                self._store(row),
                None if pointer is None else pointer.clone(),
                (grid[0], grid[1]),
                count,
                float(frame) if time is None else float(time),
                conditioning,
            )
        if self.evict == "window":
            for track in self._records.values():
                self._evict(track)

    def _pointer(self) -> Tensor | None:
        """One of the stored pointers."""
        records = (record for track in self._records.values() for record in track.values())
        return next((record.pointer for record in records if record.pointer is not None), None)

    def _store(self, tokens: Tensor) -> Tensor:
        dtype = tokens.dtype if self.dtype is None else self.dtype
        if self.device is not None and self.device.type == "cpu" and tokens.device.type == "cuda":
            kept = torch.empty(tokens.shape, dtype=dtype, device="cpu", pin_memory=True)
            return kept.copy_(tokens.detach(), non_blocking=True)
        kept = tokens.to(self.device, dtype) if self.device is not None else tokens.to(dtype)
        return kept.clone() if kept is tokens else kept

    def _evict(self, track: dict[int, Record]) -> None:
        """Let go of what no frame from the newest on can ask for."""
        newest = self._newest or 0
        read = still_read(
            newest,
            [t for t, record in track.items() if not record.conditioning],
            [t for t, record in track.items() if record.conditioning],
            recent=self.recent,
            stride=self.stride,
            max_conditioning=self.max_conditioning,
            fill_gaps=self.fill_gaps,
        )
        for t in set(track) - read:
            track[t].tokens = None
            if track[t].pointer is None or t <= newest - self.pointers:
                del track[t]

    def select(
        self,
        object: Hashable,
        frame: int,
        *,
        reverse: bool = False,
        clip_length: int | None = None,
        future_pointers: bool = False,
    ) -> Selection:
        """What `frame` looks back at for one object."""
        track = self._track(object)
        conditioning = [t for t, record in track.items() if record.conditioning]
        return select_frames(
            frame,
            [t for t, record in track.items() if not record.conditioning],
            conditioning,
            recent=self.recent,
            stride=self.stride,
            max_conditioning=self.max_conditioning,
            pointers=self.pointers,
            reverse=reverse,
            fill_gaps=self.fill_gaps,
            clip_length=clip_length,
            future_pointers=future_pointers,
        )

    def read(
        self,
        frame: int | None = None,
        *,
        time: float | None = None,
        objects: Sequence[Hashable] | None = None,
        reverse: bool = False,
        clip_length: int | None = None,
        future_pointers: bool = False,
    ) -> Memory | None:
        """What a frame looks back at.

        Parameters
        ----------
        frame
            Number of the frame that reads; by default the one after the newest.
        time
            When it is; must be given where the frames' times were.
        objects
            Objects in the order of the samples; by default all.
        reverse
            Whether the video is tracked backwards; only where nothing is let go.
        clip_length
            Frames of the whole clip, where SAM 2's scaling of pointer ages by it is wanted.
        future_pointers
            Whether conditioning frames to come give their pointers too.

        Returns
        -------
        Memory or None
            None if there is nothing. Objects with less memory than others are padded, and the masks say so.

        Raises
        ------
        ValueError
            If an object is unknown, or the frame lies before the newest, or further ahead than the window reaches, or in the
            wrong direction.
        """
        objects = self.objects if objects is None else tuple(objects)
        for object in objects:
            self._track(object)
        if self._newest is None or self._like is None or not objects:
            return None
        frame = self._newest + 1 if frame is None else frame
        self._check_read(frame, time, reverse)
        now = float(frame) if time is None else float(time)
        self._await_fetched()
        options: dict[str, Any] = {"reverse": reverse, "clip_length": clip_length, "future_pointers": future_pointers}
        chosen = [self.select(object, frame, **options) for object in objects]
        samples = [self._sample(o, selection, now, reverse) for o, selection in zip(objects, chosen, strict=True)]
        if not any(sample.records or sample.pointers for sample in samples):
            return None
        reach = self.pointers if clip_length is None else min(self.pointers, clip_length)
        return gather(samples, self._like, (self.pointers - 1) / max(reach - 1, 1))

    def _check_read(self, frame: int, time: float | None, reverse: bool) -> None:
        newest = self._newest or 0
        if self._timed != (time is not None):
            raise ValueError(
                f"time must be given to read {'as it was' if self._timed else 'only if it was'} to write: got {time}"
            )
        if self.evict == "never":
            return
        if reverse:
            raise ValueError('reverse must be used with evict="never": got evict="window", which forgets what lies behind')
        reach = max(self.recent * self.stride, 1)
        if frame < newest or (frame > newest + reach and not self.fill_gaps):
            raise ValueError(
                f"frame must be from the newest = {newest} to {newest + reach}, as far as the window reaches: got {frame}"
            )

    def _sample(self, object: Hashable, selection: Selection, now: float, reverse: bool) -> Sample:
        track, sign = self._track(object), -1.0 if reverse else 1.0
        frames = [(t, slot) for t, slot in selection.frames if track[t].tokens is not None]
        ages = []
        for t, slot in frames:
            age = sign * (now - track[t].time)
            if slot == 0 and self.conditioning_age is not None:
                age = self.conditioning_age
            ages.append(age if self.max_age is None else max(-self.max_age, min(age, self.max_age)))
        pointers = [(track[t].pointer, age) for t, age in selection.pointers if track[t].pointer is not None]
        return Sample(
            [track[t] for t, _ in frames],
            ages,
            [slot for _, slot in frames],
            [pointer for pointer, _ in pointers if pointer is not None],
            [float(age) for _, age in pointers],
        )

    def prefetch(self, frame: int | None = None, *, objects: Sequence[Hashable] | None = None) -> None:
        """Start to copy back to a CUDA device what `frame` will read, on a stream of its own, beside the work on the frame.

        Call it after `write`, and `read` later, once the backbone is under way. Does nothing where tokens aren't offloaded.
        """
        like = self._like
        if like is None or like.device.type != "cuda" or self.device is None or self.device.type != "cpu":
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(like.device)  # type: ignore[no-untyped-call]
        # What was stored must have arrived before it is copied back.
        self._stream.wait_stream(torch.cuda.current_stream(like.device))
        frame = (self._newest or 0) + 1 if frame is None else frame
        with torch.cuda.stream(self._stream):
            for object in self.objects if objects is None else objects:
                for t, _ in self.select(object, frame).frames:
                    record = self._track(object)[t]
                    if record.tokens is not None:
                        record.fetched = record.tokens.to(like.device, like.dtype, non_blocking=True)

    def _await_fetched(self) -> None:
        if self._stream is not None and self._like is not None:
            torch.cuda.current_stream(self._like.device).wait_stream(self._stream)

    def state_dict(self) -> dict[str, Any]:
        """All that is stored, as plain data and tensors that ``torch.save`` writes and ``weights_only=True`` reads."""
        return {
            "settings": self.settings,
            "newest": self._newest,
            "timed": self._timed,
            "like": self._like,
            "objects": [
                (
                    object,
                    [(frame, record.as_dict()) for frame, record in track.items()],
                )
                for object, track in self._records.items()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called; `device` and `dtype` may differ, and hold for what is stored from now on.

        Raises
        ------
        ValueError
            If this bank has other settings.
        """
        check_state(self.settings, state["settings"])
        self.reset()
        self._newest, self._timed, self._like = state["newest"], state["timed"], state["like"]
        for object, track in state["objects"]:
            self._records[object] = {frame: Record(**record) for frame, record in track}
