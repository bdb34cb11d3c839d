// Floating point numbers of 16 bits, and conversions.
#pragma once

#include <cstdint>
#include <cstring>

namespace aotc::cpu {

struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  explicit BFloat16(float value) {  // to the nearest, ties to even
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    bits = value != value ? 0x7fc0 : static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
  }
  operator float() const {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
};
#if defined(__aarch64__)
using Float16 = __fp16;  // C++ has _Float16 from GCC 13 on there
#else
using Float16 = _Float16;
#endif

}  // namespace aotc::cpu
