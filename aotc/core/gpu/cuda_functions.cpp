// What AOTInductor's code for a GPU calls beside operators: functions of torch's C shim (shim.h, of torch 2.11 to 2.15), and
// of CUDA's runtime (libcudart), over the driver. https://docs.nvidia.com/cuda/cuda-runtime-api
#include <cstdio>

#include "device.h"

using namespace aotc::cpu;
using namespace aotc::gpu;

namespace {

thread_local int last_error = 0;  // cudaError_t, whose numbers are those of CUresult where both have an error

int told(int code) {
  if (code && code != NOT_READY) last_error = code;
  return code;
}

// Runs for the device of this thread, and gives the code of what the driver says.
template <typename Run>
int for_device(Run run) {
  int code = UNKNOWN;
  guarded([&] {
    try {
      int number = 0;
      AOTC_CHECKED(cuCtxGetDevice, &number);
      run(device_at(number));
      code = SUCCESS;
    } catch (const GpuError& error) {
      code = error.code;
      throw;
    }
  });
  return told(code);
}

}  // namespace

// -- torch's C shim -------------------------------------------------------------------------------------------------------

// A call of the code has set the device and the stream: there is nothing to guard.
static char guard;
AOTC_EXPORTED Status aoti_torch_create_cuda_guard(int32_t, void** made) { return *made = &guard, 0; }
AOTC_EXPORTED Status aoti_torch_delete_cuda_guard(void*) { return 0; }
AOTC_EXPORTED Status aoti_torch_cuda_guard_set_index(void*, int32_t) { return 0; }
AOTC_EXPORTED Status aoti_torch_create_cuda_stream_guard(void*, int32_t, void** made) { return *made = &guard, 0; }
AOTC_EXPORTED Status aoti_torch_delete_cuda_stream_guard(void*) { return 0; }

AOTC_EXPORTED Status aoti_torch_get_current_cuda_stream(int32_t number, void** stream) {
  return guarded([&] { *stream = device_at(number).stream(); });
}
AOTC_EXPORTED Status aoti_torch_empty_strided_pinned(int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                                     int32_t, int32_t, Tensor** made) {
  return guarded([&] {
    int64_t bytes = storage_bytes(rank, sizes, strides, dtype);
    void* memory = nullptr;
    AOTC_CHECKED(cuMemHostAlloc, &memory, static_cast<size_t>(bytes ? bytes : 1), 0);
    auto release = [](Storage* own) { driver().cuMemFreeHost(own->data); };
    *made = new_tensor(new Storage{static_cast<char*>(memory), bytes, release}, rank, sizes, strides, 0, dtype);
  });
}
AOTC_EXPORTED Status aoti_torch_cuda_caching_allocator_raw_alloc(uint64_t bytes, void** made) {
  return guarded([&] {
    int number = 0;
    AOTC_CHECKED(cuCtxGetDevice, &number);
    *made = reinterpret_cast<void*>(device_at(number).raw(bytes ? bytes : 1));
  });
}
AOTC_EXPORTED Status aoti_torch_cuda_caching_allocator_raw_delete(void* memory) {
  return guarded([&] { AOTC_CHECKED(cuMemFree, reinterpret_cast<Address>(memory)); });
}

// -- CUDA's runtime -------------------------------------------------------------------------------------------------------

AOTC_EXPORTED int cudaGetDevice(int* number) { return told(driver().cuCtxGetDevice(number)); }
AOTC_EXPORTED int cudaSetDevice(int number) {
  int code = 0;
  guarded([&] { code = driver().cuCtxSetCurrent(device_at(number).context()); }) ? code = INVALID_DEVICE : 0;
  return told(code);
}
AOTC_EXPORTED int cudaGetLastError() {
  int code = last_error;
  last_error = 0;
  return code;
}
AOTC_EXPORTED const char* cudaGetErrorString(int code) {
  static thread_local std::string text;
  return (text = code ? GpuError(code, "CUDA").what() : "no error").c_str();
}
AOTC_EXPORTED int cudaMalloc(void** made, size_t bytes) {
  return for_device([&](Device& device) { *made = reinterpret_cast<void*>(device.raw(bytes ? bytes : 1)); });
}
AOTC_EXPORTED int cudaFree(void* memory) { return memory ? told(driver().cuMemFree(reinterpret_cast<Address>(memory))) : SUCCESS; }
AOTC_EXPORTED int cudaMemcpy(void* into, const void* from, size_t bytes, int) {
  return for_device([&](Device& device) {  // after what its stream does: one without a stream would not wait for that
    AOTC_CHECKED(cuMemcpyAsync, reinterpret_cast<Address>(into), reinterpret_cast<Address>(from), bytes, device.stream());
    device.wait();
  });
}
AOTC_EXPORTED int cudaMemcpyAsync(void* into, const void* from, size_t bytes, int, Stream stream) {
  return told(driver().cuMemcpyAsync(reinterpret_cast<Address>(into), reinterpret_cast<Address>(from), bytes, stream));
}
AOTC_EXPORTED int cudaEventCreate(Event* made) { return told(driver().cuEventCreate(made, 0)); }
AOTC_EXPORTED int cudaEventCreateWithFlags(Event* made, unsigned flags) { return told(driver().cuEventCreate(made, flags)); }
AOTC_EXPORTED int cudaEventDestroy(Event event) { return told(driver().cuEventDestroy(event)); }
AOTC_EXPORTED int cudaEventQuery(Event event) { return told(driver().cuEventQuery(event)); }
AOTC_EXPORTED int cudaEventRecord(Event event, Stream stream) { return told(driver().cuEventRecord(event, stream)); }
AOTC_EXPORTED int cudaEventSynchronize(Event event) { return told(driver().cuEventSynchronize(event)); }
AOTC_EXPORTED int cudaStreamCreateWithFlags(Stream* made, unsigned flags) { return told(driver().cuStreamCreate(made, flags)); }
AOTC_EXPORTED int cudaStreamDestroy(Stream stream) { return told(driver().cuStreamDestroy(stream)); }
AOTC_EXPORTED int cudaStreamSynchronize(Stream stream) { return told(driver().cuStreamSynchronize(stream)); }
AOTC_EXPORTED int cudaStreamWaitEvent(Stream stream, Event event, unsigned flags) {
  return told(driver().cuStreamWaitEvent(stream, event, flags));
}

struct PointerAttributes {  // cudaPointerAttributes
  int type, device;
  void *device_pointer, *host_pointer;
};
AOTC_EXPORTED int cudaPointerGetAttributes(PointerAttributes* found, const void* pointer) {
  unsigned type = 0;  // 1 of the host, 2 of a device: the same numbers in both
  if (driver().cuPointerGetAttribute(&type, MEMORY_TYPE, reinterpret_cast<Address>(pointer))) type = 0;  // the driver does not know it
  int number = 0;
  driver().cuCtxGetDevice(&number);
  auto* known = const_cast<void*>(pointer);
  *found = {static_cast<int>(type), number, type == 2 ? known : nullptr, type == 1 ? known : nullptr};
  return SUCCESS;
}
