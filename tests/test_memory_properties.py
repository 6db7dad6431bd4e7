"""What must be true of memory attention whatever its weights: places, times, gaps, precision, compiling, exporting."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from axial_rope import (
    Axial,
    Memory,
    MemoryAttention,
    MemoryAttentionLayer,
    MemoryCrossAttention,
    Mixed,
    grid_positions,
    memory_from_frames,
    pool_frame,
)

TOLERANCE = {"rtol": 0, "atol": 3e-6}


def block(**options):
    torch.manual_seed(0)
    options = {"dim": 16, "memory_dim": 8, "depth": 2, "heads": 2, "mlp_dim": 24} | options
    attend = MemoryAttention(**options).eval()
    with torch.no_grad():  # sharper than at the start, so that positions show
        for layer in attend.layers:
            for attention in (layer.self_attention, layer.cross_attention):
                attention.q_proj.weight *= 3
                attention.k_proj.weight *= 3
    return attend


def frames(grids, batch=2, channels=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, h * w, channels, generator=generator) for h, w in grids]


def memory_of(grids, ages=None, **options):
    return memory_from_frames(frames(grids), grids=grids, ages=ages or list(range(len(grids), 0, -1)), **options)


def picture(h, w, channels, batch=2, seed=2):
    return torch.randn(batch, h, w, channels, generator=torch.Generator().manual_seed(seed))


# -- places --


def test_grids_of_one_size_differ():
    """Pitfall D3: 24 and 48 tokens as any of their grids, none of them guessed."""
    attend = block()
    for grids in ([(6, 8), (8, 6), (4, 12)], [(4, 6), (2, 12)], [(2, 8), (8, 2), (4, 4)]):
        cells = grids[0][0] * grids[0][1]
        x, tokens = picture(1, cells, 16)[:, 0], picture(1, cells, 8)[:, 0]
        outs = [attend(x, Memory(tokens, ages=torch.ones(cells)), grid=grid) for grid in grids]
        for index, out in enumerate(outs):
            for other in outs[:index]:
                assert (out - other).abs().max() > 1e-3


@pytest.mark.parametrize("grid", [(6, 8), (8, 6), (4, 12), (7, 13), (1, 5)])
def test_transposing_frame_and_memory_commutes(grid):
    """With the frequencies of rows and columns exchanged: rows are rows and columns are columns, through the whole block."""
    h, w = grid
    upright = block(family=Axial(8, "yx", 100.0))
    lying = copy.deepcopy(upright)
    lying.rope = block(family=Axial(8, "xy", 100.0)).rope
    x, tokens = picture(h, w, 16), picture(h, w, 8)
    ages = torch.ones(h * w)
    out = upright(x.flatten(1, 2), Memory(tokens.flatten(1, 2), ages=ages), grid=(h, w))
    other = lying(x.transpose(1, 2).flatten(1, 2), Memory(tokens.transpose(1, 2).flatten(1, 2), ages=ages), grid=(w, h))
    torch.testing.assert_close(other.unflatten(1, (w, h)).transpose(1, 2).flatten(1, 2), out, **TOLERANCE)


@pytest.mark.parametrize("family", ["axial", "axial+time", Mixed(8, heads=2, blocks=2), Mixed(8, heads=2)], ids=str)
def test_only_differences_of_places_and_times_matter(family, monkeypatch):
    """The relative property through the whole block: everything moved by the same rows and columns gives the same."""
    attend = block(family=family)
    x, grid = picture(3, 5, 16).flatten(1, 2), (3, 5)
    memory = memory_of([(3, 5), (3, 5)])
    out = attend(x, memory, grid=grid)
    shift = torch.tensor([2.0, -7.0])
    monkeypatch.setattr("axial_rope.memory.attention.grid_positions", lambda *size, device: grid_positions(*size) + shift)
    torch.testing.assert_close(attend(x, replace(memory, positions=memory.positions + shift), grid=grid), out, **TOLERANCE)
    assert (attend(x, memory, grid=grid) - out).abs().max() > 1e-3


def test_by_hand_one_layer():
    """The layer written with loops over tokens and pairs, on grids that aren't square, with pointers and ages."""
    attend = block(depth=1, heads=1, dim=16, family=Axial(16, "tyx", 10.0, (2, 3, 3)))
    layer, memory = attend.layers[0], memory_of([(2, 3), (1, 3)], pointers=picture(1, 2, 8)[:, 0])
    x = picture(2, 3, 16).flatten(1, 2)
    frequencies = [[10.0 ** (-i / n) for i in range(n)] for n in (2, 3, 3)]

    def turned(vector, place):
        out, pair = vector.clone(), 0
        for coordinate, band in zip(place, frequencies, strict=True):
            for frequency in band:
                a, b = vector[2 * pair], vector[2 * pair + 1]
                angle = torch.tensor(coordinate * frequency)
                out[2 * pair] = a * angle.cos() - b * angle.sin()
                out[2 * pair + 1] = b * angle.cos() + a * angle.sin()
                pair += 1
        return out

    def attention(module, queries, keys, places, key_places):
        q = [turned(v, p) for v, p in zip(module.q_proj(queries), places, strict=True)]
        k = [turned(v, p) for v, p in zip(module.k_proj(keys), key_places, strict=True)]
        scores = torch.stack([torch.stack([a @ b for b in k]) for a in q]) / 4
        return module.out_proj(scores.softmax(-1) @ module.v_proj(keys))

    here = [(0.0, float(y), float(x)) for y in range(2) for x in range(3)]
    # the first frame is 2 old on its own grid, the second 1 old with a single row across both rows, the pointers nowhere
    there = [(-2.0, y, x) for _, y, x in here] + [(-1.0, 0.5, float(x)) for x in range(3)] + [(0.0, 0.0, 0.0)] * 2
    for row in range(2):
        keys = torch.cat([memory.tokens[row], memory.pointers[row]])
        y = x[row]
        y = y + attention(layer.self_attention, layer.norm1(y), layer.norm1(y), here, here)
        y = y + attention(layer.cross_attention, layer.norm2(y), keys, here, there)
        y = y + layer.linear2(layer.linear1(layer.norm3(y)).relu())
        torch.testing.assert_close(attend(x, memory, grid=(2, 3))[row], attend.norm(y), rtol=0, atol=1e-5)


