"""Numba versions of the kernels: all cores, no GIL, compiled once and kept on disk."""
