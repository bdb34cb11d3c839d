// The driver's library (libcuda.so.1), opened by name when the first model for a GPU is loaded. Neither CUDA's headers nor
// its runtime is needed. https://docs.nvidia.com/cuda/cuda-driver-api
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace aotc::gpu {

using Address = unsigned long long;  // CUdeviceptr
using Context = void*;
using Stream = void*;
using Event = void*;

enum : int {  // CUresult; cudaError_t has the same numbers for these
  SUCCESS = 0, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, NOT_READY = 600, NOT_CAPTURED = 900, UNKNOWN = 999
};
enum : int { MAJOR = 75, MINOR = 76 };                           // CUdevice_attribute: of the compute capability
enum : int { MEMORY_TYPE = 2 };                                  // CUpointer_attribute
enum : unsigned { NON_BLOCKING = 1, RELAXED = 2 };               // of a stream; of a capture

struct Copy2D {  // CUDA_MEMCPY2D
  size_t from_x, from_y;
  unsigned from_kind;
  const void* from_host;
  Address from;
  void* from_array;
  size_t from_pitch;
  size_t into_x, into_y;
  unsigned into_kind;
  void* into_host;
  Address into;
  void* into_array;
  size_t into_pitch;
  size_t width, height;
};
constexpr unsigned OF_DEVICE = 2;  // CU_MEMORYTYPE_DEVICE

// Each function's name in the library, and its parameters.
#define AOTC_DRIVER(F)                                                   \
  F(cuInit, cuInit, (unsigned))                                          \
  F(cuDriverGetVersion, cuDriverGetVersion, (int*))                      \
  F(cuGetErrorName, cuGetErrorName, (int, const char**))                 \
  F(cuGetErrorString, cuGetErrorString, (int, const char**))             \
  F(cuDeviceGetCount, cuDeviceGetCount, (int*))                          \
  F(cuDeviceGet, cuDeviceGet, (int*, int))                               \
  F(cuDeviceGetName, cuDeviceGetName, (char*, int, int))                 \
  F(cuDeviceGetAttribute, cuDeviceGetAttribute, (int*, int, int))        \
  F(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (Context*, int)) \
  F(cuCtxPushCurrent, cuCtxPushCurrent_v2, (Context))                    \
  F(cuCtxPopCurrent, cuCtxPopCurrent_v2, (Context*))                     \
  F(cuCtxSetCurrent, cuCtxSetCurrent, (Context))                         \
  F(cuCtxGetDevice, cuCtxGetDevice, (int*))                              \
  F(cuCtxSynchronize, cuCtxSynchronize, ())                              \
  F(cuMemAlloc, cuMemAlloc_v2, (Address*, size_t))                       \
  F(cuMemFree, cuMemFree_v2, (Address))                                  \
  F(cuMemGetInfo, cuMemGetInfo_v2, (size_t*, size_t*))                   \
  F(cuMemHostAlloc, cuMemHostAlloc, (void**, size_t, unsigned))          \
  F(cuMemFreeHost, cuMemFreeHost, (void*))                               \
  F(cuMemcpyAsync, cuMemcpyAsync, (Address, Address, size_t, Stream))    \
  F(cuMemcpy2DAsync, cuMemcpy2DAsync_v2, (const Copy2D*, Stream))        \
  F(cuMemsetD8Async, cuMemsetD8Async, (Address, unsigned char, size_t, Stream))   \
  F(cuMemsetD16Async, cuMemsetD16Async, (Address, unsigned short, size_t, Stream)) \
  F(cuMemsetD32Async, cuMemsetD32Async, (Address, unsigned, size_t, Stream))      \
  F(cuPointerGetAttribute, cuPointerGetAttribute, (void*, int, Address)) \
  F(cuStreamCreate, cuStreamCreate, (Stream*, unsigned))                 \
  F(cuStreamDestroy, cuStreamDestroy_v2, (Stream))                       \
  F(cuStreamSynchronize, cuStreamSynchronize, (Stream))                  \
  F(cuStreamWaitEvent, cuStreamWaitEvent, (Stream, Event, unsigned))     \
  F(cuEventCreate, cuEventCreate, (Event*, unsigned))                    \
  F(cuEventDestroy, cuEventDestroy_v2, (Event))                          \
  F(cuEventQuery, cuEventQuery, (Event))                                 \
  F(cuEventRecord, cuEventRecord, (Event, Stream))                       \
  F(cuEventSynchronize, cuEventSynchronize, (Event))                     \
  F(cuStreamBeginCapture, cuStreamBeginCapture_v2, (Stream, unsigned))   \
  F(cuStreamEndCapture, cuStreamEndCapture, (Stream, void**))            \
  F(cuGraphInstantiate, cuGraphInstantiateWithFlags, (void**, void*, unsigned long long)) \
  F(cuGraphLaunch, cuGraphLaunch, (void*, Stream))                       \
  F(cuGraphExecDestroy, cuGraphExecDestroy, (void*))                     \
  F(cuGraphDestroy, cuGraphDestroy, (void*))

struct Driver {
#define AOTC_MEMBER(name, symbol, parameters) int (*name) parameters = nullptr;
  AOTC_DRIVER(AOTC_MEMBER)
#undef AOTC_MEMBER
  int version = 0;  // 13020 for 13.2: the newest CUDA that it runs
  int devices = 0;
};

// Opens it once. Throws GpuError where there is none, or an older one that lacks a function.
const Driver& driver();

// What the driver said of a function. Of one that found no memory, `asked` are the bytes, and `available` of `total` were
// free. `name` is empty where the words are ours.
struct GpuError : std::runtime_error {
  int code;
  std::string name;
  size_t asked = 0, available = 0, total = 0;
  GpuError(int code, const char* function);
  GpuError(const std::string& words, int code);
};

void check(int code, const char* function);  // throws GpuError
#define AOTC_CHECKED(name, ...) ::aotc::gpu::check(::aotc::gpu::driver().name(__VA_ARGS__), #name)

}  // namespace aotc::gpu
