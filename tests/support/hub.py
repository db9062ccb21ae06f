"""A stand-in for the hub: the endpoints that huggingface_hub calls to push and to fetch, over HTTP, in memory.

It keeps what the hub keeps: repositories with branches of whole commits, large files apart from them on another host,
tokens that may write to some names, private repositories that others do not see. `HF_ENDPOINT` leads to it. It speaks
the older protocol for large files, so Xet is to be switched off (`HF_HUB_DISABLE_XET`).
"""

from __future__ import annotations

import base64
import json
import re
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from threading import RLock, Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LARGE = (".safetensors", ".bin", ".gguf")


@dataclass
class Repository:
    """A repository: commits are whole trees (path to content), branches name them."""

    private: bool
    branches: dict[str, str]
    commits: dict[str, dict[str, bytes]]

    def commit_of(self, revision: str) -> str | None:
        found = self.branches.get(revision, revision)
        return found if found in self.commits else None

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches.get(revision, revision)]


@dataclass
class Fault:
    """What happens to the next request whose line contains `when`; a status of 0 breaks off the connection."""

    when: str
    status: int
    message: str = "out of order"


@dataclass
class LocalHub:
    """The server, to be used in a `with` statement.

    Attributes:
        writers: the names that each token may write to.
        requests: the method and path of each request, in the order of arrival.
    """

    writers: dict[str, set[str]] = field(default_factory=lambda: {"token-of-ada": {"ada"}})
    repositories: dict[str, Repository] = field(default_factory=dict)
    faults: deque[Fault] = field(default_factory=deque)
    requests: list[str] = field(default_factory=list)
    stored: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lock = RLock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self.httpd = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.httpd.server_port}"
        # As the hub's own storage, another host: no token is sent there.
        self.storage = f"http://localhost:{self.httpd.server_port}"

    def __enter__(self) -> LocalHub:
        Thread(target=self.httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.httpd.shutdown()
        self.httpd.server_close()

    def create(self, name: str, files: dict[str, bytes] | None = None, private: bool = False) -> Repository:
        """A repository with one commit."""
        repository = Repository(private, {}, {})
        self.repositories[name] = repository
        self.commit(name, "main", files or {})
        return repository

    def commit(self, name: str, branch: str, files: dict[str, bytes]) -> str:
        repository = self.repositories[name]
        oid = sha1(f"{name} {branch} {len(repository.commits)}".encode()).hexdigest()
        repository.commits[oid] = dict(files)
        repository.branches[branch] = oid
        return oid


class _Refused(Exception):
    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        path = urlsplit(self.path).path
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {path}")
            fault = self.hub.faults[0] if self.hub.faults and self.hub.faults[0].when in self.hub.requests[-1] else None
            if fault is not None:
                self.hub.faults.popleft()
            if fault is not None and fault.status == 0:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                self.connection.close()
                return
            try:
                if fault is not None:
                    raise _Refused(fault.status, fault.message)
                for method, pattern, answer in _ROUTES:
                    match = re.fullmatch(pattern, path)
                    if match and self.command in method:
                        answer(self, *map(unquote, match.groups()))
                        return
                raise _Refused(404, f"no such endpoint: {self.requestline}")
            except _Refused as error:
                headers = {"X-Error-Message": error.message, **({"X-Error-Code": error.code} if error.code else {})}
                self.reply(error.status, {"error": error.message}, headers)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    # ------------------------------------------------------------------------------------------ who may

    @property
    def may_write(self) -> set[str]:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in self.hub.writers:
            raise _Refused(401, "Invalid credentials in Authorization header")
        return self.hub.writers.get(token, set())

    def readable(self, name: str) -> Repository:
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and name.split("/")[0] not in self.may_write):
            raise _Refused(401, "Repository not found", "RepoNotFound")
        return repository

    def writable(self, name: str) -> Repository:
        repository = self.readable(name)
        if name.split("/")[0] not in self.may_write:
            raise _Refused(403, "you have no right to write to this repository")
        return repository

    @staticmethod
    def commit_in(repository: Repository, revision: str) -> str:
        oid = repository.commit_of(revision)
        if oid is None:
            raise _Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return oid

    # ----------------------------------------------------------------------------------------- pushing

    def create(self) -> None:
        body = json.loads(self.body)
        may = self.may_write
        if not may:
            raise _Refused(401, "Invalid username or password.")
        owner = body.get("organization") or min(may)
        name = f"{owner}/{body['name']}"
        if owner not in may:
            raise _Refused(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
        answer = {"url": f"{self.hub.url}/{name}", "name": name}
        if name in self.hub.repositories:
            self.reply(409, {**answer, "error": "You already created this model repo"})
            return
        self.hub.create(name, {".gitattributes": b"*.safetensors filter=lfs\n"}, body.get("visibility") == "private")
        self.reply(200, answer)

    def branch(self, name: str, branch: str) -> None:
        repository = self.writable(name)
        if branch in repository.branches:
            raise _Refused(409, "Reference already exists")
        repository.branches[branch] = repository.branches["main"]
        self.reply(201, {})

    def validate(self) -> None:
        content = json.loads(self.body)["content"]
        match = re.match(r"---\n(.*?)\n---\n", content, re.S)
        data = yaml.safe_load(match.group(1)) if match else None
        relations = (None, "adapter", "merge", "quantized", "finetune")
        errors = []
        if not isinstance(data, dict):
            errors.append("no metadata")
        elif data.get("base_model_relation") not in relations or not isinstance(data.get("tags", []), list):
            errors.append('"base_model_relation" or "tags" is not valid')
        self.reply(400 if errors else 200, {"errors": [{"message": error} for error in errors], "warnings": []})

    def preupload(self, name: str, revision: str) -> None:
        repository = self.writable(name)
        present = repository.commits[self.commit_in(repository, revision)]
        answers = []
        for file in json.loads(self.body)["files"]:
            large = file["path"].endswith(LARGE)
            content = present.get(file["path"])
            oid = None if content is None else _oid(file["path"], content)
            answers.append(
                {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}
            )
        self.reply(200, {"files": answers})

    def large_files(self, name: str) -> None:
        self.writable(name)
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            actions = {"actions": {"upload": {"href": f"{self.hub.storage}/storage/{wanted['oid']}"}}}
            objects.append({**wanted, **({} if wanted["oid"] in self.hub.stored else actions)})
        self.reply(200, {"transfer": "basic", "objects": objects})

    def store(self, oid: str) -> None:
        if sha256(self.body).hexdigest() != oid:
            raise _Refused(400, "the content is not what its hash says")
        self.hub.stored[oid] = self.body
        self.reply(200, {})

    def commit(self, name: str, branch: str) -> None:
        repository = self.writable(name)
        files = dict(repository.commits[self.commit_in(repository, branch)])
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                if value["oid"] not in self.hub.stored:
                    raise _Refused(400, f"{value['path']} was not uploaded")
                files[value["path"]] = self.hub.stored[value["oid"]]
            elif item["key"] == "deletedFile" and files.pop(value["path"], None) is None:
                raise _Refused(404, "A file with this name doesn't exist", "EntryNotFound")
        oid = self.hub.commit(name, branch, files)
        self.reply(200, {"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}"})

    # ---------------------------------------------------------------------------------------- fetching

    def about(self, name: str, revision: str = "main") -> None:
        repository = self.readable(name)
        oid = self.commit_in(repository, revision)
        siblings = [{"rfilename": path} for path in repository.commits[oid]]
        card = {"id": name, "sha": oid, "private": repository.private, "tags": [], "siblings": siblings}
        self.reply(200, card)

    def tree(self, name: str, revision: str, folder: str = "") -> None:
        repository = self.readable(name)
        files = repository.commits[self.commit_in(repository, revision)]
        start = f"{folder}/" if folder else ""
        paths = [path for path in sorted(files) if path.startswith(start)]
        if folder and not paths:
            raise _Refused(404, f"{folder} does not exist", "EntryNotFound")
        folders = {str(parent) for path in paths for parent in PurePosixPath(path).parents if str(parent) != "."}
        entries = [{"type": "directory", "path": path, "oid": "0" * 40} for path in sorted(folders - {folder})]
        entries += [_entry(path, files[path]) for path in paths]
        if "recursive" not in parse_qs(urlsplit(self.path).query):
            entries = [entry for entry in entries if "/" not in entry["path"].removeprefix(start)]
        self.reply(200, entries)

    def resolve(self, name: str, revision: str, path: str) -> None:
        repository = self.readable(name)
        commit = self.commit_in(repository, revision)
        content = repository.commits[commit].get(path)
        if content is None:
            self.reply(404, b"Entry not found", {"X-Repo-Commit": commit, "X-Error-Code": "EntryNotFound"})
            return
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_oid(path, content)}"'}
        if not path.endswith(LARGE):
            self.reply(200, content, headers)
            return
        oid = _oid(path, content)
        self.hub.stored[oid] = content
        linked = {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(content))}
        self.reply(302, b"", {**headers, **linked, "Location": f"{self.hub.storage}/storage/{oid}"})

    def stored(self, oid: str) -> None:
        assert "Authorization" not in self.headers  # it is nobody's business there
        self.reply(200, self.hub.stored[oid], {"ETag": f'"{oid}"'})

    # ------------------------------------------------------------------------------------------ plumbing

    def reply(self, status: int, content: bytes | Any, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def _entry(path: str, content: bytes) -> dict[str, Any]:
    """A file as the hub lists it."""
    oid = _oid(path, content)
    entry = {"type": "file", "path": path, "size": len(content), "oid": oid}
    return {**entry, "lfs": {"oid": oid, "size": len(content), "pointerSize": 130}} if path.endswith(LARGE) else entry


def _oid(path: str, content: bytes) -> str:
    """What git calls a small file by, and the large-file storage a large one."""
    if path.endswith(LARGE):
        return sha256(content).hexdigest()
    return sha1(b"blob %d\0" % len(content) + content).hexdigest()


_NAME = r"([\w.-]+/[\w.-]+)"
_DATASET = r"(datasets/[\w.-]+/[\w.-]+)"
_ROUTES = [
    (("POST",), "/api/repos/create", _Handler.create),
    (("POST",), "/api/validate-yaml", _Handler.validate),
    (("POST",), f"/api/models/{_NAME}/branch/([^/]+)", _Handler.branch),
    (("POST",), f"/api/models/{_NAME}/preupload/([^/]+)", _Handler.preupload),
    (("POST",), f"/{_NAME}\\.git/info/lfs/objects/batch", _Handler.large_files),
    (("PUT",), "/storage/([0-9a-f]{64})", _Handler.store),
    (("POST",), f"/api/models/{_NAME}/commit/([^/]+)", _Handler.commit),
    (("GET",), f"/api/models/{_NAME}", _Handler.about),
    (("GET",), f"/api/models/{_NAME}/revision/([^/]+)", _Handler.about),
    (("GET",), f"/api/models/{_NAME}/tree/([^/]+)", _Handler.tree),
    (("GET", "HEAD"), f"/{_NAME}/resolve/([^/]+)/(.+)", _Handler.resolve),
    (("GET",), f"/api/{_DATASET}", _Handler.about),
    (("GET",), f"/api/{_DATASET}/revision/([^/]+)", _Handler.about),
    (("GET",), f"/api/{_DATASET}/tree/([^/]+)/?(.*)", _Handler.tree),
    (("GET", "HEAD"), f"/{_DATASET}/resolve/([^/]+)/(.+)", _Handler.resolve),
    (("GET", "HEAD"), "/storage/([0-9a-f]{64})", _Handler.stored),
]
