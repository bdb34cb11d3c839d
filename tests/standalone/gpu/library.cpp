// A library for a GPU with the interface of AOTInductor, as small as it can be: torch/csrc/inductor/aoti_runtime/interface.h.
// Its model, with a buffer `count` and a parameter `weight`:
//
//     def forward(x, total):
//         count += 1
//         total += 1
//         return x * weight
//
// The arguments are x, total, count and weight, the result is its one output. With NEEDS_TORCH it calls an operator,
// with COPIES it copies memory of the CPU to the result before it is computed. With SHARES it gives also `result.T`,
// all but the first element of the result as a vector, and `x * weight` once more, in memory of its own.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

using Tensor = void;
using Status = int32_t;
#define API extern "C" __attribute__((visibility("default")))

extern "C" {
Status aoti_torch_get_data_ptr(Tensor*, void**);
Status aoti_torch_get_numel(Tensor*, int64_t*);
Status aoti_torch_get_dim(Tensor*, int64_t*);
Status aoti_torch_get_sizes(Tensor*, int64_t**);
Status aoti_torch_get_strides(Tensor*, int64_t**);
Status aoti_torch_get_device_type(Tensor*, int32_t*);
Status aoti_torch_get_device_index(Tensor*, int32_t*);
Status aoti_torch_empty_strided(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Tensor**);
Status aoti_torch_delete_tensor_object(Tensor*);
Status aoti_torch__reinterpret_tensor(Tensor*, int64_t, const int64_t*, const int64_t*, int64_t, Tensor**);
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_device_type_cuda();
Status aoti_torch_copy_(Tensor*, Tensor*, int32_t);
int32_t aoti_torch_device_type_cpu();
Status aoti_torch_cuda_mm_out(Tensor*, Tensor*, Tensor*);
int cudaSetDevice(int);
int cudaGetDevice(int*);
const char* cudaGetErrorString(int);
int cuModuleLoadData(void**, const void*);
int cuModuleGetFunction(void**, void*, const char*);
int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
}

namespace {

#ifdef SHARES
constexpr size_t OUTPUTS = 4;
#else
constexpr size_t OUTPUTS = 1;
#endif

struct Container { int device; void *scale, *increment; };
thread_local std::string last;

void check(Status status, const char* what) {
  if (status) throw std::runtime_error(std::string(what) + " failed");
}
void check_driver(int code) {
  if (code) throw std::runtime_error(std::string("CUDA driver error: ") + cudaGetErrorString(code));
}

template <typename Run>
Status guarded(Run run) {
  try {
    run();
    return 0;
  } catch (const std::exception& error) {
    last = error.what();
    return 1;
  }
}

void* data_of(Tensor* tensor) {
  void* data = nullptr;
  check(aoti_torch_get_data_ptr(tensor, &data), "get_data_ptr");
  return data;
}
int64_t elements_of(Tensor* tensor) {
  int64_t count = 0;
  check(aoti_torch_get_numel(tensor, &count), "get_numel");
  return count;
}

Tensor* empty_like(Tensor* tensor, int device, int32_t type = aoti_torch_device_type_cuda()) {
  int64_t rank = 0, *sizes = nullptr, *strides = nullptr;
  aoti_torch_get_dim(tensor, &rank), aoti_torch_get_sizes(tensor, &sizes), aoti_torch_get_strides(tensor, &strides);
  Tensor* made = nullptr;
  check(aoti_torch_empty_strided(rank, sizes, strides, aoti_torch_dtype_float32(), type, device, &made), "empty_strided");
  return made;
}

void scale(const Container& own, Tensor* out, Tensor* x, Tensor* weight, void* stream) {
  void *into = data_of(out), *from = data_of(x), *by = data_of(weight);
  int64_t count = elements_of(x), width = elements_of(weight);
  void* arguments[] = {&into, &from, &by, &count, &width};
  check_driver(cuLaunchKernel(own.scale, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr));
}
void increment(const Container& own, Tensor* x, void* stream) {
  void* into = data_of(x);
  int64_t count = elements_of(x);
  void* arguments[] = {&into, &count};
  check_driver(cuLaunchKernel(own.increment, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr));
}

}  // namespace

