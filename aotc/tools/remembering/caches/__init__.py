"""Calls with a cache of transformers.

- `cache_arguments`: which calls these are, and what becomes of the caller's cache.
- `cache_structure`: a cache as data and tensors. `cache_module`: the module that takes it so.
"""
