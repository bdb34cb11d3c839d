"""A server on loopback that speaks of the Hugging Face Hub's protocol what huggingface_hub uses of it for stores.

Files by revision (`resolve`, with ranges, and a redirect to where large files lie), what the head of a branch is,
`preupload`, git-lfs' batch with its basic transfer, and commits, which `parentCommit` makes conditional. As the Hub, it
answers 404 for a repository that a token may not see, and 412 where another commit came first.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock
from urllib.parse import unquote

TOKEN = "hf_of_the_tests"
REGULAR = 1 << 10
"""Bytes up to which a file is kept in git. The Hub's limit is 10 MiB, for text: this one has both kinds tried."""

Tree = dict[str, bytes | str]
"""Files by their paths: their bytes, or the digest of a large one."""


@dataclass
class Repository:
    """Its commits, oldest first, and the names of some."""

    trees: dict[str, Tree] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def commit(self, branch: str, tree: Tree) -> str:
        digest = hashlib.sha1(f"{len(self.trees)} {sorted(tree)}".encode()).hexdigest()
        self.trees[digest] = tree
        self.names[branch] = digest
        return digest

    def resolve(self, revision: str) -> str | None:
        found = self.names.get(revision, revision)
        return found if found in self.trees else None


@dataclass
class Hub:
    endpoint: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    failures: list[int] = field(default_factory=list)
    """Statuses of the next answers to a download, before any that is right."""

    @property
    def environment(self) -> dict[str, str]:
        return {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}

    def new_url(self) -> str:
        """A new repository."""
        name = f"suite/store-{len(self.repositories)}"
        self.new(name)
        return f"hf://{name}"

    def new(self, name: str, **fields: Any) -> Repository:
        repository = self.repositories[name] = Repository(**fields)
        repository.commit("main", {".gitattributes": b"*.bin filter=lfs\n"})
        return repository

    def change(self, name: str, path: str, change: Callable[[bytes], bytes | None]) -> None:
        """A commit that makes another file of the one at `path`; None removes it."""
        repository = self.repositories[name]
        tree = dict(repository.trees[repository.names["main"]])
        content = tree.pop(path)
        changed = change(content if isinstance(content, bytes) else self.large[content])
        if changed is not None:
            tree[path] = changed
        repository.commit("main", tree)


class _Answered(Exception):
    """An answer that ends a request: its status, and the Hub's own code for it."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any, status: int = 200) -> None:
        self._answer(status, json.dumps(value).encode(), Content_Type="application/json")

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, name: str, write: bool = False) -> Repository:
        found = self.hub.repositories.get(name)
        if found is None or (found.private and not self._is_known()):
            raise _Answered(404 if self._is_known() else 401, "RepoNotFound", "Repository not found")
        if found.gated:
            raise _Answered(403, "GatedRepo", f"Access to model {name} is restricted")
        if write and not self._is_known():
            raise _Answered(401, "", "Invalid username or password.")
        return found

    def _handle(self) -> None:
        body, path = self._body(), self.path.partition("?")[0]
        try:
            for pattern, method in _ROUTES:
                if found := re.fullmatch(pattern, path):
                    method(self, body, *map(unquote, found.groups("main")))
                    return
            raise _Answered(404, "", f"nothing at {self.command} {path}")
        except _Answered as answer:
            status, code, message = answer.args
            self._answer(status, json.dumps({"error": message}).encode(), X_Error_Code=code, X_Error_Message=message)

    do_GET = do_HEAD = do_POST = do_PUT = _handle

    def _at(self, repository: Repository, revision: str) -> str:
        commit = repository.resolve(revision)
        if commit is None:
            raise _Answered(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def _resolve(self, _: bytes, name: str, revision: str, path: str) -> None:
        if self.command == "GET" and self.hub.failures:
            raise _Answered(self.hub.failures.pop(0), "", "busy")
        repository = self._repository(name)
        commit = self._at(repository, revision)
        content = repository.trees[commit].get(path)
        headers = {"X_Repo_Commit": commit}
        if content is None:
            self._answer(404, b"Entry not found", X_Error_Code="EntryNotFound", **headers)
        elif isinstance(content, bytes):
            self._content(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', **headers)
        else:
            linked = {"X_Linked_Size": str(len(self.hub.large[content])), "X_Linked_ETag": f'"{content}"'}
            self._answer(302, Location=f"{self.hub.endpoint}/large/{content}", **linked, **headers)

    def _content(self, content: bytes, **headers: str) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if asked is None:
            self._answer(200, content, **headers)
            return
        begin = int(asked[1])
        of = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        self._answer(206, content[begin:], Content_Range=of, **headers)

    def _download(self, _: bytes, oid: str) -> None:
        self._content(self.hub.large[oid])

    def _upload(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise _Answered(400, "", "the content is not what its digest says")
        self.hub.large[oid] = body
        self._answer(200)

    def _head(self, _: bytes, name: str, revision: str) -> None:
        self._json({"id": name, "sha": self._at(self._repository(name), revision), "siblings": [], "tags": []})

    def _preupload(self, body: bytes, name: str, revision: str) -> None:
        self._at(self._repository(name, write=True), revision)
        modes = {one["path"]: "regular" if one["size"] <= REGULAR else "lfs" for one in json.loads(body)["files"]}
        files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
        self._json({"files": files})

    def _batch(self, body: bytes, name: str) -> None:
        self._repository(name, write=True)
        objects = json.loads(body)["objects"]
        for one in objects:
            if one["oid"] not in self.hub.large:
                one["actions"] = {"upload": {"href": f"{self.hub.endpoint}/large/{one['oid']}"}}
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, body: bytes, name: str, revision: str) -> None:
        header, *operations = map(json.loads, body.splitlines())
        with self.hub.lock:
            repository = self._repository(name, write=True)
            head = self._at(repository, revision)
            if header["value"].get("parentCommit", head) != head:
                raise _Answered(412, "", "A commit has happened since. Please refresh and try again.")
            tree = dict(repository.trees[head])
            for operation in operations:
                self._apply(tree, operation["key"], operation["value"])
            commit = repository.commit(revision, tree)
        self._json({"success": True, "commitOid": commit, "commitUrl": f"{self.hub.endpoint}/{name}/commit/{commit}"})

    def _apply(self, tree: Tree, key: str, value: Any) -> None:
        path = value["path"]
        if key == "file":
            tree[path] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            if value["oid"] not in self.hub.large:
                raise _Answered(400, "", f"{path} was not uploaded")
            tree[path] = value["oid"]
        elif tree.pop(path, None) is None:  # deletedFile
            raise _Answered(404, "EntryNotFound", f"{path} is not there")


_NAME = r"([^/]+/[^/]+)"
_ROUTES: list[tuple[str, Any]] = [
    (rf"/{_NAME}/resolve/([^/]+)/(.+)", _Handler._resolve),
    (rf"/api/models/{_NAME}(?:/revision/([^/]+))?", _Handler._head),
    (rf"/api/models/{_NAME}/preupload/([^/]+)", _Handler._preupload),
    (rf"/api/models/{_NAME}/commit/([^/]+)", _Handler._commit),
    (rf"/{_NAME}\.git/info/lfs/objects/batch", _Handler._batch),
    (
        r"/large/([0-9a-f]+)",
        lambda self, body, oid: (self._upload if self.command == "PUT" else self._download)(body, oid),
    ),
]


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    """Without Xet, a protocol of its own with servers of its own: huggingface_hub then uploads by git-lfs."""
    from huggingface_hub import constants

    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with mock.patch.object(constants, "HF_HUB_DISABLE_XET", True):
            yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
