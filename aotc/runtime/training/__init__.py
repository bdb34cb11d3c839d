"""Code for training. Imported only for a model that was built with `train: true`.

- `training_library`: the libraries of a variant's forward and backward, as one function of autograd.
- `results`: several results of one call, of which one may depend on another.
- `hooks`: hooks of parameters that get no gradient.
- `step`: `aotc.TrainingStep`, forward, backward and optimizer in one call. `step_graphs`: such steps as CUDA graphs.
"""
