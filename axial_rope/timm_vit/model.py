"""timm's VisionTransformer, which makes the rotation of an image and hands it to its blocks."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from timm.layers.patch_dropout import PatchDropout, patch_dropout_forward
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.fx import Proxy
from torch.utils.checkpoint import checkpoint

from axial_rope.embedding import RotaryEmbedding, drop_legacy_tables
from axial_rope.rotation import Rotation
from axial_rope.timm_vit.tracing import call_untraced

__all__ = ["Positions", "RotaryVisionTransformer", "check_strength"]

Positions = Callable[..., Tensor]


class RotaryVisionTransformer(VisionTransformer):
    """timm's VisionTransformer with rotary position embeddings; made by `make_rotary`.

    Attributes
    ----------
    rope
        The `RotaryEmbedding`.
    rope_positions
        From a grid to positions; see `make_rotary`.
    rope_strength
        Factor on all angles, in [0, 1].
    """

    rope: RotaryEmbedding
    rope_positions: Positions

    @property
    def rope_strength(self) -> float:
        return self._rope_strength

    @rope_strength.setter
    def rope_strength(self, strength: float) -> None:
        check_strength(strength)
        self._rope_strength = float(strength)

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """(B, channels, height, width) -> (B, prefix + patches, embed_dim), as timm's."""
        x, rotations = self._embed(x)
        for index, block in enumerate(self.blocks):
            x = self._run(block, x, rotations[index], attn_mask, is_causal)
        out: Tensor = self.norm(x)
        return out

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        """Features after chosen blocks; arguments and results as timm's."""
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f'output_fmt must be "NCHW" or "NLC": got {output_fmt!r}')
        grid = self.patch_embed.dynamic_feat_size(tuple(x.shape[-2:]))
        taken, last = feature_take_indices(len(self.blocks), indices)
        blocks = self.blocks[: last + 1] if stop_early else self.blocks
        x, rotations = self._embed(x)
        outputs = []
        for index, (block, rotation) in enumerate(zip(blocks, rotations, strict=False)):
            x = self._run(block, x, rotation, attn_mask, is_causal)
            if index in taken:
                outputs.append(self.norm(x) if norm else x)
        prefixes = [y[:, : self.num_prefix_tokens] for y in outputs]
        features = [y[:, self.num_prefix_tokens :] for y in outputs]
        if output_fmt == "NCHW":
            features = [y.unflatten(1, grid).permute(0, 3, 1, 2).contiguous() for y in features]
        with_prefixes = return_prefix_tokens and self.num_prefix_tokens > 0
        if output_dict:
            result = {"image_intermediates": features}
            if with_prefixes:
                result["image_intermediates_prefix"] = prefixes
            return result if intermediates_only else {**result, "image_features": self.norm(x)}
        intermediates: list[Any] = list(zip(features, prefixes, strict=True)) if with_prefixes else features
        return intermediates if intermediates_only else (self.norm(x), intermediates)

    def no_weight_decay(self) -> set[str]:
        """Parameters that weight decay leaves alone: timm's, and learned frequencies."""
        return {*super().no_weight_decay(), *(f"rope.{name}" for name, _ in self.rope.named_parameters())}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Groups for layer-wise learning rates: learned frequencies go with the position embedding, in the stem."""
        groups: dict[str, Any] = super().group_matcher(coarse)
        return {**groups, "stem": rf"{groups['stem']}|^rope\."}

    def _embed(self, x: Tensor) -> tuple[Tensor, list[Rotation]]:
        """Tokens, and the rotation for each block: (B, channels, height, width) -> (B, prefix + patches, embed_dim)."""
        patches = self.patch_embed(x)  # (B, height, width, embed_dim)
        x, kept = self._pos_embed(patches), None
        if isinstance(self.patch_drop, PatchDropout):
            drop = self.patch_drop
            x, kept = patch_dropout_forward(x, drop.prob, drop.num_prefix_tokens, drop.ordered, self.training)
        return self.norm_pre(x), call_untraced(self._rotations, (patches, self.rope, kept))

    def _rotations(self, patches: Tensor, rope: RotaryEmbedding, kept: Tensor | None) -> list[Rotation]:
        positions = self.rope_positions(patches.shape[1], patches.shape[2], device=patches.device)
        if kept is not None:
            positions = _gather_tokens(positions, kept)
        return rope.per_block(positions * self.rope_strength, len(self.blocks))

    def _pos_embed(self, x: Tensor) -> Tensor:
        """timm's, but for two cases.

        Without absolute embeddings older versions of timm lose the prefix tokens. And torch.fx can't trace timm's own,
        since it looks whether the grid is that of the pretraining.
        """
        if self.pos_embed is not None and not isinstance(x, Proxy):
            out: Tensor = super()._pos_embed(x)
            return out
        prefix = [token.expand(x.shape[0], -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        patches = x.flatten(1, 2)
        if self.pos_embed is None:
            return torch.cat([*prefix, patches], dim=1)  # (B, prefix + patches, embed_dim)
        prefix_tokens = 0 if self.no_embed_class else self.num_prefix_tokens
        embedding = call_untraced(_resample, (x, self.pos_embed, self.patch_embed.grid_size, prefix_tokens))
        if self.no_embed_class:
            out = torch.cat([*prefix, patches + embedding], dim=1)
        else:
            out = torch.cat([*prefix, patches], dim=1) + embedding
        out = self.pos_drop(out)
        return out

    def _run(self, block: nn.Module, x: Tensor, *arguments: Any) -> Tensor:
        if self.grad_checkpointing and self.training:
            out: Tensor = checkpoint(block, x, *arguments, use_reentrant=False)
            return out
        out = block(x, *arguments)
        return out

    def _load_from_state_dict(
        self, state_dict: MutableMapping[str, Any], prefix: str, *arguments: Any, **options: Any
    ) -> None:
        drop_legacy_tables(state_dict, prefix, self.rope.family)
        if self.pos_embed is None:
            state_dict.pop(f"{prefix}pos_embed", None)
        super()._load_from_state_dict(state_dict, prefix, *arguments, **options)


def _resample(patches: Tensor, pos_embed: Tensor, grid: tuple[int, int], prefix_tokens: int) -> Tensor:
    """Position embeddings (1, prefix + tokens of `grid`, dim) for the grid of patches (B, height, width, dim)."""
    size = [patches.shape[1], patches.shape[2]]
    out: Tensor = resample_abs_pos_embed(pos_embed, new_size=size, old_size=list(grid), num_prefix_tokens=prefix_tokens)
    return out


def _gather_tokens(positions: Tensor, kept: Tensor) -> Tensor:
    """Positions (N, A) or (B, N, A) of the tokens kept in each sample, indices (B, K) -> (B, K, A)."""
    if positions.dim() == 2:
        return positions[kept]
    return positions.gather(1, kept[..., None].expand(-1, -1, positions.shape[-1]))


def check_strength(strength: float) -> None:
    if not 0.0 <= strength <= 1.0:
        raise ValueError(f"strength must be between 0 and 1: got {strength}")
