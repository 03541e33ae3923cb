"""Ops of vision and image models."""