def test_memory_of_another_resolution():
    """Content pooled 2 x 2 is found at the middle of what it pools: a query looks at the stored cell that covers it."""
    rope = block(depth=1, heads=1, dim=64, family=Axial(64, "yx", 30.0)).rope
    fine = rope(grid_positions(8, 12))
    memory = memory_from_frames([torch.zeros(1, 24, 8)], grids=[(4, 6)])
    coarse = rope(memory.positions_on((8, 12)))
    scores = fine.cos @ coarse.cos.T + fine.sin @ coarse.sin.T  # of equal contents: the sum of cos(angle difference)
    cell = torch.arange(96)
    expected = cell // 12 // 2 * 6 + cell % 12 // 2
    assert torch.equal(scores.argmax(1), expected)
    assert memory.positions_on((4, 6)).equal(grid_positions(4, 6))  # its own grid: integers, exactly


def test_rows_and_columns_scale_apart():
    """Pitfall E8: a memory of 4 x 4 read on 4 x 8 moves in columns only."""
    places = memory_of([(4, 4)]).positions_on((4, 8)).view(4, 4, 2)
    assert places[:, 0, 0].tolist() == [0, 1, 2, 3]
    assert places[0, :, 1].tolist() == [0.5, 2.5, 4.5, 6.5]


def test_pooled_token_weighs_as_much_as_what_it_stands_for():
    """Four equal tokens pooled into one with count 4 give what the four give, where nothing is rotated."""
    attend = block(family=None)
    token, others = picture(1, 1, 8)[:, 0].expand(-1, 4, -1), picture(2, 3, 8, seed=5).flatten(1, 2)
    x = picture(2, 2, 16).flatten(1, 2)
    pooled, grid, count = pool_frame(token, (2, 2), 2)
    assert (grid, count) == ((1, 1), 4.0)
    full = attend(x, Memory(torch.cat([token, others], 1), positions=torch.zeros(10, 2)), grid=(2, 2))
    counts = torch.tensor([count] + [1.0] * 6)
    short = Memory(torch.cat([pooled, others], 1), positions=torch.zeros(7, 2), counts=counts)
    torch.testing.assert_close(attend(x, short, grid=(2, 2)), full, **TOLERANCE)
    assert (attend(x, replace(short, counts=None), grid=(2, 2)) - full).abs().max() > 1e-3


