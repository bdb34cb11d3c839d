"""Random `kill -9`s over everything that writes to a store, and what must hold after each.

    python tests/benchmarks/kill9.py --kills 1000 [--compiles 5] [--seed 0] [--store STORE] [--folder DIR]

Where docker-registry is installed, `push` to and `fetch` from one on loopback are among the actions.

Each kill: an action runs in a process of its own and is killed at an instant that is uniform over the time that the
action takes. Then: `aotc fsck` finds no error; every tag that was there before is there, and names what it named or
what the action was publishing; and one of them is loaded and computes what the module does. At intervals: all of them
load in a fresh process; and `aotc gc` leaves no garbage at all.

To add an action: a function of a `World` and a random generator, decorated with `@action(…)`.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["OMP_NUM_THREADS"] = "1"  # no threads in this process, which forks

import msgspec  # noqa: E402
import torch  # noqa: E402
from registry_server import PROGRAM as REGISTRY  # noqa: E402
from registry_server import running_registry  # noqa: E402

import aotc  # noqa: E402
from aotc.compiler.messages import Settings  # noqa: E402
from aotc.compiler.pipeline import build  # noqa: E402
from aotc.compiler.publish.unit_files import store_files  # noqa: E402
from aotc.compiler.request import BuildRequest  # noqa: E402
from aotc.compiler.workers.unit_servers import ForkServers  # noqa: E402
from aotc.digest import sha256_bytes  # noqa: E402
from aotc.manifest import read_manifest  # noqa: E402
from aotc.records import Artifact, File  # noqa: E402
from aotc.store.layout.built import read_built  # noqa: E402
from aotc.store.layout.bundle import each_file, read_bundle  # noqa: E402
from aotc.store.layout.publishing import publish  # noqa: E402
from aotc.store.layout.store import Store  # noqa: E402
from aotc.store.layout.units import (  # noqa: E402
    UnitRecord,
    find_unit,
    put_unit,
    units_folder,
)
from aotc.store.maintenance.fsck import fsck  # noqa: E402
from aotc.store.maintenance.gc import collect  # noqa: E402
from aotc.store.maintenance.retention import Policy  # noqa: E402
from aotc.store.reference import Reference, parse_reference  # noqa: E402
from aotc.store.remote.fetching import fetch, of_targets  # noqa: E402
from aotc.store.remote.push import push  # noqa: E402
from examples.models import transformer_block  # noqa: E402

MANIFEST = ROOT / "manifests" / "quickstart.yaml"
BUILD = [sys.executable, "-m", "aotc", "build", str(MANIFEST), "--store"]
MODEL = "quickstart"
KEPT = (f"{MODEL}:latest", f"{MODEL}:kept*")
"""Tags that no action may remove."""
FULL_CHECK_EVERY = 25
NOW_POLICY = Policy(grace=0.0)


class Broken(Exception):
    """Something that must hold does not."""


@dataclass
class World:
    """A store, and what is known of it."""

    folder: Path
    pristine: Store
    registry: str = ""
    tags: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache, self.work = self.folder / "cache", self.folder / "work"
        self.work.mkdir()
        shutil.copytree(self.pristine.path, self.folder / "store")
        self.store = Store.open(self.folder / "store")
        os.environ.update(AOTC_CACHE_DIR=str(self.cache), TMPDIR=str(self.work))
        tempfile.tempdir = None
        (entry,) = read_bundle(self.store, Reference(None, MODEL, tag="latest")).artifacts
        self.artifact = read_built(self.store, entry)
        self.elsewhere = Store.create(self.folder / "elsewhere")
        self.staged = self.folder / "staged"
        self.staged.mkdir()
        for file in each_file(self.artifact):
            self.store.blobs.extract(file, self.staged / file.name)
        self.manifest = read_manifest(MANIFEST, ())
        torch.manual_seed(0)
        self.module = transformer_block(width=256, heads=4).eval()
        self.input = torch.randn(1, 128, 256)
        with torch.no_grad():
            self.expected = self.module(self.input)
        self.tags = self.tags_now()

    def tags_now(self) -> dict[str, str]:
        return {str(entry): entry.digest for entry in self.store.tags()}

    def load(self, tag: str) -> None:
        compiled = aotc.load(tag, self.module, store=self.store.path)
        with torch.no_grad():
            if not torch.allclose(compiled(self.input), self.expected, atol=1e-4):
                raise Broken(f"{tag} computes something else")

    def restore_units(self) -> None:
        """So that a rebuild compiles nothing, whatever gc did."""
        for path in units_folder(self.pristine).glob("*.json"):
            key = f"sha256:{path.stem}"
            if find_unit(self.store, key) is None:
                unit = find_unit(self.pristine, key)
                assert unit is not None
                for file in each_file(unit.artifact):
                    self.store.blobs.put_bytes(self.pristine.blobs.path(file.blob).read_bytes())
                put_unit(self.store, unit)


Act = Callable[[World, random.Random], None]


@dataclass(frozen=True)
class Action:
    """`prepare` runs before, to its end. `may_move` are the tags that the action may make, move or remove."""

    name: str
    act: Act
    weight: int
    prepare: Act
    may_move: str
    mend: bool
    registry: bool


ACTIONS: list[Action] = []


def action(
    name: str,
    weight: int = 1,
    prepare: Act = lambda world, rng: None,
    may_move: str = "",
    mend: bool = False,
    registry: bool = False,
) -> Callable[[Act], Act]:
    """Register an action. `mend`: it begins with damage, so a repair to its end comes before the checks. `registry`: it
    needs one."""

    def register(act: Act) -> Act:
        ACTIONS.append(Action(name, act, weight, prepare, may_move, mend, registry))
        return act

    return register


# -- the actions ------------------------------------------------------------------------------------------------------


def one_variant(world: World, rng: random.Random) -> Artifact:
    """The first variant as a build stages it, with a report that no other build gave."""
    variant = world.artifact.variants[0]
    data = rng.randbytes(rng.choice([1_000, 3_000_000]))
    (world.staged / "report.json").write_bytes(data)
    report = File("report.json", sha256_bytes(data), len(data), "", 0)
    return msgspec.structs.replace(world.artifact, variants=(msgspec.structs.replace(variant, report=report),))


@action("store a unit", 3)
def store_a_unit(world: World, rng: random.Random) -> None:
    """What a build does with each unit that it has compiled."""
    with world.store.writing("kill9"):
        artifact = store_files(world.store, one_variant(world, rng), world.staged)
        key = sha256_bytes(rng.randbytes(8))
        put_unit(world.store, UnitRecord(key, {}, artifact, 1.0, "2026-01-02T03:04:05Z"))


@action("publish", 3, may_move=f"{MODEL}:")
def publish_a_bundle(world: World, rng: random.Random) -> None:
    """New records under a tag that is there, or is not."""
    tag = rng.choice(["latest", "kept-1", "kept-2", *(f"v{number}" for number in range(6))])
    artifact = msgspec.structs.replace(world.artifact, options={"number": rng.random()})
    publish(world.store, MODEL, tag, [artifact], created=f"2026-01-02T03:04:{rng.randrange(60):02}Z")


def push_news(world: World, rng: random.Random) -> None:
    """A bundle in the registry with a file that no store here has."""
    blobs = world.elsewhere.blobs
    for file in each_file(world.artifact):
        blobs.put_bytes(world.store.blobs.path(file.blob).read_bytes())
    news = world.folder / "news"
    news.write_bytes(rng.randbytes(rng.choice([1_000, 3_000_000])))
    first, *others = world.artifact.variants
    first = msgspec.structs.replace(first, report=blobs.put_file_zstd(news, name="report.json"))
    artifact = msgspec.structs.replace(world.artifact, variants=(first, *others))
    publish(world.elsewhere, MODEL, "news", [artifact], created="2026-01-02T03:04:05Z")
    push(world.elsewhere, Reference(None, MODEL, tag="news"), parse_reference(f"oci://{world.registry}/{MODEL}:news"))


@action("fetch", 3, prepare=push_news, may_move=f"{MODEL}:v", registry=True)
def fetch_news(world: World, rng: random.Random) -> None:
    source = parse_reference(f"oci://{world.registry}/{MODEL}:news")
    fetch(source, world.store.path, of_targets(), tag=f"v{rng.randrange(6)}")


@action("push", 1, registry=True)
def push_latest(world: World, rng: random.Random) -> None:
    """Under a name of its own, so that something is uploaded each time."""
    destination = parse_reference(f"oci://{world.registry}/{MODEL}-{rng.randrange(10**6)}:latest")
    push(world.store, Reference(None, MODEL, tag="latest"), destination)


@action("rebuild", 2, prepare=lambda world, rng: world.restore_units(), may_move=f"{MODEL}:latest")
def rebuild(world: World, rng: random.Random) -> None:
    """A build in which nothing has changed."""
    with closing(ForkServers()) as servers:
        build(BuildRequest(world.manifest, world.store.path, settings=Settings(jobs=1)), servers)


@action("gc", 2)
def gc_garbage(world: World, rng: random.Random) -> None:
    collect(world.store, NOW_POLICY)


@action("gc of units and tags", 2, may_move=f"{MODEL}:v")
def gc_much(world: World, rng: random.Random) -> None:
    rules = [
        Policy(older_than=0.0, grace=0.0),
        Policy(max_size=300_000, grace=0.0),
        Policy(untag=True, keep=KEPT, keep_last=2, grace=0.0),
        Policy(untag=True, keep=KEPT, max_size=100_000, grace=0.0),
    ]
    collect(world.store, rng.choice(rules))


def damage(world: World, rng: random.Random) -> None:
    """Damage to what no tag needs."""
    blob = world.store.blobs.put_bytes(rng.randbytes(2_000))
    world.store.blobs.path(blob.digest).write_bytes(b"damaged")
    name = sha256_bytes(rng.randbytes(8))[7:]
    (units_folder(world.store) / f"{name}.json").write_bytes(b"{")
    (world.store.path / "blobs" / "sha256" / f".tmp-{name[:16]}").write_bytes(b"half")


@action("fsck --repair", 2, prepare=damage, mend=True)
def repair(world: World, rng: random.Random) -> None:
    fsck(world.store.path, repair=True)


@action("load", 2)
def load(world: World, rng: random.Random) -> None:
    world.load(f"{MODEL}:latest")


def push_news_to_load(world: World, rng: random.Random) -> None:
    """With nothing fetched yet, or with all."""
    push_news(world, rng)
    if rng.random() < 0.7:
        shutil.rmtree(world.cache, ignore_errors=True)


@action("load of a remote", 3, prepare=push_news_to_load, registry=True)
def load_remote(world: World, rng: random.Random) -> None:
    aotc.load(f"oci://{world.registry}/{MODEL}:news", world.module)


@action("create a store", 1, prepare=lambda world, rng: shutil.rmtree(world.folder / "new", ignore_errors=True))
def create(world: World, rng: random.Random) -> None:
    Store.create(world.folder / "new")


# -- killing ----------------------------------------------------------------------------------------------------------


def run_forked(act: Callable[[], None], kill_after: float | None) -> tuple[bool, float]:
    """Run it in a process of its own, killed after so many seconds; whether it was killed, and how long it ran."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(writer, b"!")
            act()
            status = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            os._exit(status)
    os.read(reader, 1)
    began = time.monotonic()
    os.close(reader)
    os.close(writer)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise Broken("the action failed by itself")
    return os.WIFSIGNALED(status), time.monotonic() - began


