"""The plug-in for vLLM: an engine starts from a cache in a store, and fills it. Guide: `aotc/tools/caches/GUIDE.md`.

vLLM calls `plugin.register` in each of its processes, before the engine is made. In the order of a start:

- `plugin`: the settings; restore before the engine, receipt and save after it.
- `replacements`: what of vLLM and torch is replaced, since no hook exists: versions, reasons, texts for upstream.
- `vllm_libraries`: a compiled library by the digest of its source, its flags and its target.
- `factors`: what vLLM's key was made of, and which of it differs where a start misses.
"""
