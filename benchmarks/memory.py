"""Memory attention against the sam2 package, in one run: python -m benchmarks.memory

SAM 2's block (4 layers, one head of 256, memory of 64 channels) on 32 x 32 tokens, 7 stored frames and 64 pointer tokens,
with the same weights on both sides: median times, and the median of the ratios of rounds that alternate. Without the sam2
package (PyPI: sam2) its side is left out.
"""

from __future__ import annotations

import argparse
import json
import warnings
from typing import Any

import torch
from torch.nn import functional as F

from axial_rope import Memory, MemoryAttention, grid_positions, rotate
from axial_rope.conversion.sam2 import memory_attention_from_sam2
from benchmarks.timing import compare

DIM, MEMORY_DIM, DEPTH = 256, 64, 4


def sam2_attention(grid: tuple[int, int]) -> torch.nn.Module | None:
    """The package's block as its configurations make it, or None where it isn't installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from sam2.modeling.memory_attention import MemoryAttention as Theirs
            from sam2.modeling.memory_attention import MemoryAttentionLayer
            from sam2.modeling.sam.transformer import RoPEAttention
    except ImportError:
        return None
    shape = {"embedding_dim": DIM, "num_heads": 1, "downsample_rate": 1, "dropout": 0.1, "feat_sizes": grid[::-1]}
    layer = MemoryAttentionLayer(
        activation="relu", d_model=DIM, dim_feedforward=2048, dropout=0.1, pos_enc_at_attn=False,
        pos_enc_at_cross_attn_keys=True, pos_enc_at_cross_attn_queries=False,
        self_attention=RoPEAttention(**shape),
        cross_attention=RoPEAttention(**shape, rope_k_repeat=True, kv_in_dim=MEMORY_DIM),
    )  # fmt: skip
    return Theirs(d_model=DIM, pos_enc_at_input=True, layer=layer, num_layers=DEPTH).eval()


def shares(attend: MemoryAttention, x: torch.Tensor, memory: Memory, grid: tuple[int, int], rounds: int) -> dict[str, float]:
    """Seconds of the cross-attention's parts in all layers together, each alone."""
    layer = attend.layers[0].cross_attention
    keys = torch.cat([memory.tokens, memory.pointers], 1)
    q, k, v = (part[:, None] for part in (layer.q_proj(x), layer.k_proj(keys), layer.v_proj(keys)))
    places = memory.positions_on(grid)
    table = attend.rope(places)
    here = attend.rope(grid_positions(*grid, device=x.device))
    pointers = memory.pointers.shape[1]
    calls = {
        "angles, once a frame": lambda: attend.rope(memory.positions_on(grid)),
        "projection": lambda: (layer.q_proj(x), layer.k_proj(keys), layer.v_proj(keys)),
        "rotation": lambda: (rotate(q, here), rotate(k, table, suffix_tokens=pointers)),
        "attention": lambda: F.scaled_dot_product_attention(q, k, v),
    }
    times = compare(calls, reference="attention", rounds=rounds)
    return {name: timing.seconds * (1 if "once" in name else DEPTH) for name, timing in times.items()}


@torch.no_grad()
def run(size: int, frames: int, pointers: int, rounds: int, device: str) -> dict[str, Any]:
    """Measure, and compare the outputs."""
    grid, cells = (size, size), size * size
    torch.manual_seed(0)
    theirs = sam2_attention(grid)
    if theirs is None:
        attend = MemoryAttention(DIM, MEMORY_DIM, DEPTH, sine=("input", "keys"), family="axial").eval().to(device)
    else:
        theirs = theirs.to(device)
        attend = memory_attention_from_sam2(theirs.state_dict()).eval().to(device)
    keys = frames * cells + pointers
    x, position = torch.randn(2, 1, cells, DIM, device=device)
    stored, stored_position = torch.randn(2, 1, keys, MEMORY_DIM, device=device)
    end = frames * cells
    memory = Memory(stored[:, :end], pointers=stored[:, end:], key_position=stored_position)
    calls = {"axial_rope": lambda: attend(x, memory, grid=grid, position=position)}
    if theirs is not None:
        first = (x.transpose(0, 1), stored.transpose(0, 1), position.transpose(0, 1), stored_position.transpose(0, 1))
        calls["sam2"] = lambda: theirs(*first, num_obj_ptr_tokens=pointers)
    times = compare(calls, reference=list(calls)[-1], rounds=rounds)
    seconds = {name: timing.seconds for name, timing in times.items()}
    result: dict[str, Any] = {"tokens": cells, "frames": frames, "pointers": pointers, "seconds": seconds}
    if theirs is not None:
        result["ratio"] = times["axial_rope"].ratio
        result["largest difference"] = (calls["axial_rope"]() - calls["sam2"]().transpose(0, 1)).abs().max().item()
    result["cross-attention"] = shares(attend, x, memory, grid, rounds)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=32, help="rows and columns of tokens")
    parser.add_argument("--frames", type=int, default=7)
    parser.add_argument("--pointers", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(json.dumps(run(args.size, args.frames, args.pointers, args.rounds, args.device), indent=2))


if __name__ == "__main__":
    main()
