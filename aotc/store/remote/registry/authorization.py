"""How a registry is told who asks: HTTP Basic, or the bearer tokens of the distribution specification.

https://distribution.github.io/distribution/spec/auth/token/ and, for refresh tokens, …/spec/auth/oauth/.
"""

from __future__ import annotations

import base64
import re
import threading
import urllib.request
from collections.abc import Callable, Iterable

import msgspec

from aotc.errors import RemoteError
from aotc.store.remote.registry.credentials import Credentials, credential_files, find_credentials

Send = Callable[..., bytes]
"""`send(method, url, what=…, headers=…, params=…, data=…)`: one request without our authorization; its body."""


class Challenge(msgspec.Struct, frozen=True):
    """What a 401 asks for: `Basic`, or `Bearer` with where to get a token, for whom and for what."""

    scheme: str
    realm: str = ""
    service: str = ""
    scope: str = ""


def parse_challenge(header: str) -> Challenge | None:
    """The best challenge that aotc can answer in a WWW-Authenticate header; None where there is none."""
    for scheme in ("Bearer", "Basic"):
        if match := re.search(rf"(?:^|,)\s*{scheme}(?:\s+(.*))?$", header, re.IGNORECASE | re.DOTALL):
            pairs = [item for item in urllib.request.parse_http_list(match[1] or "") if re.search("=.", item)]
            values = {key.lower(): value for key, value in urllib.request.parse_keqv_list(pairs).items()}
            return Challenge(scheme, *(values.get(name, "") for name in ("realm", "service", "scope")))
    return None


class _TokenAnswer(msgspec.Struct):
    """The field is `token` by the distribution specification, `access_token` by OAuth 2.0."""

    token: str = ""
    access_token: str = ""

    def __post_init__(self) -> None:
        if not (self.token or self.access_token):
            raise ValueError("the answer has neither `token` nor `access_token`")


class Authorization:
    """The Authorization header for one repository, got when the registry first asks, and again when it expires.

    Threads share it: of many that are refused at once, one gets the new token, for all that was ever asked for.
    """

    def __init__(self, url: str, host: str, repository: str, send: Send) -> None:
        self.header = ""
        self._url = url
        self._host = host
        self._repository = repository
        self._send = send
        self._scopes: list[str] = []
        self._lock = threading.Lock()

    def renew(self, refused: str, www_authenticate: str) -> bool:
        """Answer a 401 to a request that carried the header `refused`; whether another attempt makes sense.

        Raises RemoteError where the token service fails or refuses.
        """
        with self._lock:
            if self.header != refused:
                return True  # another thread was here first
            challenge = parse_challenge(www_authenticate)
            if challenge is None:
                return False
            credentials = find_credentials(self._host, self._repository)
            if challenge.scheme == "Basic":
                self.header = _basic(credentials) if credentials else ""
            else:
                self._scopes = _joined([*self._scopes, *challenge.scope.split()])
                self.header = f"Bearer {self._token(challenge, credentials)}"
            return self.header not in ("", refused)

    def explain(self) -> str:
        """A hint for who was refused: whose credentials were used, or where none were found."""
        if found := find_credentials(self._host, self._repository):
            return f"the credentials of {found.username or 'a token'} from {found.source} were not enough"
        looked = ", ".join(str(path) for path in credential_files())
        return f"log in with `docker login {self._host}` or `podman login {self._host}`; none found in {looked}"

    def _token(self, challenge: Challenge, credentials: Credentials | None) -> str:
        scheme = challenge.realm.partition("://")[0].lower()
        if scheme != "https" and not (scheme == "http" and self._url.startswith("http://")):
            raise RemoteError(
                f"{self._url} redirects to the token service {challenge.realm[:200]!r}, which is not https",
                hint="credentials are not sent there; correct the realm in the registry's configuration",
                url=self._url,
                status=401,
                transient=False,
            )
        body = self._ask(challenge, credentials)
        try:
            answer = msgspec.json.decode(body, type=_TokenAnswer)
            return answer.token or answer.access_token
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RemoteError(
                f"{challenge.realm} gave no token: {error}",
                hint="the registry's token service is broken, or something else answers in its place",
                url=challenge.realm,
                status=200,
                transient=False,
            ) from error

    def _ask(self, challenge: Challenge, credentials: Credentials | None) -> bytes:
        service = {"service": challenge.service} if challenge.service else {}
        if credentials is not None and credentials.refresh_token:
            form = {"grant_type": "refresh_token", "client_id": "aotc", "refresh_token": credentials.refresh_token}
            scope = {"scope": " ".join(self._scopes)} if self._scopes else {}
            return self._send("POST", challenge.realm, what="get a token", data={**form, **service, **scope})
        headers = {"Authorization": _basic(credentials)} if credentials else {}
        asked = {**service, "scope": self._scopes}  # the parameter once for each
        return self._send("GET", challenge.realm, what="get a token", headers=headers, params=asked)


def _joined(scopes: Iterable[str]) -> list[str]:
    """One scope for each resource, `repository:NAME:pull,push`, with all its actions."""
    resources: dict[str, list[str]] = {}
    for scope in scopes:
        resource, colon, actions = scope.rpartition(":")
        resources.setdefault(resource + colon, []).extend(actions.split(","))
    return [resource + ",".join(dict.fromkeys(actions)) for resource, actions in resources.items()]


def _basic(credentials: Credentials) -> str:
    return "Basic " + base64.b64encode(f"{credentials.username}:{credentials.password}".encode()).decode()