def measure(world: World, one: Action, rng: random.Random) -> float:
    """The longest of a few runs to the end, in seconds."""
    seconds = []
    for number in range(4):
        one.prepare(world, rng)
        seconds.append(run_forked(lambda n=number: one.act(world, random.Random(n)), None)[1])
    world.tags = world.tags_now()
    return max(seconds)


# -- what must hold ---------------------------------------------------------------------------------------------------


def check(world: World, one: Action, rng: random.Random) -> None:
    """What must hold after every kill."""
    if one.mend:
        fsck(world.store.path, repair=True)
        world.load(f"{MODEL}:latest")
    stores = [world.store.path, *world.cache.glob("store")]
    if errors := [error for path in stores for error in fsck(path).errors]:
        raise Broken("\n".join(map(str, errors)))
    if (new := world.folder / "new").exists():
        # Killed right after it made the folder, it has left an empty one, which is not a store yet.
        if any(new.iterdir()) and (errors := fsck(new).errors):
            raise Broken("\n".join(map(str, errors)))
        Store.create(new).tags()
    tags = world.tags_now()
    for name, digest in world.tags.items():
        movable = bool(one.may_move) and name.startswith(one.may_move)
        if name not in tags and (not movable or name in KEPT or name.startswith(KEPT[1][:-1])):
            raise Broken(f"the tag {name} is gone")
        if not movable and tags[name] != digest:
            raise Broken(f"the tag {name} moved from {digest} to {tags[name]}")
    world.tags = tags
    world.load(rng.choice(sorted(tags)))


