"""What the standalone runtime has of torch's C shim, and which artifacts fit it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from small_artifact import small_artifact

from aotc.provenance import BuiltVariant
from aotc.records import Argument, File, LibraryImports, Output, Parallel, Region, Signature, Variant, decode
from aotc.shim import BY_NAME, FUNCTIONS, OPERATORS
from aotc.standalone.misfits import misfits

HOUSEKEEPING = ("aoti_torch_empty_strided", "aoti_torch_get_data_ptr", "aoti_torch_create_tensor_from_blob_v2")
MM, ATTENTION = "aoti_torch_cpu_mm_out", "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu"


def variant(imports: LibraryImports | None) -> BuiltVariant:
    return BuiltVariant(
        bucket={},
        key="",
        library="model.so",
        files=(File("model.so", "digest", 0, "blob", 0),),
        arguments=(Argument(leaf=0),),
        outputs=(Output(index=0),),
        output_tree=0,
        imports=imports,
    )


def calling(*functions: str, **operators: tuple[str, ...]) -> LibraryImports:
    return LibraryImports((*HOUSEKEEPING, *functions), operators)


FITS = [
    calling(),
    calling("Sleef_expf8_u10"),
    calling(MM, **{MM: ("float32",)}),
    calling(ATTENTION, **{ATTENTION: ("bool", "float32")}),
    calling("_ZSt28__throw_bad_array_new_lengthv", "_ZNOSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv"),
    calling("aoti_torch_create_cuda_guard", "cudaMemcpy", "cuLaunchKernelEx"),
]
BY_NAME_ONLY = LibraryImports((*HOUSEKEEPING, *BY_NAME), {"aten::lstm.input": ("float32",)})
MISFITS = [
    (calling("aoti_torch_cpu_cumsum", aoti_torch_cpu_cumsum=("float32",)), "calls aoti_torch_cpu_cumsum"),
    (calling(MM, **{MM: ("float32", "int8")}), f"calls {MM} with int8"),
    (calling(MM), f"calls {MM} with unknown dtypes"),
    (calling("aoti_torch_empty_strided_v2"), "calls aoti_torch_empty_strided_v2"),
    (calling("aoti_torch_cuda_mm_out", aoti_torch_cuda_mm_out=("float16",)), "calls aoti_torch_cuda_mm_out"),
    (calling("cudaGraphLaunch"), "calls cudaGraphLaunch"),
    (calling("_ZN2at15get_num_threadsEv"), "calls _ZN2at15get_num_threadsEv"),
    (calling(BY_NAME[1]), f"calls {BY_NAME[1]}"),
    (BY_NAME_ONLY, "calls aten::lstm.input"),
]


@pytest.mark.parametrize("imports", FITS)
def test_an_artifact_fits_whose_libraries_take_what_the_runtime_has(imports: LibraryImports) -> None:
    assert misfits(small_artifact(variants=(variant(calling()), variant(imports)))) == ()


@pytest.mark.parametrize(("imports", "reason"), MISFITS)
def test_an_artifact_does_not_fit_for_a_function_a_version_or_a_dtype_that_the_runtime_lacks(
    imports: LibraryImports, reason: str
) -> None:
    assert misfits(small_artifact(variants=(variant(calling()), variant(imports)))) == (f"it {reason}",)


def test_all_reasons_are_given_each_once() -> None:
    variants = tuple(variant(imports) for imports, _ in MISFITS * 2)
    assert misfits(small_artifact(variants=variants)) == tuple(f"it {reason}" for _, reason in MISFITS)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"regions": (Region("a", ("a",), Signature((), ())),)}, "it was built by regions, whose model runs in torch"),
        ({"parallel": Parallel("tensor", 2)}, "it is the code of one of several ranks"),
    ],
)
@pytest.mark.parametrize("imports", [calling(), None])
def test_an_artifact_of_another_kind_does_not_fit_whatever_it_calls(
    imports: LibraryImports | None, fields: dict[str, Any], reason: str
) -> None:
    assert misfits(small_artifact(variants=(variant(imports),), **fields)) == (reason,)


def test_of_a_record_of_before_it_is_unknown() -> None:
    before = msgspec.json.encode(variant(None))
    assert b"imports" not in before
    assert decode(before, BuiltVariant).imports is None
    assert misfits(small_artifact(variants=(variant(calling()), variant(None)))) is None


def test_imports_are_read_back_as_they_were_written() -> None:
    one = calling(MM, **{MM: ("float32",)})
    written = msgspec.json.encode(Variant({}, "model.so", (), (), (), 0, imports=one))
    assert decode(written, Variant).imports == one


def test_the_names_are_those_of_torch() -> None:
    """A name that is mistyped would keep every artifact out that calls the function."""
    torchs = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    assert [name for name in (*FUNCTIONS, *OPERATORS) if not hasattr(torchs, name)] == []
