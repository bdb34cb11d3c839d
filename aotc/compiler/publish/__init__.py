"""From compiled units to the artifacts that a bundle names."""
