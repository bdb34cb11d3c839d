"""Every exception that aotc raises on purpose.

All of them live under `AotcError`, carry their facts as fields, survive pickling (they cross processes), and also
subclass the builtin that a caller would have caught anyway. `str()` gives the message and, on lines of their own, the
hints; one that several issues in a row share stands once, below them. Of more than five equal issues of a
BindError, `str()` gives one, with the places of three; `issues` has all.
"""

from __future__ import annotations

import logging
from typing import Any, Self

import msgspec


def visible(text: str) -> str:
    """Lines as a terminal may show them: control characters, as a name or a server's answer may hold, as escapes."""
    return "\n".join(one_line(line) for line in text.split("\n"))


def one_line(text: str) -> str:
    """The text as a terminal or a log may show it within a line: newlines as escapes too, or it could forge a line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


class _OneLine(logging.Filter):
    """Lets no text that is logged begin a line of its own."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not (text := record.getMessage()).isprintable():
            record.msg, record.args = one_line(text), None
        return True


logging.getLogger("aotc").addFilter(_OneLine())


class Issue(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finding of a check: what is wrong, what was expected and what is there, where, and what to do about it."""

    message: str
    where: str = ""
    expected: str = ""
    actual: str = ""
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}\n    hint: {self.hint}" if self.hint else text


class AotcError(Exception):
    """Base of all. `issues` lists every finding, not the first one only; `hint` says what to do.

    Example:
        >>> try:
        ...     aotc.load("no-such-store#quickstart")
        ... except aotc.AotcError as error:
        ...     print(type(error).__name__, "|", error.message.partition(" at ")[0])
        NotFoundError | there is no store
    """

    in_lines = False
    """Whether a message may hold lines, as a compiler's does. Others quote stores and servers, and stay in theirs."""

    shortens = False
    """Whether more than five equal issues, as those of all tensors of a module, are shown as one, and SHOWN in all."""

    def __init__(self, message: str, *, hint: str = "", issues: tuple[Issue, ...] = (), **fields: Any) -> None:
        super().__init__(message)
        self.message = message if self.in_lines else one_line(message)
        self.hint = hint
        self.issues = tuple(issues)
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __str__(self) -> str:
        shown = str if self.in_lines else one_line
        lines = [self.message]
        issues = _without_repeats(self.issues) if self.shortens else self.issues
        following = [*(issue.hint for issue in issues[1:]), self.hint]
        for issue, next_hint in zip(issues, following, strict=False):
            lines.append("  - " + shown(f"{issue.where}: {issue.message}" if issue.where else issue.message))
            if issue.hint and issue.hint != next_hint:
                lines.append(f"    hint: {shown(issue.hint)}")
        if self.hint:
            lines.append(f"  hint: {shown(self.hint)}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.issues, self.fields)

    def with_fields(self, **fields: Any) -> Self:
        self.fields.update(fields)
        return self


SHOWN = 20
"""Issues in the text of an error that shortens; all are in its `issues`."""


def _without_repeats(issues: tuple[Issue, ...]) -> tuple[Issue, ...]:
    """One for more than five issues that differ only in their place."""
    equal: dict[tuple[str, str], list[Issue]] = {}
    for issue in issues:
        equal.setdefault((issue.message, issue.hint), []).append(issue)
    shown = []
    for issue in issues:
        places = [one.where for one in equal[issue.message, issue.hint]]
        if len(places) <= 5 or not all(places):
            shown.append(issue)
        elif issue is equal[issue.message, issue.hint][0]:
            where = f"{', '.join(places[:3])} and {len(places) - 3} more"
            shown.append(msgspec.structs.replace(issue, where=where))
    if (more := len(shown) - SHOWN) > 1:
        shown[SHOWN:] = [msgspec.structs.replace(shown[SHOWN], message=f"and {more} more", where="")]
    return tuple(shown)


def _rebuild(
    cls: type[AotcError], message: str, hint: str, issues: tuple[Issue, ...], fields: dict[str, Any]
) -> AotcError:
    return cls(message, hint=hint, issues=issues, **fields)


class ManifestError(AotcError, ValueError):
    """The manifest cannot be used. `issues` holds every mistake found, each with file and line in `where`."""

    in_lines = True


class TraceError(AotcError, ValueError):
    """A trace of sizes cannot be read, or no buckets reach the goal for it (`aotc advise`)."""


class ReferenceFormatError(AotcError, ValueError):
    """A text that should name an artifact, like `model:tag` or `store#model@sha256:…`, does not.

    Example:
        >>> aotc.load("quickstart:")
        Traceback (most recent call last):
        aotc.errors.ReferenceFormatError: …
    """


class BuildError(AotcError, RuntimeError):
    """A unit could not be compiled. Fields: `unit`, `stage`, `source` (the model's line), `log` (path of the log)."""

    in_lines = True


class StoreError(AotcError, RuntimeError):
    """The store cannot be read or written: permissions, a full disk, a lock of another process, not a store."""


class NotFoundError(StoreError, LookupError):
    """No such tag, digest or blob in the store. Field: `known`, the names that exist.

    Example:
        >>> try:
        ...     aotc.load("aotc-store#quickstart:v9")
        ... except aotc.NotFoundError as error:
        ...     error.known
        ('quickstart:latest',)
    """


class RemoteError(StoreError):
    """A registry or an object store did not do as asked, or was not reached in time.

    Fields: `url`, `status` (of HTTP, absent where there was no answer), `transient` (whether another attempt may do),
    `retry_after` (seconds that the server asked for), `attempts`.
    """


class CorruptError(StoreError, ValueError):
    """Bytes in the store are not what their digest says. Fields: `expected`, `actual`, `path`."""


class SchemaVersionError(StoreError, ValueError):
    """A record was written by another format version of aotc. Fields: `found`, `supported`."""


class SignatureError(StoreError):
    """A bundle is not signed as the trusted keys ask, or a key cannot be used.

    About a bundle it has the fields `digest`, `expected`, `actual`, and `reason`, one of `unsigned`, `untrusted`,
    `malformed`, `other-bundle`, `other-name`, `expired`, `not-yet-valid`, `too-old`, `rolled-back`; `issues` holds one
    finding for each signature that was looked at.
    """


class UnverifiedError(StoreError):
    """An artifact has no good attestation of `aotc verify`, and `aotc.Trust(require_verified=True)` asks for one.

    Fields: `digest` of the bundle, `target`, `expected`, `actual`, and `reason`, one of `unverified` (there is none of
    this artifact), `untrusted` (none of those there are is signed by a trusted key), `failed` (the newest says that the
    artifact did not pass; `issues` are its).
    """


class AdvisoryError(StoreError):
    """Advisories are of the artifact, or may be: `issues`, for each unit. Fields: `digest`, `target` and `ids`."""


class EnvironmentMismatchError(AotcError, RuntimeError):
    """No artifact of the bundle can run on this machine. `issues` lists every mismatch with both values."""


class BindError(AotcError, TypeError):
    """The module or the weights are not those that the artifact was built for, or two arguments exclude each other.

    `issues` lists every mismatch, with both values.

    Example:
        >>> try:
        ...     aotc.load("aotc-store#quickstart", torch.nn.Linear(8, 8).eval())
        ... except aotc.BindError as error:
        ...     error.issues[0].expected, error.issues[0].actual
        ('TransformerBlock', 'Linear')
    """

    shortens = True


class MemoryLimitError(AotcError, MemoryError):
    """The host has too little memory for a load, or this process may not have as much.

    Fields, in bytes: `used`, `limit`, and `asked`, what was asked for last; None where that is not known.
    """


class LibraryError(AotcError, RuntimeError):
    """A compiled library could not be opened, or failed while it ran."""

    in_lines = True


class GradientError(AotcError, RuntimeError):
    """A compiled training step cannot give a derivative: of a tensor that it was not built for, or a second one."""


class GroupError(AotcError, RuntimeError):
    """The ranks of a parallel model do not load or call the same, or one of them has failed or is gone.

    Field: `ranks`, those that are to blame, where they are known.
    """


class ForkError(AotcError, RuntimeError):
    """A forked child cannot load what its parent prepared: `issues` names all that it inherited and cannot use.

    Field: `parent`, the process that it was forked from.
    """


class OperatorError(AotcError, LookupError):
    """Compiled code calls operators that this process has not registered. `issues` names their modules."""


class TorchMissingError(AotcError, ModuleNotFoundError):
    """What was asked for needs torch, which is not installed: `aotc.standalone` and most commands on stores do not."""


class MissError(AotcError, LookupError):
    """No variant may run this call. `issues` says for the nearest variants why not, with both values.

    Example:
        >>> try:
        ...     compiled(torch.randn(2, 128, 256))
        ... except aotc.MissError as error:
        ...     print(error.issues[0].message)
        batch is 2, the bucket takes 1 and its inputs are not padded
    """


class VerifyError(AotcError, RuntimeError):
    """`aotc verify` could not run (a comparison that ran and failed is a result, not this)."""

    in_lines = True
