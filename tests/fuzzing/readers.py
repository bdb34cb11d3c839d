"""Everything in aotc that reads bytes of a store, each as a function of those bytes, with good examples to start from.

`Readers.read(name, data)` must return or raise AotcError, quickly and in little memory, whatever `data` is: anything
else is a finding. The bytes have their right digests, as somebody's who writes a store; wrong digests are
`test_integrity.py`'s.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch
import zstandard
from bound_files import bind_files
from torch import Tensor, nn

from aotc.digest import canonical_json, sha256_bytes
from aotc.errors import AotcError, CorruptError
from aotc.expressions import Expression
from aotc.machine.compatibility import mismatches
from aotc.machine.environment import this_environment
from aotc.picks import Candidate, Pick, PickFile, UnitPicks, decode_picks
from aotc.provenance import BuiltArtifact, Provenance
from aotc.reads.module_check import check_module
from aotc.reads.tensors import dtype_of, named_state
from aotc.records import (
    Artifact,
    ConstantLeaf,
    File,
    PadRule,
    Parameter,
    ResultContainer,
    SizeRange,
    TensorLeaf,
    decode,
    decode_artifact,
)
from aotc.runtime.call import CompiledCall
from aotc.runtime.checkpoints.checkpoint_files import open_weights
from aotc.runtime.checkpoints.state import bind_checkpoint
from aotc.runtime.load import bind_artifact
from aotc.runtime.select import select_artifact
from aotc.runtime.variant import result_builder
from aotc.store.layout import oci
from aotc.store.layout.bundle import ARTIFACT_TYPE, CONFIG, FILE, each_file, read_artifact, read_bundle
from aotc.store.layout.check_record import check_artifact
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.layout.units import UnitRecord, find_unit, latest_unit, put_unit
from aotc.store.reference import Reference, parse_reference
from aotc.tensors.constants import decode_constants, encode_constants
from tests.runtime.hand_built import make_artifact, specs_of, tensor, tree_of

CREATED = "2026-01-02T03:04:05Z"
FORBIDDEN = ("torch._dynamo", "torch._inductor", "torch.onnx", "triton", "sympy", "antigravity")
"""Modules that nothing a store says may import."""
CPU = torch.device("cpu")
KEY = "sha256:" + "1" * 64
CONTENT = b"a library, as far as the store can tell " * 40
LARGEST_CALL = 100_000
"""Elements of a tensor that a call is tried with."""


class Held(nn.Module):
    """A module with these tensors as buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(4, 4))
        self.register_buffer("bias", torch.ones(4))
        self.inner = nn.Linear(4, 4)
        self.width = 4
        self.eval()


