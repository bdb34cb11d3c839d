"""The rows of a call table, as Python evaluates them: without torch, for whatever makes tensors.

- `bind`: from arguments to leaves. `dispatch`: from sizes to a plan, by `rules` where no bucket is equal.
- `obstacles`: why sizes keep a call out of a bucket. `refusals`: the words of the other rows. `values`: an argument in
  words. `misses`: all of them together, as an error.
"""
