"""Memory for video models: attention from a frame to stored frames, and the bank that keeps them.

    tokens       what a memory holds: frames, grids, ages, pointers
    layer        one layer: self-attention, cross-attention to the memory, MLP
    attention    MemoryAttention, the layers and the positions of everything they look at
    selection    which frames are read: a pure function of integers
    checks       what a bank refuses
    gather       stored tokens of several objects brought together
    bank         MemoryBank, which writes, reads and lets go

Attention knows nothing of banks, and a bank nothing of models; a `Memory` goes from the one to the other.
"""

from axial_rope.memory.attention import MemoryAttention
from axial_rope.memory.bank import MemoryBank
from axial_rope.memory.layer import MemoryAttentionLayer, MemoryCrossAttention
from axial_rope.memory.selection import Selection, select_frames
from axial_rope.memory.tokens import Memory, memory_from_frames, pool_frame, sine_positions

__all__ = [
    "Memory",
    "MemoryAttention",
    "MemoryAttentionLayer",
    "MemoryBank",
    "MemoryCrossAttention",
    "Selection",
    "memory_from_frames",
    "pool_frame",
    "select_frames",
    "sine_positions",
]