class Readers:
    """The readers, over a store in `folder` that they fill and empty."""

    def __init__(self, folder: Path) -> None:
        self.store = Store.create(folder / "store")
        self.module = Held()
        self.here = this_environment("cpu")
        work = folder / "library.so"
        work.write_bytes(CONTENT)
        self.file = self.store.blobs.put_file_zstd(work)
        self.functions: dict[str, Callable[[bytes], None]] = {
            "layout": self._layout,
            "index": self._index,
            "bundle": self._bundle,
            "manifest": self._manifest,
            "record": self._record,
            "unit": self._unit,
            "picks": self._picks,
            "provenance": self._provenance,
            "attributes": self._attributes,
            "constants": self._constants,
            "structure": self._structure,
            "reference": self._reference,
            "expression": self._expression,
            "blob": self._blob,
        }
        self.names = list(self.functions)
        self._layout_bytes = (self.store.path / "oci-layout").read_bytes()
        self._index_bytes = b""
        self.seeds: dict[str, list[bytes]] = {name: [] for name in self.names}
        self._make_seeds()

    def read(self, name: str, data: bytes) -> bool:
        """Whether the reader took the bytes; False where it refused them with an AotcError."""
        before = set(sys.modules)  # other tests of this process may have imported a compiler
        try:
            self.functions[name](data)
        except AotcError as error:
            assert str(error)
            return False
        finally:
            imported = [module for module in FORBIDDEN if module in sys.modules and module not in before]
            assert not imported, f"reading imported {imported}"
        return True

    # -- readers ------------------------------------------------------------------------------------------------------

    def _layout(self, data: bytes) -> None:
        path = self.store.path / "oci-layout"
        try:
            path.write_bytes(data)
            Store.open(self.store.path)
        finally:
            path.write_bytes(self._layout_bytes)

    def _index(self, data: bytes) -> None:
        (self.store.path / "index.json").write_bytes(data)
        try:
            store = Store.open(self.store.path)
            for entry in store.tags():
                store.resolve(Reference(None, entry.model, tag=entry.tag))
            bundle = read_bundle(store, parse_reference("handmade:latest"))
            check_artifact(store, bundle.artifacts[0].digest)
        finally:
            (self.store.path / "index.json").write_bytes(self._index_bytes)

    def _bundle(self, data: bytes) -> None:
        with _Put(self.store, data) as digest:
            bundle = read_bundle(self.store, Reference(None, "handmade", digest=digest))
            for entry in bundle.artifacts:
                check_artifact(self.store, entry.digest)

    def _manifest(self, data: bytes) -> None:
        with _Put(self.store, data) as digest:
            check_artifact(self.store, digest)

    def _record(self, data: bytes) -> None:
        """As far as a callable, and calls of it; the library is a fake."""
        with _Put(self.store, data) as config, _Put(self.store, self._manifest_for(config, data)) as digest:
            artifact = read_artifact(self.store, digest)
            try:
                check_artifact(self.store, digest)
            except AotcError:
                with contextlib.suppress(AotcError):
                    self._attached(artifact)
                raise
        mismatches(artifact, self.here)
        try:
            select_artifact([artifact], CPU, lambda one: one)
        except AotcError as error:
            assert str(error)
        compiled = self._attached(artifact)
        for arguments in _calls_of(artifact):
            try:
                compiled.explain(*arguments)
                compiled(*arguments)
            except (AotcError, TypeError) as error:
                if isinstance(error, TypeError) and not isinstance(error, AotcError):
                    assert str(error).startswith("forward() "), error

    def _attached(self, artifact: Artifact) -> CompiledCall:
        with patch.dict(bind_artifact.__globals__, open_library=lambda *_: OpenLibrary()):
            with contextlib.suppress(AotcError):
                bind_files(
                    artifact,
                    lambda variant: self.store.path,
                    None,
                    CPU,
                    read_file=lambda file: self.seeds["constants"][0],
                    weights=named_state(self.module),
                )
            return bind_files(
                artifact,
                lambda variant: self.store.path,
                self.module,
                CPU,
                ignore=("class", "source", "training", "attributes"),
                read_file=lambda file: b"",
            )

    def _manifest_for(self, config: str, data: bytes) -> bytes:
        try:
            files = list(each_file(decode_artifact(data)))
        except AotcError:
            files = []
        layers = tuple(oci.Descriptor(FILE, file.blob, file.blob_size) for file in files)
        return canonical_json(
            oci.ImageManifest(
                schema_version=2,
                config=oci.Descriptor(CONFIG, config, len(data)),
                layers=layers,
                artifact_type=ARTIFACT_TYPE,
            )
        )

    def _unit(self, data: bytes) -> None:
        path = self.store.path / ".aotc" / "units" / f"{KEY[7:]}.json"
        path.write_bytes(data)
        find_unit(self.store, KEY)
        path.write_bytes(_with_digest(data))
        find_unit(self.store, KEY)
        latest_unit(self.store, "handmade", {"batch": 4}, "cpu:x86-64-v3")

    def _picks(self, data: bytes) -> None:
        decode_picks(data, "picks")

    def _provenance(self, data: bytes) -> None:
        decode(data, Provenance).join(self.artifact.record(self.file))

    def _attributes(self, data: bytes) -> None:
        artifact = msgspec.structs.replace(
            self.artifact,
            module=msgspec.structs.replace(self.artifact.module, attributes_file=self.file, attributes=KEY),
        )
        check_module(artifact, self.module, ("class", "source", "training"), lambda file: data)

    def _constants(self, data: bytes) -> None:
        """As far as the tensors that calls take, of which the file is to give some."""
        values = decode_constants(data)
        state = tuple(msgspec.structs.replace(spec, persistent=False) for spec in specs_of(self.module))
        artifact = make_artifact([], state=state)
        take = bind_checkpoint(artifact, open_weights(named_state(self.module)), lambda: values, CPU).take
        assert [tuple(each.shape) for each in take()] == [spec.shape for spec in state]

    def _structure(self, data: bytes) -> None:
        """With or without the classes that it names; of as many outputs as the examples have."""
        tree = decode(data, ResultContainer)
        for count, plain in itertools.product((1, 2), (True, False)):
            with contextlib.suppress(CorruptError):
                result_builder(tree, count, plain=plain)(list(range(count)))

    def _reference(self, data: bytes) -> None:
        text = data.decode("utf-8", "surrogateescape")
        reference = parse_reference(text)
        assert parse_reference(str(reference)) == reference

    def _expression(self, data: bytes) -> None:
        """An Expression is refused with ValueError, and divides by zero and lacks names with errors of their own."""
        try:
            expression = Expression(data.decode("utf-8", "surrogateescape"))
        except ValueError:
            return
        for size in (0, 1, 7, 2**63 - 1):
            with contextlib.suppress(ZeroDivisionError):
                assert isinstance(expression.evaluate(dict.fromkeys(expression.names, size)), int)

    def _blob(self, data: bytes) -> None:
        """The first four bytes say which size the record claims."""
        claimed = (len(CONTENT), 0, 1, len(CONTENT) - 1, 1 << 20)[data[0] % 5] if data else 0
        packed = data[4:]
        with _Put(self.store, packed) as digest:
            file = File("library.so", self.file.digest, claimed, digest, len(packed))
            assert self.store.blobs.load(file, 1 << 21) == CONTENT

    # -- good examples ------------------------------------------------------------------------------------------------

    def _make_seeds(self) -> None:
        artifacts = list(self._artifacts())
        self.artifact = artifacts[0]
        publish(self.store, "handmade", "latest", artifacts[:1], created=CREATED, annotations={"a": "b"})
        bundle = read_bundle(self.store, parse_reference("handmade"))
        manifest = self.store.blobs.read(bundle.artifacts[0].digest, 1 << 20)
        one_variant = msgspec.structs.replace(artifacts[0], variants=artifacts[0].variants[:1])
        put_unit(self.store, UnitRecord(KEY, {"torch": "2.13"}, one_variant, 1.5, CREATED))
        self._index_bytes = (self.store.path / "index.json").read_bytes()
        self.seeds["layout"] = [self._layout_bytes]
        self.seeds["index"] = [self._index_bytes]
        self.seeds["bundle"] = [self.store.blobs.read(bundle.digest, 1 << 20)]
        self.seeds["manifest"] = [manifest]
        self.seeds["record"] = [artifact.record(self.file).encode() for artifact in artifacts]
        self.seeds["unit"] = [next((self.store.path / ".aotc" / "units").glob("*.json")).read_bytes()]
        self.seeds["picks"] = [canonical_json(_picks())]
        self.seeds["provenance"] = [self.artifact.provenance_of().encode()]
        self.seeds["attributes"] = [b'{"":{"class":"Held","width":5},"inner":{"class":"Linear","in_features":4}}']
        self.seeds["constants"] = [
            encode_constants(named_state(self.module)),
            encode_constants({"weight": torch.eye(4)}),
        ]
        self.seeds["structure"] = [canonical_json(tree_of(sample)) for sample in _SAMPLES]
        self.seeds["reference"] = [
            b"model",
            b"m:t",
            b"/a/store#m:t",
            f"m@{KEY}".encode(),
            b"a#b#m:latest",
            b"oci://h:5/r:t",
        ]
        self.seeds["expression"] = [text.encode() for text in _EXPRESSIONS]
        self.seeds["blob"] = [bytes((which, 0, 0, 0)) + frame for frame in _frames() for which in (0, 4)]

    def _artifacts(self) -> Iterator[BuiltArtifact]:
        names = ["weight", "bias", "inner.weight", "inner.bias"]
        frozen = specs_of(self.module, names[:1], digests=True)
        files = {"library": "library.so", "files": (self.file,)}
        x = tensor("x", "batch", 4, pad={"batch": PadRule(0)})
        ids = tensor("ids", "batch", "2*seq", dtype="int64", pad={"batch": PadRule(1), "seq": PadRule(edge=True)})
        nested = [
            Parameter("x", 0),
            Parameter("more", {"ids": 1, "list": [2, [3]]}),
            Parameter("flag", 4, "keyword", default=False),
        ]
        leaves = [x, ids, tensor("mask", "seq", dtype="bool"), ConstantLeaf("scale", 2.0), ConstantLeaf("flag", False)]
        ranged = {"batch": SizeRange(1, 64, 1, 8), "seq": SizeRange(8, 64, 8, 16)}
        for artifact in (
            make_artifact([x], [{"batch": 4}, {"batch": 8}], state=specs_of(self.module, names)),
            make_artifact(
                leaves,
                [{"batch": 4, "seq": 16}, ranged],
                nested,
                conditions={1: ("batch * seq <= 1024", "seq % 8 == 0")},
                make_contiguous=True,
                mutated_leaves=(0,),
            ),
            make_artifact([tensor("x", 2, 3, "h", 5, layout="channels_last")], [{"h": 4}], output_sample={"a": (0,)}),
            make_artifact([tensor("x", "n")], [{"n": 1}], weights="frozen", state=frozen),
            make_artifact([]),
        ):
            variants = tuple(msgspec.structs.replace(variant, **files) for variant in artifact.variants)
            yield msgspec.structs.replace(artifact, variants=variants)


