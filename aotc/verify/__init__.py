"""Proof that an artifact computes what the model computes: in fresh processes, against eager."""
