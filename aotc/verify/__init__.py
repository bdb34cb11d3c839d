"""`aotc verify`: compares an artifact with the model in eager, in fresh processes."""