def _with_digest(data: bytes) -> bytes:
    """A unit's document with the digest that it should have, where it is one."""
    try:
        document = msgspec.json.decode(data)
        record = {name: value for name, value in document.items() if name != "digest"}
        return canonical_json({**record, "digest": sha256_bytes(canonical_json(record))})
    except (ValueError, RecursionError, AttributeError):
        return data


class _Put:
    """A blob under its right digest, for as long as it is read."""

    def __init__(self, store: Store, data: bytes) -> None:
        self.digest = sha256_bytes(data)
        self.path = store.blobs.path(self.digest)
        self.new = not self.path.exists()
        if self.new:
            self.path.write_bytes(data)

    def __enter__(self) -> str:
        return self.digest

    def __exit__(self, *_: object) -> None:
        if self.new:
            self.path.unlink()


class OpenLibrary:
    """A library that takes any tensors."""

    counts = None

    def run(self, arguments: Any) -> list[Tensor]:
        assert all(isinstance(argument, Tensor) for argument in arguments)
        return [torch.zeros(4, 4), torch.zeros(4)][: len(arguments) % 3]


def _calls_of(artifact: Artifact) -> Iterator[tuple[Any, ...]]:
    """Calls that the record describes, at the sizes of its buckets, and some that it does not."""
    yield ()
    yield (torch.zeros(4, 4),)
    yield (torch.zeros(3, 4), {"ids": torch.zeros(3, 32, dtype=torch.int64), "list": [torch.zeros(16).bool(), [2.0]]})
    for variant in artifact.variants[:3]:
        dims = {name: size if isinstance(size, int) else size.min for name, size in variant.bucket.items()}
        leaves = [_value_of(leaf, dims) for leaf in artifact.signature.leaves]
        yield tuple(_filled(parameter.tree, leaves) for parameter in artifact.signature.parameters)


