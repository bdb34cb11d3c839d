"""What a store at a URL remembers for several machines, each of which is a folder here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from registry_server import free_port, needs, running_registry
from sample_artifacts import stored_artifact

import aotc
from aotc.errors import BindError, CorruptError, NotFoundError, RemoteError
from aotc.records import Artifact
from aotc.store.layout.bundle import read_artifact, read_bundle
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.maintenance.fsck import fsck
from aotc.store.maintenance.gc import collect
from aotc.store.maintenance.retention import Policy
from aotc.store.opening import open_readable, open_transfer
from aotc.store.reference import Reference
from aotc.store.remote.interface import Limits
from aotc.store.remote.push import change_attachment
from aotc.store.signing.attachments import Layer, encode_layers
from aotc.tools.remembering.memory import remote_memory
from aotc.tools.remembering.memory.kind_index import key_of
from aotc.tools.remembering.memory.manifest import write_remembered
from aotc.tools.remembering.memory.memory import Kind, Memory, Place, remembered_in
from aotc.tools.remembering.memory.remote_memory import REMEMBERED, RemoteMemory, remembered_of


def call(batch: int, double: bool = False) -> dict[str, Any]:
    return {"x": {"shape": [batch, 2], "dtype": "float32"}, "double": double}


def new() -> Memory:
    return Memory({"class": "Net", "target": "cpu:native"}, {}, "remembered_nets:Net", {})


class Machine:
    """A host with its own copy of the store at `url`. What it "builds" has a variant for each batch."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.store = folder, Store.create(folder / "copy")
        self.place = Place(remembered_in(folder / "copy"), "net")
        self.remote = RemoteMemory(url, self.place)

    def sees(self, *calls: dict[str, Any]) -> None:
        def keep(memory: Memory) -> None:
            for one in calls:
                like = [kind for kind in memory.kinds if key_of(kind) == key_of(kind, one)]
                if like:
                    like[0].calls.append(one)
                else:
                    memory.kinds.append(Kind({}, [one]))

        self.place.change(new(), keep)

    def builds(self) -> None:
        memory = self.memory
        for number in self.place.unbuilt(memory):
            kind, model = memory.kinds[number], self.place.model(number)
            batches = tuple(one["x"]["shape"][0] for one in kind.calls)
            work = self.folder / f"work-{model}-{len(batches)}"
            work.mkdir()
            artifact = stored_artifact(self.store, work, batches, model=model)
            publish(self.store, model, "latest", [artifact])
            kind.built, kind.pushed = len(kind.calls), ""
        self.place.change(None, lambda now: setattr(now, "kinds", memory.kinds))

    def shares(self) -> bool:
        """As a build process does."""
        self.remote.pull()
        self.builds()
        return self.remote.push()

    @property
    def memory(self) -> Memory:
        found = self.place.read()
        assert found is not None
        return found

    @property
    def known(self) -> list[list[int]]:
        """Of each kind, the batches that are remembered and have code, which this machine's store must have."""
        found = []
        for number, kind in enumerate(self.memory.kinds):
            batches = [one["x"]["shape"][0] for one in kind.calls[: kind.built]]
            if batches:
                bundle = read_bundle(self.store, Reference(None, self.place.model(number), tag="latest"))
                artifact: Artifact = read_artifact(self.store, bundle.artifacts[0].digest)
                assert [variant.bucket["batch"] for variant in artifact.variants] == batches
            found.append(batches)
        return found


@pytest.fixture(scope="module")
def registry_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_registry(tmp_path_factory.mktemp("registry")) as server:
        yield f"oci+http://{server.host}"


@pytest.fixture(params=["folder", pytest.param("registry", marks=needs("docker-registry"))])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "registry":
        return f"{request.getfixturevalue('registry_url')}/{tmp_path.name.replace('_', '-').lower()}"
    return f"file://{tmp_path}/url"


