"""RotaryEmbedding: a family and positions make a rotation."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from axial_rope.frequencies import Extended, Family, Periods
from axial_rope.rotation import Rotation, angles, period_angles

__all__ = ["RotaryEmbedding"]

HALF = (torch.float16, torch.bfloat16)

# Tables that other code keeps in its checkpoints. They follow from the grid, so they are dropped on load, with a message.
LEGACY_TABLE = re.compile(
    r"(^|\.)(freqs_(cis|cos|sin)(_\d+)?|freqs_t_[xy]|rope_t_[xy]|inv_freq|(cos|sin)_cached|rope\.(pos_embed(_cos|_sin)?|bands))$"
)


class RotaryEmbedding(nn.Module):
    """Turns positions into a rotation, by the frequencies of a family.

    The frequencies of a fixed family are a buffer that isn't saved, those of a learned one a parameter named
    `frequencies`. Either way they are float32 and stay so when the module is cast, as ``model.bfloat16()`` does: angles
    from rounded frequencies are wrong. Nothing here has the size of a grid, and calling it changes nothing.

    Parameters
    ----------
    family
        An `Axial`, `Mixed`, `Periods`, ... of `axial_rope.frequencies`.

    Raises
    ------
    TypeError
        If `family` isn't a family.

    Examples
    --------
    >>> from axial_rope import Axial, RotaryEmbedding, grid_positions, rotate
    >>> rope = RotaryEmbedding(Axial(head_dim=64, axes=2, base=100.0))
    >>> rotation = rope(grid_positions(14, 14))
    >>> rotation.cos.shape
    torch.Size([196, 32])
    >>> rotate(torch.randn(2, 6, 197, 64), rotation, prefix_tokens=1).shape
    torch.Size([2, 6, 197, 64])
    """

    frequencies: Tensor
    periods: Tensor | None

    def __init__(self, family: Family) -> None:
        super().__init__()
        if not isinstance(family, Family):
            raise TypeError(f"family must be a family of frequencies such as Axial(head_dim=64): got {family!r}")
        self.family = family
        if family.learned:
            self.frequencies = nn.Parameter(family.frequencies().to(torch.get_default_device()))
        else:
            self.register_buffer("frequencies", None, persistent=False)
        self.register_buffer("periods", None, persistent=False)
        self._fill_tables(torch.get_default_device())

    def forward(self, positions: Tensor) -> Rotation:
        """The rotation of tokens at `positions`.

        Parameters
        ----------
        positions
            (N, A), or (B, N, A) where samples differ: N tokens on the A axes of the family, columns (t, y, x). Integers or
            float32; float64 gives float64 angles.

        Returns
        -------
        Rotation
            With tables of shape (N, P), (H, N, P), (B, 1, N, P) or (B, H, N, P) for P pairs and H heads, and L in front for
            a family with L blocks.

        Raises
        ------
        ValueError
            If `positions` don't have a column for each axis of the family.
        TypeError
            If `positions` are no tensor, or float16, bfloat16, complex or bool.
        """
        columns = self.family.columns
        if not isinstance(positions, Tensor):
            raise TypeError(f"positions must be a tensor: got {type(positions).__name__}")
        if positions.dim() not in (2, 3) or positions.shape[-1] != columns:
            raise ValueError(
                f"positions must have shape (tokens, axes={columns}) or (batch, tokens, axes={columns}): "
                f"got {tuple(positions.shape)}"
            )
        if positions.dtype in HALF or positions.is_complex() or positions.dtype == torch.bool:
            raise TypeError(
                f"positions must be float32, float64 or integers: got {positions.dtype}, which can't tell large positions "
                f"apart"
            )
        if positions.dtype != torch.float64:
            positions = positions.to(torch.float32)
        positions = positions.to(self.frequencies.device)
        turned = angles(positions, self.frequencies) if self.periods is None else period_angles(positions, self.periods)
        scale, family = self.family.scale, self.family
        blocks = getattr(family, "blocks", None)
        rotation = Rotation.from_angles(turned, family.head_dim, family.layout, family.split, blocks)
        if scale != 1.0:
            factor = torch.tensor(scale, dtype=turned.dtype, device=turned.device) if isinstance(scale, tuple) else scale
            return replace(rotation, cos=rotation.cos * factor, sin=rotation.sin * factor)
        return rotation

    def per_block(self, positions: Tensor, blocks: int) -> list[Rotation]:
        """One rotation for each of `blocks` blocks: its own for a family with blocks, else the same for all.

        Raises
        ------
        ValueError
            If the family has tables for another number of blocks.
        """
        rotation: Rotation = self(positions)
        own = getattr(self.family, "blocks", None)
        if own is None:
            return [rotation] * blocks
        if blocks > own:
            raise ValueError(f"family must have frequencies for {blocks} blocks: got blocks={own}")
        return rotation.unbind()[:blocks]

    def extra_repr(self) -> str:
        return repr(self.family)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        """Follow the module to another device, never to a lower precision; see the class's docstring."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype in HALF else moved

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        # Made anew, since `to_empty` leaves a buffer that no checkpoint fills with whatever was in memory.
        self._fill_tables(self.frequencies.device)
        return self

    def _fill_tables(self, device: torch.device) -> None:
        """Make the tables of a fixed family, on that device."""
        if not self.family.learned:
            self.frequencies = self.family.frequencies().to(device)
            periods = self.family.period_table()
            self.periods = None if periods is None else periods.to(device)

    def _load_from_state_dict(
        self, state_dict: MutableMapping[str, Any], prefix: str, *arguments: Any, **options: Any
    ) -> None:
        drop_legacy_tables(state_dict, prefix, self.family)
        if not self.family.learned and self.frequencies.is_meta:
            self._fill_tables(torch.device("cpu"))  # a model made on the meta device and loaded with assign=True
        super()._load_from_state_dict(state_dict, prefix, *arguments, **options)


def drop_legacy_tables(state_dict: MutableMapping[str, Any], prefix: str, family: Family) -> None:
    """Take the tables that other code saves out of a state dict, in place, and say so.

    Raises
    ------
    ValueError
        If the state dict holds DINOv3's ``periods`` and `family` has others: they are weights of that checkpoint.
    """
    while isinstance(family, Extended):
        family = family.original
    dropped = []
    for key in [key for key in state_dict if key.startswith(prefix)]:
        if key.endswith("periods") and isinstance(family, Periods):
            _check_periods(key, state_dict[key], family)
        elif not LEGACY_TABLE.search(key):
            continue
        del state_dict[key]
        dropped.append(key)
    if dropped:
        warnings.warn(f"dropped tables that follow from the grid: {', '.join(dropped)}", stacklevel=2)


def _check_periods(key: str, saved: Tensor, family: Periods) -> None:
    own = family.period_band(family.split[0])
    difference = (saved.float().cpu() / own - 1).abs().max().item() if saved.shape == own.shape else float("inf")
    if difference > 1e-6:
        raise ValueError(
            f"periods must be those of the checkpoint: {key} differs from the family's by {difference:.2g} (relative); "
            f"make the family with Periods(head_dim={family.head_dim}, periods=checkpoint[{key!r}].tolist()), or delete the "
            f"key to go by the formula"
        )
