// A libcuda.so.1 for tests of the standalone runtime: one GPU or more, whose memory is the host's. Copies, and kernels that
// are named below, are done for real and at once, or when the graph is launched that holds them; other kernels are counted.
//
// An address on the GPU has a bit set that no address of the host has: what reads it on the CPU ends the process.
//
// STAND_IN_GPUS, STAND_IN_MEMORY (bytes of each), STAND_IN_CAPABILITY (90), STAND_IN_CUDA (13000) say what it is.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#define DRIVER extern "C" __attribute__((visibility("default"))) int

using Address = unsigned long long;

namespace {

constexpr Address ON_GPU = Address{1} << 56;
enum { SUCCESS, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700, CAPTURE = 900 };

std::recursive_mutex lock;
std::map<std::string, long long> counts;
std::map<std::string, int> failing;  // by function: what its next call gives
int sticky = 0, capturing = 0;  // streams
std::map<Address, size_t> allocated;  // by host address
size_t in_use = 0;
thread_local std::vector<int> contexts;

struct Stream { bool captures = false; std::vector<std::function<void()>> recorded; };
struct Graph { std::vector<std::function<void()>> steps; };

long long setting(const char* name, long long otherwise) {
  const char* text = getenv(name);
  return text ? atoll(text) : otherwise;
}
size_t memory() { return static_cast<size_t>(setting("STAND_IN_MEMORY", 1ll << 30)); }

int called(const char* function) {
  counts[function]++;
  if (sticky) return sticky;
  auto found = failing.find(function);
  if (found == failing.end()) return SUCCESS;
  int code = found->second;
  failing.erase(found);
  if (code == ILLEGAL_ADDRESS) sticky = code;
  return code;
}

#define CALLED                                                    \
  std::lock_guard<std::recursive_mutex> hold(lock);               \
  if (int code = called(__func__)) return code;
#define IN_CONTEXT CALLED if (contexts.empty()) return INVALID_CONTEXT;

char* real(Address address) { return reinterpret_cast<char*>(address & ~ON_GPU); }

int enqueue(void* stream, std::function<void()> step) {
  auto* own = static_cast<Stream*>(stream);
  if (own && own->captures) own->recorded.push_back(std::move(step));
  else step();
  return SUCCESS;
}

// -- kernels -------------------------------------------------------------------------------------------------------------

template <typename T>
T* pointer(void** arguments, int at) { return reinterpret_cast<T*>(real(*static_cast<Address*>(arguments[at]))); }
int64_t number(void** arguments, int at) { return *static_cast<int64_t*>(arguments[at]); }

void scale(void** given) {  // (out, x, weight, elements, width)
  for (int64_t at = 0; at < number(given, 3); at++) pointer<float>(given, 0)[at] = pointer<float>(given, 1)[at] * pointer<float>(given, 2)[at % number(given, 4)];
}
void increment(void** given) {  // (x, elements)
  for (int64_t at = 0; at < number(given, 1); at++) pointer<float>(given, 0)[at] += 1;
}

struct Function { std::string name; void (*run)(void**); std::vector<size_t> widths; };
Function functions[] = {{"scale", scale, {8, 8, 8, 8, 8}}, {"increment", increment, {8, 8}}, {"", nullptr, {}}};

int launch(Function* function, void* stream, void** arguments) {
  counts["launches"]++;
  auto values = std::vector<std::vector<char>>();
  for (size_t at = 0; at < function->widths.size(); at++) values.emplace_back(static_cast<char*>(arguments[at]), static_cast<char*>(arguments[at]) + function->widths[at]);
  return enqueue(stream, [function, values]() mutable {
    counts["runs"]++;
    std::vector<void*> given;
    for (auto& each : values) given.push_back(each.data());
    if (function->run) function->run(given.data());
  });
}

}  // namespace

// -- for the tests --------------------------------------------------------------------------------------------------------

extern "C" __attribute__((visibility("default"))) long long stand_in_count(const char* name) { return counts[name]; }
extern "C" __attribute__((visibility("default"))) long long stand_in_memory() { return static_cast<long long>(in_use); }
extern "C" __attribute__((visibility("default"))) void stand_in_fail(const char* function, int code) { failing[function] = code; }

// -- the driver -----------------------------------------------------------------------------------------------------------

