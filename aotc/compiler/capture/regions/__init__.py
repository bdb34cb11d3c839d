"""Submodules that are compiled once for all their equal instances.

- `equal_regions`: finds equal submodules, and the inputs that they are called with, while the build plans.
- `suggest_regions`: `aotc build --suggest-regions`.
"""
