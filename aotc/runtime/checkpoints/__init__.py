"""Weights that come from a checkpoint instead of a module, and other weights in the place of those that are served."""
