"""The Triton kernels: in the interpreter everywhere, and on a GPU where there is one."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

CASES = Path(__file__).with_name("triton_cases.py")


def run(device, start, step, **environment):
    """In a process of its own, since Triton decides on import whether it interprets."""
    done = subprocess.run(
        [sys.executable, str(CASES), device, str(start), str(step)],
        capture_output=True,
        text=True,
        cwd=CASES.parents[1],
        env={**os.environ, "PYTHONPATH": str(CASES.parents[1]), **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_interpreted_kernels_for_some_sizes():
    assert run("cpu", 0, 7, TRITON_INTERPRET="1") == "checked 11 sizes\n"


@pytest.mark.slow
def test_interpreted_kernels_for_all_sizes():
    with ThreadPoolExecutor() as pool:  # each half in a process
        halves = pool.map(lambda start: run("cpu", start, 2, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"), range(2))
    assert list(halves) == ["checked 36 sizes\n"] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_on_the_gpu():
    assert run("cuda", 0, 1, TRITON_INTERPRET="0") == "checked 72 sizes\n"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with 20 GB free")
@pytest.mark.slow
def test_more_elements_than_an_int32_counts():
    from axial_rope import Axial, RotaryEmbedding, grid_positions, rotate_packed

    rotation = RotaryEmbedding(Axial(72)).cuda()(grid_positions(9, 10))
    qkv = torch.randn(7200, 90, 3 * 16 * 72, device="cuda", dtype=torch.bfloat16)
    last = qkv[-1:].clone()
    q = rotate_packed(qkv, rotation, 16, overwrite=True)[0]
    assert torch.equal(q[-1:], rotate_packed(last, rotation, 16)[0])
