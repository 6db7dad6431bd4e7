"""One layer of memory attention: self-attention over a frame, cross-attention to stored tokens, a perceptron.

Rotations come as arguments. What the tokens are, where and when, is known to `axial_rope.memory.attention` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from axial_rope.attention import RotaryAttention, is_plain_linear
from axial_rope.rotation import Rotation, rotate

__all__ = ["MemoryAttentionLayer", "MemoryCrossAttention"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}

# (keys, values) -> (keys, values, bias), after the rotation; see MemoryCrossAttention.
Pooling = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]


class MemoryCrossAttention(RotaryAttention):
    """`RotaryAttention` from a frame to a memory, with a bias for each key and, if asked, keys pooled after their rotation.

    Examples
    --------
    >>> attend = MemoryCrossAttention(dim=32, heads=2, context_dim=12)
    >>> attend(torch.randn(1, 6, 32), torch.randn(1, 20, 12), bias=torch.zeros(1, 20)).shape
    torch.Size([1, 6, 32])
    """

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        rotation: Rotation | None = None,
        key_rotation: Rotation | None = None,
        key_suffix_tokens: int = 0,
        bias: Tensor | None = None,
        pooling: Pooling | None = None,
    ) -> Tensor:
        """Attend from `x` to the memory.

        Parameters
        ----------
        x
            (B, N, dim).
        key, value
            (B, M, context_dim).
        rotation, key_rotation
            Of all queries, and of the first ``M - key_suffix_tokens`` keys.
        key_suffix_tokens
            Unrotated keys at the end.
        bias
            (B, M) or (1, M), added to the scores of each key for all queries and heads; -inf hides it.
        pooling
            A function of rotated keys and values, (B, heads, M - key_suffix_tokens, head_dim) each, that returns fewer of
            both and a bias for the remaining keys; see `axial_rope.conversion.sam2`.

        Returns
        -------
        Tensor
            (B, N, dim).
        """
        value = key if value is None else value
        q = rearrange(self.q_proj(x), "b n (h d) -> b h n d", h=self.heads)
        k = rearrange(self.k_proj(key), "b m (h d) -> b h m d", h=self.kv_heads)
        q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q = rotate(q, rotation)
        if key_rotation is not None and k.shape[2] > key_suffix_tokens:
            k = rotate(k, key_rotation, suffix_tokens=key_suffix_tokens)
        if bias is not None:
            bias = bias[:, None, None].to(q.dtype)  # (B, 1, 1, M)
        if pooling is None and self._averages_first(q, value):
            attended = self._average_then_project(q, k, value, bias)
        else:
            v = rearrange(self.v_proj(value), "b m (h d) -> b h m d", h=self.kv_heads)
            if pooling is not None:
                k, v, bias = pool_prefix(k, v, bias, key_suffix_tokens, pooling)
            attended = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=bias,
                dropout_p=self.dropout if self.training else 0.0,
                enable_gqa=self.kv_heads != self.heads,
            )
        out: Tensor = self.out_proj(rearrange(attended, "b h n d -> b n (h d)"))
        return out

    def _averages_first(self, q: Tensor, value: Tensor) -> bool:
        """Whether to average the memory and project the average, rather than the other way round: the same, in fewer steps.

        Weights sum to 1, so ``weights @ (value W + b) = (weights @ value) W + b``. SAM 2's memory has a quarter of the
        channels of its one head. On the CPU, without gradients, that saves a quarter of the time; elsewhere PyTorch's fused
        attention is kept, which has no such narrow values.
        """
        if torch.compiler.is_compiling() or not is_plain_linear(self.v_proj):
            return False
        plain = q.device.type == "cpu" and q.dtype == value.dtype == torch.float32 and not torch.is_grad_enabled()
        fits = self.heads == self.kv_heads and value.shape[-1] < self.head_dim and value.shape[1] > 0
        return plain and fits and not (self.training and self.dropout)

    def _average_then_project(self, q: Tensor, k: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """The attention of `_averages_first`, for as many queries at a time as leave their scores in the cache."""
        averages = []
        for rows in (q * self.head_dim**-0.5).split(128, dim=2):
            scores = rows @ k.mT  # (B, heads, rows, M)
            weights = (scores if bias is None else scores + bias).softmax(dim=-1)
            averages.append(weights @ value[:, None])
        average = torch.cat(averages, dim=2)  # (B, heads, N, context_dim)
        weight = rearrange(self.v_proj.weight, "(h d) c -> h c d", h=self.heads)
        projected = average @ weight
        return (
            projected
            if self.v_proj.bias is None
            else projected + rearrange(self.v_proj.bias, "(h d) -> h 1 d", h=self.heads)
        )


def pool_prefix(
    k: Tensor, v: Tensor, bias: Tensor | None, suffix: int, pooling: Pooling
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values with all but the last `suffix` of them pooled."""
    if bias is not None:
        raise ValueError("pooling must be used without a mask and without counts: got a bias for each key")
    end = k.shape[2] - suffix
    pooled_k, pooled_v, pooled_bias = pooling(k[:, :, :end], v[:, :, :end])
    if pooled_bias is not None:
        bias = F.pad(pooled_bias.to(k.dtype), (0, suffix))
    return torch.cat([pooled_k, k[:, :, end:]], dim=2), torch.cat([pooled_v, v[:, :, end:]], dim=2), bias


