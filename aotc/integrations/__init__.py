"""Plug-ins for engines, which load them. Nothing in aotc imports them.

- `vllm`: starts of vLLM from a cache in a store.
"""