API Status AOTInductorModelContainerCreateWithDevice(Container** made, size_t, const char* device, const char*) {
  return guarded([&] {
    auto* own = new Container{};
    if (std::string(device).rfind("cuda:", 0)) throw std::runtime_error(std::string("a container for ") + device);
    own->device = std::stoi(std::string(device).substr(5));
    check(cudaSetDevice(own->device), "cudaSetDevice");
    void* module = nullptr;
    check_driver(cuModuleLoadData(&module, "an image"));
    check_driver(cuModuleGetFunction(&own->scale, module, "scale"));
    check_driver(cuModuleGetFunction(&own->increment, module, "increment"));
    *made = own;
  });
}
API Status AOTInductorModelContainerDelete(Container* own) {
  int device = -1;
  if (cudaGetDevice(&device) || device != own->device) std::abort();  // it is deleted where its device is none of the thread's
  return delete own, 0;
}
API Status AOTInductorModelContainerGetNumInputs(Container*, size_t* count) { return *count = 4, 0; }
API Status AOTInductorModelContainerGetNumOutputs(Container*, size_t* count) { return *count = OUTPUTS, 0; }
API Status AOTInductorGetLastError(const char** words) { return *words = last.c_str(), 0; }

API Status AOTInductorModelContainerRunSingleThreaded(Container* own, Tensor** inputs, size_t count, Tensor** outputs, size_t, void* stream, void*) {
  Status status = guarded([&] {
    Tensor *x = inputs[0], *total = inputs[1], *counted = inputs[2], *weight = inputs[3];
    for (size_t at = 0; at < count; at++) {
      int32_t type = 0, device = 0;
      aoti_torch_get_device_type(inputs[at], &type), aoti_torch_get_device_index(inputs[at], &device);
      if (type != aoti_torch_device_type_cuda() || device != own->device) throw std::runtime_error("an argument that lies elsewhere");
    }
#ifdef NEEDS_TORCH
    aoti_torch_cuda_mm_out(x, x, x);
#endif
    Tensor* scratch = empty_like(x, own->device);
    Tensor* out = empty_like(x, own->device);
    outputs[0] = out;
#ifdef COPIES
    Tensor* host = empty_like(x, 0, aoti_torch_device_type_cpu());
    Status copied = aoti_torch_copy_(out, host, 0);
    aoti_torch_delete_tensor_object(host);
    check(copied, "copy_");
#endif
    scale(*own, scratch, x, weight, stream);
    scale(*own, out, x, weight, stream);
    increment(*own, counted, stream);
    increment(*own, total, stream);
#ifdef SHARES
    int64_t all = elements_of(x), one = 1, *sizes = nullptr, *strides = nullptr;
    aoti_torch_get_sizes(x, &sizes), aoti_torch_get_strides(x, &strides);
    int64_t turned[] = {sizes[2], sizes[1], sizes[0]}, steps[] = {strides[2], strides[1], strides[0]}, but_one = all - 1;
    check(aoti_torch__reinterpret_tensor(out, 3, turned, steps, 0, &outputs[1]), "reinterpret_tensor");
    check(aoti_torch__reinterpret_tensor(out, 1, &but_one, &one, 1, &outputs[2]), "reinterpret_tensor");
    outputs[3] = scratch;
#else
    aoti_torch_delete_tensor_object(scratch);
#endif
  });
  for (size_t at = 0; at < count; at++) aoti_torch_delete_tensor_object(inputs[at]);
  return status;
}
API Status AOTInductorModelContainerRun(Container*, Tensor**, size_t, Tensor**, size_t, void*, void*) {
  last = "an event is asked for";
  return 1;
}
