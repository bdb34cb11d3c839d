"""The wrapper in two parts: what is common to all libraries is compiled once, and an unexpected text as it is."""

from __future__ import annotations

import mmap
import subprocess
from pathlib import Path

import pytest
import torch
from torch._inductor import codegen

from aotc.compiler.toolchain import wrapper_split
from aotc.compiler.toolchain.wrapper_split import (
    Compile,
    checks_alike,
    common_part,
    compile_common,
    compile_common_once,
    own_part,
    short_refusals,
    thin_header,
)
from aotc.store.compile_cache import CompileCache

INTERFACE = (Path(str(codegen.__file__)).parent / "aoti_runtime" / "interface.cpp").read_text()
HEADER = (Path(torch.__file__).parent / "include/torch/csrc/inductor/aoti_runtime/model_base.h").read_text()
INCLUDES = "\n#include <torch/csrc/inductor/aoti_include/cpu.h>\n"
OWN = "\nnamespace torch::aot_inductor { void AOTInductorModel::run_impl() {} }\n"


def test_the_interface_is_common_and_the_generated_code_a_library_s_own() -> None:
    own = own_part(INCLUDES + INTERFACE + OWN, INTERFACE)
    assert own is not None
    assert own.startswith(INCLUDES)
    assert own.endswith(OWN)
    assert "AOTInductorModelContainerRun(" not in own
    common = common_part(INTERFACE)
    assert "AOTInductorModelContainerRun(" in common
    kept = "g_aoti_last_error = e.what();"
    assert common.count(kept) == INTERFACE.count(kept)
    assert ('"Error: " << e.what()' in common) == (kept not in INTERFACE)  # what is raised is not printed too


@pytest.mark.parametrize(
    "text",
    [
        INCLUDES + OWN,  # another torch's, which includes it
        INCLUDES + INTERFACE.replace("AOTInductorModelContainerRun", "Run") + OWN,
        INCLUDES + "#define USE_SOMETHING\n" + INTERFACE + OWN,
        INCLUDES + INTERFACE + INTERFACE + OWN,
    ],
    ids=["absent", "changed", "code before it", "twice"],
)
def test_a_wrapper_that_is_not_as_expected_is_left_whole(text: str) -> None:
    assert own_part(text, INTERFACE) is None


def test_an_interface_without_the_container_is_left_whole() -> None:
    other = INTERFACE.replace("model_container.h", "container.h")
    assert own_part(INCLUDES + other + OWN, other) is None


def test_the_thin_header_says_all_but_how_a_device_s_name_is_read() -> None:
    thin = thin_header(HEADER)
    assert thin is not None
    gone = set(HEADER.splitlines()) - set(thin.splitlines())
    assert "#include <regex>" in gone
    assert not [line for line in gone if "class" in line]


def test_what_is_not_exported_this_torch_does_not_look_up() -> None:
    with (Path(torch.__file__).parent / "lib" / "libtorch_cpu.so").open("rb") as file:
        library = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    assert library.find(b"\0AOTInductorModelContainerRun\0") >= 0
    assert [name for name in wrapper_split._UNUSED if library.find(f"\0{name}\0".encode()) >= 0] == []


@pytest.mark.parametrize("known", ["(cpu|cuda|xpu|mps)", "void parse_device_str"])
def test_a_header_that_reads_devices_in_another_way_is_not_replaced(known: str) -> None:
    assert thin_header(HEADER.replace(known, "(cpu|tpu)")) is None


def test_a_header_that_uses_regular_expressions_elsewhere_is_not_replaced() -> None:
    assert thin_header(HEADER + "inline std::regex more;\n") is None


DEVICES = (
    "cpu",
    "cuda",
    "cuda:0",
    "cuda:12",
    "cpu:3",
    "cuda:",
    "cuda:x",
    "cuda:1x",
    "tpu",
    "",
    ":0",
    "cuda:0:1",
    "CPU",
)


