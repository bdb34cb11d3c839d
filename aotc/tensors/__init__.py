"""Tensors, and what holds them: their layout in memory, which of them overlap, how two results compare,
which tensors a subclass holds. Without torch: `formats`, `strides`."""