# -- times --


@pytest.mark.parametrize("options", [{}, {"family": "axial", "age_slots": 7}], ids=["rotary", "embedding"])
def test_order_of_stored_frames_means_nothing_and_their_times_do(options):
    """Pitfall I5: oldest first and newest first are one memory, if each frame keeps its time."""
    attend, x = block(**options), picture(3, 4, 16).flatten(1, 2)
    stored = frames([(3, 4)] * 3)

    def out(order, times):
        memory = memory_from_frames(
            [stored[i] for i in order], grids=[(3, 4)] * 3, ages=[times[i] for i in order], slots=[times[i] for i in order]
        )
        return attend(x, memory, grid=(3, 4))

    torch.testing.assert_close(out([2, 0, 1], [3, 2, 1]), out([0, 1, 2], [3, 2, 1]), **TOLERANCE)
    assert (out([0, 1, 2], [1, 2, 3]) - out([0, 1, 2], [3, 2, 1])).abs().max() > 1e-4


def test_more_frames_than_age_slots():
    """Pitfall I6: what is older than the table shares the oldest's row; slot 0 is the last row."""
    attend, x = block(family="axial", age_slots=3), picture(3, 4, 16).flatten(1, 2)
    deep, table = memory_of([(3, 4)] * 9, slots=[0, 8, 7, 6, 5, 4, 3, 2, 1]), attend.age_embedding
    rows = torch.cat([row.expand(12, -1) for row in (table[2], *[table[1]] * 7, table[0])])
    by_hand = replace(deep, slots=torch.zeros_like(deep.slots), key_position=rows - table[2])
    torch.testing.assert_close(attend(x, deep, grid=(3, 4)), attend(x, by_hand, grid=(3, 4)), **TOLERANCE)


# -- gaps --


@pytest.mark.parametrize("options", [{}, {"pointer_span": 15.0, "sine": ("input", "self", "queries", "keys")}])
def test_masked_keys_are_absent(options):
    attend, x = block(**options), picture(3, 4, 16).flatten(1, 2)
    pointers, ages = picture(1, 3, 16)[:, 0], torch.tensor([1.0, 2.0, 3.0])
    stored = frames([(3, 4)] * 3)

    def memory(kept, pointer):
        return memory_from_frames(
            [stored[i] for i in kept],
            grids=[(3, 4)] * len(kept),
            ages=[3 - i for i in kept],
            pointers=pointers[:, pointer],
            pointer_ages=ages[pointer],
        )

    mask = torch.tensor([[True, False, True], [False, True, True]]).repeat_interleave(12, 1)
    pointer_mask = torch.tensor([[True, True, False], [True, True, True]])
    gaps = replace(memory([0, 1, 2], slice(0, 3)), mask=mask, pointer_mask=pointer_mask)
    out = attend(x, gaps, grid=(3, 4))
    torch.testing.assert_close(out[0], attend(x, memory([0, 2], slice(0, 2)), grid=(3, 4))[0], **TOLERANCE)
    torch.testing.assert_close(out[1], attend(x, memory([1, 2], slice(0, 3)), grid=(3, 4))[1], **TOLERANCE)


