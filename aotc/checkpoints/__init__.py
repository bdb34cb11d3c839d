"""Checkpoints in safetensors files, read without torch.

`mapped_file` maps one, `safetensors_files` finds those of a checkpoint, `checkpoint_forms` compares dtypes and shapes
with a record.
"""
