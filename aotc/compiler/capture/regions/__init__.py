"""Submodules that are compiled once for all their equal instances.

- `equal_regions`: finds equal submodules, and the inputs that they are called with, while the build plans.
- `padded_calls`: of a model whose inputs are padded, what its own calls are padded to, and how results are cropped.
- `suggest_regions`: `aotc build --suggest-regions`.
"""
