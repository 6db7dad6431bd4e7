"""What compilers, exporters and tracers make of rotations: one graph, real arithmetic, the same numbers."""

import copy

import pytest
import timm
import torch
import torch._dynamo.testing
from torch import nn

from axial_rope import (
    Axial,
    Mixed,
    RotaryAttention,
    RotaryEmbedding,
    Rotation,
    grid_positions,
    make_rotary,
    rotate,
    rotate_packed,
)

FAMILIES = {"axial": Axial(16, base=100.0), "mixed": Mixed(16, heads=3, blocks=2), "half": Axial(16, layout="half")}
quiet = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::torch.jit.TracerWarning"
)


def a_vit(family, **options):
    torch.manual_seed(0)
    vit = timm.create_model(
        "vit_tiny_patch16_224", embed_dim=48, depth=2, num_heads=3, img_size=64, num_classes=5, **options
    )
    return make_rotary(vit, family).eval()


class Attend(nn.Module):
    """Queries and keys of a grid, in the way that a user would write it."""

    def __init__(self, family):
        super().__init__()
        self.rope, self.attention = RotaryEmbedding(family), RotaryAttention(48, heads=3)

    def forward(self, x):
        positions = grid_positions(x.shape[1], x.shape[2])
        return self.attention(x.flatten(1, 2), rotation=self.rope(positions))


def ulps(a, b):
    """Largest difference, in units in the last place of the largest channel of the head."""
    step = torch.finfo(a.dtype).eps * b.double().abs().amax(-1, keepdim=True)
    return ((a.double() - b.double()).abs() / step).max().item()


@pytest.mark.slow
def test_inductor_agrees_with_eager_to_a_unit_in_the_last_place():
    torch._dynamo.reset()
    rotations = [RotaryEmbedding(Axial(16, layout=layout))(grid_positions(2, 3)) for layout in ("interleaved", "half")]
    tensors = [
        torch.randn(*shape).to(dtype).requires_grad_()
        for dtype in (torch.float32, torch.bfloat16)
        for shape in ((2, 3, 7, 16), (2, 7, 144))
    ]

    def doors(tensors, tables):
        out = []
        for rotation, (cos, sin) in zip(rotations, tables, strict=True):
            turned = Rotation(cos, sin, 16, rotation.layout, rotation.split)
            for x, qkv in zip(tensors[::2], tensors[1::2], strict=True):
                out += [rotate(x, turned, prefix_tokens=1)]
                out += rotate_packed(qkv, turned, 3, prefix_tokens=1, overwrite=True)
        return out

    tables = [(rotation.cos, rotation.sin) for rotation in rotations]
    results = []
    for function in (doors, torch.compile(doors, fullgraph=True)):
        out = function(tensors, tables)
        gradients = torch.autograd.grad(sum(part.float().square().sum() for part in out[::4]), tensors[::2])
        results.append([*out, *gradients])
    for index, (eager, fused) in enumerate(zip(*results, strict=True)):
        assert fused.dtype == eager.dtype
        assert ulps(fused, eager) <= (1 if index < len(out) else 2)  # the gradients are sums over both layouts


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # PyTorch's, for any tensor that isn't a leaf
def test_a_compiled_function_takes_a_learned_rotation():
    torch._dynamo.reset()
    rope = RotaryEmbedding(Mixed(16, heads=3, blocks=2))
    rotation = rope.per_block(grid_positions(2, 3), 2)[1]
    x = torch.randn(2, 3, 7, 16, dtype=torch.float64)

    def turn(x, rotation):
        return rotate(x, rotation.inverse(), prefix_tokens=1).square().cumsum(-1).sum()

    gradients = [
        torch.autograd.grad(function(x, rotation), rope.frequencies, retain_graph=True)[0]
        for function in (turn, torch.compile(turn, backend="aot_eager", fullgraph=True))
    ]
    assert gradients[0].abs().max() > 0.1
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_one_graph_for_any_grid(name):
    torch._dynamo.reset()
    family = FAMILIES[name]
    module = Attend(Mixed(16, heads=3) if name == "mixed" else family)
    twin = copy.deepcopy(module)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    for height, width in ((3, 5), (7, 4), (6, 9)):
        x = torch.randn(2, height, width, 48)
        ours, theirs = compiled(x), twin(x)
        assert (ours - theirs).abs().max() < 1e-6
        ours.square().sum().backward(), theirs.square().sum().backward()
    for (key, parameter), other in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert (parameter.grad - other.grad).norm() <= 1e-5 * other.grad.norm() + 1e-6, key
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_a_compiled_vit_is_one_graph():
    """timm's patch embedding has the image size in its error message, so that it is compiled again for another one."""
    torch._dynamo.reset()
    vit = a_vit(FAMILIES["mixed"])
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(vit, fullgraph=True, backend=counter)
    x = torch.randn(2, 3, 48, 80)
    for _ in range(2):
        assert (compiled(x) - vit(x)).abs().max() < 2e-6
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_export_with_dynamic_grid(name):
    vit, free = a_vit(FAMILIES[name]), torch.export.Dim.AUTO
    program = torch.export.export(vit, (torch.randn(2, 3, 64, 64),), dynamic_shapes=({0: free, 2: free, 3: free},))
    for size in ((64, 64), (48, 80), (80, 32)):
        x = torch.randn(3, 3, *size)
        assert (program.module()(x) - vit(x)).abs().max() < 1e-6
    values = [node.meta.get("val") for node in program.graph.nodes]
    assert not any(isinstance(value, torch.Tensor) and value.is_complex() for value in values)


def rotation_ops(program):
    return {node.target.__name__.split(".")[0] for node in program.graph.nodes if node.op == "call_function"}


