"""Mends of what Inductor gets wrong."""
