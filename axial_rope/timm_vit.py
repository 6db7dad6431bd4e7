"""make_rotary: a timm VisionTransformer becomes rotary, under the same state-dict keys.

The model, its blocks and their attention layers get subclasses of their timm classes, so that everything else timm offers
(feature extraction, classifier reset, pickling, EMA, layer decay) goes on as before. The rotation is computed once per
forward pass and handed from the model to the blocks to the attention layers as an argument.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from timm.layers.attention import Attention
from timm.layers.format import Format
from timm.layers.patch_dropout import PatchDropout, patch_dropout_forward
from timm.layers.patch_embed import PatchEmbed
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models._features import FeatureGetterNet, feature_take_indices
from timm.models.vision_transformer import Block, ResPostBlock, VisionTransformer
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from axial_rope.embedding import RotaryEmbedding, drop_legacy_tables
from axial_rope.frequencies import Family, Mixed
from axial_rope.positions import grid_positions
from axial_rope.presets import Scheme
from axial_rope.rotation import Rotation, rotate, rotate_packed

__all__ = ["RotaryVisionTransformer", "make_rotary"]

Positions = Callable[..., Tensor]
Model = TypeVar("Model", bound=nn.Module)


def make_rotary(
    vit: Model,
    family: Family | Scheme,
    *,
    positions: Positions | None = None,
    keep_pos_embed: bool = True,
    strength: float = 1.0,
) -> Model:
    """Give a timm VisionTransformer rotary position embeddings, in place.

    Class and register tokens aren't rotated. The model takes images of any number of patches from then on, square or not
    (``dynamic_img_size`` is switched on; for sides that aren't whole patches make it with ``dynamic_img_pad=True``). Its
    state-dict keys stay those of the timm model, with ``rope.frequencies`` added where the family is learned, so that
    weights can be loaded before or after.

    Parameters
    ----------
    vit
        A model of ``timm.create_model`` whose class is `VisionTransformer` (vit_*, deit3_*, DINOv2's, CLIP's towers, ...),
        with any of timm's `Block` or `ResPostBlock` blocks, or such a model under ``features_only=True``.
    family
        Frequencies for the head width of the model and two axes, or one of `axial_rope.presets`, which has positions too.
    positions
        From a grid of patches to their positions; `grid_positions`, or those of the preset, by default. Called as
        ``positions(height, width, device=...)``, it returns (height * width, 2), or that for each sample.
        ``functools.partial(grid_positions, reference=(14, 14))`` interpolates every grid to that of a pretraining. Kept as
        ``vit.rope_positions``, and may be replaced there.
    keep_pos_embed
        Whether the absolute position embedding stays. A checkpoint that has one can be loaded either way.
    strength
        Factor on all angles, from 0 (the model computes what it did before) to 1. Kept as ``vit.rope_strength``, and may be
        raised there during fine-tuning, so that a pretrained model is made rotary without a jump.

    Returns
    -------
    VisionTransformer
        The same object, whose class is now `RotaryVisionTransformer`.

    Raises
    ------
    TypeError
        If the model, its blocks or its attention layers are of another class, or it is rotary already.
    ValueError
        If the family doesn't fit the model's heads or blocks, or `strength` isn't in [0, 1].

    Examples
    --------
    >>> import timm
    >>> from axial_rope import Axial, make_rotary
    >>> vit = timm.create_model("vit_tiny_patch16_224", depth=2)
    >>> vit = make_rotary(vit, Axial(head_dim=64, base=100.0))
    >>> vit(torch.randn(1, 3, 160, 320)).shape
    torch.Size([1, 1000])
    """
    model = vit.model if isinstance(vit, FeatureGetterNet) else vit
    family, positions = _scheme(family, positions)
    rope = RotaryEmbedding(family)
    _check_model(model, family)
    _check_strength(strength)
    _make_rotary(model, rope, positions, keep_pos_embed, strength)
    return vit


def _make_rotary(vit: Any, rope: RotaryEmbedding, positions: Positions, keep_pos_embed: bool, strength: float) -> None:
    """Turn the checked model's classes into the rotary ones."""
    if not vit.dynamic_img_size:
        vit.dynamic_img_size = True
        vit.patch_embed.strict_img_size, vit.patch_embed.flatten = False, False
        vit.patch_embed.output_fmt = Format.NHWC
    if not keep_pos_embed:
        vit.pos_embed = None
    for block in vit.blocks:
        block.__class__ = ROTARY_BLOCKS[type(block)]
        block.attn.__class__ = RotaryTimmAttention
        block.attn.prefix_tokens = vit.num_prefix_tokens
    vit.__class__ = RotaryVisionTransformer
    vit.rope, vit.rope_positions, vit.rope_strength = rope.to(next(vit.parameters()).device), positions, strength


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
            overwrite = _is_unseen_output(self.qkv) and not isinstance(x, Proxy)
            packed: tuple[Tensor, Tensor, Tensor] = _call(
                rotate_packed, qkv, rotation, self.num_heads, overwrite=overwrite, **options
            )
            return packed
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        return (
            _call(rotate, self.q_norm(q), rotation, **options),
            _call(rotate, self.k_norm(k), rotation, **options),
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


def _is_unseen_output(layer: nn.Module) -> bool:
    """Whether the output of `layer` is a new tensor that nobody else can have: neither a hook nor a layer of another kind.

    What PyTorch calls around forward() is known by these attributes alone.
    """
    hooks = (
        layer._forward_hooks,
        layer._backward_hooks,
        nn.modules.module._global_forward_hooks,
        nn.modules.module._global_backward_hooks,
    )
    return type(layer) is nn.Linear and "forward" not in layer.__dict__ and not any(hooks)


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
        _check_strength(strength)
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
        return self.norm_pre(x), _call(self._rotations, patches, self.rope, kept)

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
        embedding = _call(
            _resample, x, self.pos_embed, self.patch_embed.grid_size, 0 if self.no_embed_class else self.num_prefix_tokens
        )
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


def _call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The function's result; while torch.fx traces, a call of it, into which the trace doesn't go."""
    proxy = next((argument for argument in arguments if isinstance(argument, Proxy)), None)
    if proxy is None:
        return function(*arguments, **options)
    return proxy.tracer.create_proxy("call_function", function, arguments, options)


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


def _scheme(family: Family | Scheme, positions: Positions | None) -> tuple[Family, Positions]:
    """The family and the positions of what `make_rotary` was given."""
    if not isinstance(family, Scheme):
        return family, grid_positions if positions is None else positions
    if family.rotate is not rotate:
        raise ValueError(f"family must be a rotation: got a preset whose rotate is {family.rotate.__name__}")
    return family.family, family.positions if positions is None else positions


def _check_strength(strength: float) -> None:
    if not 0.0 <= strength <= 1.0:
        raise ValueError(f"strength must be between 0 and 1: got {strength}")


def _check_model(vit: Any, family: Family) -> None:
    """Raise unless `vit` can be made rotary with `family`; nothing has been changed by then."""
    if isinstance(vit, RotaryVisionTransformer):
        raise TypeError("vit must not be rotary already: make the model anew, or set vit.rope, whose family is "
                        f"{vit.rope.family}")  # fmt: skip
    if type(vit) is not VisionTransformer:
        raise TypeError(f"vit must be a timm VisionTransformer: got {type(vit).__module__}.{type(vit).__qualname__}")
    if not vit.dynamic_img_size and type(vit.patch_embed) is not PatchEmbed:
        raise TypeError(
            f"vit must be created with dynamic_img_size=True, since its patch_embed is a {type(vit.patch_embed).__name__}: "
            f"got dynamic_img_size=False"
        )
    blocks: Any = vit.blocks
    for block in blocks:
        _check_class("blocks", block, tuple(ROTARY_BLOCKS))
        _check_class("attention layers", block.attn, (Attention,))
    if family.columns != 2:
        raise ValueError(f"family must have 2 axes (y, x) for images: got {family.columns} in {family}")
    attention = blocks[0].attn
    if family.head_dim != attention.head_dim:
        raise ValueError(f"family must have the model's head_dim={attention.head_dim}: got head_dim={family.head_dim}")
    if isinstance(family, Mixed):
        depth = len(blocks) if family.blocks is None else family.blocks
        if (family.heads, depth) != (attention.num_heads, len(blocks)):
            raise ValueError(
                f"family must have the model's heads={attention.num_heads} and blocks={len(blocks)}: "
                f"got heads={family.heads} and blocks={family.blocks}"
            )


def _check_class(name: str, module: nn.Module, classes: Sequence[type[nn.Module]]) -> None:
    if type(module) not in classes:
        wanted = " or ".join(cls.__name__ for cls in classes)
        raise TypeError(f"{name} must be timm's {wanted}: got {type(module).__module__}.{type(module).__qualname__}")
