"""The rotation written twice more, element by element in float64, to hold the library against."""

import math

import torch
from torch import Tensor


def rotate_complex(x: Tensor, positions: Tensor, frequencies: Tensor, pairs: Tensor) -> Tensor:
    """x (..., N, head_dim), positions (N, A), frequencies (A, P), pairs (P, 2): complex multiplication by e^(i angle)."""
    out = x.to(torch.float64).clone()
    angle = positions.to(torch.float64) @ frequencies.to(torch.float64)  # (N, P)
    i, j = pairs.unbind(-1)
    z = torch.complex(out[..., i], out[..., j]) * torch.polar(torch.ones_like(angle), angle)
    out[..., i], out[..., j] = z.real, z.imag
    return out


def rotate_matrix(x: Tensor, positions: Tensor, frequencies: Tensor, pairs: Tensor) -> Tensor:
    """The same by one 2x2 rotation matrix for each token and pair."""
    out = x.to(torch.float64).clone()
    for n in range(positions.shape[0]):
        for p, (i, j) in enumerate(pairs.tolist()):
            angle = sum(float(positions[n, a]) * float(frequencies[a, p]) for a in range(positions.shape[1]))
            c, s = math.cos(angle), math.sin(angle)
            turn = torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
            out[..., n, [i, j]] = out[..., n, [i, j]].clone() @ turn.T
    return out
