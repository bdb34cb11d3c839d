"""Equal builds give equal bytes."""
