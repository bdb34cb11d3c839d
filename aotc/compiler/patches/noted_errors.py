"""[inductor] An error that is thrown in a kernel's loop ends the process.

Most loops are OpenMP's, which an exception may not leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.shared.generated_code import NOTED, reproduce_index_error
from aotc.compiler.patches.shared.operators import DIVISIONS, INDEXING

PATCH = Patch(
    __name__,
    severity="crash",
    advisory="AOTC-2026-0022",
    operators=(*INDEXING, *DIVISIONS, "aten.fmod", "aten._assert"),
    upstream="pytorch#195402",
    targets=("torch._inductor.codegen.cpp:CppScheduling.define_kernel(src_code, ...)",),
)

_HELPERS = r"""
#ifndef AOTC_CHECKED_VALUES
#define AOTC_CHECKED_VALUES
#include <atomic>
#include <limits>
#include <stdexcept>
namespace aotc {
struct Error {
    std::atomic<const char*> message{nullptr};
    void note(const char* text) { message.store(text, std::memory_order_relaxed); }
    bool noted() const { return message.load(std::memory_order_relaxed) != nullptr; }
    void raise() const { if (noted()) throw std::out_of_range(message.load(std::memory_order_relaxed)); }
};

// Whether an element counts: a masked-out one may hold anything.
inline bool counts(bool mask, int) { return mask; }
template <typename T, int N>
inline bool counts(const at::vec::VecMask<T, N>& mask, int lane) { return mask.is_masked(lane); }

// The value as the processor has it. The compiler takes it that no integer overflows, and leaves a check out whose
// outcome follows: that `abs(x)` is negative, or that `2 * relu(x) + 2` is 0.
template <typename T> inline T as_it_is(T value) { asm("" : "+r"(value)); return value; }

inline bool within(int64_t index, int64_t size) { return static_cast<uint64_t>(index) < static_cast<uint64_t>(size); }

// The index, or 0 where it is out of bounds.
template <typename T>
inline T checked_index(T index, int64_t size, bool mask, Error& error, const char* message) {
    index = as_it_is(index);
    if (C10_LIKELY(within(index, size))) return index;
    if (mask) error.note(message);
    return 0;
}

template <typename Vec, typename Mask>
inline Vec checked_indices(
    const Vec& given, int64_t size, int count, const Mask& mask, Error& error, const char* message) {
    __at_align__ typename Vec::value_type indices[Vec::size()];
    given.store(indices);
    asm("" : "+m"(indices));
    bool all = true;
    for (int i = 0; i < count; ++i) all &= within(indices[i], size);
    if (C10_LIKELY(all)) return Vec::loadu(indices);
    for (int i = 0; i < count; ++i) indices[i] = checked_index(indices[i], size, counts(mask, i), error, message);
    return Vec::loadu(indices);
}

// The divisor, or 1 where no quotient is: the remainder by 1 is 0, and the smallest integer by 1 is the same that its
// quotient by -1 wraps to.
template <typename A, typename B>
inline B checked_divisor(A dividend, B divisor, bool mask, Error& error) {
    using Common = std::common_type_t<A, B>;
    divisor = as_it_is(divisor);
    if (C10_UNLIKELY(divisor == 0)) {
        if (mask) error.note("integer division by zero");
        return 1;
    }
    if constexpr (std::is_signed_v<Common>) {
        if (divisor == static_cast<B>(-1) && as_it_is(dividend) == std::numeric_limits<Common>::min()) return 1;
    }
    return divisor;
}

template <typename Vec, typename Mask>
inline Vec checked_divisors(const Vec& dividend, const Vec& given, int count, const Mask& mask, Error& error) {
    __at_align__ typename Vec::value_type dividends[Vec::size()], divisors[Vec::size()];
    dividend.store(dividends);
    given.store(divisors);
    for (int i = 0; i < count; ++i) divisors[i] = checked_divisor(dividends[i], divisors[i], counts(mask, i), error);
    for (int i = count; i < Vec::size(); ++i) divisors[i] = 1;
    return Vec::loadu(divisors);
}

template <typename Vec, typename T, int N>
inline bool all_hold(const at::vec::VecMask<T, N>& condition, int count, const Vec& mask) {
    bool all = true;
    for (int i = 0; i < count; ++i) all &= condition.is_masked(i) || !counts(mask, i);
    return all;
}
template <typename Mask> inline bool all_hold(bool condition, int, const Mask&) { return condition; }

// Memory of no element is not read once an index of it has been found out of bounds.
template <typename T>
struct Guarded {
    T* memory;
    const Error& error;
    std::remove_const_t<T> operator[](int64_t at) const {
        return error.noted() ? std::remove_const_t<T>{} : memory[at];
    }
    const T* operator+(int64_t at) const {
        alignas(64) static const unsigned char nothing[1024] = {};
        return error.noted() ? reinterpret_cast<const T*>(nothing) : memory + at;
    }
};
template <typename T> Guarded(T*, const Error&) -> Guarded<T>;
}
#endif
"""


@contextmanager
def apply() -> Iterator[None]:
    """While active, errors that C++ kernels find in their loops are recorded there, and thrown after the loops.

    A kernel that can find an error has a local variable `aotc_error`: any thread records an error in it and continues
    with a harmless value, and the kernel throws at its end. Concurrent calls have their own variables.
    """
    from torch._inductor.codegen.cpp import CppScheduling

    define_kernel: Any = CppScheduling.define_kernel

    def define(self: Any, src_code: str, *args: Any, **kwargs: Any) -> Any:
        return define_kernel(self, _throwing(src_code) if NOTED in src_code else src_code, *args, **kwargs)

    with replaced(CppScheduling, "define_kernel", define):
        yield


def _throwing(code: str) -> str:
    function = code.rindex('extern "C"')
    begin, end = code.index("{", function) + 1, code.rindex("}")
    return (
        f"{code[:function]}{_HELPERS}{code[function:begin]}\n    aotc::Error {NOTED};"
        f"{code[begin:end]}    {NOTED}.raise();\n{code[end:]}"
    )


reproduce = reproduce_index_error
