"""Tensors that leave the service, and how they are read."""

from typing import Final

__all__ = ["MEDIA_TYPE"]

MEDIA_TYPE: Final = "application/x-safetensors"
"""Of a body of tensors, and of the `Accept` that asks for one."""
