// DLPack, and its dtypes as ours.
#pragma once

#include "aotc.h"
#include "tensor.h"

namespace aotc::cpu {

struct DLManagedTensorVersioned {  // of DLPack 1
  struct { uint32_t major, minor; } version;
  void* manager_ctx;
  void (*deleter)(DLManagedTensorVersioned*);
  uint64_t flags;
  DLTensor dl_tensor;
};

struct Coded { DLDataType dtype; int32_t ours; };
constexpr Coded CODED[] = {
    {{kDLInt, 8, 1}, INT8},       {{kDLInt, 16, 1}, INT16},     {{kDLInt, 32, 1}, INT32},     {{kDLInt, 64, 1}, INT64},
    {{kDLUInt, 8, 1}, UINT8},     {{kDLUInt, 16, 1}, UINT16},   {{kDLUInt, 32, 1}, UINT32},   {{kDLUInt, 64, 1}, UINT64},
    {{kDLFloat, 16, 1}, FLOAT16}, {{kDLFloat, 32, 1}, FLOAT32}, {{kDLFloat, 64, 1}, FLOAT64}, {{kDLBfloat, 16, 1}, BFLOAT16},
    {{kDLComplex, 64, 1}, COMPLEX64}, {{kDLComplex, 128, 1}, COMPLEX128}, {{kDLBool, 8, 1}, BOOL},
};

inline int32_t dtype_of(const DLDataType& dtype) {  // -1 for one that no tensor holds here
  for (const Coded& each : CODED)
    if (each.dtype.code == dtype.code && each.dtype.bits == dtype.bits && each.dtype.lanes == dtype.lanes) return each.ours;
  return -1;
}

inline DLDataType dlpack_dtype(int32_t dtype) {  // of 0 bits where DLPack has none
  for (const Coded& each : CODED)
    if (each.ours == dtype) return each.dtype;
  return {0, 0, 0};
}

}  // namespace aotc::cpu
