"""The manifest: what a user wants compiled, read from YAML and checked before anything is compiled.

Nothing here imports torch.
"""

from aotc.manifest.read import mistakes_in, read_manifest
from aotc.manifest.schema import editor_schema
from aotc.manifest.types import Manifest, ModelSpec, OutputsSpec

__all__ = ["Manifest", "ModelSpec", "OutputsSpec", "editor_schema", "mistakes_in", "read_manifest"]
