"""Memory attention of SAM 2, SAM 2.1 and their descendants as ours.

Weights come with the names of facebookresearch/sam2 (also Ultralytics, EdgeTAM, EfficientTAM) or of transformers' Sam2Video,
from a whole checkpoint or from the memory attention's own state dict:

    sam2                            transformers                                        here
    layers.N.self_attn.out_proj     layers.N.self_attn.o_proj                           layers.N.self_attention.out_proj
    layers.N.cross_attn_image.*     layers.N.cross_attn_image.*                         layers.N.cross_attention.*
    layers.N.norm1, norm            layers.N.layer_norm1, layer_norm                    layers.N.norm1, norm
    maskmem_tpos_enc                memory_temporal_positional_encoding                 age_embedding
    no_mem_embed                    no_memory_embedding                                 no_memory
    obj_ptr_tpos_proj               temporal_positional_encoding_projection_layer       pointer_age
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from axial_rope.frequencies import Axial, Family
from axial_rope.memory.attention import MemoryAttention
from axial_rope.memory.layer import Pooling
from axial_rope.memory.tokens import Grid

__all__ = ["ConvertedMemory", "memory_attention_from_sam2", "pool_rotated", "sam2_memory_weights"]

LAYERS = (
    (r"(layers\.\d+)\.self_attn\.", r"\1.self_attention."),
    (r"(layers\.\d+)\.cross_attn_image\.", r"\1.cross_attention."),
    (r"\.o_proj\.", ".out_proj."),
    (r"(^|\.)layer_norm(\d?)\.", r"\1norm\2."),
)
OTHERS = {
    "maskmem_tpos_enc": "age_embedding",
    "memory_temporal_positional_encoding": "age_embedding",
    "no_mem_embed": "no_memory",
    "no_memory_embedding": "no_memory",
    "obj_ptr_tpos_proj.weight": "pointer_age.weight",
    "obj_ptr_tpos_proj.bias": "pointer_age.bias",
    "temporal_positional_encoding_projection_layer.weight": "pointer_age.weight",
    "temporal_positional_encoding_projection_layer.bias": "pointer_age.bias",
}
OWN = re.compile(r"(layers\.\d+\.(self_attn|cross_attn_image|linear[12]|norm[123]|layer_norm[123])\.|(layer_)?norm\.)")

NEEDED = tuple(f"layers.0.{part}.weight" for part in ("self_attention.q_proj", "cross_attention.k_proj", "linear1"))


class ConvertedMemory(NamedTuple):
    """Weights under our names, and what became of each key of the checkpoint."""

    weights: dict[str, Tensor]
    renamed: dict[str, str]
    unused: tuple[str, ...]


def sam2_memory_weights(state_dict: Mapping[str, Tensor]) -> ConvertedMemory:
    """The weights of memory attention in a state dict of sam2 or transformers, under our names.

    Parameters
    ----------
    state_dict
        Of a whole model, whose memory attention has the prefix ``memory_attention.``, or of the memory attention alone.
        sam2's checkpoint files hold it under "model".

    Returns
    -------
    ConvertedMemory
        `unused` names the keys that belong to other parts of the model.

    Raises
    ------
    ValueError
        If the state dict has no memory attention in it.
    """
    inside = any(key.startswith("memory_attention.") for key in state_dict)
    weights: dict[str, Tensor] = {}
    renamed: dict[str, str] = {}
    unused: list[str] = []
    for key, tensor in state_dict.items():
        own = key.removeprefix("memory_attention.")
        if key in OTHERS:
            new = OTHERS[key]
        elif OWN.match(own) and inside == (own != key):
            new = own
            for pattern, replacement in LAYERS:
                new = re.sub(pattern, replacement, new)
        else:
            unused.append(key)
            continue
        if new == "age_embedding":
            tensor = tensor.reshape(tensor.shape[0], -1)  # (slots, 1, 1, C)
        weights[new] = tensor.reshape(-1) if new == "no_memory" else tensor  # (1, 1, dim)
        renamed[key] = new
    if not {"norm.weight", *NEEDED} <= weights.keys():
        raise ValueError(
            f"state_dict must hold a memory attention of sam2 or transformers: got {len(state_dict)} other keys"
        )
    return ConvertedMemory(weights, renamed, tuple(unused))


def memory_attention_from_sam2(
    state_dict: Mapping[str, Tensor],
    *,
    heads: int = 1,
    activation: str = "relu",
    dropout: float = 0.1,
    family: Family | None = None,
) -> MemoryAttention:
    """SAM 2's memory attention with its weights, ready for frames of any size.

    Sizes, the age embedding and the projection of pointer ages follow from the weights. A state dict without an embedding
    for "no memory" (the memory attention alone) gives zeros there.

    Parameters
    ----------
    state_dict
        See `sam2_memory_weights`.
    heads, activation, dropout
        Of the model's configuration: 1, "relu" and 0.1 in all of SAM 2.
    family
        Of the model's configuration; by default ``Axial(head_dim, "xy", base=10000)``, SAM 2's.

    Raises
    ------
    ValueError
        If the state dict has no memory attention in it, or lacks one of its weights.

    Examples
    --------
    Of a checkpoint file: ``memory_attention_from_sam2(torch.load("sam2.1_hiera_tiny.pt", weights_only=True)["model"])``.
    """
    weights = dict(sam2_memory_weights(state_dict).weights)
    depth = 1 + max(int(key.split(".")[1]) for key in weights if key.startswith("layers."))
    if heads < 1:
        raise ValueError(f"heads must be at least 1: got {heads}")
    inner, dim = weights["layers.0.self_attention.q_proj.weight"].shape
    head_dim = inner // heads
    ages = weights.get("age_embedding")
    attention = MemoryAttention(
        dim,
        weights["layers.0.cross_attention.k_proj.weight"].shape[1],
        depth,
        heads,
        head_dim=head_dim,
        mlp_dim=weights["layers.0.linear1.weight"].shape[0],
        activation=activation,
        dropout=dropout,
        family=Axial(head_dim, "xy", 10000.0) if family is None else family,
        age_slots=0 if ages is None else ages.shape[0],
        sine=("input", "keys"),
        pointer_span=15.0 if "pointer_age.weight" in weights else None,
    )
    weights.setdefault("no_memory", torch.zeros(dim))
    missing, unexpected = attention.load_state_dict(weights, strict=False)
    if missing or unexpected:
        raise ValueError(f"state_dict must hold all of a memory attention: it lacks {missing} and has {unexpected} besides")
    return attention


def pool_rotated(grid: Grid, kernel: int = 2, bias: str = "scores") -> Pooling:
    """EfficientTAM's pooling of a memory: keys averaged over cells after their rotation, values likewise.

    It is here to run its weights; a rotated pair loses length in the average, so pool frames with `pool_frame` instead.

    Parameters
    ----------
    grid
        (h, w) of the stored frames.
    kernel
        Rows and columns that make one key; they must divide the grid.
    bias
        Where the logarithm of the number of tokens in a cell is added: to the "scores" (``EfficientRoPEAttention1``), or,
        which is no bias of the scores, to every channel of the "keys" (``EfficientRoPEAttention2``).

    Returns
    -------
    Callable
        For the argument `pooling` of `MemoryAttention` and `MemoryCrossAttention`.

    Raises
    ------
    ValueError
        If `kernel` doesn't divide `grid` or `bias` is unknown.
    """
    h, w = grid
    if kernel < 1:
        raise ValueError(f"kernel must be at least 1: got {kernel}")
    if h % kernel or w % kernel:
        raise ValueError(f"kernel must divide the grid {grid}: got {kernel}")
    if bias not in ("scores", "keys"):
        raise ValueError(f'bias must be "scores" or "keys": got {bias!r}')
    weight = 2 * math.log(kernel)

    def average(x: Tensor) -> Tensor:
        batch, heads, length, channels = x.shape
        if length % (h * w):
            raise ValueError(f"memory must hold whole frames of grid {grid} = {h * w} tokens: got {length} tokens")
        cells = x.reshape(batch, heads, -1, h // kernel, kernel, w // kernel, kernel, channels)
        return cells.mean(dim=(4, 6)).flatten(2, 4)

    def pooling(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        keys, values = average(keys), average(values)
        if bias == "keys":
            return keys + weight, values, None
        return keys, values, keys.new_full((1, 1, 1, keys.shape[2]), weight)

    return pooling