def test_the_rotation_is_exported_as_simple_arithmetic():
    class Turn(nn.Module):
        def forward(self, x, cos, sin):
            return rotate(x, Rotation(cos, sin, 16), prefix_tokens=1)

    arguments = torch.randn(2, 3, 7, 16, dtype=torch.bfloat16), torch.randn(6, 8), torch.randn(6, 8)
    program = torch.export.export(Turn(), arguments).run_decompositions()
    simple = {"mul", "add", "sub", "neg", "cat", "stack", "view", "reshape", "select", "slice", "_to_copy", "unsqueeze"}
    simple |= {"alias", "squeeze", "_assert_tensor_metadata"}
    assert rotation_ops(program) <= simple
    sizes = [node.meta["val"].numel() for node in program.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    assert 0 not in sizes
    casts = [node for node in program.graph.nodes if "_to_copy" in str(node.target)]
    assert {node.kwargs["dtype"] for node in casts} == {torch.float32, torch.bfloat16}


def test_make_fx_sees_no_complex_numbers():
    rotation = RotaryEmbedding(Axial(16))(grid_positions(2, 3))
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda qkv: rotate_packed(qkv, rotation, 3, overwrite=True))(
        torch.randn(2, 6, 144)
    )
    assert "complex" not in graph.code and "set_" not in graph.code


@quiet
@pytest.mark.parametrize("name", FAMILIES)
def test_symbolic_trace_and_jit_trace_of_a_vit(name):
    vit = a_vit(FAMILIES[name])
    x = torch.randn(2, 3, 64, 64)
    traced = torch.fx.symbolic_trace(vit)
    assert torch.equal(traced(x), vit(x))
    other = torch.randn(1, 3, 48, 80)
    assert torch.equal(traced(other), vit(other))
    assert set(dict(traced.named_parameters())) == set(dict(vit.named_parameters()))
    traced(x).sum().backward()
    assert all(parameter.grad is not None for parameter in traced.parameters())
    assert torch.allclose(torch.jit.trace(vit, x)(x), vit(x), atol=1e-6)


def test_symbolic_trace_with_norms_and_without_position_embeddings():
    for options in ({"qk_norm": True}, {"pos_embed": "none"}, {"no_embed_class": True, "reg_tokens": 2}):
        vit = a_vit(FAMILIES["axial"], **options)
        x = torch.randn(2, 3, 48, 80)
        assert torch.equal(torch.fx.symbolic_trace(vit)(x), vit(x))


@quiet
@pytest.mark.slow
@pytest.mark.parametrize("module", ["vit", "attention"])
def test_onnx_runs_elsewhere(module, tmp_path):
    pytest.importorskip("onnxscript")
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    model, x = (
        (a_vit(FAMILIES["mixed"]), torch.randn(2, 3, 64, 80))
        if module == "vit"
        else (Attend(FAMILIES["half"]).eval(), torch.randn(2, 3, 5, 48))
    )
    path = tmp_path / "model.onnx"
    torch.onnx.export(model, (x,), path, dynamo=True, verbose=False)
    loaded = onnx.load(path)
    onnx.checker.check_model(loaded)
    types = {value.type.tensor_type.elem_type for value in loaded.graph.value_info}
    assert not types & {onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128}
    assert not {node.op_type for node in loaded.graph.node} & {"If", "Tile", "Loop", "Range"}
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert (torch.from_numpy(out) - model(x)).abs().max() < 1e-4


def test_a_pad_mask_does_not_break_the_graph():
    torch._dynamo.reset()
    attention, rope = RotaryAttention(48, heads=3), RotaryEmbedding(Axial(16))
    mask = torch.tensor([True] * 5 + [False]).view(1, 1, 1, 6)

    def attend(x, mask):
        return attention(x, rotation=rope(grid_positions(2, 3)), mask=mask)

    x = torch.randn(2, 6, 48)
    assert torch.allclose(torch.compile(attend, fullgraph=True, backend="eager")(x, mask), attend(x, mask), atol=1e-6)


def test_hooks_of_the_projection_see_what_it_gave():
    vit, seen = a_vit(FAMILIES["axial"]), []
    layer = vit.blocks[0].attn.qkv
    x = torch.randn(2, 3, 64, 64)
    plain = vit(x)
    handle = layer.register_forward_hook(lambda module, arguments, output: seen.append((arguments[0].detach(), output)))
    assert torch.equal(vit(x), plain)
    assert torch.equal(seen[0][1], nn.functional.linear(seen[0][0], layer.weight, layer.bias))
    handle.remove()
    outputs = []
    layer.forward = lambda x: outputs.append(nn.functional.linear(x, layer.weight, layer.bias)) or outputs[-1]
    vit(x)
    kept = outputs[0].clone()
    assert torch.equal(vit(x), plain) and torch.equal(outputs[0], kept)


@pytest.mark.parametrize("name", FAMILIES)
def test_checkpointed_vit_learns_the_same(name):
    vit = a_vit(FAMILIES[name]).train()
    twin = copy.deepcopy(vit)
    twin.set_grad_checkpointing()
    x = torch.randn(2, 3, 48, 64)
    for model in (vit, twin):
        model(x).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(vit.parameters(), twin.parameters(), strict=True))
    copy.deepcopy(twin)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_buffer_is_complex_and_no_output_is_wide(name):
    vit = a_vit(FAMILIES[name])
    assert not any(buffer.is_complex() for buffer in vit.buffers())
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert copy.deepcopy(vit).to(dtype)(torch.randn(1, 3, 48, 64, dtype=dtype)).dtype == dtype
