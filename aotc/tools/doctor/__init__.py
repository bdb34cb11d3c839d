"""`aotc doctor`: what this machine can load and build, check by check.

checks: one check, and how findings and errors become checks. torch_import: torch, before anything here imports it.
machine: torch, hardware, memory for code, folders. remotes: credentials, and whether they answer. bundle: would a
bundle load here, signature_check: is it signed as asked; standalone_checks: without torch. build: can a manifest be
built here.

The checks ask the code that loads and builds, and hold no rules of their own.
"""
