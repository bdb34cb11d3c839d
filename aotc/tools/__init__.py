"""Tools around artifacts: recording manifests, measuring, verifying, auditing. Only commands and plug-ins import them.

- `recording`: the first manifest of a model, from its calls. `remembering`: code that is compiled as a module is used.
- `advise`: buckets, from recorded sizes.
- `bench`: how fast. `gate`: whether a release is fast enough. `inspection`: what is in a bundle, and how two differ.
- `doctor`: whether a bundle runs on this machine. `bisection`: where compiled code and eager part.
- `audit`: which advisories are of what was built.
- `caches`: the caches of other compilers, in a store. `html_page`: pages of these tools.
"""
