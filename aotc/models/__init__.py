"""From a model's part of a manifest to its module, its inputs and its calls."""
