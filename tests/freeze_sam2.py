"""What facebookresearch/sam2 computes, frozen into frozen/sam2_memory.npz: python tests/freeze_sam2.py

The sam2 package (PyPI, 1.1.0) comes as source only and asks for a second copy of torch to be built, so it is no dependency
of the tests. Run this where it is installed to make the file anew.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

GRID, DIM, MEMORY_DIM, HEADS = (3, 5), 32, 16, 1
FRAMES, POINTERS = (0, 1, 2, 7), (0, 4, 64)


def make_attention():
    """sam2's MemoryAttention with random weights: two layers, one head of 32, frames of 3 x 5 tokens."""
    from sam2.modeling.memory_attention import MemoryAttention, MemoryAttentionLayer
    from sam2.modeling.sam.transformer import RoPEAttention

    shape = {"embedding_dim": DIM, "num_heads": HEADS, "downsample_rate": 1, "dropout": 0.1, "feat_sizes": GRID[::-1]}
    layer = MemoryAttentionLayer(
        activation="relu", d_model=DIM, dim_feedforward=48, dropout=0.1, pos_enc_at_attn=False,
        pos_enc_at_cross_attn_keys=True, pos_enc_at_cross_attn_queries=False,
        self_attention=RoPEAttention(**shape),
        cross_attention=RoPEAttention(**shape, rope_k_repeat=True, kv_in_dim=MEMORY_DIM),
    )  # fmt: skip
    attention = MemoryAttention(d_model=DIM, pos_enc_at_input=True, layer=layer, num_layers=2).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return attention


def make_inputs(frames, pointers, batch=2):
    """(tokens, batch, channels) tensors, as sam2 takes them: frame, its position, memory, its position."""
    generator = torch.Generator().manual_seed(100 * frames + pointers)
    length, keys = GRID[0] * GRID[1], frames * GRID[0] * GRID[1] + pointers
    shapes = [(length, batch, DIM)] * 2 + [(keys, batch, MEMORY_DIM)] * 2
    return [torch.randn(shape, generator=generator) for shape in shapes]


def make_schedule(rng):
    """A random state of a tracker: which frames are stored, which frame reads, and the settings."""
    length = int(rng.integers(2, 60))
    order = rng.permutation(length).tolist()
    conditioning = order[: int(rng.integers(1, min(6, length) + 1))]
    rest = order[len(conditioning) :]
    stored = sorted(rest[: int(rng.integers(0, len(rest) + 1))] if rng.random() < 0.5 else rest)
    return {
        "length": length,
        "frame": int(rng.integers(0, length)),
        "conditioning": conditioning,
        "stored": stored,
        "reverse": bool(rng.random() < 0.4),
        "stride": int(rng.integers(1, 6)),
        "recent": int(rng.integers(1, 9)),
        "max_conditioning": None if rng.random() < 0.4 else int(rng.integers(2, 5)),
        "pointers": int(rng.integers(2, 20)),
        "future_pointers": bool(rng.random() < 0.3),
    }


def sam2_choice(schedule):
    """The frames with their slots and the pointers with their distances that sam2 reads, in its order."""
    from sam2.modeling.sam2_base import SAM2Base

    seen = {}

    def attend(curr, curr_pos, memory, memory_pos, num_obj_ptr_tokens):
        seen.update(memory=memory[:, 0, 0].tolist(), slots=memory_pos[:, 0, 0].tolist(), pointers=num_obj_ptr_tokens)
        return torch.zeros(1, 1, 1)

    slots = schedule["recent"] + 1
    # One token of one channel per frame and per pointer, which carries the number of its frame.
    tracker = SimpleNamespace(
        hidden_dim=1, mem_dim=1, num_maskmem=slots, training=False, memory_attention=attend,
        max_cond_frames_in_attn=schedule["max_conditioning"] or -1, memory_temporal_stride_for_eval=schedule["stride"],
        maskmem_tpos_enc=torch.arange(slots).view(slots, 1, 1, 1).float(), use_obj_ptrs_in_encoder=True,
        max_obj_ptrs_in_encoder=schedule["pointers"], add_tpos_enc_to_obj_ptrs=True, proj_tpos_enc_in_obj_ptrs=True,
        use_signed_tpos_enc_to_obj_ptrs=True, only_obj_ptrs_in_the_past_for_eval=not schedule["future_pointers"],
        obj_ptr_tpos_proj=lambda sines: sines,
    )  # fmt: skip

    def output(t):
        one = torch.full((1, 1, 1, 1), float(t))
        return {"maskmem_features": one, "maskmem_pos_enc": [torch.zeros(1, 1, 1, 1)], "obj_ptr": one[0, 0]}

    distances = []

    def sine(positions, dim):
        distances.extend(positions.tolist())
        return torch.zeros(len(positions), 1)

    import sam2.modeling.sam2_base as module

    kept, module.get_1d_sine_pe = module.get_1d_sine_pe, sine
    try:
        SAM2Base._prepare_memory_conditioned_features(
            tracker,
            frame_idx=schedule["frame"],
            is_init_cond_frame=False,
            current_vision_feats=[torch.zeros(1, 1, 1)],
            current_vision_pos_embeds=[torch.zeros(1, 1, 1)],
            feat_sizes=[(1, 1)],
            output_dict={
                "cond_frame_outputs": {t: output(t) for t in schedule["conditioning"]},
                "non_cond_frame_outputs": {t: output(t) for t in schedule["stored"]},
            },
            num_frames=schedule["length"],
            track_in_reverse=schedule["reverse"],
        )
    finally:
        module.get_1d_sine_pe = kept
    split = len(seen["memory"]) - seen["pointers"]
    # Row n - 1 of sam2's table is the n-th recent frame, the last row a conditioning frame.
    frames = [
        [int(t), 0 if row == slots - 1 else int(row) + 1]
        for t, row in zip(seen["memory"][:split], seen["slots"][:split], strict=True)
    ]
    span = min(schedule["length"], schedule["pointers"]) - 1
    pointers = [[int(t), round(share * span)] for t, share in zip(seen["memory"][split:], distances, strict=True)]
    return {"frames_read": frames, "pointers_read": pointers}


def main():
    attention = make_attention()
    arrays = {f"sd/{name}": tensor.numpy() for name, tensor in attention.state_dict().items()}
    for frames in FRAMES:
        for pointers in POINTERS:
            if frames or pointers:  # without any, sam2's tracker doesn't call its memory attention
                curr, curr_pos, memory, memory_pos = make_inputs(frames, pointers)
                with torch.no_grad():
                    out = attention(curr, memory, curr_pos, memory_pos, num_obj_ptr_tokens=pointers)
                arrays[f"out/{frames}_{pointers}"] = out.numpy()
    rng = np.random.default_rng(0)
    schedules = [make_schedule(rng) for _ in range(300)]
    arrays["schedules"] = json.dumps([schedule | sam2_choice(schedule) for schedule in schedules])
    np.savez_compressed(Path(__file__).parent / "frozen" / "sam2_memory.npz", **arrays)


if __name__ == "__main__":
    main()
