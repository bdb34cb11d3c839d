"""A model as a folder that needs neither Python nor torch: `aotc export REF --standalone FOLDER`.

- `exported_folder`: writes the folder. `folder_refusals`: what it cannot hold. What reads the folder is in C++
  (`aotc/core/cpu/c_api.cpp`).
- `folder_runtime`: the folder's `libaotc.so`, for this machine's architecture or another one.
- `aotc_exported`: the folder's one file of Python, over ctypes; it is copied, and imports nothing of aotc.
"""