DRIVER cuInit(unsigned) {
  CALLED
  return setting("STAND_IN_GPUS", 1) ? SUCCESS : NO_DEVICE;
}
DRIVER cuDriverGetVersion(int* version) { return *version = static_cast<int>(setting("STAND_IN_CUDA", 13000)), SUCCESS; }
DRIVER cuGetErrorName(int code, const char** name) {
  *name = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : code == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : code == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR";
  return SUCCESS;
}
DRIVER cuGetErrorString(int, const char** text) { return *text = "in words", SUCCESS; }
DRIVER cuDeviceGetCount(int* count) { return *count = static_cast<int>(setting("STAND_IN_GPUS", 1)), SUCCESS; }
DRIVER cuDeviceGet(int* device, int number) { return *device = number, SUCCESS; }
DRIVER cuDeviceGetName(char* name, int size, int) { return strncpy(name, "Stand-in GPU", static_cast<size_t>(size)), SUCCESS; }
DRIVER cuDeviceGetAttribute(int* value, int attribute, int) {
  int capability = static_cast<int>(setting("STAND_IN_CAPABILITY", 90));
  return *value = attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : 1, SUCCESS;
}
DRIVER cuDevicePrimaryCtxRetain(void** context, int device) {
  CALLED
  return *context = reinterpret_cast<void*>(intptr_t{device} + 1), SUCCESS;
}
DRIVER cuCtxPushCurrent_v2(void* context) { return contexts.push_back(static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1), SUCCESS; }
DRIVER cuCtxPopCurrent_v2(void** context) {
  if (contexts.empty()) return INVALID_CONTEXT;
  *context = reinterpret_cast<void*>(intptr_t{contexts.back()} + 1);
  return contexts.pop_back(), SUCCESS;
}
DRIVER cuCtxSetCurrent(void* context) {
  if (!contexts.empty()) contexts.pop_back();
  return cuCtxPushCurrent_v2(context);
}
DRIVER cuCtxGetDevice(int* device) { return contexts.empty() ? INVALID_CONTEXT : (*device = contexts.back(), SUCCESS); }
DRIVER cuCtxSynchronize() { IN_CONTEXT return capturing ? CAPTURE : SUCCESS; }

DRIVER cuMemAlloc_v2(Address* made, size_t bytes) {
  IN_CONTEXT
  if (in_use + bytes > memory()) return OUT_OF_MEMORY;
  auto host = reinterpret_cast<Address>(aligned_alloc(512, (bytes + 511) / 512 * 512));
  memset(reinterpret_cast<void*>(host), 0xAB, bytes);
  allocated[host] = bytes, in_use += bytes;
  return *made = host | ON_GPU, SUCCESS;
}
DRIVER cuMemFree_v2(Address address) {
  IN_CONTEXT
  auto found = allocated.find(address & ~ON_GPU);
  if (found == allocated.end()) return INVALID_VALUE;
  in_use -= found->second;
  free(real(address));
  return allocated.erase(found), SUCCESS;
}
DRIVER cuMemGetInfo_v2(size_t* available, size_t* total) { return *available = memory() - in_use, *total = memory(), SUCCESS; }
DRIVER cuMemHostAlloc(void** made, size_t bytes, unsigned) { IN_CONTEXT return *made = malloc(bytes), SUCCESS; }
DRIVER cuMemFreeHost(void* memory) { return free(memory), SUCCESS; }
DRIVER cuMemcpyAsync(Address into, Address from, size_t bytes, void* stream) {
  IN_CONTEXT
  return enqueue(stream, [=] { memmove(real(into), real(from), bytes); });
}

struct Copy2D {
  size_t from_x, from_y; unsigned from_kind; const void* from_host; Address from; void* from_array; size_t from_pitch;
  size_t into_x, into_y; unsigned into_kind; void* into_host; Address into; void* into_array; size_t into_pitch;
  size_t width, height;
};
DRIVER cuMemcpy2DAsync_v2(const Copy2D* given, void* stream) {
  IN_CONTEXT
  Copy2D copy = *given;
  if (copy.from_pitch < copy.width || copy.into_pitch < copy.width || copy.from_kind != 2 || copy.into_kind != 2) return INVALID_VALUE;
  return enqueue(stream, [copy] {
    for (size_t row = 0; row < copy.height; row++) memmove(real(copy.into) + row * copy.into_pitch, real(copy.from) + row * copy.from_pitch, copy.width);
  });
}
template <typename T>
int fill(Address into, T value, size_t count, void* stream) {
  return enqueue(stream, [=] { for (size_t at = 0; at < count; at++) memcpy(real(into) + at * sizeof value, &value, sizeof value); });
}
DRIVER cuMemsetD8Async(Address into, unsigned char value, size_t count, void* stream) { IN_CONTEXT return fill(into, value, count, stream); }
DRIVER cuMemsetD16Async(Address into, unsigned short value, size_t count, void* stream) { IN_CONTEXT return fill(into, value, count, stream); }
DRIVER cuMemsetD32Async(Address into, unsigned value, size_t count, void* stream) { IN_CONTEXT return fill(into, value, count, stream); }
DRIVER cuPointerGetAttribute(void* value, int, Address address) { return *static_cast<unsigned*>(value) = address & ON_GPU ? 2 : 1, SUCCESS; }

