"""Conversion of weights between pair layouts.

A layout says which channels of a head are pairs. Another layout is the same model with the channels of queries and keys in
another order: rows of their projections, biases, and the weights of query and key norms are permuted inside each head, and
scores stay what they were. Values, and what comes after them, are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from axial_rope.frequencies import Extended, Family
from axial_rope.rotation import check_layout, layout_permutation

__all__ = ["convert_layout", "convert_qkv_layout", "convert_state_dict_layout", "with_layout"]

AnyFamily = TypeVar("AnyFamily", bound=Family)

PACKED = ("in_proj_weight", "in_proj_bias")  # of torch.nn.MultiheadAttention
QUERY_KEY = ("q_proj", "k_proj", "q_norm", "k_norm", "q_bias", "k_bias")


def with_layout(family: AnyFamily, layout: str) -> AnyFamily:
    """The same family in another layout.

    Examples
    --------
    >>> from axial_rope import Axial
    >>> with_layout(Axial(head_dim=8), "half").layout
    'half'
    """
    check_layout(layout)
    if isinstance(family, Extended):
        return replace(family, original=with_layout(family.original, layout))
    return replace(family, layout=layout)  # type: ignore[type-var]


def convert_layout(tensor: Tensor, family: Family, layout: str) -> Tensor:
    """A weight, bias or norm of queries or keys, its channels in another layout.

    Parameters
    ----------
    tensor
        (heads * head_dim, ...): rows of a query or key projection, its bias, or the weight of a norm over a head
        (head_dim,) or over all heads. Any number of heads, so also the fewer key heads of grouped-query attention.
    family
        The family in the layout that the tensor has now.
    layout
        The layout wanted.

    Returns
    -------
    Tensor
        A new tensor of the same shape.

    Raises
    ------
    ValueError
        If the first dimension isn't a multiple of the head's channels, or the layout is unknown.

    Examples
    --------
    >>> from axial_rope import Axial
    >>> convert_layout(torch.arange(4), Axial(head_dim=4, axes=1, layout="half"), "interleaved").tolist()
    [0, 2, 1, 3]
    """
    check_layout(layout)
    if tensor.dim() == 0 or tensor.shape[0] % family.head_dim:
        raise ValueError(
            f"tensor must have heads * head_dim rows, a multiple of {family.head_dim}: got shape {tuple(tensor.shape)}"
        )
    order = layout_permutation(family.layout, layout, family.split, family.head_dim).to(tensor.device)
    heads = tensor.reshape(-1, family.head_dim, *tensor.shape[1:])
    return heads[:, order].reshape(tensor.shape)


def convert_qkv_layout(tensor: Tensor, family: Family, layout: str, *, heads: int, kv_heads: int | None = None) -> Tensor:
    """The weight or bias of a joint projection, rows (q, k, v): queries and keys converted, values as they are.

    Parameters
    ----------
    tensor
        ((heads + 2 * kv_heads) * head_dim, ...).
    family, layout
        As for `convert_layout`.
    heads, kv_heads
        Query heads, and heads of keys and values (the same by default).

    Raises
    ------
    ValueError
        If the first dimension isn't that of the heads.

    Examples
    --------
    >>> from axial_rope import Axial
    >>> family = Axial(head_dim=4, axes=1, layout="half")
    >>> convert_qkv_layout(torch.arange(12), family, "interleaved", heads=1).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7, 8, 9, 10, 11]
    """
    kv_heads = heads if kv_heads is None else kv_heads
    rows = [n * family.head_dim for n in (heads, kv_heads, kv_heads)]
    if tensor.dim() == 0 or tensor.shape[0] != sum(rows):
        raise ValueError(
            f"tensor must have (heads + 2 * kv_heads) * head_dim = ({heads} + 2 * {kv_heads}) * {family.head_dim} = "
            f"{sum(rows)} rows: got shape {tuple(tensor.shape)}"
        )
    q, k, v = torch.split(tensor, rows)
    return torch.cat([convert_layout(q, family, layout), convert_layout(k, family, layout), v])


def convert_state_dict_layout(
    state_dict: Mapping[str, Any], family: Family, layout: str, *, heads: int, kv_heads: int | None = None
) -> dict[str, Any]:
    """A state dict with the channels of all its queries and keys in another layout.

    Entries whose name has a part ``qkv``, ``in_proj_weight`` or ``in_proj_bias`` (joint projections), or ``q_proj``,
    ``k_proj``, ``q_norm``, ``k_norm``, ``q_bias`` or ``k_bias``, are converted; the others are the same objects. Learned
    frequencies belong to pairs, whose order a layout doesn't change.

    Parameters
    ----------
    state_dict
        Of a model with names as in timm, transformers or SAM 2.
    family, layout, heads, kv_heads
        As for `convert_qkv_layout`.

    Returns
    -------
    dict
        A new state dict.

    Raises
    ------
    ValueError
        If there is nothing to convert, or an entry doesn't have the rows of the heads.

    Examples
    --------
    >>> from axial_rope import Axial, RotaryAttention
    >>> family = Axial(head_dim=8, layout="half")
    >>> attention = RotaryAttention(dim=16, heads=2)
    >>> converted = convert_state_dict_layout(attention.state_dict(), family, "interleaved", heads=2)
    >>> bool((converted["v_proj.weight"] == attention.v_proj.weight).all())
    True
    """
    converted = {}
    for key, value in state_dict.items():
        parts = key.split(".")
        if "qkv" in parts or parts[-1] in PACKED:
            converted[key] = convert_qkv_layout(value, family, layout, heads=heads, kv_heads=kv_heads)
        elif part := next((part for part in parts if part in QUERY_KEY), None):
            number = (heads if kv_heads is None else kv_heads) if part.startswith("k") else heads
            if value.shape[0] not in (family.head_dim, number * family.head_dim):
                raise ValueError(
                    f"{key} must have the {number} * {family.head_dim} rows of its heads, or those of one: "
                    f"got {value.shape[0]}"
                )
            converted[key] = convert_layout(value, family, layout)
    if not converted:
        raise ValueError(
            f"state_dict must have entries named qkv or {', '.join(QUERY_KEY)}: got {len(state_dict)} entries without"
        )
    return {**state_dict, **converted}