@pytest.fixture
def one(tmp_path: Path, url: str) -> Machine:
    return Machine(tmp_path / "one", url)


@pytest.fixture
def other(tmp_path: Path, url: str) -> Machine:
    return Machine(tmp_path / "other", url)


def test_another_machine_has_the_code_and_builds_nothing(one: Machine, other: Machine) -> None:
    one.sees(call(1), call(4))
    assert one.shares() and one.known == [[1, 4]]
    other.remote.pull(new)
    assert other.known == [[1, 4]] and not other.place.unbuilt(other.memory) and not other.memory.unpushed()


def test_where_nothing_is_remembered_nothing_is_read(one: Machine) -> None:
    one.remote.pull(new)
    assert one.place.read() is None and one.remote.read() is None


def test_of_two_that_build_at_once_the_second_begins_again_and_nothing_is_lost(one: Machine, other: Machine) -> None:
    one.sees(call(1), call(4))
    other.sees(call(4), call(8))
    for machine in (one, other):
        machine.remote.pull()
        machine.builds()
    assert one.remote.push() and not other.remote.push()
    assert other.shares() and other.known == [[1, 4, 8]]
    one.sees(call(2))
    assert one.shares() and one.known == [[1, 4, 8, 2]]
    other.remote.pull()
    assert other.known == [[1, 4, 8, 2]]


def test_kinds_of_calls_keep_the_numbers_that_the_first_machine_gave_them(one: Machine, other: Machine) -> None:
    one.sees(call(1))
    other.sees(call(3, double=True), call(1), call(2))
    other.builds()
    assert other.known == [[3], [1, 2]]
    assert one.shares() and other.shares()
    assert other.known == [[1, 2], [3]]
    one.remote.pull()
    assert one.known == [[1, 2], [3]]


def test_a_form_that_failed_elsewhere_keeps_its_number_and_may_be_tried_here(one: Machine, other: Machine) -> None:
    one.sees(call(1), call(2), call(3, double=True))
    one.place.fail(0, "too little memory")
    assert one.shares() and one.known == [[], [3]]
    other.remote.pull(new)
    assert other.known == [[], [3]] and [len(kind.calls) for kind in other.memory.kinds] == [1, 1]


def test_a_tombstone_is_of_the_kind_that_failed(one: Machine, other: Machine) -> None:
    one.sees(call(1))
    one.shares()
    other.sees(call(3, double=True), call(1))
    other.place.fail(0, "too little memory")
    other.remote.pull()
    assert other.known == [[1], []] and other.place.failed(0) == "" and other.place.unbuilt(other.memory) == [1]
    other.place.fail(1, "too little memory")
    one.sees(call(2))
    one.shares()
    other.remote.pull()
    assert other.known == [[1, 2], []] and other.place.unbuilt(other.memory) == []