DRIVER cuStreamCreate(void** made, unsigned) { IN_CONTEXT return *made = new Stream, SUCCESS; }
DRIVER cuStreamDestroy_v2(void* stream) { return delete static_cast<Stream*>(stream), SUCCESS; }
DRIVER cuStreamSynchronize(void* stream) {
  IN_CONTEXT
  return stream && static_cast<Stream*>(stream)->captures ? CAPTURE : SUCCESS;
}
DRIVER cuStreamWaitEvent(void*, void*, unsigned) { IN_CONTEXT return SUCCESS; }
DRIVER cuEventCreate(void** made, unsigned) { IN_CONTEXT return *made = new char, SUCCESS; }
DRIVER cuEventDestroy_v2(void* event) { IN_CONTEXT return delete static_cast<char*>(event), SUCCESS; }
DRIVER cuEventQuery(void*) { IN_CONTEXT return SUCCESS; }
DRIVER cuEventRecord(void*, void*) { IN_CONTEXT return SUCCESS; }
DRIVER cuEventSynchronize(void*) { IN_CONTEXT return SUCCESS; }

DRIVER cuStreamBeginCapture_v2(void* stream, unsigned) {
  {
    IN_CONTEXT
    static_cast<Stream*>(stream)->captures = true, capturing++;
  }
  usleep(500);  // in which other threads do what they do
  return SUCCESS;
}
DRIVER cuStreamEndCapture(void* stream, void** made) {
  IN_CONTEXT
  auto* own = static_cast<Stream*>(stream);
  own->captures = false, capturing--;
  *made = new Graph{std::move(own->recorded)};
  return own->recorded.clear(), SUCCESS;
}
DRIVER cuGraphInstantiateWithFlags(void** made, void* graph, unsigned long long) {
  IN_CONTEXT
  counts["graphs"]++;
  return *made = new Graph(*static_cast<Graph*>(graph)), SUCCESS;
}
DRIVER cuGraphLaunch(void* graph, void*) {
  IN_CONTEXT
  for (auto& step : static_cast<Graph*>(graph)->steps) step();
  return SUCCESS;
}
DRIVER cuGraphExecDestroy(void* graph) { return counts["graphs"]--, delete static_cast<Graph*>(graph), SUCCESS; }
DRIVER cuGraphDestroy(void* graph) { return delete static_cast<Graph*>(graph), SUCCESS; }

DRIVER cuModuleLoadData(void** made, const void* image) { IN_CONTEXT return *made = const_cast<void*>(image), SUCCESS; }
DRIVER cuModuleUnload(void*) { return SUCCESS; }
DRIVER cuModuleGetFunction(void** made, void*, const char* name) {
  IN_CONTEXT
  Function* at = functions;
  while (at->run && at->name != name) at++;
  return *made = at, SUCCESS;
}
DRIVER cuFuncSetAttribute(void*, int, int) { return SUCCESS; }
DRIVER cuFuncSetCacheConfig(void*, int) { return SUCCESS; }
DRIVER cuFuncGetAttribute(int* value, int, void*) { return *value = 0, SUCCESS; }
DRIVER cuLaunchKernel(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void* stream, void** arguments, void**) {
  IN_CONTEXT
  return launch(static_cast<Function*>(function), stream, arguments);
}
struct Launch { unsigned sizes[7]; void* stream; };  // CUlaunchConfig, as far as it is read here
DRIVER cuLaunchKernelEx(const Launch* config, void* function, void** arguments, void**) {
  IN_CONTEXT
  return launch(static_cast<Function*>(function), config->stream, arguments);
}
DRIVER cuTensorMapEncodeTiled(void* map, int, unsigned, void*, const uint64_t*, const uint64_t*, const unsigned*, const unsigned*, int, int, int, int) {
  return memset(map, 0, 128), SUCCESS;
}
DRIVER cuOccupancyMaxActiveClusters(int* count, void*, const void*) { return *count = 1, SUCCESS; }
