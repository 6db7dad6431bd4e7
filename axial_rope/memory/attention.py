"""Memory attention for video: a frame attends to itself, then to stored frames, each with positions of its own.

The block of SAM 2 (arXiv 2408.00714), at any grid. Nothing about a frame, a grid or a time is kept in the modules: where the
tokens are comes with every call, from the caller's grid and from a `Memory`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from axial_rope.embedding import RotaryEmbedding
from axial_rope.frequencies import Axial, Family, Mixed
from axial_rope.memory.checks import check_grid, check_memory
from axial_rope.memory.layer import MemoryAttentionLayer, Pooling
from axial_rope.memory.tokens import Grid, Memory, sine_ages, sine_positions
from axial_rope.positions import grid_positions
from axial_rope.rotation import Rotation

__all__ = ["MemoryAttention"]

SINE_PLACES = ("input", "self", "queries", "keys")


def default_family(head_dim: int, time: bool, base: float = 100.0) -> Axial:
    """Equal shares of the head for rows and columns, and a quarter of it for time if that is an axis."""
    pairs = head_dim // 2
    if not time:
        return Axial(head_dim, "yx", base)
    share = 3 * pairs // 8
    if not share:
        raise ValueError(f"head_dim must be at least 6 for time, rows and columns: got {head_dim}; or give a family")
    return Axial(head_dim, "tyx", base, (pairs - 2 * share, share, share))


class MemoryAttention(nn.Module):
    """Layers of self-attention over a frame and cross-attention to a memory, between a backbone and a decoder.

    Time is a choice: a third rotary axis, on which a key is turned by its age when it is read (the default); the learned
    table of age embeddings that SAM 2 adds to the keys; both; or none.

    Parameters
    ----------
    dim, memory_dim
        Channels of the frame and of the memory.
    depth
        Layers.
    heads, head_dim, mlp_dim, activation, dropout
        See `MemoryAttentionLayer`.
    family
        Frequencies of the rotation: a family of two axes (y, x) or of three (t, y, x); "axial" for two with base 100,
        "axial+time" for three, a quarter of each head turning with time; None for no rotation.
    age_slots
        Rows of the learned age embedding, 0 for none: the last for conditioning frames, row n - 1 for the n-th recent frame;
        older ones share the oldest's. SAM 2 has 7.
    sine
        Where SAM 2's additive sine embedding goes: any of "input" (times 0.1), "self", "queries" and "keys". SAM 2 has
        "input" and "keys". A `position` or `Memory.key_position` that is given is used in its stead.
    pointer_span
        Ages of pointers are added to their keys as sines of ``age / pointer_span``, projected; None for none. 15 in
        SAM 2.1.

    Raises
    ------
    ValueError
        If a name is unknown, or the family's heads or axes don't fit.

    Examples
    --------
    >>> from axial_rope import MemoryBank
    >>> attend, bank = MemoryAttention(dim=64, memory_dim=16, depth=2), MemoryBank(recent=6)
    >>> for tokens in torch.randn(3, 1, 6 * 10, 64):
    ...     features = attend(tokens, bank.read(), grid=(6, 10))
    ...     bank.write(features[..., :16], grid=(6, 10))
    >>> features.shape, len(bank)
    (torch.Size([1, 60, 64]), 3)
    """

    def __init__(
        self,
        dim: int = 256,
        memory_dim: int = 64,
        depth: int = 4,
        heads: int = 1,
        *,
        head_dim: int | None = None,
        mlp_dim: int = 2048,
        activation: str = "relu",
        dropout: float = 0.1,
        family: Family | str | None = "axial+time",
        age_slots: int = 0,
        sine: Sequence[str] = (),
        pointer_span: float | None = None,
    ) -> None:
        super().__init__()
        for place in sine:
            if place not in SINE_PLACES:
                raise ValueError(f"sine must hold {', '.join(SINE_PLACES)} only: got {place!r}")
        if depth < 1:
            raise ValueError(f"depth must be at least 1: got {depth}")
        if age_slots < 0 or age_slots == 1:
            raise ValueError(f"age_slots must be 0, or at least 2 for conditioning and recent frames: got {age_slots}")
        if pointer_span is not None and pointer_span <= 0:
            raise ValueError(f"pointer_span must be positive: got {pointer_span}")
        self.dim, self.memory_dim, self.sine, self.pointer_span = dim, memory_dim, tuple(sine), pointer_span
        self.layers = nn.ModuleList(
            MemoryAttentionLayer(
                dim,
                memory_dim,
                heads,
                head_dim=head_dim,
                mlp_dim=mlp_dim,
                activation=activation,
                dropout=dropout,
                sine=sine,
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        self.rope = self._embedding(family, dim // heads if head_dim is None else head_dim, heads, depth)
        self.no_memory = nn.Parameter(nn.init.trunc_normal_(torch.empty(dim), std=0.02))
        self.age_embedding = (
            nn.Parameter(nn.init.trunc_normal_(torch.empty(age_slots, memory_dim), std=0.02)) if age_slots else None
        )
        self.pointer_age = None if pointer_span is None else nn.Linear(dim, memory_dim)

    @staticmethod
    def _embedding(family: Family | str | None, head_dim: int, heads: int, depth: int) -> RotaryEmbedding | None:
        if family is None:
            return None
        if isinstance(family, str):
            if family not in ("axial", "axial+time"):
                raise ValueError(f'family must be "axial", "axial+time", a Family or None: got {family!r}')
            family = default_family(head_dim, time=family == "axial+time")
        if family.head_dim != head_dim or family.columns not in (2, 3):
            raise ValueError(
                f"family must have head_dim={head_dim} and 2 or 3 axes: got head_dim={family.head_dim} and "
                f"{family.columns} axes"
            )
        if isinstance(family, Mixed) and (family.heads != heads or family.blocks not in (None, depth)):
            raise ValueError(
                f"family must have heads={heads} and blocks={depth} or none: got heads={family.heads} and "
                f"blocks={family.blocks}"
            )
        return RotaryEmbedding(family)

    @property
    def rotary_time(self) -> bool:
        """Whether time is an axis of the rotation."""
        return self.rope is not None and self.rope.family.columns == 3

    def forward(
        self,
        x: Tensor,
        memory: Memory | None = None,
        *,
        grid: Grid,
        position: Tensor | None = None,
        pooling: Pooling | None = None,
    ) -> Tensor:
        """The frame, with what the memory knows.

        Parameters
        ----------
        x
            (B, h * w, dim).
        memory
            Stored frames and pointers of the B samples. Without any, the frame is returned with a learned embedding added,
            as SAM 2 does; so is a sample for which the masks leave nothing.
        grid
            (h, w).
        position
            (h * w, dim) or (B, h * w, dim): an additive position to use where `sine` says, instead of the sines.
        pooling
            See `MemoryCrossAttention`.

        Returns
        -------
        Tensor
            (B, h * w, dim).

        Raises
        ------
        ValueError
            If `x` isn't a frame of `grid`, or the memory has another batch, other channels, no ages where time is an axis,
            or tokens that aren't whole frames.
        TypeError
            If the memory has another dtype than `x`, outside autocast.
        """
        self._check(x, memory, grid)
        alone = x + self.no_memory
        if memory is None or memory.empty:
            return alone
        places = grid_positions(*grid, device=x.device)
        if position is None and self.sine:
            position = sine_positions(places, grid, self.dim).to(x.dtype)
        out = x + 0.1 * position if position is not None and "input" in self.sine else x
        keys = memory.positions_on(grid)
        rotations, key_rotations = self._rotations(places, keys, memory)
        tokens, key_position, pointer_tokens = self._keys(memory, grid, keys, x.dtype)
        bias, present = key_bias(memory, 1 if memory.pointers is None else memory.pointers.shape[2] // self.memory_dim)
        for layer, rotation, key_rotation in zip(self.layers, rotations, key_rotations, strict=True):
            out = layer(
                out,
                tokens,
                rotation=rotation,
                key_rotation=key_rotation,
                position=position,
                key_position=key_position,
                pointer_tokens=pointer_tokens,
                bias=bias,
                pooling=pooling,
            )
        out = self.norm(out)
        return out if present is None else torch.where(present[:, None, None], out, alone)

    def _check(self, x: Tensor, memory: Memory | None, grid: Grid) -> None:
        check_grid(grid)
        cells = grid[0] * grid[1]
        if x.dim() != 3 or x.shape[1] != cells or x.shape[2] != self.dim:
            raise ValueError(
                f"x must have shape (batch, {grid[0]} * {grid[1]} = {cells}, dim={self.dim}): got {tuple(x.shape)}"
            )
        if memory is None:
            return
        check_memory(memory, x.shape[0], self.memory_dim)
        if memory.tokens.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"memory must have the dtype {x.dtype} of x: got {memory.tokens.dtype}")
        if self.rotary_time and memory.ages is None and memory.tokens.shape[1]:
            raise ValueError("memory must have ages, since time is an axis of the rotation: got none")
        if self.age_embedding is not None and memory.slots is None and memory.tokens.shape[1]:
            raise ValueError("memory must have slots, since there is an age embedding: got none")

    def _rotations(
        self, places: Tensor, keys: Tensor, memory: Memory
    ) -> tuple[list[Rotation | None], list[Rotation | None]]:
        """The rotations of queries and keys in each layer."""
        if self.rope is None:
            return [None] * len(self.layers), [None] * len(self.layers)
        if self.rotary_time:
            # Turned by age at read: absolute frame numbers would lose precision in a long stream.
            ages = memory.ages if memory.ages is not None else keys.new_zeros(keys.shape[:-1])
            time = -ages if memory.placed is None else -ages * memory.placed
            rows, columns = keys.unbind(-1)
            keys = torch.stack(torch.broadcast_tensors(time.to(keys.dtype), rows, columns), dim=-1)  # type: ignore[no-untyped-call]
            places = F.pad(places, (1, 0))
        return (
            list(self.rope.per_block(places, len(self.layers))),
            list(self.rope.per_block(keys, len(self.layers))) if keys.shape[-2] else [None] * len(self.layers),
        )

    def _keys(self, memory: Memory, grid: Grid, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, int]:
        """The memory's tokens with the pointers cut up at their end, what is added to its keys, and the pointers' number."""
        length = memory.tokens.shape[1]
        added = None if memory.key_position is None else memory.key_position[..., :length, :]
        if added is None and "keys" in self.sine:
            own = positions if memory.positions is None else memory.positions
            added = sine_positions(own, memory.grid or grid, self.memory_dim)
        if self.age_embedding is not None and memory.slots is not None:
            recent = len(self.age_embedding) - 1
            rows = torch.where(memory.slots == 0, recent, (memory.slots - 1).clamp(0, recent - 1))
            added = self.age_embedding[rows] if added is None else added + self.age_embedding[rows]
        if memory.pointers is None or memory.pointers.shape[1] == 0:
            return memory.tokens, None if added is None else added.to(dtype), 0
        parts = [(memory.tokens, added), self._pointers(memory)]
        tokens = torch.cat([part for part, _ in parts], dim=1)
        number = tokens.shape[1] - length
        if all(added is None for _, added in parts):
            return tokens, None, number
        columns = [torch.zeros_like(part) if added is None else added.to(dtype).expand_as(part) for part, added in parts]
        return tokens, torch.cat(columns, dim=1), number

    def _pointers(self, memory: Memory) -> tuple[Tensor, Tensor | None]:
        """Tokens of memory_dim channels from pointers, (B, P * D / C, C), and what is added to their keys."""
        pointers, ages, length = memory.pointers, memory.pointer_ages, memory.tokens.shape[1]
        if pointers is None:
            raise ValueError("memory must have pointers: got none")
        parts = pointers.shape[2] // self.memory_dim
        tokens = pointers.reshape(pointers.shape[0], pointers.shape[1] * parts, self.memory_dim)
        if memory.key_position is not None and memory.key_position.shape[-2] > length:
            return tokens, memory.key_position[..., length:, :]
        if self.pointer_age is None or self.pointer_span is None:
            return tokens, None
        if ages is None:
            raise ValueError("memory must have pointer_ages, since there is an embedding of them: got none")
        sines = sine_ages(ages / self.pointer_span, self.dim).to(self.pointer_age.weight.dtype)
        return tokens, self.pointer_age(sines).repeat_interleave(parts, dim=-2)


def key_bias(memory: Memory, parts: int) -> tuple[Tensor | None, Tensor | None]:
    """What is added to the scores of the keys, (B or 1, keys), and which samples have any key, (B,); None for none at all.

    `parts` is the number of tokens that a pointer is cut into.
    """
    masks, logs = (memory.mask, memory.pointer_mask), memory.counts
    if all(mask is None for mask in masks) and logs is None:
        return None, None
    tokens = memory.tokens
    pointers = 0 if memory.pointers is None else memory.pointers.shape[1] * parts
    weight = torch.zeros(tokens.shape[1], device=tokens.device) if logs is None else logs.to(torch.float32).log()
    bias = F.pad(weight, (0, pointers)).view(-1, tokens.shape[1] + pointers)  # (1 or B, keys)
    if all(mask is None for mask in masks):
        return bias, None
    frames = tokens.new_ones(tokens.shape[:2], dtype=torch.bool) if memory.mask is None else memory.mask
    if pointers and memory.pointer_mask is None:
        frames = F.pad(frames, (0, pointers), value=True)
    elif pointers and memory.pointer_mask is not None:
        frames = torch.cat([frames, memory.pointer_mask.repeat_interleave(parts, dim=1)], dim=1)
    present = frames.any(dim=1)
    # A sample without any key looks at all of them, and its output is thrown away: a softmax over nothing is not a number.
    seen = frames | ~present[:, None]
    return torch.where(seen, bias, float("-inf")), present
