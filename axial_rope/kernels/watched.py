"""Whether the memory of a tensor may be touched."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["is_watched"]


def is_watched(x: Tensor) -> bool:
    """Whether anything but eager autograd looks on: then memory isn't to be touched, and there may be none."""
    return (
        torch.compiler.is_compiling()
        or type(x) not in (Tensor, torch.nn.Parameter)
        or x.is_meta
        or x.is_neg()
        or torch._C._functorch.is_legacy_batchedtensor(x)
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
    )
