"""What the rotation costs, against what others' does and against none: ``python -m benchmarks``."""
