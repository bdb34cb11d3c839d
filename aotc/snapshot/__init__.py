"""The state of a module and of the process: recorded at build, taken again at load, and compared.

A capture bakes in more than shapes: the module's Python attributes (`self.heads`), its classes' code, tied weights, and
the modes of the process. Each is plain data here: `attributes`, `sources`, `tensors`, `modes`.
"""
