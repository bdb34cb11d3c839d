"""README and guides: their code runs, their links lead somewhere, and their tables have all that there is."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import PAGES, anchors, blocks, links
from processes import ROOT, environment
from scripts_here import run_script

import aotc
from aotc.cli.reference import reference
from aotc.manifest import read_manifest
from aotc.store.remote.interface import Limits
from aotc.tools.gate.gate_document import read_gate

RUN = [
    Path(page)
    for page in (
        "README.md",
        "aotc/ERRORS.md",
        "aotc/tools/caches/GUIDE.md",
        "aotc/tools/remembering/GUIDE.md",
        "aotc/tools/remembering/IN_EAGER.md",
        "aotc/tools/remembering/FROM_TORCH_COMPILE.md",
        "aotc/compiler/GUIDE.md",
        "aotc/manifest/GUIDE.md",
        "aotc/runtime/GUIDE.md",
        "aotc/runtime/FAST_START.md",
        "aotc/store/REMOTES.md",
        "aotc/store/SECURITY.md",
        "examples/c/README.md",
        "examples/kubernetes/README.md",
        "examples/warm/README.md",
    )
]
TUTORIALS = [
    ("bert", "transformers"),
    ("llm", "transformers"),
    ("llm_without_torch", "transformers"),
    ("diffusion", "diffusers transformers peft"),
    ("training", ""),
    ("flex_attention", ""),
]
BUILT = ("flex_attention", "llm_without_torch")
"""Tutorials whose manifests other tests build, too: they find those units in their stores."""
SETTING_UP = "pip install"
"""Commands that a test of these pages does not repeat: it runs in what they install."""


@pytest.mark.parametrize("page", RUN, ids=str)
def test_the_code_of_a_page_runs(page: Path, quickstart_store: Path, tmp_path: Path) -> None:
    for name in ("examples", "manifests"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(quickstart_store, tmp_path / "aotc-store")
    run_page(page, tmp_path, tmp_path)


@pytest.mark.parametrize(("folder", "libraries"), TUTORIALS, ids=str)
def test_a_tutorial_runs_in_its_folder(
    folder: str, libraries: str, tmp_path: Path, shared_folder: Path, built: Any
) -> None:
    for library in libraries.split():
        pytest.importorskip(library)
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("aotc-store"))
    if folder in BUILT:
        store = built(shared_folder, f"{folder}-store", ROOT / "examples" / folder / "manifest.yaml")
        shutil.copytree(store, tmp_path / "examples" / folder / "aotc-store")
    run_page(Path("examples", folder, "README.md"), tmp_path / "examples" / folder, tmp_path)


def run_page(page: Path, folder: Path, scratch: Path) -> None:
    """Run in `folder` what the page shows, block after block."""
    shown = [
        (block.language, block.code, f"{page}:{block.line}")
        for block in blocks(page)
        if block.runs and block.language in ("python", "bash") and SETTING_UP not in block.code
    ]
    (scratch / "blocks.json").write_text(json.dumps(shown))
    command = [sys.executable, Path(__file__).with_name("run_page.py"), scratch / "blocks.json"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = run_script(command, folder, environment(AOTC_CACHE_DIR=str(scratch / "cache"), PATH=path))
    assert shown and ran.returncode == 0, ran.stdout


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_manifest_or_a_gate_on_a_page_has_no_mistakes(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for block in blocks(page):
        if block.language == "yaml" and block.code.startswith("version: 1") and "transformers:" not in block.code:
            path = tmp_path / "manifest.yaml"
            path.write_text(block.code)
            found = read_manifest(path).models if "models:" in block.code else read_gate(path)
            assert found, f"{page}:{block.line}"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page.parent / name).resolve() if name else ROOT / page
        assert target.exists(), f"{page} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.relative_to(ROOT)), f"{page} links to {link}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name == "GUIDE.md"], ids=str)
def test_a_guide_s_list_of_contents_is_whole(page: Path) -> None:
    text = (ROOT / page).read_text()
    sections = {re.sub(r"^\d+\. ", "", line[3:]) for line in text.splitlines() if line.startswith("## ")}
    assert sections - set(re.findall(r"^- \[(.+?)\]\(#", text, re.MULTILINE)) == set()


def test_the_architecture_names_every_package_and_fits_a_screen() -> None:
    text = (ROOT / "aotc/ARCHITECTURE.md").read_text()
    packages = {path.parent.name for path in (ROOT / "aotc").glob("*/__init__.py")}
    assert {name for name in packages if f"`{name}/" not in text} == set()
    named = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", text)
    assert [name for name in named if not [*(ROOT / "aotc").rglob(name)]] == []
    assert len(text.splitlines()) <= 50


def test_one_glossary_has_the_terms_of_all_guides() -> None:
    """FORMAT.md specifies bytes, and says first what its own words mean."""
    guides = [page for page in PAGES if page.parts[0] == "aotc" and page.name != "FORMAT.md"]
    assert [page for page in guides if "terms" in anchors(page)] == []
    terms = re.findall(r"^\| (.+?) \|", (ROOT / "aotc/GLOSSARY.md").read_text(), re.MULTILINE)
    assert terms and {term for term in terms if terms.count(term) > 1} <= {"term"}


def test_the_reference_of_commands_is_current() -> None:
    """`python -m aotc.cli.reference > aotc/cli/COMMANDS.md` makes it so."""
    assert (ROOT / "aotc/cli/COMMANDS.md").read_text() == reference()


def test_every_error_is_described() -> None:
    errors = {name for name in aotc.__all__ if name.endswith("Error")} - {"AotcError"}
    assert {name.lower() for name in errors} <= anchors(Path("aotc/ERRORS.md"))


def test_every_variable_is_in_the_table() -> None:
    files = [file for folder in ("aotc", "tests") for file in (ROOT / folder).rglob("*.py")]
    read = {name for file in files for name in re.findall(r"\"(AOTC_[A-Z_]*[A-Z])\"", file.read_text())}
    read |= {f"AOTC_REMOTE_{field.upper()}" for field in Limits.__struct_fields__}
    listed = {line.split("`")[1] for line in (ROOT / "aotc/ENVIRONMENT.md").read_text().splitlines() if "| `" in line}
    assert read and read == {name for name in listed if name.startswith("AOTC_")}


def test_ci_tests_as_the_readme_says() -> None:
    setting_up, testing = next(blocks(Path("README.md"))).code.splitlines()
    assert "aotc build" in setting_up
    assert testing.partition("  #")[0].strip() in (ROOT / ".ci/run").read_text()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 170


def test_the_changelog_begins_with_this_version_and_its_entries_are_short() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (.+)$", text, re.MULTILINE)[0] == aotc.__version__
    assert f'version = "{aotc.__version__}"' in (ROOT / "pyproject.toml").read_text()
    entries = re.findall(r"^- .*(?:\n  .*)*", text, re.MULTILINE)
    assert entries and [entry for entry in entries if len(entry.splitlines()) > 2] == []
