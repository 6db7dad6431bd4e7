"""Readers of the files of tests/golden that hold frequencies, coordinates, position ids and orders, and of xPos.

Each yields (found, expected, largest difference allowed); 0 where numbers must be equal.
"""

import torch

from axial_rope import (
    Axial,
    Periods,
    RotaryEmbedding,
    centered_positions,
    grid_positions,
    multimodal_parts,
    multimodal_positions,
    rotate,
    window_order,
)
from axial_rope.beyond_rotation import xpos
from axial_rope.extension import dynamic_ntk, interpolate, llama3, longrope, proportional, yarn


def stretched(family, parameters, max_position, length):
    """The family that transformers' `rope_parameters` make of one; `length` is its `seq_len`."""
    options = dict(parameters)
    kind, _ = options.pop("rope_type"), options.pop("rope_theta")
    part, factor = options.pop("partial_rotary_factor", 1.0), options.pop("factor", None)
    original = options.pop("original_max_position_embeddings", max_position)
    if kind == "linear":
        found = interpolate(family, factor)
    elif kind == "dynamic":
        found = dynamic_ntk(family, factor, length=length or max_position, original_length=max_position)
    elif kind == "yarn":
        options = {key: value for key, value in options.items() if value is not None}
        return yarn(family, factor or max_position / original, original, **options)
    elif kind == "llama3":
        return llama3(family, factor, original, **options)
    elif kind == "longrope":
        factors, factor = (options.pop("short_factor"), options.pop("long_factor")), factor or max_position / original
        scale = options.pop("attention_factor", None)
        length = length or original
        found = longrope(family, *factors, length=length, original_length=original, factor=factor, attention_factor=scale)
    elif kind == "proportional":
        found = proportional(family, part, factor)
    assert not options, f"unknown options of {kind}: {options}"
    return found


def plain(head_dim, parameters):
    """The 1-D family that transformers stretches."""
    part = 1.0 if parameters["rope_type"] == "proportional" else parameters.get("partial_rotary_factor", 1.0)
    return Axial(head_dim, 1, parameters["rope_theta"], (int(head_dim * part) // 2,))


def transformers_frequencies(golden):
    for entry in golden["entries"]:
        parameters, expected = entry["rope_parameters"], golden.array(entry["key"])
        assert parameters["rope_type"] == entry["kind"]
        family = plain(entry["head_dim"], parameters)
        family = stretched(family, parameters, entry["max_position_embeddings"], entry["seq_len"])
        yield family.frequencies()[0] / expected.clamp(min=1e-30), (expected > 0).float(), 5e-7
        yield torch.tensor(family.scale), torch.tensor(entry["attention_factor"]), 1e-6


def meta_frequencies(golden):
    family = Axial(golden["head_dim"], 1, golden["theta"])
    yield family.frequencies()[0] / golden.array("freq_in"), torch.ones(family.pairs), 5e-7
    three, four = golden["llama3"], golden["llama4"]
    for name, factor, old, low, high in (
        ("llama3_freq", three["scale_factor"], three["old"], three["low"], three["high"]),
        ("llama4_freq", four["scale_factor"], four["old"], four["low"], four["high_freq_factor"]),
        # Llama 4's function with the arguments of Llama 3
        ("llama4_freq_high4", three["scale_factor"], four["old"], four["low"], three["high"]),
    ):
        scaled = llama3(family, factor, old, low_freq_factor=low, high_freq_factor=high).frequencies()[0]
        yield scaled / golden.array(name), torch.ones(family.pairs), 5e-7


def dinov3_coordinates(golden):
    for shape in golden["shapes"]:
        for normalize in ("separate", "max", "min"):
            name = f"{normalize}_{shape[0]}x{shape[1]}"
            positions = centered_positions(*shape, normalize=normalize)
            yield positions, golden.array(name), 0.0
            rotation = RotaryEmbedding(Periods(4, periods=[1.0]))(positions)
            yield rotation.cos, golden.array(f"{name}_cos"), 1e-6
            yield rotation.sin, golden.array(f"{name}_sin"), 1e-6


def qwen_ids(golden):
    """Position ids, padding included, and the next free position, for each sequence of the file."""
    family = golden["family"]
    tokens_per_second = golden.get("tokens_per_second", None) if family == "qwen25" else None
    golden.read |= {"tokens_per_second", "token_ids"}
    for sequence in golden["sequences"]:
        name = sequence["name"]
        mask = golden.array(f"{name}_attention_mask")[0].bool()
        padding = sequence["left_padding"]
        assert not mask[:padding].any() and mask[padding:].all()
        videos = golden.arrays.get(f"{name}_video_grid_thw", torch.zeros(0, 3, dtype=torch.int64))
        if family == "qwen3":  # every frame apart
            videos = torch.tensor([[1, h, w] for t, h, w in videos.tolist() for _ in range(t)])
        parts = multimodal_parts(
            golden.array(f"{name}_mm_token_type_ids")[0][mask],
            image_grids=golden.arrays.get(f"{name}_image_grid_thw", ()),
            video_grids=videos,
            seconds_per_frame=sequence.get("second_per_grid_ts") if family == "qwen25" else None,
            merge=golden["spatial_merge_size"],
        )
        positions, following = multimodal_positions(
            parts, merge=golden["spatial_merge_size"], tokens_per_second=tokens_per_second, left_padding=padding
        )
        yield positions.T[:, None], golden.array(f"{name}_pos_official"), 0.0
        yield torch.tensor([[following - len(mask)]]), golden.array(f"{name}_delta_official"), 0.0


def qwen_windows(golden):
    merge = golden["spatial_merge_size"]
    window = golden["window_size"] // merge // golden["patch_size"]
    orders, lengths, start = [], [], 0
    for frames, height, width in golden["grid_thw"]:
        order, counts = window_order(frames, height // merge, width // merge, window=window)
        orders.append(order + start)
        lengths.append(counts)
        start += len(order)
    yield torch.cat(orders), golden.array("window_index"), 0.0
    ends = (torch.cat(lengths) * merge**2).cumsum(0)
    yield torch.cat([torch.zeros(1, dtype=torch.int64), ends]), golden.array("cu_window_seqlens"), 0.0


def lucidrains_xpos(golden):
    """The reference centres the decay on half the length of the sequence."""
    q, k = golden.array("q"), golden.array("k")
    length, family = q.shape[-2], Axial(golden["dim"], 1, layout=golden["layout"])
    yield family.frequencies()[0], golden.array("freqs"), 1e-7
    rotation = RotaryEmbedding(family)(grid_positions(length))
    queries, keys = xpos(rotation, torch.arange(length), center=length // 2, scale_base=golden["xpos_scale_base"])
    yield (queries.cos / rotation.cos), golden.array("scale")[:, : family.pairs], 1e-6
    for x, turned, name in ((q, queries, "q_rot"), (k, keys, "k_rot")):
        yield rotate(x, turned), golden.array(name), (2e-6 + 1e-7 * length) * x.abs().max().item() / 3


TABLES = {
    "transformers.modeling_rope_utils ROPE_INIT_FUNCTIONS": transformers_frequencies,
    "meta-llama/llama-models llama3/model.py": meta_frequencies,
    "facebookresearch/dinov3 coordinates": dinov3_coordinates,
    "QwenLM/Qwen3-VL qwen-vl-finetune/qwenvl/data/rope2d.py": qwen_ids,
    "transformers get_vision_window_index": qwen_windows,
    "rotary_embedding_torch use_xpos": lucidrains_xpos,
}