def _value_of(leaf: Any, dims: dict[str, int]) -> Any:
    if not isinstance(leaf, TensorLeaf):
        return leaf.value
    shape = [entry if isinstance(entry, int) else Expression(entry).evaluate(dims) for entry in leaf.shape]
    elements = 1
    for size in shape:
        elements *= max(size, 0)
    if elements > LARGEST_CALL or min(shape, default=0) < 0:
        return None
    try:
        return torch.empty(shape, dtype=dtype_of(leaf.dtype)).zero_()
    except (RuntimeError, TypeError):  # a dtype that torch cannot fill
        return None


def _filled(tree: Any, leaves: list[Any]) -> Any:
    if isinstance(tree, int):
        return leaves[tree]
    if isinstance(tree, list):
        return [_filled(subtree, leaves) for subtree in tree]
    return {name: _filled(subtree, leaves) for name, subtree in tree.items()}


def _picks() -> PickFile:
    pick = Pick("operator", "mm", (Candidate("cpp", {"m": 4, "flag": True}, 0.5), Candidate("aten")), 0, ("f32[1]",))
    return PickFile(1, (UnitPicks("handmade", {"batch": 4}, "cpu:amx", "2.13.0", "cpu", (pick,)),))


_SAMPLES: tuple[Any, ...] = (
    (0,), ([0], {"a": 0}), {1: 0, None: 0}, OrderedDict(z=0, a=0),
    defaultdict(list, a=0), deque([0], 3),
)  # fmt: skip
_EXPRESSIONS = (
    "batch", "2*seq", "batch * seq <= 1024 and seq % 8 == 0", "min(seq, 512)", "max(1, abs(-seq)) // 2",
    "not a < b <= c",     "-(a + 1) * (b - 2)", "a or b", "1",
)  # fmt: skip


def _frames() -> Iterator[bytes]:
    """zstd in every form: unsized, checked, several frames, skippable ones, a dictionary, a huge window, bombs."""
    plain = zstandard.ZstdCompressor(level=3).compress(CONTENT)
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"12345"
    yield plain
    yield zstandard.ZstdCompressor(write_content_size=False, write_checksum=True).compress(CONTENT)
    half = len(CONTENT) // 2
    yield b"".join(zstandard.compress(part) for part in (CONTENT[:half], CONTENT[half:]))
    yield skippable + plain + skippable
    yield plain + zstandard.compress(b"") * 20
    dictionary = zstandard.ZstdCompressionDict(CONTENT[:512])
    yield zstandard.ZstdCompressor(dict_data=dictionary).compress(CONTENT)
    window = zstandard.ZstdCompressionParameters(window_log=29, write_content_size=False)
    yield zstandard.ZstdCompressor(compression_params=window).compress(CONTENT)
    yield zstandard.compress(bytes(64 << 20))
    yield b"\x28\xb5\x2f\xfd\xc0\x00" + (2**63).to_bytes(8, "little") + b"\x03\x00\x00\x00"
