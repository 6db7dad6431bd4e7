"""Assembled models that use axial_rope."""
