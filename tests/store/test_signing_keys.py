"""Keys: which are accepted, which are refused, and that OpenSSL and aotc mean the same by each."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from signing import COSIGN_KEY, COSIGN_PASSWORD, key_by_openssl, needs_openssl, openssl, private_key

from aotc.digest import sha256_bytes
from aotc.errors import SignatureError, StoreError
from aotc.store.signing.keys import generate_key_pair, read_private_key, read_public_keys

KINDS = {
    "ecdsa-p256": (),
    "rsa-2048": ("-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"),
    "rsa-3072": ("-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:3072"),
    "ed25519": ("-algorithm", "ED25519"),
}
REFUSED = {
    "rsa-1024": ("-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:1024"),
    "rsa-exponent-3": ("-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-pkeyopt", "rsa_keygen_pubexp:3"),
    "ecdsa-p224": ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-224"),
    "ecdsa-p384": ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-384"),
    "secp256k1": ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:secp256k1"),
    "ed448": ("-algorithm", "ED448"),
    "x25519": ("-algorithm", "X25519"),
}
MESSAGE = b"what is signed" * 7

pytestmark = needs_openssl


def openssl_verifies(public: Path, signature: bytes, folder: Path) -> bool:
    (folder / "signature").write_bytes(signature)
    (folder / "message").write_bytes(MESSAGE)
    raw = ("-rawin",) if b"ED25519" in openssl("pkey", "-pubin", "-in", public, "-text", "-noout") else ()
    hashing = () if raw else ("-rawin", "-digest", "sha256")
    out = openssl(
        *("pkeyutl", "-verify", "-pubin", "-inkey", public, "-in", folder / "message"),
        *("-sigfile", folder / "signature", *(raw or hashing)),
    )
    return b"Successfully" in out


def signed_by_openssl(private: Path, folder: Path, kind: str) -> bytes:
    (folder / "message").write_bytes(MESSAGE)
    hashing = () if kind == "ed25519" else ("-digest", "sha256")
    return openssl("pkeyutl", "-sign", "-inkey", private, "-in", folder / "message", "-rawin", *hashing)


@pytest.mark.parametrize("kind", KINDS)
def test_openssl_accepts_what_aotc_signs_and_aotc_what_openssl_signs(kind: str, tmp_path: Path) -> None:
    private, public = key_by_openssl(tmp_path, "k", *KINDS[kind])
    (trusted,) = read_public_keys([public])
    assert openssl_verifies(public, private_key(private).sign(MESSAGE), tmp_path)
    theirs = signed_by_openssl(private, tmp_path, kind)
    assert trusted.verifies(theirs, MESSAGE)
    assert not trusted.verifies(theirs, MESSAGE + b"!")


@pytest.mark.parametrize("kind", REFUSED)
def test_weak_keys_and_keys_of_other_kinds_are_refused_on_both_sides(kind: str, tmp_path: Path) -> None:
    private, public = key_by_openssl(tmp_path, "k", *REFUSED[kind])
    with pytest.raises(SignatureError, match=r"not accepted|cannot be read"):
        read_public_keys([public])
    with pytest.raises(SignatureError, match=r"not accepted|cannot be read"):
        private_key(private)


def test_a_dsa_key_is_refused(tmp_path: Path) -> None:
    openssl("genpkey", "-genparam", "-algorithm", "DSA", "-pkeyopt", "dsa_paramgen_bits:1024", "-out", tmp_path / "p")
    openssl("genpkey", "-paramfile", tmp_path / "p", "-out", tmp_path / "k")
    openssl("pkey", "-in", tmp_path / "k", "-pubout", "-out", tmp_path / "k.pub")
    with pytest.raises(SignatureError, match="not accepted"):
        read_public_keys([tmp_path / "k.pub"])
    with pytest.raises(SignatureError, match="not accepted"):
        private_key(tmp_path / "k")


def test_the_fingerprint_is_the_sha256_of_the_der_form(tmp_path: Path) -> None:
    _, public = key_by_openssl(tmp_path, "k")
    (key,) = read_public_keys([public])
    assert key.fingerprint == sha256_bytes(openssl("pkey", "-pubin", "-in", public, "-outform", "DER"))


def test_keys_come_from_texts_files_and_folders_and_each_counts_once(tmp_path: Path) -> None:
    _, first = key_by_openssl(tmp_path, "a")
    _, second = key_by_openssl(tmp_path, "b")
    both = tmp_path / "both.pem"
    both.write_text(first.read_text() + "\n# the next one\n" + second.read_text())
    for sources in ([first, second], [both], [tmp_path], [first.read_text(), str(second), both, tmp_path]):
        assert len(read_public_keys(sources)) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "no PEM block"), ("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----", "cannot be read")],
)
def test_what_is_no_public_key_is_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "k.pub"
    path.write_text(content)
    with pytest.raises(SignatureError, match=message):
        read_public_keys([path])


def test_a_private_key_is_not_trusted(tmp_path: Path) -> None:
    private, _ = key_by_openssl(tmp_path, "k")
    with pytest.raises(SignatureError, match="it holds PRIVATE KEY"):
        read_public_keys([private])


def test_a_folder_without_keys_and_no_keys_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SignatureError, match=r"no file \*\.pub"):
        read_public_keys([tmp_path])
    with pytest.raises(SignatureError, match="no trusted key was given"):
        read_public_keys([])
    with pytest.raises(StoreError, match="No such file"):
        read_public_keys([tmp_path / "missing.pub"])


def test_a_folder_of_keys_that_may_not_be_read_is_not_called_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_by_openssl(tmp_path, "k")

    def refuse(path: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(StoreError, match=f"cannot read {tmp_path}: Permission denied"):
        read_public_keys([tmp_path])


def test_a_key_that_is_not_there_is_an_error_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"missing\.pub: No such file") as public:
        read_public_keys([tmp_path / "missing.pub"])
    assert "a folder of files *.pub" in public.value.hint
    with pytest.raises(StoreError, match=r"missing\.key: No such file") as private:
        private_key(tmp_path / "missing.key")
    assert "env://NAME" in private.value.hint


@pytest.mark.parametrize("source", ["a\0b", Path("a\0b")], ids=["text", "path"])
def test_what_can_be_no_path_of_a_key_is_said_so(source: str | Path) -> None:
    with pytest.raises(SignatureError, match=r"'a\\x00b' is not a key"):
        read_public_keys([source])
    with pytest.raises(SignatureError, match=r"'a\\x00b' is not a key"):
        read_private_key(str(source), lambda: b"")


# -- private keys -----------------------------------------------------------------------------------------------------


def test_cosign_s_own_encrypted_key_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cosign.key"
    path.write_text(COSIGN_KEY)
    key = read_private_key(str(path), lambda: COSIGN_PASSWORD)
    (tmp_path / "cosign.pub").write_text(key.public.pem)
    assert openssl_verifies(tmp_path / "cosign.pub", key.sign(MESSAGE), tmp_path)


def test_a_wrong_password_is_said(tmp_path: Path) -> None:
    path = tmp_path / "cosign.key"
    path.write_text(COSIGN_KEY)
    with pytest.raises(SignatureError, match="cannot be decrypted") as caught:
        read_private_key(str(path), lambda: b"wrong")
    assert "COSIGN_PASSWORD" in caught.value.hint


def test_a_generated_pair_is_private_encrypted_and_never_overwritten(tmp_path: Path) -> None:
    private, public = generate_key_pair(str(tmp_path / "ci"), b"secret")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert private.read_text().startswith("-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\n")
    key = read_private_key(str(private), lambda: b"secret")
    assert openssl_verifies(public, key.sign(MESSAGE), tmp_path)
    with pytest.raises(SignatureError):
        read_private_key(str(private), lambda: b"Secret")
    before = private.read_bytes()
    with pytest.raises(StoreError, match="there already"):
        generate_key_pair(str(tmp_path / "ci"), b"secret")
    assert private.read_bytes() == before


@pytest.mark.parametrize("form", ["pkcs8", "traditional"])
def test_keys_that_openssl_encrypted_are_read(form: str, tmp_path: Path) -> None:
    plain, public = key_by_openssl(tmp_path, "k")
    options = ("-traditional",) if form == "traditional" else ()
    openssl("pkey", "-in", plain, "-aes256", "-passout", "pass:pw", *options, "-out", tmp_path / "e.key")
    key = read_private_key(str(tmp_path / "e.key"), lambda: b"pw")
    assert openssl_verifies(public, key.sign(MESSAGE), tmp_path)


def test_a_key_with_the_parameters_of_its_curve_before_it_is_read(tmp_path: Path) -> None:
    openssl("ecparam", "-name", "prime256v1", "-genkey", "-out", tmp_path / "k.key")
    assert (tmp_path / "k.key").read_text().startswith("-----BEGIN EC PARAMETERS-----")
    openssl("pkey", "-in", tmp_path / "k.key", "-pubout", "-out", tmp_path / "k.pub")
    assert openssl_verifies(tmp_path / "k.pub", private_key(tmp_path / "k.key").sign(MESSAGE), tmp_path)


def test_what_is_no_private_key_is_said(tmp_path: Path) -> None:
    _, public = key_by_openssl(tmp_path, "k")
    with pytest.raises(SignatureError, match="it holds PUBLIC KEY"):
        private_key(public)


def test_a_key_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private, public = key_by_openssl(tmp_path, "k")
    monkeypatch.setenv("SIGNING_KEY", private.read_text())
    key = read_private_key("env://SIGNING_KEY", lambda: b"")
    assert openssl_verifies(public, key.sign(MESSAGE), tmp_path)
    monkeypatch.delenv("SIGNING_KEY")
    with pytest.raises(SignatureError, match="SIGNING_KEY"):
        read_private_key("env://SIGNING_KEY", lambda: b"")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"N":32768', '"N":1073741824'),
        ('"N":32768', '"N":3'),
        ('"N":32768', '"N":-1'),
        ('"r":8', '"r":0'),
        ('"scrypt"', '"md5"'),
        ('"nacl/secretbox"', '"none"'),
        ('"nonce":"', '"nonce":"AA'),
        ("{", ""),
    ],
)
def test_a_hostile_cosign_key_is_an_error_and_takes_no_memory(old: str, new: str, tmp_path: Path) -> None:
    import base64

    body = "".join(COSIGN_KEY.splitlines()[1:-1])
    text = base64.b64decode(body).decode()
    assert old in text
    changed = base64.b64encode(text.replace(old, new, 1).encode()).decode()
    path = tmp_path / "cosign.key"
    path.write_text(COSIGN_KEY.splitlines()[0] + "\n" + changed + "\n" + COSIGN_KEY.splitlines()[-1])
    with pytest.raises(SignatureError):
        read_private_key(str(path), lambda: COSIGN_PASSWORD)


def test_a_pipe_is_no_key(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "k.pub")
    with pytest.raises(StoreError, match="not a regular file"):
        read_public_keys([tmp_path / "k.pub"])
