"""From the records of a bank to one `Memory`: frames one after another, objects one above the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from axial_rope.memory.tokens import Grid, Memory, regrid
from axial_rope.positions import grid_positions

__all__ = ["Record", "Sample", "gather"]


@dataclass
class Record:
    """What is kept of one object in one frame; `tokens` go first when only the pointer can still be asked for."""

    tokens: Tensor | None  # (n, C)
    pointer: Tensor | None  # (D,)
    grid: Grid
    count: float
    time: float
    conditioning: bool
    fetched: Tensor | None = None  # tokens on their way back to the device that reads them

    def on(self, like: Tensor) -> Tensor | None:
        """The tokens on the device and in the dtype of `like`; those fetched before are handed over once."""
        fetched, self.fetched = self.fetched, None
        if fetched is not None:
            fetched.record_stream(torch.cuda.current_stream(fetched.device))
            return fetched
        return None if self.tokens is None else self.tokens.to(like.device, like.dtype, non_blocking=True)

    def as_dict(self) -> dict[str, Any]:
        """All but what is on its way, as plain data."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "fetched"}


@dataclass
class Sample:
    """What one object looks back at."""

    records: list[Record]
    ages: list[float]
    slots: list[int]
    pointers: list[Tensor]
    pointer_ages: list[float]

    @property
    def lengths(self) -> list[int]:
        return [0 if record.tokens is None else record.tokens.shape[0] for record in self.records]

    @property
    def layout(self) -> tuple[object, ...]:
        """What objects must share for one table of positions, ages and slots to do for all."""
        grids = [(record.grid, record.count) for record in self.records]
        return (tuple(self.ages), tuple(self.slots), tuple(grids), tuple(self.lengths))


def gather(samples: Sequence[Sample], like: Tensor, pointer_scale: float = 1.0) -> Memory:
    """The memory of several objects, on the device and in the dtype of `like`; shorter ones are padded and masked."""
    device, dtype = like.device, like.dtype
    frames = [[tokens for record in sample.records if (tokens := record.on(like)) is not None] for sample in samples]
    pointers = [[pointer.to(device, dtype) for pointer in sample.pointers] for sample in samples]
    width = next((pointer.shape[0] for rows in pointers for pointer in rows), 0)
    tokens, mask = pad([torch.cat(rows) if rows else like for rows in frames])
    grid = next((record.grid for sample in samples for record in sample.records), None)
    shared = all(sample.layout == samples[0].layout for sample in samples)
    described = [describe(sample, grid, device) for sample in (samples[:1] if shared else samples)]
    positions, ages, slots, counts = (together(list(column)) for column in zip(*described, strict=True))
    pooled = any(record.count != 1 for sample in samples for record in sample.records)
    pointer_rows, pointer_mask = pad([torch.stack(rows) if rows else like.new_zeros(0, width) for rows in pointers])
    aged = samples[:1] if all(sample.pointer_ages == samples[0].pointer_ages for sample in samples) else samples
    pointer_ages = together([torch.tensor(sample.pointer_ages, device=device) * pointer_scale for sample in aged])
    return Memory(
        tokens,
        None if grid is None else positions,
        grid,
        ages,
        slots,
        mask,
        # Padding stands for one token: the mask hides it, and the logarithm of none would be infinite.
        counts=counts.clamp(min=1.0) if pooled else None,
        pointers=pointer_rows if width else None,
        pointer_ages=pointer_ages if width else None,
        pointer_mask=pointer_mask if width else None,
    )


def describe(sample: Sample, grid: Grid | None, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions in cells of `grid`, ages, slots and counts of each token of one object."""

    def spread(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        spread_out = [value for value, n in zip(values, sample.lengths, strict=True) for value in [value] * n]
        return torch.tensor(spread_out, dtype=dtype, device=device)

    places = {
        own: regrid(grid_positions(*own, device=device), own, grid or own)
        for own in {record.grid for record in sample.records}
    }
    spots = [places[record.grid] for record in sample.records]
    return (
        torch.cat(spots) if spots else torch.zeros(0, 2, device=device),
        spread(sample.ages, torch.float32),
        spread(sample.slots, torch.int64),
        spread([record.count for record in sample.records], torch.float32),
    )


def together(rows: list[Tensor]) -> Tensor:
    """A single row for all samples as it is, else one for each, padded with zeros."""
    return rows[0] if len(rows) == 1 else pad_sequence(rows, batch_first=True)


def pad(rows: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Rows (n_i, C) as (B, n, C), and where they are, (B, n); None if they all have the same length."""
    lengths = [row.shape[0] for row in rows]
    if len(set(lengths)) == 1:
        return torch.stack(rows), None
    longest = torch.arange(max(lengths), device=rows[0].device)
    return pad_sequence(rows, batch_first=True), longest < torch.tensor(lengths, device=longest.device)[:, None]
