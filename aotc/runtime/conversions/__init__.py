"""What a call changes on its way in and out where the caller's form is not the compiled code's.

- `default_tensors`: arguments with defaults. `call_forms`:
  tensors of other layouts, and whether a call has the compiled form.
- `written`: into the caller's tensors. `result_containers`: results of the model's own classes.
"""
