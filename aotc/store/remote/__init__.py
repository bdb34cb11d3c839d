"""Stores that are reached over a network: their interface, and what copies bundles from and to them."""