def test_code_that_was_removed_from_the_url_is_built_again(
    one: Machine, other: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.sees(call(1))
    one.shares()

    def gone(*_: object, **__: object) -> None:
        raise NotFoundError("no such bundle", known=())

    monkeypatch.setattr(remote_memory, "fetch", gone)
    other.remote.pull(new)
    assert other.known == [[]] and other.shares() and other.known == [[1]]


def test_a_pull_that_broke_leaves_forms_to_build_and_goes_on_later(
    one: Machine, other: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.sees(call(1))
    one.shares()

    def broken(*_: object, **__: object) -> None:
        raise RemoteError("reset by peer", url="", transient=True)

    with monkeypatch.context() as patched, pytest.raises(RemoteError):
        patched.setattr(remote_memory, "fetch", broken)
        other.remote.pull(new)
    assert other.known == [[]] and other.place.unbuilt(other.memory) == [0]
    other.remote.pull()
    assert other.known == [[1]]


def test_only_forms_are_taken_from_the_url(one: Machine, other: Machine) -> None:
    """Who writes to the store may not choose what the builds of others import."""
    one.place.change(Memory({"class": "Bad"}, {"mode": "bad"}, "os:system", {"command": "true"}), lambda memory: None)
    one.sees(call(1))
    one.shares()
    other.remote.pull(new)
    found = other.memory
    assert (found.facts, found.asked, found.factory, found.kwargs) == (new().facts, {}, "remembered_nets:Net", {})


def test_what_is_remembered_is_read_by_its_url(one: Machine, url: str, tmp_path: Path) -> None:
    one.sees(call(1), call(4))
    assert remembered_of(url, "net") is None
    one.shares()
    found = remembered_of(url, "net")
    assert found is not None and found.kinds[0].calls == [call(1), call(4)] and found.factory == "remembered_nets:Net"


def test_what_is_remembered_is_kept_by_gc_and_no_flaw_of_the_store(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/url"
    one = Machine(tmp_path / "one", url)
    one.sees(call(1))
    one.shares()
    assert [entry.model for entry in open_readable(url).tags()] == ["net"]
    freed = collect(Store.open(tmp_path / "url"), Policy(grace=0.0))
    assert [each.kind for each in freed.removed if each.kind == "blob"] == []
    assert fsck(tmp_path / "url").findings == ()
    assert one.remote.read() is not None


def test_a_document_that_cannot_be_read_is_corrupt(tmp_path: Path) -> None:
    one = Machine(tmp_path / "one", f"file://{tmp_path}/url")
    one.sees(call(1))
    one.shares()
    (document,) = (
        path for path in (tmp_path / "url" / "blobs" / "sha256").iterdir() if path.read_bytes().startswith(b'{"facts"')
    )
    document.write_bytes(b"{}")
    with pytest.raises(CorruptError):
        one.remote.read()


SCRIPT = """
model = aotc.compile(Net().eval(), store={url!r}, build={build!r})
assert called(model, *{sizes})
waited = model.wait()
assert called(model, *{sizes})
tell(model, waited=waited)
"""


@pytest.mark.compile
@needs("docker-registry")
def test_a_program_on_another_machine_loads_what_the_first_one_built(program: Any, registry_url: str) -> None:
    url, machines = f"{registry_url}/programs", [str(program.folder / name) for name in ("one", "other")]

    def run(machine: str, sizes: str, build: str = "background") -> dict[str, Any]:
        found: dict[str, Any] = program.run(
            SCRIPT.format(url=url, build=build, sizes=sizes), AOTC_CACHE_DIR=machine, AOTC_REMOTE_ATTEMPTS="1"
        )
        assert found["compilers"] == []
        return found

    first = run(machines[0], "[(2, 3), (2, 9)]")
    assert (first["forms"], first["built"], first["waited"], first["failed"]) == (2, 2, True, {})
    second = run(machines[1], "[(2, 3), (2, 7)]")
    assert (second["forms"], second["built"], second["models"]) == (2, 2, [first["name"]])
    assert "is built by process" not in second["log"] and second["notes"] == []
    never = run(str(program.folder / "third"), "[(2, 3), (2, 7)]", build="never")
    assert never["models"] == [first["name"]]
    written = write_remembered(program.folder / "from_store.yaml", url, first["name"], check=False)
    assert "factory: remembered_nets:Net" in written


@pytest.mark.compile
@needs("docker-registry")
def test_where_the_url_cannot_be_reached_the_program_has_its_code_and_the_next_run_pushes_it(program: Any) -> None:
    port = free_port()
    url = f"oci+http://127.0.0.1:{port}/x"
    code = SCRIPT.format(url=url, build="background", sizes="[(2, 3)]")

    def run() -> dict[str, Any]:
        found: dict[str, Any] = program.run(code, AOTC_CACHE_DIR=str(program.folder), AOTC_REMOTE_ATTEMPTS="1")
        assert (found["compilers"], found["built"], found["models"]) == ([], 1, [found["name"]])
        return found

    first = run()
    assert any("cannot be read" in note for note in first["notes"])
    assert any("the build ended with status 1" in note for note in first["notes"])
    with running_registry(program.folder / "registry", port):
        assert run()["notes"] == []
        found = remembered_of(url, first["name"])
    assert found is not None and (found.kinds[0].built, len(found.kinds[0].calls)) == (1, 1)


LINES = "y: {shape: [1]}\n    factory: os:getcwd\n    x"
"""A name that goes on after its own line of a manifest."""

HOSTILE = {
    "no call": Kind({}, []),
    "a shape of one number": Kind({}, [{"x": {"shape": 3}}]),
    "calls of two kinds": Kind({}, [call(1), {"y": 1}]),
    "the name of a mode": Kind({f"autocast: float16\n    {LINES}": "float32"}, [call(1)]),
    "a mode": Kind({"autocast": f"float16\n    {LINES}"}, [call(1)]),
    "the name of an argument": Kind({}, [{LINES: call(1)["x"]}]),
    "an init": Kind({}, [{"x": {"shape": [1], "dtype": "float32", "init": "os:getcwd"}}]),
    "an init without a shape": Kind({}, [{"x": [{"init": "os:getcwd"}]}]),
    "a size": Kind({}, [{"x": {"shape": [f"1]\n    {LINES}"], "dtype": "float32"}}]),
    "a dtype": Kind({}, [{"x": {"shape": [1], "dtype": "load"}}]),
    "a region": Kind({}, [call(1)], regions=[f"a]\n    {LINES}"]),
    "code of more calls than there are": Kind({}, [call(1)], built=2),
    "a digest that is a name": Kind({}, [call(1)], built=1, pushed="../other"),
}


@pytest.mark.parametrize("kind", HOSTILE.values(), ids=HOSTILE)
def test_what_no_program_has_recorded_is_corrupt(tmp_path: Path, kind: Kind) -> None:
    url = f"file://{tmp_path}/url"
    layer = Layer(msgspec.json.encode(Memory({}, {}, "", {}, kinds=[kind])))
    encoded = encode_layers(REMEMBERED, [layer], artifact_type=REMEMBERED.media_type)
    Store.create(tmp_path / "url")
    change_attachment(
        open_transfer(url, Limits.from_environment()), "net.remembered", lambda theirs: None if theirs else encoded
    )
    with pytest.raises(CorruptError, match=r"cannot be read|unknown form"):
        Machine(tmp_path / "one", url).remote.read()


@pytest.mark.compile
def test_a_build_makes_the_module_as_its_own_program_says(program: Any) -> None:
    """Whatever the store says of the factory and its arguments, and where keys are trusted."""
    code = "model = aotc.compile(Net().eval()); called(model, (2, 16))\n"
    name = program.run(f"{code}tell(model)\nos._exit(0)")["name"]
    file = program.files / f"{name}.json"
    memory = json.loads(file.read_bytes())
    memory |= {"factory": "os:mkdir", "kwargs": {"path": str(program.folder / "made")}, "dtype": "float16"}
    memory["asked"] = {"method": "fit"}
    file.write_text(json.dumps(memory))
    told = program.run(f"{code}tell(model, ready=model.wait())", AOTC_TRUSTED_KEYS="key.pub")
    assert not (program.folder / "made").exists()
    assert "factory: remembered_nets:Net" in (program.files / f"{name}.yaml").read_text()
    assert (told["built"], told["ready"]) == (1, False)


def test_code_that_must_be_signed_is_not_built_for_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    from remembered_nets import Net

    monkeypatch.setenv("AOTC_TRUSTED_KEYS", "key.pub")
    with pytest.raises(BindError, match="signs nothing") as caught:
        aotc.compile(Net(), store="oci://registry.example/team/remembered")
    assert 'build="never"' in caught.value.hint
    assert aotc.compile(Net(), store="oci://registry.example/team/remembered", build="never") is not None
