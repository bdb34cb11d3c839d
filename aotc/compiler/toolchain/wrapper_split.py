"""The part of AOTInductor's wrapper that is the same in every library, compiled once on a machine and linked to each.

Inductor copies torch's `interface.cpp` into each wrapper: the C interface, with the container and the base class of
models. It uses only the declaration of the generated class, so it can be compiled separately. The slowest part is one
function, which parses a device's name with `std::regex`: the headers here only declare it, and the common part has a
definition without `std::regex`.

With `AOTI_RUNTIME_CHECK_INPUTS`, which a build's smoke run sets, a wrapper checks each input in a function of its own,
with a stream for each message. In a library with many parameters this is most of the code. Here one function checks all
inputs of equal checks, and one function formats messages.

With a torch whose sources differ, wrappers are compiled as a whole.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from aotc.digest import sha256_bytes, sha256_json
from aotc.machine.cpp_compiler import is_cross_compiler
from aotc.store.compile_cache import FOLDER, CompileCache

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

_DECLARE_REFUSE = "[[noreturn, gnu::cold, gnu::format(printf, 1, 2)]] void aotc_refuse(const char* format, ...);\n"
_REFUSE = """
#include <cstdarg>
#include <cstdio>

void aotc_refuse(const char* format, ...) {
  char text[512];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  throw std::runtime_error(text);
}
"""

_PART = r'<<\s*(?:"(?P<text>(?:[^"\\]|\\.)*)"|(?P<value>[\w\[\]]+))\s*'
_REFUSAL = re.compile(
    rf"std::stringstream ss;\s*ss\s*(?P<parts>(?:{re.sub('[?]P<[a-z]+>', '?:', _PART)})+);\s*"
    r"throw std::runtime_error\((?:ss|std::move\(ss\))\.str\(\)\);"
)
"""The failure branch of an input check: texts and whole numbers go to a stream, and are thrown."""

_CHECK = re.compile(
    r"^AOTI_NOINLINE static void (?P<name>check_input_(?P<index>\d+))\(\n    AtenTensorHandle\* input_handles\n\) \{\n"
    r"(?P<body>    ConstantHandle (?P<input>\w+) = (?:.*\n)*?)\}\n",
    re.MULTILINE,
)
"""The function that checks one input."""

_PRINTED = re.compile(r"(?<=g_aoti_last_error = e\.what\(\);) *\\\n *std::cerr << \"Error: \" << e\.what\(\) << '\\n';")
"""The line of the C interface, within a macro, that writes a kept error to standard error."""

_SECTIONS = ("-ffunction-sections", "-fdata-sections")
"""With these, the linker drops unused functions and data of the common part."""

_UNUSED = (
    *("AOTInductorModelCreate", "AOTInductorModelCreateV2", "AOTInductorModelDelete", "AOTInductorModelRun"),
    *("AOTInductorModelGetNumOutputs", "AOTInductorModelUpdateConstantsMap", "AOTInductorModelUpdateConstantsMapV2"),
    "AOTInductorModelContainerExtractConstantsMapEntries",
    "AOTInductorModelContainerUpdateConstantBufferPairs",
    "AOTInductorModelContainerUpdateConstantBufferFromCpuPairs",
    "AOTInductorModelContainerUpdateInactiveConstantBufferPairs",
)
"""Functions of the C interface that neither torch's runner nor `aotc.runtime.libraries` looks up: those of models
without a container, and all but one of those that take or give maps as arrays."""

_TORCH = "torch_cpu"
"""The library of torch that a library for a CPU needs; `-ltorch` only links it once more."""

_OF_TORCH_AND_CUDA = frozenset({"torch", _TORCH, "torch_cuda", "c10", "c10_cuda", "cuda", "cudart"})
_DRIVER = "libcuda.so.1"

_EXPORTS = f"{{ global: AOTInductor*; cpp_*; local: {'; '.join(_UNUSED)}; *; }};\n"
"""Exported: the functions that torch looks up, and the kernels, whose names a profiler shows. Names win over `*`."""


# -- texts ------------------------------------------------------------------------------------------------------------


def own_part(wrapper: str, interface: str) -> str | None:
    """A wrapper's text without torch's `interface`. None if the wrapper does not contain it as expected."""
    written = "\n".join(line if line.strip() else "" for line in interface.strip().split("\n")) + "\n"
    before, found, after = wrapper.partition(written)
    includes, container, code = written.partition(_CONTAINER)
    if not found or not container or written in after or not _only_includes(before):
        return None
    standard = "".join(re.findall(r"^#include <\w+>\n", code, re.MULTILINE))
    return before + includes + standard + _DECLARE_REFUSE + short_refusals(checks_alike(after))


def checks_alike(code: str) -> str:
    """The code with one function for all inputs of equal checks, which takes the number of the input."""
    functions: dict[str, str] = {}
    calls: dict[str, str] = {}

    def shared(check: re.Match[str]) -> str:
        index = check["index"]
        body = re.sub(rf"\b{check['input']}(?=\b|_)", "input", check["body"])
        body = body.replace(f'"input_handles[{index}]: ', '"input_handles[" << index << "]: ')
        body = body.replace(f"input_handles[{index}]", "input_handles[index]")
        known = body in functions
        name = functions.setdefault(body, f"check_inputs_like_{index}")
        calls[f"{check['name']}(input_handles);"] = f"{name}(input_handles, {index});"
        signature = f"AOTI_NOINLINE static void {name}(AtenTensorHandle* input_handles, int32_t index)"
        return "" if known else f"{signature} {{\n{body}}}\n"

    shorter = _CHECK.sub(shared, code)
    return re.sub(r"\bcheck_input_\d+\(input_handles\);", lambda call: calls.get(call[0], call[0]), shorter)


def short_refusals(code: str) -> str:
    """The code with calls of `aotc_refuse` in place of streams that format a message and throw it."""
    return _REFUSAL.sub(_refuse, code)


def _refuse(refusal: re.Match[str]) -> str:
    text, values = "", []
    for part in re.finditer(_PART, refusal["parts"]):
        text += "%lld" if part["value"] else part["text"].replace("%", "%%")
        values += [f", static_cast<long long>({part['value']})"] if part["value"] else []
    return f'aotc_refuse("{text}"{"".join(values)});'


def _only_includes(text: str) -> bool:
    return all(not line.strip() or line.startswith(("#include <", "//")) for line in text.split("\n"))


def common_part(interface: str) -> str:
    """The source of the common part of all libraries. It includes its own headers, and contains no operators.

    An error that the library keeps, as of torch 2.13, is raised by its caller, and not printed too.
    """
    return f"{_PRINTED.sub(r'', interface)}\n{_INSTANCE}{_REFUSE}"


def thin_header(text: str) -> str | None:
    """The header of the models' base class without `std::regex`. None if the header is not as expected."""
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
        """Split a command line. None unless it names the source and the target exactly once each."""
        command = tuple(shlex.split(line))
        once = command.count(str(source)) == command.count(str(target)) == 1
        return cls(command, str(source), str(target)) if once else None

    def of(self, source: Path, target: Path, first: Sequence[str] = (), last: Sequence[str] = ()) -> Compile:
        """The same command for other files, with more arguments before and after."""
        names = {self.source: str(source), self.target: str(target)}
        replaced = [names.get(word, word) for word in self.command]
        at = replaced.index(str(source))
        return Compile((*replaced[:at], *first, *replaced[at:], *last), str(source), str(target))

    def run(self, *more: str) -> None:
        """Raises subprocess.CalledProcessError, OSError."""
        subprocess.run([*self.command, *more], cwd=Path(self.target).parent, capture_output=True, text=True, check=True)


