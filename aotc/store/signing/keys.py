"""Keys of signatures: cosign's own encrypted files, and plain PEM.

`cryptography` does the work, and `PyNaCl` opens cosign's encrypted keys: `cosign generate-key-pair` writes no others,
and `cryptography` has no XSalsa20. Both belong to the extra `aotc[sign]`, and are
imported here, inside functions, when keys are used.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, NoReturn

import msgspec

from aotc.digest import canonical_json, sha256_bytes
from aotc.errors import SignatureError, StoreError
from aotc.store.files.disk import read_limited, typed_errors

if TYPE_CHECKING:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

    _Public = ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey
    _Private = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey

KEY_FILE_LIMIT = 1 << 20
RSA_BITS = (2048, 3072, 4096)  # the sizes that sigstore allows
ACCEPTED = "an ECDSA key on P-256, an RSA key of 2048, 3072 or 4096 bits, or an Ed25519 key"

_PEM = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----\s(.*?)-----END \1-----", re.DOTALL)
_COSIGN_LABELS = ("ENCRYPTED SIGSTORE PRIVATE KEY", "ENCRYPTED COSIGN PRIVATE KEY")
_INSTALL = "pip install 'aotc[sign]'"

PathOrText = str | os.PathLike[str]


class PublicKey:
    """A key that is trusted. `fingerprint` is the sha256 of its DER form (SubjectPublicKeyInfo)."""

    def __init__(self, key: _Public) -> None:
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        self._key = key
        self.pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
        self.fingerprint = sha256_bytes(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))

    def verifies(self, signature: bytes, payload: bytes) -> bool:
        """Whether the holder of the private key signed exactly these bytes (with SHA-256; RSA with PKCS #1 v1.5)."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric import ec, rsa

        try:
            if isinstance(self._key, ec.EllipticCurvePublicKey):
                self._key.verify(signature, payload, ec.ECDSA(_sha256()))
            elif isinstance(self._key, rsa.RSAPublicKey):
                self._key.verify(signature, payload, _pkcs1(), _sha256())
            else:
                self._key.verify(signature, payload)
        except InvalidSignature:
            return False
        return True


class PrivateKey:
    """A key that signs."""

    def __init__(self, key: _Private) -> None:
        self._key = key
        self.public = PublicKey(key.public_key())

    def sign(self, payload: bytes) -> bytes:
        from cryptography.hazmat.primitives.asymmetric import ec, rsa

        if isinstance(self._key, ec.EllipticCurvePrivateKey):
            return self._key.sign(payload, ec.ECDSA(_sha256()))
        if isinstance(self._key, rsa.RSAPrivateKey):
            return self._key.sign(payload, _pkcs1(), _sha256())
        return self._key.sign(payload)


# -- trusted keys -----------------------------------------------------------------------------------------------------


def read_public_keys(sources: Sequence[PathOrText]) -> tuple[PublicKey, ...]:
    """The keys of PEM texts, PEM files (one key or more in each) and folders (their files `*.pub`), each key once.

    Raises SignatureError for a source without a key, for weak or unknown kinds of keys, and where the package
    `cryptography` is missing; StoreError for a file that cannot be read.
    """
    if not sources:
        raise SignatureError(
            "no trusted key was given, so no bundle could be trusted",
            hint="give a file of a public key; to load unsigned bundles give none, and no AOTC_TRUSTED_KEYS",
        )
    keys = [key for source in sources for where, text in _texts(source) for key in _public_keys(where, text)]
    return tuple({key.fingerprint: key for key in keys}.values())


def _texts(source: PathOrText) -> Iterator[tuple[str, str]]:
    """Where a text came from, and the text."""
    if isinstance(source, str) and "-----BEGIN" in source:
        yield "the given text", source
        return
    path = _path_of_key(source)
    with typed_errors("read", path, "give the file of a public key, a folder of files *.pub, or the key's PEM text"):
        if not path.is_dir():
            yield str(path), _read_text(path)
            return
        files = sorted(file for file in path.iterdir() if file.name.endswith(".pub"))
    if not files:
        raise SignatureError(f"the folder {path} holds no file *.pub", hint="put the public keys there, as PEM files")
    for file in files:
        with typed_errors("read", file):
            yield str(file), _read_text(file)


def _path_of_key(source: PathOrText) -> Path:
    if "\0" in str(source):
        raise SignatureError(
            f"{str(source)[:100]!r} is not a key: it is neither a PEM text nor a path", hint="give the key's file"
        )
    return Path(source)


def _read_text(path: Path) -> str:
    return read_limited(path, KEY_FILE_LIMIT).decode(errors="replace")


def _public_keys(where: str, text: str) -> Iterator[PublicKey]:
    from_pem = _serialization().load_pem_public_key
    blocks = list(_PEM.finditer(text))
    labels = {block[1] for block in blocks}
    if labels != {"PUBLIC KEY"}:
        found = ", ".join(sorted(labels)) or "no PEM block"
        raise SignatureError(
            f"{where} holds no public key: it holds {found}",
            hint="trust the file *.pub; a private key stays with the one who signs",
            expected="PUBLIC KEY",
            actual=found,
        )
    for block in blocks:
        try:
            key = from_pem(block[0].encode())
        except Exception as error:  # of many types: ValueError, UnsupportedAlgorithm, and OpenSSL's own
            raise SignatureError(f"the public key in {where} cannot be read: {error}", hint=ACCEPTED) from error
        yield PublicKey(_checked_public(key, where))


def _checked_public(key: object, where: str) -> _Public:
    """Raises SignatureError for a key that is weak, or that cosign and aotc do not use in the same way."""
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

    if isinstance(key, ec.EllipticCurvePublicKey):
        if isinstance(key.curve, ec.SECP256R1):
            return key
        found = f"an ECDSA key on {key.curve.name}"
    elif isinstance(key, rsa.RSAPublicKey):
        exponent = key.public_numbers().e
        if key.key_size in RSA_BITS and exponent > 1 << 16:
            return key
        found = f"an RSA key of {key.key_size} bits and exponent {exponent}"
    elif isinstance(key, ed25519.Ed25519PublicKey):
        return key
    else:
        found = f"a {type(key).__name__}"
    raise SignatureError(
        f"the key in {where} is {found}, which is not accepted",
        hint=f"use {ACCEPTED}",
        expected=ACCEPTED,
        actual=found,
    )


# -- the key that signs -----------------------------------------------------------------------------------------------


def read_private_key(source: str, password: Callable[[], bytes]) -> PrivateKey:
    """The key in a file, or in the environment variable NAME for `env://NAME`.

    Read are cosign's files (`ENCRYPTED SIGSTORE PRIVATE KEY`, `ENCRYPTED COSIGN PRIVATE KEY`) and PEM as OpenSSL
    writes it. `password` is called only where the key is encrypted.

    Raises SignatureError for what is not a private key, a wrong password, or a kind of key that is not accepted;
    StoreError for a file that cannot be read.
    """
    where, text = _private_text(source)
    blocks = list(_PEM.finditer(text))  # OpenSSL may write the curve's parameters before the key
    block = next((block for block in blocks if block[1].endswith("PRIVATE KEY")), None)
    if block is None:
        raise SignatureError(
            f"{where} holds no private key: it holds {', '.join(one[1] for one in blocks) or 'no PEM block'}",
            hint="`aotc sign --generate-key-pair cosign` makes cosign.key and cosign.pub",
        )
    if block[1] in _COSIGN_LABELS:
        key = _from_der(_decrypt(_from_base64(block[2], where), password(), where), where)
    else:
        key = _from_pem(block[0].encode(), password, where)
    _checked_public(key.public_key(), where)
    return PrivateKey(key)


def _private_text(source: str) -> tuple[str, str]:
    if not source.startswith("env://"):
        path = _path_of_key(source)
        with typed_errors("read the key", path, "give the file of a private key, or env://NAME for a variable's text"):
            return source, _read_text(path)
    name = source.removeprefix("env://")
    if name not in os.environ:
        hint = "set it to the text of the key, or give the key's file"
        raise SignatureError(f"the environment variable {name} that should hold the key is not set", hint=hint)
    return f"${name}", os.environ[name]


def _from_pem(data: bytes, password: Callable[[], bytes], where: str) -> _Private:
    encrypted = b"ENCRYPTED" in data  # the label of PKCS #8, or the header of OpenSSL's older form
    secret = password() if encrypted else None
    try:
        key: _Private = _serialization().load_pem_private_key(data, secret)
        return key
    except Exception as error:
        _no_private_key(where, error)


def _from_der(data: bytes, where: str) -> _Private:
    try:
        key: _Private = _serialization().load_der_private_key(data, None)
        return key
    except Exception as error:
        _no_private_key(where, error)


def _no_private_key(where: str, error: Exception) -> NoReturn:
    raise SignatureError(f"the private key in {where} cannot be read: {error}", hint=ACCEPTED) from error


# -- cosign's encrypted keys ------------------------------------------------------------------------------------------


_Small = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class _Scrypt(msgspec.Struct):
    cost: _Small = msgspec.field(name="N")
    r: _Small
    p: _Small


class _Derivation(msgspec.Struct):
    name: str
    params: _Scrypt
    salt: bytes  # in JSON as base64, as the other bytes


class _Cipher(msgspec.Struct):
    name: str
    nonce: bytes


class _Encrypted(msgspec.Struct):
    """The JSON in the PEM of cosign's private keys: github.com/secure-systems-lab/go-securesystemslib, `encrypted`."""

    kdf: _Derivation
    cipher: _Cipher
    ciphertext: bytes


_KINDS = ("scrypt", "nacl/secretbox")
_MEMORY = 1 << 28  # bytes that deriving a key may take; cosign's parameters take 32 or 64 MiB
_NEW = _Scrypt(cost=1 << 16, r=8, p=1)  # what cosign uses for new keys


def generate_key_pair(prefix: str, password: bytes) -> tuple[Path, Path]:
    """Write PREFIX.key (ECDSA P-256, encrypted as cosign does, readable by this user only) and PREFIX.pub.

    Raises StoreError where one of them is there already or cannot be written; SignatureError.
    """
    serialization = _serialization()
    from cryptography.hazmat.primitives.asymmetric import ec

    private, public = Path(f"{prefix}.key"), Path(f"{prefix}.pub")
    for path in (private, public):
        if path.exists():
            raise StoreError(f"{path} is there already", hint="a key is not overwritten: choose another prefix")
    key = ec.generate_private_key(ec.SECP256R1())
    plain = key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _write_new(private, _to_pem(_COSIGN_LABELS[0], _encrypt(plain, password)), 0o600)
    _write_new(public, PublicKey(key.public_key()).pem, 0o644)
    return private, public


def _write_new(path: Path, text: str, mode: int) -> None:
    with typed_errors("write", path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(text)


def _to_pem(label: str, data: bytes) -> str:
    text = base64.b64encode(data).decode()
    lines = [text[start : start + 64] for start in range(0, len(text), 64)]
    return "\n".join([f"-----BEGIN {label}-----", *lines, f"-----END {label}-----", ""])


def _from_base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except binascii.Error as error:
        _no_private_key(where, error)


def _encrypt(data: bytes, password: bytes) -> bytes:
    salt, nonce = os.urandom(32), os.urandom(24)
    box = _secret_box(_derived(password, _Derivation("scrypt", _NEW, salt)))
    ciphertext = box(data, nonce, True)
    return canonical_json(_Encrypted(_Derivation("scrypt", _NEW, salt), _Cipher("nacl/secretbox", nonce), ciphertext))


def _decrypt(data: bytes, password: bytes, where: str) -> bytes:
    try:
        encrypted = msgspec.json.decode(data, type=_Encrypted)
    except msgspec.MsgspecError as error:
        _no_private_key(where, error)
    kinds = (encrypted.kdf.name, encrypted.cipher.name)
    if kinds != _KINDS:
        raise SignatureError(
            f"the private key in {where} is encrypted with {', '.join(kinds)}; this aotc reads {', '.join(_KINDS)}",
            hint="import the key into cosign again, or make one: aotc sign --generate-key-pair PREFIX",
            expected=", ".join(_KINDS),
            actual=", ".join(kinds),
        )
    try:
        box = _secret_box(_derived(password, encrypted.kdf))
        return box(encrypted.ciphertext, encrypted.cipher.nonce, False)
    except ValueError as error:
        raise SignatureError(
            f"the private key in {where} cannot be decrypted: {error}",
            hint="is the password right? it is read from COSIGN_PASSWORD, or asked for",
        ) from error


def _derived(password: bytes, derivation: _Derivation) -> bytes:
    params = derivation.params
    return hashlib.scrypt(
        password, salt=derivation.salt, n=params.cost, r=params.r, p=params.p, maxmem=_MEMORY, dklen=32
    )


def _secret_box(key: bytes) -> Callable[[bytes, bytes, bool], bytes]:
    """Encrypts (True) or decrypts (False) with a nonce: XSalsa20 and Poly1305, which `cryptography` does not have."""
    try:
        from nacl.exceptions import CryptoError
        from nacl.secret import SecretBox
    except ImportError as error:
        raise SignatureError("cosign's encrypted keys need the package PyNaCl", hint=_INSTALL) from error

    def box(data: bytes, nonce: bytes, encrypt: bool) -> bytes:
        try:
            return SecretBox(key).encrypt(data, nonce).ciphertext if encrypt else SecretBox(key).decrypt(data, nonce)
        except CryptoError as error:
            raise ValueError(str(error)) from error

    return box


# -- cryptography -----------------------------------------------------------------------------------------------------


def _serialization() -> ModuleType:
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError as error:
        raise SignatureError("signatures need the package cryptography", hint=_INSTALL) from error
    return serialization


def _sha256() -> hashes.SHA256:
    from cryptography.hazmat.primitives.hashes import SHA256

    return SHA256()


def _pkcs1() -> padding.PKCS1v15:
    from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15

    return PKCS1v15()
