"""Buckets with ranges.

- `dynamic_shapes`: ranges for torch.export, and the conditions that it found.
- `range_solver`: proofs of these conditions.
- `bucket_proposals`: the edit to propose where a range is refused.
"""