def test_devices_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    """Torch's own function, out of its header, beside ours, compiled into one program."""
    found = wrapper_split._PARSE_DEVICE.search(HEADER)
    assert found is not None
    ours = wrapper_split._INSTANCE.partition("namespace")[2]
    names = ", ".join(f'"{name}"' for name in DEVICES)
    (tmp_path / "devices.cpp").write_text(
        f"""
#include <cstdint>
#include <iostream>
#include <regex>
#include <stdexcept>
#define AOTI_RUNTIME_CHECK(EXPR, MSG) do {{ if (!(EXPR)) throw std::runtime_error(MSG); }} while (0)
int32_t aoti_torch_device_type_cpu() {{ return 0; }}
int32_t aoti_torch_device_type_cuda() {{ return 1; }}
namespace theirs {{
{found[0]}
}}
namespace{ours}
template <typename F> void show(F read, const std::string& name) {{
  int32_t type = -7, index = -7;
  try {{ read(name, type, index); std::cout << type << " " << index << "\\n"; }}
  catch (const std::runtime_error& error) {{ std::cout << error.what() << "\\n"; }}
}}
int main() {{
  for (const char* name : {{{names}}}) {{
    show(theirs::parse_device_str, name);
    show(torch::aot_inductor::parse_device_str, name);
  }}
}}
"""
    )
    subprocess.run(["g++", "-std=c++20", "-o", "devices", "devices.cpp"], cwd=tmp_path, check=True)
    shown = subprocess.run([tmp_path / "devices"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(shown) == 2 * len(DEVICES)
    assert shown[::2] == shown[1::2]
    assert shown[0] == "0 -1"
    assert shown[6] == "1 12"


REFUSALS = """
    if (768 != size[0]) {
        std::stringstream ss;
        ss << "input_handles[2]: unmatched dim value at 0, "
           << "expected: 768, " << "but got: " << size[0]
           << "\\n";
        throw std::runtime_error(std::move(ss).str());
    }
    if (dtype != 6) {
        std::stringstream ss;
        ss << "100% unmatched dtype, expected: " << six << "(at::kFloat), but \\"got\\": " << dtype << "\\n";
        throw std::runtime_error(std::move(ss).str());
    }
"""


@pytest.mark.parametrize("text", ["std::move(ss).str()", "ss.str()"], ids=["torch 2.13", "torch 2.11"])
def test_short_refusals_say_the_same(tmp_path: Path, text: str) -> None:
    refusals = REFUSALS.replace("std::move(ss).str()", text)
    short = short_refusals(refusals)
    assert "stringstream" not in short and short.count("aotc_refuse(") == 2
    (tmp_path / "refusals.cpp").write_text(
        f"""
#include <cstdint>
#include <iostream>
#include <sstream>
#include <stdexcept>
{wrapper_split._DECLARE_REFUSE}
{wrapper_split._REFUSE}
void theirs(const int64_t* size, int32_t dtype, int32_t six) {{ {refusals} }}
void ours(const int64_t* size, int32_t dtype, int32_t six) {{ {short} }}
int main() {{
  for (auto check : {{theirs, ours}})
    for (int64_t size : {{768L, 769L, -4611686018427387904L}})
      for (int32_t dtype : {{6, -1}}) {{
        try {{ check(&size, dtype, 6); std::cout << "ok\\n"; }}
        catch (const std::runtime_error& error) {{ std::cout << error.what(); }}
      }}
}}
"""
    )
    subprocess.run(
        ["g++", "-std=c++20", "-Wall", "-Werror", "-o", "refusals", "refusals.cpp"], cwd=tmp_path, check=True
    )
    shown = subprocess.run([tmp_path / "refusals"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(shown) == 12
    assert shown[:6] == shown[6:]
    assert shown[:2] == ["ok", '100% unmatched dtype, expected: 6(at::kFloat), but "got": -1']


@pytest.mark.parametrize("other", ['ss << "a" << name.str();', 'ss << "a" << (1 + x);', 'std::cerr << "a";'])
def test_what_is_thrown_of_other_values_stays_as_it_is(other: str) -> None:
    code = f"std::stringstream ss;\n{other}\nthrow std::runtime_error(std::move(ss).str());"
    assert short_refusals(code) == code


def check(index: int, name: str, size: int) -> str:
    """As torch's `generate_input_output_runtime_checks` writes it, of one dim."""
    return f"""
AOTI_NOINLINE static void check_input_{index}(
    AtenTensorHandle* input_handles
) {{
    ConstantHandle {name} = ConstantHandle(input_handles[{index}]);
    auto {name}_size = {name}.sizes();

    if ({size} != {name}_size[0]) {{
        std::stringstream ss;
        ss << "input_handles[{index}]: unmatched dim value at 0, "
           << "expected: {size}, " << "but got: " << {name}_size[0]
           << "\\n";
        throw std::runtime_error(std::move(ss).str());
    }}
}}
"""


SIZES = [5, 7, 5, 7, 5, 5, 7, 7, 5, 5, 5, 9]


def test_inputs_that_are_alike_are_checked_by_one_function_that_says_which_it_is(tmp_path: Path) -> None:
    names = [f"arg{index}_1" if index != 3 else "arg1" for index in range(len(SIZES))]
    checks = "".join(map(check, range(len(SIZES)), names, SIZES))
    calls = "".join(f"    check_input_{index}(input_handles);\n" for index in range(len(SIZES)))
    theirs = f"{checks}\nvoid all(AtenTensorHandle* input_handles) {{\n{calls}}}\n"
    ours = checks_alike(theirs)
    assert ours.count("stringstream") == len(set(SIZES))
    (tmp_path / "checks.cpp").write_text(
        f"""
#include <cstdint>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <vector>
#define AOTI_NOINLINE __attribute__((noinline))
using AtenTensorHandle = int64_t*;
struct ConstantHandle {{ int64_t* given; const int64_t* sizes() const {{ return given; }} }};
namespace theirs {{ {theirs} }}
namespace ours {{ {ours} }}
{wrapper_split._DECLARE_REFUSE}
{wrapper_split._REFUSE}
namespace in_short {{ {short_refusals(ours)} }}
int main() {{
  for (auto all : {{theirs::all, ours::all, in_short::all}})
    for (size_t wrong = 0; wrong <= {len(SIZES)}; ++wrong) {{
      std::vector<int64_t> sizes{{{", ".join(map(str, SIZES))}, 0}};
      sizes[wrong] = 6;
      std::vector<AtenTensorHandle> handles;
      for (auto& size : sizes) handles.push_back(&size);
      try {{ all(handles.data()); std::cout << "ok\\n"; }}
      catch (const std::runtime_error& error) {{ std::cout << error.what(); }}
    }}
}}
"""
    )
    subprocess.run(["g++", "-std=c++20", "-Wall", "-Werror", "-o", "checks", "checks.cpp"], cwd=tmp_path, check=True)
    shown = subprocess.run([tmp_path / "checks"], capture_output=True, text=True, check=True).stdout.splitlines()
    one = len(SIZES) + 1
    assert shown[:one] == shown[one : 2 * one] == shown[2 * one :]
    assert shown[one - 2 : one] == ["input_handles[11]: unmatched dim value at 0, expected: 9, but got: 6", "ok"]


def test_checks_of_another_form_stay_as_they_are() -> None:
    other = check(0, "arg0_1", 5).replace("AOTI_NOINLINE ", "") + "void all() {\n    check_input_0(input_handles);\n}\n"
    assert checks_alike(other) == other


# -- compiling --------------------------------------------------------------------------------------------------------


def common_of_unit(folder: Path, compiler: Path, flags: str = "-O1", text: str = "common") -> Compile:
    folder.mkdir()
    source, target = folder / "common.cpp", folder / "common.o"
    source.write_text(text)
    compile = Compile.read(f"{compiler} {source} {flags} -I{folder} -o {target}", source, target)
    assert compile is not None
    return compile


def test_two_units_compile_the_common_part_once(tmp_path: Path, compiler: Path) -> None:
    cache = CompileCache(tmp_path / "cache")
    first, second = (common_of_unit(tmp_path / name, compiler) for name in ("first", "second"))
    assert not compile_common(first, cache)
    assert compile_common(second, cache)
    assert (tmp_path / "log").read_text() == f"{first.source}\n"
    assert Path(second.target).read_bytes() == Path(first.target).read_bytes()


@pytest.mark.parametrize("other", [{"flags": "-O2"}, {"text": "another torch's"}])
def test_other_flags_or_headers_are_another_object(tmp_path: Path, compiler: Path, other: dict[str, str]) -> None:
    cache = CompileCache(tmp_path / "cache")
    assert not compile_common(common_of_unit(tmp_path / "first", compiler), cache)
    assert not compile_common(common_of_unit(tmp_path / "second", compiler, **other), cache)


def test_another_compiler_is_another_object(tmp_path: Path, compiler: Path) -> None:
    cache = CompileCache(tmp_path / "cache")
    assert not compile_common(common_of_unit(tmp_path / "first", compiler), cache)
    compiler.write_text(compiler.read_text().replace("fake 1.0", "fake 1.1"))
    assert not compile_common(common_of_unit(tmp_path / "second", compiler), cache)


def test_units_of_a_build_preprocess_it_once(tmp_path: Path, compiler: Path) -> None:
    script = compiler.read_text()
    compiler.write_text(script.replace("#!/bin/sh\n", f'#!/bin/sh\necho "$*" >> "{tmp_path}/all"\n'))
    kept, build = CompileCache(tmp_path / "kept"), CompileCache(tmp_path / "build")

    def preprocessed(name: str, build: CompileCache | None, flags: str = "-O1") -> int:
        common = common_of_unit(tmp_path / name, compiler, flags)
        compile_common_once(common, kept, build)
        assert Path(common.target).read_text() == "common"
        return sum(" -E " in line for line in (tmp_path / "all").read_text().splitlines())

    assert [preprocessed("first", build), preprocessed("second", build)] == [1, 1]
    assert preprocessed("third", build, "-O2") == 2
    assert preprocessed("fourth", None) == 3


def test_a_command_that_does_not_name_its_files_once_is_not_read(tmp_path: Path) -> None:
    source, target = tmp_path / "a.cpp", tmp_path / "a.o"
    assert Compile.read(f"g++ -c {source}", source, target) is None
    assert Compile.read(f"g++ {source} {source} -o {target}", source, target) is None
