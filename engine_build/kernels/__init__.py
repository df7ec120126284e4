"""Paged attention on NVIDIA GPUs: Triton kernels, and compiling them ahead of time."""
