// A stand-in for the NVIDIA driver's library (libcuda) beside `runtime.cpp`: what Triton asks of it. Code can be loaded
// and described, and not run: a launch is an error, or ignored. See https://docs.nvidia.com/cuda/cuda-driver-api.
#include <cuda.h>

#include <elf.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace {

constexpr int kAttributes = 512;
int attributes[kAttributes]; // by CUdevice_attribute

struct Function {
  int registers = 0, local_bytes = 0, threads = 1024, shared_bytes = 0;
};

struct Module {
  std::string image;
  std::map<std::string, Function> functions;
};

std::mutex lock;
int ignored; // whether launches are ignored
thread_local CUcontext current;

CUcontext the_context() {
  static char context;
  return reinterpret_cast<CUcontext>(&context);
}

// -- what a cubin says of a kernel ------------------------------------------------------------------------------------

// The section `.nv.info` is a list of entries: a format, an attribute, and two bytes, which for the format 4 are the size
// of what follows. `cuobjdump -elf` names the attributes (EIATTR_…).
constexpr unsigned char kSized = 4;
constexpr unsigned char kFrameSize = 0x11, kRegisterCount = 0x2f;

size_t size_of(const unsigned char *image) {
  auto header = reinterpret_cast<const Elf64_Ehdr *>(image);
  size_t end = header->e_shoff + size_t(header->e_shnum) * header->e_shentsize;
  auto sections = reinterpret_cast<const Elf64_Shdr *>(image + header->e_shoff);
  for (int i = 0; i < header->e_shnum; ++i)
    if (sections[i].sh_type != SHT_NOBITS && sections[i].sh_offset + sections[i].sh_size > end)
      end = sections[i].sh_offset + sections[i].sh_size;
  return end;
}

template <class Found> void each_entry(const char *image, const Elf64_Shdr &section, Found found) {
  const unsigned char *at = reinterpret_cast<const unsigned char *>(image) + section.sh_offset;
  const unsigned char *end = at + section.sh_size;
  while (at + 4 <= end) {
    unsigned size = at[0] == kSized ? at[2] | at[3] << 8 : 0;
    if (size)
      found(at[1], reinterpret_cast<const uint32_t *>(at + 4), size);
    at += 4 + size;
  }
}

Function described(const std::string &cubin, const std::string &name) {
  Function function;
  const char *image = cubin.data();
  auto header = reinterpret_cast<const Elf64_Ehdr *>(image);
  auto sections = reinterpret_cast<const Elf64_Shdr *>(image + header->e_shoff);
  const char *names = image + sections[header->e_shstrndx].sh_offset;
  const Elf64_Shdr *symbols = nullptr;
  for (int i = 0; i < header->e_shnum; ++i)
    if (sections[i].sh_type == SHT_SYMTAB)
      symbols = &sections[i];
  auto is_kernel = [&](uint32_t index) {
    if (symbols == nullptr || index >= symbols->sh_size / sizeof(Elf64_Sym))
      return false;
    auto symbol = reinterpret_cast<const Elf64_Sym *>(image + symbols->sh_offset)[index];
    return name == image + sections[symbols->sh_link].sh_offset + symbol.st_name;
  };
  for (int i = 0; i < header->e_shnum; ++i) {
    const Elf64_Shdr &section = sections[i];
    std::string title = names + section.sh_name;
    if (title == ".nv.shared." + name)
      function.shared_bytes = static_cast<int>(section.sh_size);
    if (title == ".nv.info")
      each_entry(image, section, [&](unsigned char kind, const uint32_t *value, unsigned size) {
        if (size < 8 || !is_kernel(value[0]))
          return;
        if (kind == kRegisterCount)
          function.registers = static_cast<int>(value[1]);
        if (kind == kFrameSize)
          function.local_bytes = static_cast<int>(value[1]);
      });
  }
  // A warp's registers are given in units of 256, and four warps at a time.
  int registers_of_warp = (function.registers * 32 + 255) / 256 * 256;
  int warps = registers_of_warp ? 65536 / registers_of_warp / 4 * 4 : 32;
  function.threads = warps < 32 ? warps * 32 : 1024;
  return function;
}

} // namespace

extern "C" {

// Set what GPU this is. `values` are indexed by CUdevice_attribute.
void aotc_absent_gpu(const char *, size_t, const int *values, int count) {
  memcpy(attributes, values, sizeof(int) * (count < kAttributes ? count : kAttributes));
}

void aotc_ignore_launches(int yes) { ignored = yes; }

CUresult cuInit(unsigned) { // there is no GPU where nothing has said what it is
  return attributes[CU_DEVICE_ATTRIBUTE_WARP_SIZE] ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}
CUresult cuDriverGetVersion(int *version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_SUCCESS ? "no error" : "aotc compiles for a GPU that this machine lacks: nothing runs on it";
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int *count) { return *count = 1, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice) {
  *value = attribute > 0 && attribute < kAttributes ? attributes[attribute] : 0;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *given, CUdevice) { return *given = the_context(), CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *active) {
  return *flags = 0, *active = 1, CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *given) { return *given = current, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext chosen) { return current = chosen, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }

CUresult cuModuleLoadData(CUmodule *given, const void *image) {
  if (memcmp(image, ELFMAG, SELFMAG) != 0)
    return CUDA_ERROR_INVALID_IMAGE;
  auto module = new Module;
  module->image.assign(static_cast<const char *>(image), size_of(static_cast<const unsigned char *>(image)));
  return *given = reinterpret_cast<CUmodule>(module), CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *given, CUmodule from, const char *name) {
  std::lock_guard<std::mutex> hold(lock);
  auto module = reinterpret_cast<Module *>(from);
  auto found = module->functions.find(name);
  if (found == module->functions.end())
    found = module->functions.emplace(name, described(module->image, name)).first;
  return *given = reinterpret_cast<CUfunction>(&found->second), CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction from) {
  auto function = reinterpret_cast<Function *>(from);
  switch (attribute) {
  case CU_FUNC_ATTRIBUTE_NUM_REGS:
    return *value = function->registers, CUDA_SUCCESS;
  case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
    return *value = function->local_bytes, CUDA_SUCCESS;
  case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    return *value = function->threads, CUDA_SUCCESS;
  case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
    return *value = function->shared_bytes, CUDA_SUCCESS;
  default:
    return CUDA_ERROR_NOT_SUPPORTED;
  }
}
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                        void **, void **) {
  return ignored ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *, CUfunction, void **, void **) {
  return ignored ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction, const CUlaunchConfig *) {
  return *clusters = 1, CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return memset(map, 0, sizeof *map), CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    return CUDA_ERROR_NOT_SUPPORTED;
  return *static_cast<CUdeviceptr *>(value) = pointer, CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
}