class Apart(NamedTuple):
    """The two compiles of a wrapper, whose sources are written to files."""

    own: Compile
    common: Compile


def apart(whole: Compile, folder: Path) -> Apart | None:
    """Write the two parts of the wrapper that `whole` compiles to `folder`. None if its text is not as expected.

    Raises OSError.
    """
    own = own_part(Path(whole.source).read_text(), _interface().read_text())
    common = common_of(whole, folder)
    if own is None or common is None:
        return None
    source = folder / "own.cpp"
    source.write_text(own)
    return Apart(whole.of(source, Path(whole.target), *_more(folder)), common)


def common_of(whole: Compile, folder: Path) -> Compile | None:
    """Write the common part of wrappers, and the headers that replace torch's, to `folder`. Returns its compile, with
    the arguments of `whole`; None if this torch's headers are not as expected. Raises OSError."""
    import torch

    header = thin_header((Path(torch.__file__).parent / "include" / _HEADER).read_text())
    if header is None:
        return None
    (folder / _HEADER).parent.mkdir(parents=True, exist_ok=True)
    (folder / _HEADER).write_text(header)
    source = folder / "common.cpp"
    source.write_text(common_part(_interface().read_text()))
    return whole.of(source, source.with_suffix(".o"), *_more(folder))


def _interface() -> Path:
    from torch._inductor import codegen

    return Path(str(codegen.__file__)).parent / "aoti_runtime" / "interface.cpp"


def _more(folder: Path) -> tuple[Sequence[str], Sequence[str]]:
    """Arguments to put first and last. Of several prefix maps the last one wins, so the code contains no unit's
    folder."""
    return (f"-I{folder}", *_SECTIONS), (f"-ffile-prefix-map={folder}={FOLDER}",)


