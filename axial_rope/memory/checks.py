"""What a bank refuses, before anything is stored or read."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from axial_rope.memory.tokens import Grid

__all__ = ["check_grid", "check_objects", "check_settings", "check_state", "check_tokens", "scores_of"]

LEAST = {"recent": 0, "stride": 1, "pointers": 0, "max_conditioning": 2}


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise unless a bank can be made with these settings."""
    for name, least in LEAST.items():
        value = settings[name]
        if value is None and name == "max_conditioning":
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be a whole number: got {value!r}")
        if value < least:
            also = ", one before and one after" if name == "max_conditioning" else ""
            raise ValueError(f"{name} must be at least {least}{also}: got {value}")
    if settings["evict"] not in ("window", "never"):
        raise ValueError(f'evict must be "window" or "never": got {settings["evict"]!r}')
    if settings["max_age"] is not None and settings["max_age"] <= 0:
        raise ValueError(f"max_age must be positive: got {settings['max_age']}")


def check_grid(grid: Any) -> None:
    """Raise unless `grid` is (height, width)."""
    if not isinstance(grid, (tuple, list)) or len(grid) != 2:
        raise ValueError(f"grid must be (height, width): got {grid}")


def check_tokens(tokens: Tensor, grid: Grid | None, pointers: Tensor | None, like: Tensor | None) -> None:
    """Raise unless tokens are frames of `grid`, in the dtype and channels of those before, `like`, with a pointer each."""
    if grid is not None:
        check_grid(grid)
    if tokens.dim() != 3 or (grid is not None and tokens.shape[1] != grid[0] * grid[1]):
        rule = "h * w" if grid is None else f"{grid[0]} * {grid[1]} = {grid[0] * grid[1]}"
        raise ValueError(f"tokens must have shape (objects, {rule}, channels): got {tuple(tokens.shape)}")
    if like is not None and tokens.dtype != like.dtype:
        raise TypeError(f"tokens must have the dtype {like.dtype} of those before: got {tokens.dtype}")
    if like is not None and tokens.shape[2] != like.shape[1]:
        raise ValueError(f"tokens must have the {like.shape[1]} channels of those before: got {tokens.shape[2]}")
    if pointers is not None and (pointers.dim() != 2 or pointers.shape[0] != tokens.shape[0]):
        raise ValueError(f"pointers must have shape ({tokens.shape[0]}, channels): got {tuple(pointers.shape)}")


def check_objects(objects: Sequence[Hashable] | None, rows: int, known: Sequence[Hashable]) -> Sequence[Hashable]:
    """The names of the rows that are written: those given, or all that are known, or 0, 1, ... for the first."""
    if objects is None:
        if known and len(known) != rows:
            raise ValueError(f"objects must be named unless all {len(known)} are written, {list(known)}: got {rows} rows")
        return known or range(rows)
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
