"""Targets `tensorrt` and `tensorrt-rtx`: one builder for both, the module it speaks to is a handle. See README.md."""
