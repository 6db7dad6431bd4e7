"""RotaryAttention: multi-head attention that takes the rotations of its queries and keys as arguments."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from axial_rope.rotation import Rotation, rotate

__all__ = ["RotaryAttention", "is_plain_linear"]


class RotaryAttention(nn.Module):
    """Self- or cross-attention with rotary queries and keys, each with positions of its own.

    The norms of queries and keys, if any, come before the rotation, as in timm and EVA-02. Nothing about positions is kept:
    the same module takes any grid, and another one in the next call.

    Parameters
    ----------
    dim
        Channels of the queries' input and of the output.
    heads
        Query heads.
    context_dim
        Channels of the input of keys and values; `dim` by default.
    kv_heads
        Heads of keys and values, each shared by ``heads / kv_heads`` query heads (grouped-query attention, arXiv
        2305.13245); `heads` by default.
    head_dim
        Channels of a head; ``dim / heads`` by default.
    bias
        Whether the four projections have a bias.
    qk_norm
        Whether queries and keys are layer-normalised within each head.
    dropout
        Probability of dropping an attention weight in training.

    Raises
    ------
    ValueError
        If `dim` isn't divisible by `heads`, or `heads` by `kv_heads`.

    Examples
    --------
    >>> import torch
    >>> from axial_rope import Axial, RotaryAttention, RotaryEmbedding, grid_positions
    >>> attend, rope = RotaryAttention(dim=96, heads=3), RotaryEmbedding(Axial(head_dim=32))
    >>> attend(torch.randn(2, 1 + 35, 96), rotation=rope(grid_positions(5, 7)), prefix_tokens=1).shape
    torch.Size([2, 36, 96])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        context_dim: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        qk_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout must be between 0 and 1: got {dropout}")
        if heads < 1 or (kv_heads is not None and kv_heads < 1):
            raise ValueError(f"heads and kv_heads must be at least 1: got heads={heads}, kv_heads={kv_heads}")
        if head_dim is None and dim % heads:
            raise ValueError(f"dim must be divisible by heads={heads}, or head_dim be given: got dim={dim}")
        kv_heads = heads if kv_heads is None else kv_heads
        if heads % kv_heads:
            raise ValueError(f"heads must be divisible by kv_heads={kv_heads}: got heads={heads}")
        self.heads, self.kv_heads = heads, kv_heads
        self.head_dim = dim // heads if head_dim is None else head_dim
        context_dim = dim if context_dim is None else context_dim
        self.q_proj = nn.Linear(dim, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(context_dim, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(context_dim, kv_heads * self.head_dim, bias=bias)
        self.q_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.out_proj = nn.Linear(heads * self.head_dim, dim, bias=bias)
        self.dropout = dropout

    def forward(
        self,
        x: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        rotation: Rotation | None = None,
        key_rotation: Rotation | None = None,
        prefix_tokens: int = 0,
        key_prefix_tokens: int = 0,
        key_suffix_tokens: int = 0,
        mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Attend from `x` to `key` and `value`, or to itself.

        Parameters
        ----------
        x
            (B, N, dim).
        key, value
            (B, M, context_dim). Without `key` it is self-attention; without `value`, `key` serves for both.
        rotation, key_rotation
            Of the queries and of the keys; None leaves them as they are. In self-attention `rotation` is that of the keys
            too, and `key_rotation` must not be given.
        prefix_tokens
            Unrotated tokens at the start of `x` (class and register tokens).
        key_prefix_tokens, key_suffix_tokens
            Unrotated tokens at the start and the end of `key`, in cross-attention.
        mask
            (N, M), or with heads or samples and heads in front, broadcastable to (B, heads, N, M): boolean, True where a
            query may look, or added to the scores.
        is_causal
            Let query n look at keys 0 .. n alone.

        Returns
        -------
        Tensor
            (B, N, dim).

        Raises
        ------
        ValueError
            If inputs, rotations, prefixes and mask don't agree, or `key_rotation` is given in self-attention.
        TypeError
            If the mask is neither boolean nor floating.
        """
        if key is None:
            if value is not None or key_rotation is not None or key_prefix_tokens or key_suffix_tokens:
                raise ValueError(
                    "key must be given with value, key_rotation, key_prefix_tokens or key_suffix_tokens: got None"
                )
            key, key_rotation, key_prefix_tokens = x, rotation, prefix_tokens
        value = key if value is None else value
        self._check(x, key, value, mask, is_causal)
        q = self.q_norm(rearrange(self.q_proj(x), "b n (h d) -> b h n d", h=self.heads))
        k = self.k_norm(rearrange(self.k_proj(key), "b m (h d) -> b h m d", h=self.kv_heads))
        v = rearrange(self.v_proj(value), "b m (h d) -> b h m d", h=self.kv_heads)
        if rotation is not None:
            q = rotate(q, rotation, prefix_tokens=prefix_tokens)
        if key_rotation is not None:
            k = rotate(k, key_rotation, prefix_tokens=key_prefix_tokens, suffix_tokens=key_suffix_tokens)
        attended = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=is_causal,
            enable_gqa=self.kv_heads != self.heads,
        )
        out: Tensor = self.out_proj(rearrange(attended, "b h n d -> b n (h d)"))
        return out

    def _check(self, x: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> None:
        for name, given, layer in (("x", x, self.q_proj), ("key", key, self.k_proj), ("value", value, self.v_proj)):
            if given.dim() != 3 or given.shape[2] != layer.in_features:
                raise ValueError(f"{name} must have shape (batch, tokens, {layer.in_features}): got {tuple(given.shape)}")
        if key.shape[:2] != value.shape[:2] or key.shape[0] != x.shape[0]:
            raise ValueError(
                f"key and value must have the batch {x.shape[0]} of x and as many tokens: got {tuple(key.shape)} and "
                f"{tuple(value.shape)}"
            )
        if mask is None:
            return
        if is_causal:
            raise ValueError("mask must not be given with is_causal=True: leave one of them away")
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise TypeError(f"mask must be boolean or floating: got {mask.dtype}")
        full = (x.shape[0], self.heads, x.shape[1], key.shape[1])
        fits = 2 <= mask.dim() <= 4 and all(m in (1, n) for m, n in zip(mask.shape[::-1], full[::-1], strict=False))
        if not fits:
            raise ValueError(f"mask must be broadcastable to (batch, heads, tokens, keys) = {full}: got {tuple(mask.shape)}")


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether `layer` is a linear layer and nothing more: its weights say all, and nobody else sees or changes its output.

    Adapters and quantized layers are of another class; hooks and what PyTorch calls around forward() are known by these
    attributes alone.
    """
    everywhere = nn.modules.module
    hooks = (
        layer._forward_pre_hooks,
        layer._forward_hooks,
        layer._backward_pre_hooks,
        layer._backward_hooks,
        everywhere._global_forward_pre_hooks,
        everywhere._global_forward_hooks,
        everywhere._global_backward_pre_hooks,
        everywhere._global_backward_hooks,
    )
    return type(layer) is nn.Linear and "forward" not in layer.__dict__ and not any(hooks)
