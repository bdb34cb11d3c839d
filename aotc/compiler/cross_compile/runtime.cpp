// A stand-in for the CUDA runtime (libcudart) in a process that compiles for a GPU which this machine lacks. It
// answers what torch asks about one GPU, keeps "device" memory in pages of the host that cost nothing until they are
// written, and runs nothing: a capture and a measured time are errors, and so is a launch, unless launches are ignored
// (`absent_gpu.stand_in.launches_ignored`). Functions that are not here are errors, too (`absent_gpu.libraries` writes
// them), and the text of an error names the function. See https://docs.nvidia.com/cuda/cuda-runtime-api.
#include <cuda_runtime_api.h>

#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace {

constexpr int kAttributes = 512;
int attributes[kAttributes]; // by cudaDeviceAttr, whose numbers are those of CUdevice_attribute
char gpu_name[256];
size_t gpu_memory;

std::mutex lock;
std::map<uintptr_t, size_t> on_device, on_host; // address → bytes
size_t allocated;
thread_local cudaError_t last = cudaSuccess;
int ignored; // whether launches are ignored

thread_local std::string refused = "nothing"; // the function that was last called or looked up in vain

cudaError_t failed(cudaError_t error, const char *function = __builtin_FUNCTION()) { // the caller's name
  return refused = function, last = error;
}
cudaError_t launched(const char *function = __builtin_FUNCTION()) {
  return ignored ? cudaSuccess : failed(cudaErrorNotSupported, function);
}

bool is_in(const std::map<uintptr_t, size_t> &memory, const void *pointer) {
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto next = memory.upper_bound(address);
  return next != memory.begin() && address < (--next)->first + next->second;
}

cudaError_t map_pages(std::map<uintptr_t, size_t> &memory, void **pointer, size_t bytes) {
  constexpr size_t kPage = 2 << 20;
  bytes = (bytes + kPage - 1) / kPage * kPage;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void *pages = mmap(nullptr, bytes ? bytes : kPage, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (pages == MAP_FAILED)
    return failed(cudaErrorMemoryAllocation);
  memory[reinterpret_cast<uintptr_t>(pages)] = bytes;
  return *pointer = pages, cudaSuccess;
}

size_t unmap_pages(std::map<uintptr_t, size_t> &memory, void *pointer) {
  auto found = memory.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == memory.end())
    return 0;
  size_t bytes = found->second;
  munmap(pointer, bytes);
  memory.erase(found);
  return bytes;
}

template <class Handle> cudaError_t handle(Handle *given) {
  static uintptr_t next = 0x1000;
  std::lock_guard<std::mutex> hold(lock);
  return *given = reinterpret_cast<Handle>(next += 0x10), cudaSuccess;
}

} // namespace

extern "C" {

// Set what GPU this is. `values` are indexed by cudaDeviceAttr.
void aotc_absent_gpu(const char *name, size_t memory, const int *values, int count) {
  snprintf(gpu_name, sizeof gpu_name, "%s", name);
  gpu_memory = memory;
  memcpy(attributes, values, sizeof(int) * (count < kAttributes ? count : kAttributes));
}

void aotc_ignore_launches(int yes) { ignored = yes; }

// What a function does that is not here.
int aotc_refuse(const char *function) { return refused = function, cudaErrorNotSupported; }

// -- the device -------------------------------------------------------------------------------------------------------

cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *count) { // none, where nothing has said what GPU this is
  *count = gpu_memory != 0;
  return *count ? cudaSuccess : failed(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : failed(cudaErrorInvalidDevice); }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int) { return snprintf(id, size, "0000:00:00.0"), cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
  *value = attribute > 0 && attribute < kAttributes ? attributes[attribute] : 0;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int) {
  auto of = [](cudaDeviceAttr attribute) { return attributes[attribute]; };
  memset(properties, 0, sizeof *properties);
  snprintf(properties->name, sizeof properties->name, "%s", gpu_name);
  properties->totalGlobalMem = gpu_memory;
  properties->major = of(cudaDevAttrComputeCapabilityMajor);
  properties->minor = of(cudaDevAttrComputeCapabilityMinor);
  properties->warpSize = of(cudaDevAttrWarpSize);
  properties->multiProcessorCount = of(cudaDevAttrMultiProcessorCount);
  properties->maxThreadsPerBlock = of(cudaDevAttrMaxThreadsPerBlock);
  properties->maxThreadsPerMultiProcessor = of(cudaDevAttrMaxThreadsPerMultiProcessor);
  properties->maxBlocksPerMultiProcessor = of(cudaDevAttrMaxBlocksPerMultiprocessor);
  properties->regsPerBlock = of(cudaDevAttrMaxRegistersPerBlock);
  properties->regsPerMultiprocessor = of(cudaDevAttrMaxRegistersPerMultiprocessor);
  properties->sharedMemPerBlock = of(cudaDevAttrMaxSharedMemoryPerBlock);
  properties->sharedMemPerBlockOptin = of(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  properties->sharedMemPerMultiprocessor = of(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  properties->reservedSharedMemPerBlock = of(cudaDevAttrReservedSharedMemoryPerBlock);
  properties->l2CacheSize = of(cudaDevAttrL2CacheSize);
  properties->memoryBusWidth = of(cudaDevAttrGlobalMemoryBusWidth);
  properties->totalConstMem = of(cudaDevAttrTotalConstantMemory);
  properties->textureAlignment = of(cudaDevAttrTextureAlignment);
  properties->maxThreadsDim[0] = of(cudaDevAttrMaxBlockDimX);
  properties->maxThreadsDim[1] = of(cudaDevAttrMaxBlockDimY);
  properties->maxThreadsDim[2] = of(cudaDevAttrMaxBlockDimZ);
  properties->maxGridSize[0] = of(cudaDevAttrMaxGridDimX);
  properties->maxGridSize[1] = of(cudaDevAttrMaxGridDimY);
  properties->maxGridSize[2] = of(cudaDevAttrMaxGridDimZ);
  return cudaSuccess;
}

// -- errors -----------------------------------------------------------------------------------------------------------

cudaError_t cudaGetLastError() {
  cudaError_t error = last;
  return last = cudaSuccess, error;
}
cudaError_t cudaPeekAtLastError() { return last; }
const char *cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaError"; }
const char *cudaGetErrorString(cudaError_t error) {
  static thread_local char text[256];
  snprintf(text, sizeof text, "aotc compiles for a GPU that this machine lacks: nothing runs on it, which %s would need",
           refused.c_str());
  return error == cudaSuccess ? "no error" : error == cudaErrorMemoryAllocation ? "out of memory" : text;
}

// -- streams and events: nothing runs, so everything has ended ------------------------------------------------------------

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return handle(stream); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) { return handle(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) { return handle(stream); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int *priority) { return *priority = 0, cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus *status, unsigned long long *, cudaGraph_t *,
                                     const cudaGraphNode_t **, const cudaGraphEdgeData **, size_t *) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
#else
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus *status, unsigned long long *) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t, cudaStreamCaptureStatus *status, unsigned long long *,
                                        cudaGraph_t *, const cudaGraphNode_t **, size_t *) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