def check_all(world: World) -> None:
    """What must hold when nothing runs: every tag loads, and gc leaves no garbage."""
    run_forked(lambda: [world.load(tag) for tag in sorted(world.tags)] and None, None)
    collect(world.store, NOW_POLICY)
    if left := fsck(world.store.path).findings:
        raise Broken("left after gc:\n" + "\n".join(map(str, left)))
    if world.tags_now() != world.tags:
        raise Broken("gc changed the tags")


def kill_compiles(world: World, count: int, rng: random.Random) -> None:
    """Whole builds, killed while they compile; nothing of them may be left but garbage."""
    command = [*BUILD, str(world.store.path), "--force"]
    seconds = 0.0
    for number in range(count + 1):
        began = time.monotonic()
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as started:
            if number:
                time.sleep(rng.uniform(0, seconds))
                started.kill()
            started.wait()
        seconds = seconds or time.monotonic() - began
        time.sleep(1)  # its workers end with it, at once but not at the same instant
        world.tags = {**world.tags, f"{MODEL}:latest": world.tags_now()[f"{MODEL}:latest"]}
        check(world, COMPILE, rng)
        check_all(world)
        print(f"compile {number} of {count}: {'killed' if number else f'{seconds:.0f} s'}", flush=True)


COMPILE = Action("compile", lambda world, rng: None, 0, lambda world, rng: None, "", False, False)


