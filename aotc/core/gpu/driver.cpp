#include "driver.h"

#include <dlfcn.h>

#include <vector>

namespace aotc::gpu {
namespace {

std::string told(int code, int (*ask)(int, const char**)) {
  const char* text = nullptr;
  return ask && !ask(code, &text) && text ? text : "an unknown error";
}

const Driver* opened = nullptr;  // also by a function that fails while it is opened

Driver open_driver() {
  Driver made;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) throw GpuError(std::string("there is no driver of NVIDIA here: ") + dlerror(), NO_DEVICE);
  std::string missing;
  auto find = [&](auto& function, const char* symbol) {
    void* found = dlsym(library, symbol);
    if (!found) missing += std::string(missing.empty() ? "" : ", ") + symbol;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
  };
#define AOTC_FIND(name, symbol, parameters) find(made.name, #symbol);
  AOTC_DRIVER(AOTC_FIND)
#undef AOTC_FIND
  if (made.cuDriverGetVersion) made.cuDriverGetVersion(&made.version);
  if (!missing.empty())
    throw GpuError("the driver of this machine, for CUDA " + std::to_string(made.version / 1000) + "." + std::to_string(made.version % 1000 / 10) + ", lacks " + missing, NO_DEVICE);
  opened = &made;
  try {
    check(made.cuInit(0), "cuInit");
    check(made.cuDeviceGetCount(&made.devices), "cuDeviceGetCount");
  } catch (...) {
    opened = nullptr;
    throw;
  }
  return made;
}

}  // namespace

const Driver& driver() {
  static const Driver made = open_driver();
  opened = &made;
  return made;
}

GpuError::GpuError(int code, const char* function)
    : std::runtime_error(std::string(function) + ": " + told(code, opened ? opened->cuGetErrorName : nullptr) + " (" + std::to_string(code) + "), " + told(code, opened ? opened->cuGetErrorString : nullptr)),
      code(code),
      name(told(code, opened ? opened->cuGetErrorName : nullptr)) {}

GpuError::GpuError(const std::string& words, int code) : std::runtime_error(words), code(code) {}

void check(int code, const char* function) {
  if (code) throw GpuError(code, function);
}

}  // namespace aotc::gpu
