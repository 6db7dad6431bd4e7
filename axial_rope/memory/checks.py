"""What memory attention and a bank refuse, before anything is computed, stored or read."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from axial_rope.frequencies.base import check_whole
from axial_rope.memory.tokens import Grid, Memory

__all__ = ["check_grid", "check_memory", "check_objects", "check_settings", "check_state", "check_tokens", "scores_of"]

LEAST = {"recent": 0, "stride": 1, "pointers": 0, "max_conditioning": 2}


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise unless a bank can be made with these settings."""
    for name, least in LEAST.items():
        value = settings[name]
        if value is None and name == "max_conditioning":
            continue
        check_whole(name, value)
        if value < least:
            also = ", one before and one after" if name == "max_conditioning" else ""
            raise ValueError(f"{name} must be at least {least}{also}: got {value}")
    if settings["evict"] not in ("window", "never"):
        raise ValueError(f'evict must be "window" or "never": got {settings["evict"]!r}')
    if settings["max_age"] is not None and settings["max_age"] <= 0:
        raise ValueError(f"max_age must be positive: got {settings['max_age']}")


def check_grid(grid: Any) -> None:
    """Raise unless `grid` is (height, width)."""
    if not isinstance(grid, (tuple, list)) or len(grid) != 2 or any(cells < 1 for cells in grid):
        raise ValueError(f"grid must be (height, width), at least 1 each: got {grid}")


def check_memory(memory: Any, batch: int, channels: int) -> None:
    """Raise unless what stands beside the tokens and pointers of a memory is of their number."""
    if not isinstance(memory, Memory):
        raise TypeError(f"memory must be a Memory or None: got {type(memory).__name__}")
    tokens, pointers = memory.tokens, memory.pointers
    if tokens.dim() != 3 or tokens.shape[0] != batch or tokens.shape[2] != channels:
        raise ValueError(
            f"memory must have tokens of the batch {batch} of x and memory_dim={channels}: got shape {tuple(tokens.shape)}"
        )
    number, ends = tokens.shape[1], 0
    _check_rows("positions", memory.positions, (number, 2), batch)
    for name in ("ages", "slots", "counts"):
        _check_rows(name, getattr(memory, name), (number,), batch)
    _check_mask("placed", memory.placed, (number,))
    _check_mask("mask", memory.mask, (batch, number))
    if pointers is not None:
        if pointers.dim() != 3 or pointers.shape[0] != batch or pointers.shape[2] % channels:
            raise ValueError(
                f"pointers must have the batch {batch} of x and a multiple of memory_dim={channels} channels: "
                f"got shape {tuple(pointers.shape)}"
            )
        if pointers.dtype != tokens.dtype:
            raise TypeError(f"pointers must have the dtype {tokens.dtype} of the tokens: got {pointers.dtype}")
        _check_rows("pointer_ages", memory.pointer_ages, (pointers.shape[1],), batch)
        _check_mask("pointer_mask", memory.pointer_mask, (batch, pointers.shape[1]))
        ends = pointers.shape[1] * (pointers.shape[2] // channels)
    added = memory.key_position
    rows = number + ends if added is not None and added.dim() > 1 and added.shape[-2] != number else number
    _check_rows("key_position", added, (rows, channels), batch)


def _check_rows(name: str, values: Tensor | None, shape: tuple[int, ...], batch: int) -> None:
    if values is not None and tuple(values.shape) not in (shape, (batch, *shape)):
        raise ValueError(f"{name} must have shape {shape} or {(batch, *shape)}: got {tuple(values.shape)}")


def _check_mask(name: str, mask: Tensor | None, shape: tuple[int, ...]) -> None:
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"{name} must be boolean: got {mask.dtype}")
    if mask is not None and tuple(mask.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}: got {tuple(mask.shape)}")


def check_tokens(
    tokens: Tensor, grid: Grid, count: float, pointers: Tensor | None, like: Tensor | None, pointer_like: Tensor | None
) -> None:
    """Raise unless tokens are frames of `grid`, in the dtype and channels of those before, `like`, with a pointer each."""
    check_grid(grid)
    cells = grid[0] * grid[1]
    if tokens.dim() != 3 or tokens.shape[1] != cells:
        raise ValueError(
            f"tokens must have shape (objects, {grid[0]} * {grid[1]} = {cells}, channels): got {tuple(tokens.shape)}"
        )
    if not count >= 1:
        raise ValueError(f"count must be at least 1, the tokens that each stands for: got {count}")
    if like is not None and tokens.dtype != like.dtype:
        raise TypeError(f"tokens must have the dtype {like.dtype} of those before: got {tokens.dtype}")
    if like is not None and tokens.shape[2] != like.shape[1]:
        raise ValueError(f"tokens must have the {like.shape[1]} channels of those before: got {tokens.shape[2]}")
    if pointers is not None and (pointers.dim() != 2 or pointers.shape[0] != tokens.shape[0]):
        raise ValueError(f"pointers must have shape ({tokens.shape[0]}, channels): got {tuple(pointers.shape)}")
    if pointers is not None and pointer_like is not None and pointers.shape[1:] != pointer_like.shape:
        raise ValueError(f"pointers must have the {pointer_like.shape[0]} channels of those before: got {pointers.shape[1]}")


def check_objects(objects: Sequence[Hashable] | None, rows: int, known: Sequence[Hashable]) -> Sequence[Hashable]:
    """The names of the rows that are written: those given, or all that are known, or 0, 1, ... for the first."""
    if objects is None:
        if known and len(known) != rows:
            raise ValueError(f"objects must be named unless all {len(known)} are written, {list(known)}: got {rows} rows")
        return known or range(rows)
    if isinstance(objects, Tensor):
        raise TypeError("objects must be names, such as a list of numbers: got a Tensor, whose entries equal no others")
    if len(objects) != rows or len(set(objects)) != len(objects):
        raise ValueError(f"objects must be {rows} different names, one for each row: got {list(objects)}")
    return objects


def check_state(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise unless a bank has the settings of the one whose state it loads, which kept what those ask for."""
    for name, value in own.items():
        if saved[name] != value:
            raise ValueError(f"{name} must be {saved[name]}, as in the bank that was saved: got {value}")


def scores_of(score: float | Sequence[float] | Tensor | None, number: int) -> list[float]:
    """One score for each of `number` objects; infinite if there is none."""
    if score is None:
        return [float("inf")] * number
    values = torch.as_tensor(score, dtype=torch.float32).detach().cpu()
    if values.dim() == 0:
        return [values.item()] * number
    if values.shape != (number,):
        raise ValueError(f"score must be one number or one for each of {number} objects: got {tuple(values.shape)}")
    return list(values.tolist())
