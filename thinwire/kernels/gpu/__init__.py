"""Triton versions of the kernels: CUDA tensors, or CPU tensors under Triton's interpreter (tests)."""