def test_averages_of_narrow_memory_are_the_attention(monkeypatch):
    """Without gradients the memory may be averaged before it is projected: the same with gaps, heads and no bias."""
    attend = block(dim=32, heads=2, pointer_span=15.0)  # heads of 16, memory of 8 channels
    x, pointers = picture(3, 4, 32).flatten(1, 2), picture(1, 3, 32)[:, 0]
    mask = torch.tensor([[True] * 12 + [False] * 12, [False, True] * 12])
    memory = replace(memory_of([(3, 4)] * 2, pointers=pointers, pointer_ages=[1, 2, 3]), mask=mask)
    used = []
    average = MemoryCrossAttention._average_then_project
    monkeypatch.setattr(MemoryCrossAttention, "_average_then_project", lambda *a: used.append(1) or average(*a))
    for stored in (memory, replace(memory, mask=None)):
        expected = attend(x, stored, grid=(3, 4))
        assert not used
        with torch.no_grad():
            torch.testing.assert_close(attend(x, stored, grid=(3, 4)), expected, rtol=0, atol=5e-6)
        assert len(used) == 2
        used.clear()


@pytest.mark.parametrize("parts", [(0, 0), (0, 2), (2, 0), (1, 2)])
def test_nothing_to_look_at_is_legal(parts):
    """Pitfall I2: zero frames, zero pointers, zero of both; finite values and gradients."""
    count, pointers = parts
    attend, x = block(pointer_span=15.0), picture(3, 4, 16).flatten(1, 2).requires_grad_()
    memory = Memory(
        picture(1, 12 * count, 8)[:, 0] if count else torch.zeros(2, 0, 8),
        ages=torch.ones(12 * count),
        pointers=picture(1, pointers, 16)[:, 0] if pointers else torch.zeros(2, 0, 16),
        pointer_ages=torch.ones(pointers),
    )
    out = attend(x, memory, grid=(3, 4))
    out.square().sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all() and x.grad.abs().max() > 0
    if not count and not pointers:
        assert torch.equal(out, x + attend.no_memory)
        assert torch.equal(out, attend(x, grid=(3, 4)))


def test_a_sample_without_any_key_is_passed_by():
    attend, x = block(), picture(3, 4, 16).flatten(1, 2).requires_grad_()
    memory = replace(memory_of([(3, 4)]), mask=torch.tensor([[True], [False]]).expand(2, 12))
    out = attend(x, memory, grid=(3, 4))
    out.square().sum().backward()
    assert torch.equal(out[1], (x + attend.no_memory)[1])
    assert all(p.grad is None or p.grad.isfinite().all() for p in [x, *attend.parameters()])


def test_gradcheck_with_pointers_and_gaps():
    attend = block(depth=1, pointer_span=15.0, activation="gelu", age_slots=3).double()
    memory = memory_of([(2, 2), (1, 2)], slots=[0, 1])
    mask = torch.tensor([[True] * 4 + [False] * 2, [False] * 4 + [True] * 2])
    x, tokens, pointers = (t.double().requires_grad_() for t in (picture(2, 2, 16).flatten(1, 2), memory.tokens,
                                                                picture(1, 2, 16)[:, 0]))  # fmt: skip

    def out(x, tokens, pointers):
        stored = replace(memory, tokens=tokens, pointers=pointers, mask=mask, pointer_ages=torch.tensor([1.0, 4.0]))
        return attend(x, stored, grid=(2, 2))

    assert torch.autograd.gradcheck(out, (x, tokens, pointers))


# -- precision, state --


def test_low_precision():
    """bfloat16 throughout, positions in float32: near the float32 result even far from the origin and long ago."""
    attend = block()
    x = picture(3, 4, 16).flatten(1, 2)
    memory = memory_of([(3, 4)] * 2, ages=[1000.0, 1.0])
    expected = attend(x, memory, grid=(3, 4))
    half = copy.deepcopy(attend).bfloat16()
    out = half(x.bfloat16(), replace(memory, tokens=memory.tokens.bfloat16()), grid=(3, 4))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(attend(x, memory, grid=(3, 4)).float(), expected, rtol=0, atol=0.1)


