"""The part of AOTInductor's wrapper that is the same in every library, compiled once on a machine and linked to each.

Inductor writes torch's `interface.cpp` into each wrapper: the C interface, with the container and the base class of
models under it. It knows the generated class by its declaration alone, so it compiles apart from it. What takes longest
is one function, which takes a device's name apart with `std::regex`: it is declared in the headers, and defined here.

A torch whose texts are others has its wrappers compiled as they are.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from aotc.build.compile_cache import CompileCache
from aotc.build.repeatable import FOLDER
from aotc.digest import sha256_bytes, sha256_json

_HEADER = Path("torch/csrc/inductor/aoti_runtime/model_base.h")
_CONTAINER = "#include <torch/csrc/inductor/aoti_runtime/model_container.h>\n"

_PARSE_DEVICE = re.compile(r"^inline (void parse_device_str\([^)]*\)) \{\n(?P<body>(?:.*\n)*?)\}\n", re.MULTILINE)
_KNOWN_DEVICES = 'std::regex re("(cpu|cuda|xpu|mps)(:([0-9]+))?");'

_INSTANCE = """
template class torch::aot_inductor::AOTInductorModelBase<torch::aot_inductor::AOTInductorModel>;

namespace torch::aot_inductor {
void parse_device_str(const std::string& device_str, int32_t& device_type, int32_t& device_idx) {
  const size_t colon = device_str.find(':');
  const bool numbered = colon != std::string::npos;
  const std::string name = device_str.substr(0, colon);
  const std::string number = numbered ? device_str.substr(colon + 1) : "0";
  const bool known = (name == "cpu" || name == "cuda") && !number.empty() &&
      number.find_first_not_of("0123456789") == std::string::npos;
  AOTI_RUNTIME_CHECK(known, "Invalid device: " + device_str);
  device_type = name == "cpu" ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda();
  device_idx = numbered ? std::stoi(number) : -1;
}
} // namespace torch::aot_inductor
"""

_SECTIONS = ("-ffunction-sections", "-fdata-sections")
"""The linker drops what no library needs of the common part."""

_EXPORTS = "{ global: AOTInductor*; cpp_*; local: *; };\n"
"""What torch looks up in a library, and the kernels, whose names a profiler shows."""


# -- texts ------------------------------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """A wrapper in two: what is `common` to all libraries, and the `own` code of one."""

    common: str
    own: str


def split(wrapper: str, interface: str) -> Parts | None:
    """Cut torch's `interface` out of a wrapper's text. None where it does not stand in it as expected."""
    written = "\n".join(line if line.strip() else "" for line in interface.strip().split("\n")) + "\n"
    before, found, after = wrapper.partition(written)
    includes, container, code = written.partition(_CONTAINER)
    if not found or not container or written in after or not _only_includes(before):
        return None
    standard = "".join(re.findall(r"^#include <\w+>\n", code, re.MULTILINE))
    return Parts(before + written + _INSTANCE, before + includes + standard + after)


def _only_includes(text: str) -> bool:
    return all(not line.strip() or line.startswith(("#include <", "//")) for line in text.split("\n"))


def thin_header(text: str) -> str | None:
    """The header of the models' base class without `std::regex`. None where it is not as expected."""
    found = _PARSE_DEVICE.search(text)
    if found is None or _KNOWN_DEVICES not in found["body"]:
        return None
    thin = _PARSE_DEVICE.sub(r"\1;\n", text)
    thin = thin.replace("#include <regex>\n", "#include <functional>\n#include <string>\n")
    return None if "regex" in thin or "smatch" in thin else thin


# -- compiling --------------------------------------------------------------------------------------------------------


class Compile(NamedTuple):
    """A command of the C++ compiler that makes `target` of `source`."""

    command: tuple[str, ...]
    source: str
    target: str

    @classmethod
    def read(cls, line: str, source: Path, target: Path) -> Compile | None:
        """None where the line names either of them not exactly once."""
        command = tuple(shlex.split(line))
        once = command.count(str(source)) == command.count(str(target)) == 1
        return cls(command, str(source), str(target)) if once else None

    def of(self, source: Path, target: Path, first: Sequence[str] = (), last: Sequence[str] = ()) -> Compile:
        """The same for other files, with more arguments."""
        names = {self.source: str(source), self.target: str(target)}
        replaced = [names.get(word, word) for word in self.command]
        at = replaced.index(str(source))
        return Compile((*replaced[:at], *first, *replaced[at:], *last), str(source), str(target))

    def run(self, *more: str) -> None:
        """Raises subprocess.CalledProcessError, OSError."""
        subprocess.run([*self.command, *more], cwd=Path(self.target).parent, capture_output=True, text=True, check=True)


class Apart(NamedTuple):
    """The two compiles of a wrapper, with what they need written to files."""

    own: Compile
    common: Compile


def apart(whole: Compile) -> Apart | None:
    """Write down the two parts of the wrapper that `whole` compiles. None where its text, or torch's, is another.

    Raises OSError.
    """
    import torch
    from torch._inductor import codegen

    source, target = Path(whole.source), Path(whole.target)
    interface = Path(str(codegen.__file__)).parent / "aoti_runtime" / "interface.cpp"
    parts = split(source.read_text(), interface.read_text())
    header = thin_header((Path(torch.__file__).parent / "include" / _HEADER).read_text())
    if parts is None or header is None:
        return None
    folder = source.with_suffix(".parts")
    (folder / _HEADER).parent.mkdir(parents=True, exist_ok=True)
    (folder / _HEADER).write_text(header)
    own, common = folder / "own.cpp", folder / "common.cpp"
    own.write_text(parts.own)
    common.write_text(parts.common)
    first = (f"-I{folder}", *_SECTIONS)
    last = (f"-ffile-prefix-map={folder}={FOLDER}",)  # of several the last one counts: no name of this unit in the code
    return Apart(whole.of(own, target, first, last), whole.of(common, common.with_suffix(".o"), first, last))


def compile_common(compile: Compile, cache: CompileCache) -> bool:
    """Make the object of the common part, or take it from the cache; whether it was there.

    Its key: what the preprocessor makes of the source, the compiler, and its arguments, as far as the folder of the
    unit does not stand in them. Raises subprocess.CalledProcessError, OSError.
    """
    source, target = Path(compile.source), Path(compile.target)
    folder = source.parent
    preprocessed = folder / "common.ii"
    compile.of(source, preprocessed).run("-E", "-P")
    version = subprocess.run([compile.command[0], "--version"], capture_output=True, text=True, check=True).stdout
    arguments = [word for word in compile.command if str(folder) not in word and not _maps(word, folder)]
    key = sha256_json([version.partition("\n")[0], arguments, sha256_bytes(preprocessed.read_bytes())])
    return cache.fetch(key, target, lambda _: compile.run())


def _maps(word: str, folder: Path) -> bool:
    """Whether the argument only says how a folder around this one is called in compiled code."""
    option, _, mapped = word.partition("=")
    return option == "-ffile-prefix-map" and folder.is_relative_to(mapped.partition("=")[0])


def link_arguments(command: Sequence[str], folder: Path) -> list[str]:
    """What makes a library small: only what torch looks up in it is exported, and what nobody uses is not in it.

    Today's libraries stay loaded for good, because of symbols that are unique in a process; `nodelete` keeps it so.
    """
    exports = folder / "exports.map"
    exports.write_text(_EXPORTS)
    debugging = any(word.startswith("-g") for word in command)
    return [
        "-Wl,--gc-sections",
        f"-Wl,--version-script={exports}",
        "-Wl,-z,nodelete",
        *(() if debugging else ("-Wl,--strip-all",)),
    ]
