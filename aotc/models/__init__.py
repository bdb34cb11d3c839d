"""From a model's part of a manifest to its module, its inputs and its calls.

- `factory`: the module, and a method in the place of its forward. `casting`: its `dtype:`. `dummy_weights`: its
  parameters without memory. `auto_inputs`: `inputs: auto`.
  `example_inputs`: values of the inputs. `input_forms`: values with which the model does other things.
  `extreme_inputs`: values at which compilers go wrong. `extreme_calls`: a call with them, compared with eager.
- `signature`: the calling convention of its forward. `calls`: a call with values, and its modes.
- `gradients`: those of a call, to compare compiled code with eager. `float64_reference`: the model in float64.
  `tolerance`: when compiled results count as right; `decided_values`: when they do at extreme values.
- `launch`: how code for a GPU is launched where that is not a matter of time.
- `fake_ranks`: the process group of a parallel model, of fake ranks while it is built.
- `regions`: submodules, and the calls that the model makes to them.
"""