#endif
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t *event) { return handle(event); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) { return handle(event); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }

// -- memory: pages of the host, from which the values of a graph's constants are read back ---------------------------------

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
  std::lock_guard<std::mutex> hold(lock);
  if (allocated + bytes > gpu_memory)
    return failed(cudaErrorMemoryAllocation);
  cudaError_t error = map_pages(on_device, pointer, bytes);
  if (error == cudaSuccess)
    allocated += on_device[reinterpret_cast<uintptr_t>(*pointer)];
  return error;
}
cudaError_t cudaFree(void *pointer) {
  std::lock_guard<std::mutex> hold(lock);
  allocated -= unmap_pages(on_device, pointer);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> hold(lock);
  return map_pages(on_host, pointer, bytes);
}
cudaError_t cudaFreeHost(void *pointer) {
  std::lock_guard<std::mutex> hold(lock);
  return unmap_pages(on_host, pointer), cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
  std::lock_guard<std::mutex> hold(lock);
  return *available = gpu_memory - allocated, *total = gpu_memory, cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *found, const void *pointer) {
  std::lock_guard<std::mutex> hold(lock);
  memset(found, 0, sizeof *found);
  bool device = is_in(on_device, pointer), host = is_in(on_host, pointer);
  found->type = device ? cudaMemoryTypeDevice : host ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  found->device = device || host ? 0 : -2;
  found->devicePointer = device || host ? const_cast<void *>(pointer) : nullptr;
  found->hostPointer = device ? nullptr : const_cast<void *>(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
  return memcpy(to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return memcpy(to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemset(void *to, int value, size_t bytes) { return memset(to, value, bytes), cudaSuccess; }
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t) {
  return memset(to, value, bytes), cudaSuccess;
}

// -- code that torch registers when its libraries are loaded -----------------------------------------------------------------

void **__cudaRegisterFatBinary(void *) {
  static void *handles[1];
  return handles;
}
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
void __cudaRegisterFunction(void **, const char *, char *, const char *, int, void *, void *, void *, void *, int *) {}
void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
char __cudaInitModule(void **) { return 1; }

cudaError_t cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t) { return launched(); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *, void **) { return launched(); }
cudaError_t cudaLaunchCooperativeKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t) { return launched(); }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void **, size_t, cudaStream_t) { return launched(); }
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *) { return handle(kernel); }
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, struct CUstream_st *) { return launched() != cudaSuccess; }
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = *block = dim3{1, 1, 1};
  *shared = 0;
  *static_cast<cudaStream_t *>(stream) = nullptr;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *found, const void *) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *, int, size_t) {
  return *blocks = 1, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int, size_t, unsigned) {
  return *blocks = 1, cudaSuccess;
}

// Functions of the driver that torch takes by name: those of the stand-in for it.
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *found) {
  static void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  *function = driver ? dlsym(driver, name) : nullptr;
  if (found != nullptr)
    *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  if (*function == nullptr)
    refused = name;
  return cudaSuccess; // also for a name that is not found: `found` says so
}
}