def test_nothing_has_the_size_of_a_grid_and_forward_changes_nothing():
    """Pitfalls D7, E1, I4: any sizes, in any order; the first again, bit by bit."""
    attend = block()
    state = {name: tensor.clone() for name, tensor in attend.state_dict().items()}
    names = dict(attend.rope.__dict__), {name: id(value) for name, value in attend.__dict__.items()}
    x = picture(7, 13, 16).flatten(1, 2)
    first = attend(x, memory_of([(7, 13)]), grid=(7, 13))
    for grid in ((3, 5), (1, 2), (16, 9)):
        attend(picture(*grid, 16).flatten(1, 2), memory_of([grid]), grid=grid)
    assert torch.equal(attend(x, memory_of([(7, 13)]), grid=(7, 13)), first)
    assert state.keys() == attend.state_dict().keys()
    assert names == (attend.rope.__dict__, {name: id(value) for name, value in attend.__dict__.items()})
    assert torch.equal(pickle.loads(pickle.dumps(attend))(x, memory_of([(7, 13)]), grid=(7, 13)), first)


def test_dropout_is_where_sam2_has_it():
    layer = MemoryAttentionLayer(8, 8, dropout=1.0, mlp_dim=8).train()
    x = torch.randn(1, 4, 8)
    assert torch.equal(layer(x, torch.randn(1, 4, 8)), x)  # all three residuals
    assert (layer.self_attention.dropout, layer.cross_attention.dropout) == (1.0, 1.0)


# -- compiling and exporting --


class Stacked(nn.Module):
    """The block on plain tensors, as a program that exports it would call it: stored frames (B, T, h * w, C), ages (T,)."""

    def __init__(self, attend, grid):
        super().__init__()
        self.attend, self.grid = attend, grid

    def forward(self, x, stored, ages, pointers, pointer_ages):
        cells = self.grid[0] * self.grid[1]
        memory = Memory(
            stored.flatten(1, 2),
            ages=ages.repeat_interleave(cells),
            pointers=pointers,
            pointer_ages=pointer_ages,
        )
        return self.attend(x, memory, grid=self.grid)


def stacked_inputs(count, pointers=3):
    return (
        picture(3, 5, 16).flatten(1, 2),
        picture(count, 15, 8, seed=count),
        torch.arange(count, 0, -1).float(),
        picture(1, pointers, 16, seed=7)[:, 0],
        torch.arange(pointers).float(),
    )


@pytest.mark.slow
def test_compiles_once_for_any_number_of_frames():
    """Pitfall I7: 1 to 7 frames and 2 to 16 pointers with at most two compilations, and no graph break."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    block_ = Stacked(block(depth=1, pointer_span=15.0), (3, 5)).eval()
    compiled = torch.compile(block_, backend=count, fullgraph=True, dynamic=True)
    for number in range(1, 8):
        inputs = stacked_inputs(number, pointers=2 * number + 2)
        torch.testing.assert_close(compiled(*inputs), block_(*inputs), **TOLERANCE)
    assert len(graphs) <= 2
    for graph in graphs:  # pitfalls C1, C5: no complex number on the way
        for node in graph.graph.nodes:
            value = node.meta.get("example_value")
            assert not (isinstance(value, torch.Tensor) and value.is_complex()), node


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the exporter, about itself
def test_runs_in_onnxruntime(tmp_path):
    import onnx
    import onnxruntime

    model, inputs = Stacked(block(depth=1, pointer_span=15.0), (3, 5)).eval(), stacked_inputs(3)
    frames_, pointers = torch.export.Dim("frames", min=2, max=64), torch.export.Dim("pointers", min=2, max=64)
    path = str(tmp_path / "block.onnx")
    names = ["x", "stored", "ages", "pointers", "pointer_ages"]
    torch.onnx.export(
        model,
        inputs,
        path,
        dynamo=True,
        input_names=names,
        dynamic_shapes=({}, {1: frames_}, {0: frames_}, {1: pointers}, {0: pointers}),
        verbose=False,
    )
    graph = onnx.load(path).graph
    complex_types = (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128)
    assert not [value for value in graph.value_info if value.type.tensor_type.elem_type in complex_types]
    session = onnxruntime.InferenceSession(path)
    for number in (2, 3, 7):
        inputs = stacked_inputs(number, pointers=number + 1)
        out = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)})[0]
        torch.testing.assert_close(torch.from_numpy(out), model(*inputs), rtol=0, atol=1e-4)
