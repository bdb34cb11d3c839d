"""The training step: from a captured graph to the libraries of its forward and its backward.

- `training_compile`: both libraries of a unit.
- `halves`: the joint graph of forward and backward, by AOTAutograd, and its partition into two graphs.
- `backward_sizes`: symbolic sizes that the backward needs, read from its tensors.
"""
