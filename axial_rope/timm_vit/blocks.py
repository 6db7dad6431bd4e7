"""timm's attention and blocks, with the rotation as an argument."""

from __future__ import annotations

import torch
from timm.layers.attention import Attention
from timm.models.vision_transformer import Block, ResPostBlock
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn import functional as F

from axial_rope.attention import is_plain_linear
from axial_rope.rotation import Rotation, rotate, rotate_packed
from axial_rope.timm_vit.tracing import call_untraced

__all__ = ["ROTARY_BLOCKS", "RotaryBlock", "RotaryResPostBlock", "RotaryTimmAttention"]


class RotaryTimmAttention(Attention):
    """timm's Attention with rotated queries and keys; made by `make_rotary`."""

    prefix_tokens: int

    def forward(  # type: ignore[override]
        self, x: Tensor, rotation: Rotation, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        q, k, v = self._project(x, rotation)  # (B, heads, N, head_dim)
        if self.fused_attn:
            dropout = self.attn_drop.p if self.training else 0.0
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout, is_causal=is_causal)
        else:
            out = self._attend(q, k, v, attn_mask, is_causal)
        out = self.norm(out.transpose(1, 2).flatten(2))  # (B, N, heads * head_dim)
        gate = getattr(self, "gate", None)
        if gate is not None:
            out = out * gate(x).sigmoid()
        result: Tensor = self.proj_drop(self.proj(out))
        return result

    def _project(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        qkv, options = self.qkv(x), {"prefix_tokens": self.prefix_tokens}
        if isinstance(self.q_norm, nn.Identity) and isinstance(self.k_norm, nn.Identity):
            overwrite = is_plain_linear(self.qkv) and not isinstance(x, Proxy)
            packed: tuple[Tensor, Tensor, Tensor] = call_untraced(
                rotate_packed, (qkv, rotation, self.num_heads), {"overwrite": overwrite, **options}
            )
            return packed
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        return (
            call_untraced(rotate, (self.q_norm(q), rotation), options),
            call_untraced(rotate, (self.k_norm(k), rotation), options),
            v,
        )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """Attention with its weights in the open, for timm's ``set_fused_attn(False)``."""
        scores = (q * self.scale) @ k.transpose(-2, -1)  # (B, heads, N, N)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask
        out: Tensor = self.attn_drop(scores.softmax(dim=-1)) @ v
        return out


class RotaryBlock(Block):
    """timm's pre-norm Block, with the rotation as an argument; made by `make_rotary`."""

    def forward(  # type: ignore[override]
        self, x: Tensor, rotation: Rotation, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), rotation, attn_mask, is_causal)))
        x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return x


class RotaryResPostBlock(ResPostBlock):
    """timm's post-norm ResPostBlock, with the rotation as an argument; made by `make_rotary`."""

    def forward(  # type: ignore[override]
        self, x: Tensor, rotation: Rotation, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        x = x + self.drop_path1(self.norm1(self.attn(x, rotation, attn_mask, is_causal)))
        x = x + self.drop_path2(self.norm2(self.mlp(x)))
        return x


ROTARY_BLOCKS: dict[type[nn.Module], type[nn.Module]] = {Block: RotaryBlock, ResPostBlock: RotaryResPostBlock}