def expected_wrapper(options: Mapping[str, Any], device: str, folder: Path) -> Compile | None:
    """Predict how Inductor will compile a wrapper, so that the common part can be compiled before the wrapper exists.

    If the prediction is wrong, the object has another key, and only time is lost.
    """
    from torch._inductor import config
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    source = folder / "expected.wrapper.cpp"
    with config.patch(dict(options)):
        flags = CppTorchDeviceOptions(
            vec_isa=pick_vec_isa(), device_type=device, aot_mode=True, compile_only=True, min_optimize=True
        )
        builder = CppBuilder(name=source.stem, sources=str(source), output_dir=str(folder), BuildOption=flags)
        return Compile.read(builder.get_command_line(), source, source.with_suffix(".o"))


def compile_common(compile: Compile, cache: CompileCache) -> bool:
    """Compile the object of the common part, or take it from the cache. Returns whether it was in the cache.

    Its key: the preprocessed source, the compiler's version, and the arguments without those that contain the unit's
    folder. Raises subprocess.CalledProcessError, OSError.
    """
    source, target = Path(compile.source), Path(compile.target)
    preprocessed = source.parent / "common.ii"
    compile.of(source, preprocessed).run("-E", "-P")
    version = subprocess.run([compile.command[0], "--version"], capture_output=True, text=True, check=True).stdout
    key = sha256_json([version.partition("\n")[0], _arguments(compile), sha256_bytes(preprocessed.read_bytes())])
    return cache.fetch(key, target, lambda _: compile.run())


def compile_common_once(compile: Compile, cache: CompileCache, build: CompileCache | None) -> None:
    """`compile_common`, with a cache of the `build` in front. There the key is the arguments alone: headers and
    compiler do not change during a build, and reading them takes a tenth of a second each time."""

    def make(_: Path) -> None:
        compile_common(compile, cache)

    if build is None:
        make(Path(compile.target))
    else:
        build.fetch(sha256_json(_arguments(compile)), Path(compile.target), make)


def _arguments(compile: Compile) -> list[str]:
    """The arguments of the common part's compile that do not contain the unit's folder."""
    folder = Path(compile.source).parent
    return [word for word in compile.command if str(folder) not in word and not _maps(word, folder)]


def _maps(word: str, folder: Path) -> bool:
    """Whether the argument maps the name of `folder`, or of a parent of it, in compiled code."""
    option, _, mapped = word.partition("=")
    return option == "-ffile-prefix-map" and folder.is_relative_to(mapped.partition("=")[0])


def needing_torch(command: Sequence[str], folder: Path) -> list[str]:
    """The link of a library for a CPU, with an empty library in `folder` in place of torch's, with the same soname.

    Reading torch's 74,000 symbols takes five times as long as the rest of a link, and is not needed: undefined symbols
    are resolved when the library is loaded. The command is unchanged if torch's library is a link, whose soname may
    differ from its file name, and for a GPU, unless a cross compiler links, for whose machine torch and CUDA are not
    here: the driver's library gets such an empty one, too.

    Raises subprocess.CalledProcessError, OSError.
    """
    import torch

    real = Path(torch.__file__).parent / "lib" / f"lib{_TORCH}.so"
    on_gpu = any("cuda" in word for word in command if word.startswith("-l"))
    if is_cross_compiler(command[0]):
        left_out, names = _OF_TORCH_AND_CUDA, [real.name, *([_DRIVER] if on_gpu else [])]
    elif on_gpu or f"-l{_TORCH}" not in command or real.is_symlink() or not real.is_file():
        return [*command]
    else:
        left_out, names = frozenset({"torch", _TORCH}), [real.name]
    nothing = folder / "nothing.c"
    nothing.touch()
    empty = [command[0], "-shared", "-nostdlib", "-x", "c", str(nothing)]
    for name in names:
        soname = f"-Wl,-soname,{name}"
        subprocess.run([*empty, soname, "-o", str(folder / name)], capture_output=True, text=True, check=True)
    others = [word for word in command if word[:2] != "-l" or word[2:] not in left_out]
    named = [str(folder / name) for name in names]
    return [*others, "-Wl,--push-state,--no-as-needed", *named, "-Wl,--pop-state"]


def link_arguments(command: Sequence[str], folder: Path) -> list[str]:
    """Linker arguments for a small library: export only the looked-up symbols, and drop unused sections.

    Without them a library stays loaded for good, because it has unique symbols (STB_GNU_UNIQUE); `nodelete` keeps this.
    The object file of the constants does not say that it needs no executable stack, and from 2.41 on glibc opens no
    library that seems to need one.
    """
    exports = folder / "exports.map"
    exports.write_text(_EXPORTS)
    debugging = any(word.startswith("-g") for word in command)
    return [
        "-Wl,--gc-sections",
        f"-Wl,--version-script={exports}",
        "-Wl,-z,nodelete",
        "-Wl,-z,noexecstack",
        *(() if debugging else ("-Wl,--strip-all",)),
    ]