def campaign(world: World, kills: int, seed: int, compiles: int) -> Counter[str]:
    """How often each action was killed. Raises Broken."""
    rng = random.Random(seed)
    actions = [one for one in ACTIONS if world.registry or not one.registry]
    seconds = {one.name: measure(world, one, rng) for one in actions}
    print("seconds:", ", ".join(f"{name} {took:.3f}" for name, took in seconds.items()), flush=True)
    killed: Counter[str] = Counter()
    while killed.total() < kills:
        (one,) = rng.choices(actions, [one.weight for one in actions])
        one.prepare(world, rng)
        # One in ten runs to its end: on a busy machine, how long it takes changes.
        after = rng.uniform(0, seconds[one.name]) if rng.random() < 0.9 else None
        own_seed = rng.random()
        where = f"kill {killed.total()} (seed {seed}): {one.name}, killed after {after} s"
        try:
            was_killed, took = run_forked(lambda o=one, s=own_seed: o.act(world, random.Random(s)), after)
            if was_killed:
                killed[one.name] += 1
            else:
                seconds[one.name] = max(took, 0.7 * seconds[one.name])
            check(world, one, rng)
            if was_killed and killed.total() % FULL_CHECK_EVERY == 0:
                check_all(world)
                print(f"{killed.total()} kills", flush=True)
        except Exception as error:
            raise Broken(f"{where}: {type(error).__name__}: {error}\nleft in {world.folder}") from error
    check_all(world)
    if compiles:
        kill_compiles(world, compiles, rng)
    return killed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--compiles", type=int, default=0, help="besides: whole builds that are killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", type=Path, help="a store built from manifests/quickstart.yaml; else it is built")
    parser.add_argument("--folder", type=Path, help="a new folder to work in, kept if something breaks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kill9-"))
    folder.mkdir(exist_ok=True)
    store = options.store
    if store is None:
        store = folder / "pristine"
        subprocess.run(
            [sys.executable, "-m", "aotc", "build", str(MANIFEST), "--store", str(store)], cwd=ROOT, check=True
        )
    began = time.monotonic()
    with running_registry(folder / "registry") if REGISTRY else nullcontext() as server:
        world = World(folder, Store.open(store), server.host if server else "")
        killed = campaign(world, options.kills, options.seed, options.compiles)
    shutil.rmtree(folder)
    print(
        f"{killed.total()} kills and {options.compiles} of compiles in {time.monotonic() - began:.0f} s, nothing lost"
    )
    print(", ".join(f"{name} {count}" for name, count in sorted(killed.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
