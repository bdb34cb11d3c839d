"""The loader: from a reference to a callable, with no compiler in the process.

In the order in which a load and then a call meet the modules:

- `prepare`: the half of a load that needs no device, before a fork.
- `load`: the stages, over one value of `options`. `find`: the bundle, with `fetch` for a remote reference. `select`:
  the artifact of this machine, `attested` where it has to have passed `aotc verify`. `attach` loads for a pipeline.
- `state`: the module, checked, and its tensors; `checkpoints` where there is no module. `libraries`: opened.
- `compiled` is what a load returns; `call` runs it: `aotc.call_table` binds arguments and finds the bucket (`padding`
  where none is equal), then `guards` (with `aliases`), `variant` (its library). `conversions` of arguments and results,
  where the caller's are of another form. `native` writes the tables by which the evaluator in C++ (`aotc.core`) makes
  calls, from the first one on; what it does not decide, Python makes or refuses.
- `compiled_regions`: for a model that is compiled by regions. `training`: for one with gradients. `parallel`: for one
  rank of several. `cuda`: graphs and streams. `stats`, `forks`.
- `explain`: what a miss does, and why a call is one; imported only then.
"""
