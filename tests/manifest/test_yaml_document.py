"""Files that are not manifests, and YAML that means harm: an error with a line, in no time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from aotc.errors import Issue, ManifestError
from aotc.manifest import read_manifest


def refusal(folder: Path, content: bytes | str) -> Issue:
    path = folder / "m.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    started = time.monotonic()
    with pytest.raises(ManifestError) as caught:
        read_manifest(path)
    assert time.monotonic() - started < 10
    return caught.value.issues[0]


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ("version: 1\nmodels: [", 2, "not valid YAML"),
        ("version: 1\nmodels:\n\tm: 1", 3, "not valid YAML"),
        ("version: 1\nmodels: a: b", 2, "mapping values are not allowed"),
        ("version: 1\n---\nversion: 1", 2, "not valid YAML"),
        ("version: 1\nmodels: *nowhere", 2, "undefined alias"),
        ("version: 1\nmodels: \x00", 2, "not allowed in YAML"),
        ("version: 1\nversion: 1\n", 2, "the key `version` is there twice; the first is at"),
        ("version: 1\nmodels:\n  m: {}\n  m: {}", 4, "the model `m` is there twice"),
        ("version: 1\nmodels: !!python/object:os.system {}", 2, "is not used in manifests"),
        ("version: 1\nmodels: {m: {kwargs: {day: 2024-01-01}}}", 2, "`2024-01-01` reads as a date"),
        ("version: 1\nmodels: {m: {kwargs: {low: -.inf}}}", 2, "`-.inf` is not a finite number"),
        ("version: 1\nmodels: {m: {kwargs: {n: 99999999999999999999}}}", 2, "does not fit into 64 bits"),
        ("version: 1\nmodels: {m: {kwargs: {n: !!int ''}}}", 2, "`` cannot be read as"),
        ("version: 1\nmodels: {m: {kwargs: {n: !!bool maybe}}}", 2, "`maybe` cannot be read as"),
        ("version: 1\nmodels: {m: {kwargs: {n: !!timestamp x}}}", 2, "`x` cannot be read as"),
        ("version: 1\nmodels: {m: {kwargs: {1: a}}}", 2, "the key `1` is not text"),
        ("version: 1\ndefaults: {on: 1}", 2, "the key `on` is not text"),
        ("version: 1\nmodels: {<<: 3}", 2, "`<<` needs a mapping"),
        ('version: 1\npicks: "a\\ud800"', 2, "the text has the character U+D800"),
        ('version: 1\npicks: "a\\0b"', 2, "the text has the character U+0000"),
        ('version: 1\nmodels: {m: {kwargs: {n: ["\\udfff"]}}}', 2, "the text has the character U+DFFF"),
        ('version: 1\nmodels: {m: {kwargs: {"\\ud800": 1}}}', 2, "a key has the character U+D800"),
    ],
)
def test_yaml_that_is_wrong_is_told_with_its_line(tmp_path: Path, content: str, line: int, message: str) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(content)
    with pytest.raises(ManifestError) as caught:
        read_manifest(path)
    assert any(issue.where == f"{path}:{line}" and message in issue.message for issue in caught.value.issues), str(
        caught.value
    )


def test_a_file_that_is_not_utf8_is_told_with_the_line_of_the_byte(tmp_path: Path) -> None:
    issue = refusal(tmp_path, b"version: 1\n# caf\xe9\n")
    assert issue.where.endswith(":2")
    assert "not UTF-8: byte 0xe9" in issue.message


def test_a_folder_whose_name_is_not_utf8_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "caf\udce9"
    folder.mkdir()
    (folder / "m.yaml").write_text("version: 1\nmodels: {}\n")
    with pytest.raises(ManifestError, match=r"caf\\udce9' is not UTF-8"):
        read_manifest(folder / "m.yaml")


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("\ufeffversion: 1\nmodels: {m: {factory: 'p:f', inputs: {}}}")
    assert list(read_manifest(path).models) == ["m"]


def test_what_is_no_manifest_is_told_with_the_one_that_may_be_meant(tmp_path: Path) -> None:
    (tmp_path / "cnn.yaml").touch()
    for path, message in [
        (tmp_path / "none.yaml", "there is no such file"),
        (tmp_path / "cnn.yml", "cnn.yaml"),
        (tmp_path / "cnn", "cnn.yaml"),
        (tmp_path / "net.py", "this is a Python file"),
        (tmp_path, "this is a folder"),
    ]:
        with pytest.raises(ManifestError) as caught:
            read_manifest(path)
        assert caught.value.issues[0].where == str(path)
        assert message in caught.value.issues[0].message + caught.value.issues[0].hint


def test_an_alias_bomb_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert "counting what aliases repeat" in refusal(tmp_path, "\n".join(lines)).message


def test_a_merge_bomb_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 {k: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 12)]
    assert "counting what aliases repeat" in refusal(tmp_path, "\n".join(lines)).message


@pytest.mark.parametrize("content", ["[" * 200_000, "{a: " * 50_000, "- " * 100_000, "a: &a [*a]", "? " * 50_000])
def test_endless_nesting_is_refused(tmp_path: Path, content: str) -> None:
    assert "nested more than 30 levels deep" in refusal(tmp_path, content).message


def test_a_huge_file_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    assert "a manifest may have 1048576" in refusal(tmp_path, b"#" * (1 << 21)).message


def test_many_values_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aotc.manifest.document.MAX_NODES", 1000)
    assert "more than 1000 values" in refusal(tmp_path, "[" + "1," * 1000 + "]").message
