"""Weights of RoPE-ViTs under the names of `make_rotary`'s models: naver-ai/rope-vit's, and timm's, DINOv3 among them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from axial_rope.embedding import LEGACY_TABLE

__all__ = ["ConvertedViT", "rope_vit_weights"]


class ConvertedViT(NamedTuple):
    """Weights under timm's names for VisionTransformer, and what became of each key of the checkpoint."""

    weights: dict[str, Tensor]
    renamed: dict[str, str]
    dropped: tuple[str, ...]


def rope_vit_weights(state_dict: Mapping[str, Tensor], heads: int) -> ConvertedViT:
    """The weights of a RoPE-ViT of naver-ai/rope-vit, or of timm's ``vit_*_rope_*`` and ``vit_*_dinov3``.

    Learned frequencies, ``freqs`` (2, depth, heads * P) or ``rope.freqs`` (2, depth, heads, P) with x before y, become
    ``rope.frequencies`` with rows (y, x). LayerScale ``gamma_1`` becomes ``ls1.gamma``; apart biases of queries and values
    become one of the projection. Tables that follow from the grid are dropped. Whatever else there is keeps its name.

    Parameters
    ----------
    state_dict
        Of the whole model.
    heads
        Attention heads.

    Returns
    -------
    ConvertedViT
        For ``load_state_dict`` of a model of `make_rotary`, with the preset of that name: `presets.rope_vit_mixed`,
        `presets.rope_vit_axial` or `presets.dinov3`.

    Raises
    ------
    ValueError
        If there are no blocks of a ViT, or learned frequencies aren't those of `heads` heads.

    Examples
    --------
    >>> saved = {"freqs": torch.zeros(2, 12, 6 * 32), "blocks.0.gamma_1": torch.ones(384), "freqs_t_x": torch.zeros(196)}
    >>> converted = rope_vit_weights(saved, heads=6)
    >>> converted.weights["rope.frequencies"].shape, converted.renamed["blocks.0.gamma_1"], converted.dropped
    (torch.Size([2, 12, 6, 32]), 'blocks.0.ls1.gamma', ('freqs_t_x',))
    """
    if not any(key.startswith("blocks.0.") for key in state_dict):
        raise ValueError(f"state_dict must hold the blocks of a ViT: got {len(state_dict)} keys without blocks.0")
    weights: dict[str, Tensor] = {}
    renamed: dict[str, str] = {}
    dropped = []
    for key, tensor in state_dict.items():
        if LEGACY_TABLE.search(key):
            dropped.append(key)
            continue
        new = re.sub(r"\.gamma_([12])$", r".ls\1.gamma", key)
        if key in ("freqs", "rope.freqs"):
            new, tensor = "rope.frequencies", _frequencies(key, tensor, heads)
        elif key.endswith((".q_bias", ".v_bias")):
            stem = key.removesuffix(key.rsplit(".", 1)[1])
            new, values = f"{stem}qkv.bias", state_dict[f"{stem}v_bias"]
            tensor = torch.cat([state_dict[f"{stem}q_bias"], torch.zeros_like(values), values])
        weights[new] = tensor
        if new != key:
            renamed[key] = new
    return ConvertedViT(weights, renamed, tuple(dropped))


def _frequencies(key: str, tensor: Tensor, heads: int) -> Tensor:
    width = tensor.shape[2:].numel()
    if (
        tensor.dim() not in (3, 4)
        or tensor.shape[0] != 2
        or width % heads
        or (tensor.dim() == 4 and tensor.shape[2] != heads)
    ):
        raise ValueError(
            f"{key} must have shape (2, depth, heads * pairs) or (2, depth, heads, pairs) for {heads} heads: "
            f"got {tuple(tensor.shape)}"
        )
    return tensor.reshape(2, tensor.shape[1], heads, width // heads).flip(0)