class MemoryAttentionLayer(nn.Module):
    """Self-attention over a frame, cross-attention to a memory, and a two-layer perceptron; each after a norm, residual.

    Parameters
    ----------
    dim, memory_dim
        Channels of the frame and of the memory.
    heads
        Attention heads of both attentions.
    head_dim
        Channels of a head; ``dim / heads`` by default.
    mlp_dim
        Hidden channels of the perceptron.
    activation
        "relu" (SAM 2) or "gelu".
    dropout
        On the three residuals, inside the perceptron and on the attention weights, as in SAM 2.
    sine
        Where the additive position goes in the attentions: any of "self" (queries and keys of the self-attention),
        "queries" and "keys" (of the cross-attention).
    """

    def __init__(
        self,
        dim: int,
        memory_dim: int,
        heads: int = 1,
        *,
        head_dim: int | None = None,
        mlp_dim: int = 2048,
        activation: str = "relu",
        dropout: float = 0.1,
        sine: Sequence[str] = (),
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}: got {activation!r}")
        self.self_attention = RotaryAttention(dim, heads, head_dim=head_dim, dropout=dropout)
        self.cross_attention = MemoryCrossAttention(dim, heads, context_dim=memory_dim, head_dim=head_dim, dropout=dropout)
        self.linear1, self.linear2 = nn.Linear(dim, mlp_dim), nn.Linear(mlp_dim, dim)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.activation = activation
        self.sine = tuple(sine)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        *,
        rotation: Rotation | None = None,
        key_rotation: Rotation | None = None,
        position: Tensor | None = None,
        key_position: Tensor | None = None,
        pointer_tokens: int = 0,
        bias: Tensor | None = None,
        pooling: Pooling | None = None,
    ) -> Tensor:
        """One layer.

        Parameters
        ----------
        x
            (B, N, dim), the frame.
        memory
            (B, M, memory_dim): tokens of stored frames, then pointers.
        rotation
            Of the frame's tokens.
        key_rotation
            Of the ``M - pointer_tokens`` tokens of stored frames.
        position
            (N, dim) or (B, N, dim), used where `sine` says.
        key_position
            (M, memory_dim) or (B, M, memory_dim), added to the keys of the memory.
        pointer_tokens
            Tokens at the end of the memory that aren't rotated.
        bias, pooling
            See `MemoryCrossAttention`.

        Returns
        -------
        Tensor
            (B, N, dim).
        """
        y = self.norm1(x)
        if position is not None and "self" in self.sine:
            y = self.self_attention(y + position, y + position, y, rotation=rotation, key_rotation=rotation)
        else:
            y = self.self_attention(y, rotation=rotation)
        x = x + self.dropout(y)
        y = self.norm2(x)
        y = self.cross_attention(
            y + position if position is not None and "queries" in self.sine else y,
            memory if key_position is None else memory + key_position,
            memory,
            rotation=rotation,
            key_rotation=key_rotation,
            key_suffix_tokens=pointer_tokens,
            bias=bias,
            pooling=pooling,
        )
        x = x + self.dropout(y)
        y = self.dropout(ACTIVATIONS[self.activation](self.linear1(self.norm3(x))))
        out: Tensor = x + self.dropout(self.linear2(y))
        return out
