"""Remotes: the packages that they need, the credentials that are found for them, and whether they answer."""

from __future__ import annotations

import importlib.util
import os
import shutil
import time

import msgspec

from aotc.store.opening import open_transfer
from aotc.store.reference import DEFAULT_TAG, REGISTRY_SCHEMES, Reference
from aotc.store.remote.interface import Limits
from aotc.store.remote.registry.credentials import Credentials, credentials_named, find_credentials
from aotc.store.remote.transfer import Transfer
from aotc.tools.doctor.checks import Check, failing

PART = "remotes"
_VARIABLES = {
    "s3": ("AWS_",),
    "gs": ("GOOGLE_",),
    "az": ("AZURE_",),
    "https": ("NETRC",),
    "http": ("NETRC",),
    "hf": ("HF_TOKEN", "HF_ENDPOINT"),
}
_PATIENCE = 60.0  # seconds for all that is asked of a remote


def check_credentials() -> list[Check]:
    """The extras for remotes that are installed, and each file of credentials for registries. Asks no helper."""
    found = [
        name
        for name, module in (("oci", "requests"), ("objects", "obstore"), ("hub", "huggingface_hub"))
        if importlib.util.find_spec(module)
    ]
    about = (
        f"installed: {', '.join(f'aotc[{name}]' for name in found)}"
        if found
        else "none of aotc[oci], aotc[objects], aotc[hub]"
    )
    checks = [
        Check(
            PART, "packages", "ok", f"{about}; needed for registries, for object storage, and for the Hugging Face Hub"
        )
    ]
    for file in credentials_named():
        name = "credentials"
        if file.flaw:
            checks.append(
                Check(PART, name, "warn", f"{file.path} is not used: {file.flaw}", hint="correct or remove it")
            )
            continue
        hosts = ", ".join(file.hosts) or "no registry by name"
        checks.append(Check(PART, name, "ok", f"{file.path}: {hosts}"))
        for program in file.helpers:
            if shutil.which(program) is None:
                hint = f"install it, or log in again without it: {file.path} names it"
                checks.append(Check(PART, name, "warn", f"{program} is not on the PATH", hint=hint))
    return checks


def check_remote(url: str) -> list[Check]:
    """The credentials that a remote is asked with, and whether it answers. Sends requests, each once."""
    checks: list[Check] = []
    scheme, _, rest = url.partition("://")
    if scheme in REGISTRY_SCHEMES:
        host, _, repository = rest.partition("/")
        found = find_credentials(host, repository)
        checks.append(Check(PART, "credentials", "ok", f"for {host}: {_shown(found)}"))
    else:
        names = sorted(name for name in os.environ if name.startswith(_VARIABLES.get(scheme, ())))
        where = f"from the environment: {', '.join(names)}" if names else "none in the environment"
        checks.append(Check(PART, "credentials", "ok", f"for {url}: {where}"))
    with failing(checks, PART, "store"):
        transfer, began = open_once(url), time.monotonic()
        reference = Reference(url, "" if scheme in REGISTRY_SCHEMES else "model", tag=DEFAULT_TAG)
        known = transfer.retrying(lambda: transfer.remote.known(reference))
        checks.append(
            Check(PART, "store", "ok", f"{url}: tags: {len(known)}; answered in {time.monotonic() - began:.1f} s")
        )
    return checks


def open_once(url: str) -> Transfer:
    """A transfer with the remote at a URL that tries nothing again. Raises StoreError for `AOTC_REMOTE_…` that are not
    limits."""
    limits = Limits.from_environment()
    return open_transfer(url, msgspec.structs.replace(limits, attempts=1, total=min(limits.total, _PATIENCE)))


def _shown(found: Credentials | None) -> str:
    """The text of a credential without its secret."""
    if found is None:
        return "none, so requests are anonymous"
    return f"{found.username or 'a refresh token'}, of {found.source}"
