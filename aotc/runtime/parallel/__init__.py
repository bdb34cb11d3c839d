"""Code of one rank of several: `aotc.load(…, ranks=aotc.Ranks(GROUP))`. Imported only where `ranks` is given.

- `ranks`: the process group of a load. Ranks tell each other what they load, and wait for one another for a limited
  time, through the group's store: no collective runs before all have the same code.
- `watching`: a call that waits for a rank which has failed, or is gone, is ended by aborting the group.
- `slices`: a rank's part of a checkpoint of the whole model.
- `rank_call`: `CompiledCall` with both. `graph_release`: graphs that hold collectives go before their group does.
"""
