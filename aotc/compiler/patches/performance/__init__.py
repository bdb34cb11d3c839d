"""Faster kernels than Inductor's own."""
