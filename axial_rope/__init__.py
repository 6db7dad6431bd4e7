"""Rotary position embeddings for vision transformers."""
