#include "device.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace aotc::gpu {

using namespace aotc::cpu;

namespace {

constexpr size_t ALIGNMENT = 512;
constexpr size_t MOST_PITCH = (size_t{1} << 31) - 1;

thread_local std::shared_ptr<Pool> allocating;

size_t rounded(int64_t bytes) {
  auto count = static_cast<size_t>(std::max<int64_t>(bytes, 1));
  return (count + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

bool fits(size_t block, size_t bytes) { return block <= bytes + bytes / 4 + 4096; }

Address address_of(const Tensor& tensor) { return reinterpret_cast<Address>(tensor.bytes()); }

bool same_form(const Tensor& one, const Tensor& other) {
  if (one.rank != other.rank) return false;
  for (int axis = 0; axis < one.rank; axis++)
    if (one.sizes[axis] != other.sizes[axis] || (one.sizes[axis] > 1 && one.strides[axis] != other.strides[axis])) return false;
  return true;
}

// -- between two places on GPUs ----------------------------------------------------------------------------------------

struct Axis { int64_t size, into, from; };  // steps in bytes

// The axes of a copy, those of one element left out, neighbours that lie as one joined. The last is the fastest.
std::vector<Axis> axes_of(const Tensor& into, const Tensor& from) {
  int64_t width = itemsize_of(into.dtype);
  require(from.rank <= into.rank, "a copy into fewer axes");
  std::vector<Axis> axes;
  for (int axis = 0; axis < into.rank; axis++) {
    int there = axis - (into.rank - from.rank);
    bool repeats = there < 0 || (from.sizes[there] == 1 && into.sizes[axis] != 1);
    require(repeats || from.sizes[there] == into.sizes[axis], "a copy between different sizes");
    if (into.sizes[axis] > 1) axes.push_back({into.sizes[axis], into.strides[axis] * width, repeats ? 0 : from.strides[there] * width});
  }
  std::stable_sort(axes.begin(), axes.end(), [](const Axis& one, const Axis& other) { return one.into > other.into; });
  std::vector<Axis> joined;
  for (const Axis& axis : axes) {
    if (!joined.empty() && joined.back().into == axis.size * axis.into && joined.back().from == axis.size * axis.from) {
      joined.back() = {joined.back().size * axis.size, axis.into, axis.from};
    } else {
      joined.push_back(axis);
    }
  }
  return joined;
}

void copy_rows(Address into, Address from, size_t bytes, const Axis& rows, Stream stream) {
  auto step = [&](int64_t pitch) { return pitch >= static_cast<int64_t>(bytes) && static_cast<size_t>(pitch) <= MOST_PITCH; };
  if (step(rows.into) && step(rows.from)) {
    Copy2D copied{};
    copied.from_kind = copied.into_kind = OF_DEVICE;
    copied.from = from, copied.into = into;
    copied.from_pitch = static_cast<size_t>(rows.from), copied.into_pitch = static_cast<size_t>(rows.into);
    copied.width = bytes, copied.height = static_cast<size_t>(rows.size);
    AOTC_CHECKED(cuMemcpy2DAsync, &copied, stream);
    return;
  }
  for (int64_t at = 0; at < rows.size; at++)
    AOTC_CHECKED(cuMemcpyAsync, into + static_cast<Address>(at * rows.into), from + static_cast<Address>(at * rows.from), bytes, stream);
}

void copy_on_gpu(const Tensor& into, const Tensor& from, Stream stream) {
  std::vector<Axis> axes = axes_of(into, from);
  auto bytes = static_cast<size_t>(itemsize_of(into.dtype));
  if (!axes.empty() && axes.back().into == static_cast<int64_t>(bytes) && axes.back().from == static_cast<int64_t>(bytes)) {
    bytes *= static_cast<size_t>(axes.back().size);
    axes.pop_back();
  }
  Axis rows{1, 0, 0};
  if (!axes.empty()) rows = axes.back(), axes.pop_back();
  std::vector<int64_t> index(axes.size());
  for (;;) {
    Address target = address_of(into), source = address_of(from);
    for (size_t axis = 0; axis < axes.size(); axis++)
      target += static_cast<Address>(index[axis] * axes[axis].into), source += static_cast<Address>(index[axis] * axes[axis].from);
    copy_rows(target, source, bytes, rows, stream);
    auto axis = static_cast<int64_t>(axes.size()) - 1;
    while (axis >= 0 && ++index[static_cast<size_t>(axis)] == axes[static_cast<size_t>(axis)].size) index[static_cast<size_t>(axis--)] = 0;
    if (axis < 0) return;
  }
}

// -- from and to the CPU's memory ----------------------------------------------------------------------------------------

// Sets every element to that of the host at `element`; false where the driver has no function of that width.
bool fill(const Tensor& into, const char* element, Stream stream) {
  auto count = static_cast<size_t>(into.elements());
  uint64_t bits = 0;
  auto width = static_cast<size_t>(itemsize_of(into.dtype));
  if (width > sizeof bits) return false;
  std::memcpy(&bits, element, width);
  if (width == 1) AOTC_CHECKED(cuMemsetD8Async, address_of(into), static_cast<unsigned char>(bits), count, stream);
  else if (width == 2) AOTC_CHECKED(cuMemsetD16Async, address_of(into), static_cast<unsigned short>(bits), count, stream);
  else if (width == 4) AOTC_CHECKED(cuMemsetD32Async, address_of(into), static_cast<unsigned>(bits), count, stream);
  else if (!bits) AOTC_CHECKED(cuMemsetD8Async, address_of(into), 0, count * width, stream);
  else return false;
  return true;
}

// A graph would read or write that memory at each launch, when it is another's.
void refuse_in_capture(const char* copies) {
  if (allocating) throw GpuError(std::string("the model cannot be captured as a CUDA graph: it copies ") + copies + " within it", NOT_CAPTURED);
}

void to_gpu(const Tensor& into, const Tensor& from, Device& device) {
  if (is_dense(into) && from.elements() == 1 && fill(into, from.bytes(), device.stream())) return;
  refuse_in_capture("from the CPU");
  if (!is_dense(into)) {
    Owned dense(new_dense_like(into));
    to_gpu(*dense, from, device);
    return copy_on_gpu(into, *dense, device.stream());
  }
  const Tensor* source = &from;
  Owned laid;
  if (!same_form(into, from)) {
    laid.reset(new_empty(into.rank, into.sizes, into.strides, into.dtype));
    copy(*laid, from);
    source = laid.get();
  }
  auto bytes = static_cast<size_t>(into.elements() * itemsize_of(into.dtype));
  AOTC_CHECKED(cuMemcpyAsync, address_of(into), address_of(*source), bytes, device.stream());
  if (laid) device.wait();
}

void to_host(const Tensor& into, const Tensor& from, Device& device) {
  refuse_in_capture("to the CPU");
  if (!is_dense(from)) {
    Owned dense(new_dense_like(from));
    copy_on_gpu(*dense, from, device.stream());
    return to_host(into, *dense, device);
  }
  const Tensor* target = &into;
  Owned laid;
  if (!same_form(into, from)) laid.reset(new_empty(from.rank, from.sizes, from.strides, from.dtype)), target = laid.get();
  auto bytes = static_cast<size_t>(from.elements() * itemsize_of(from.dtype));
  AOTC_CHECKED(cuMemcpyAsync, address_of(*target), address_of(from), bytes, device.stream());
  device.wait();
  if (laid) copy(into, *laid);
}

void copy_with_gpu(const Tensor& into, const Tensor& from) {
  require(into.dtype == from.dtype, "a copy between dtypes");
  if (!into.elements()) return;
  Device& device = device_at(into.device() != HOST ? into.device() : from.device());
  std::lock_guard<std::recursive_mutex> hold(device.order);
  Using use(device);
  if (from.device() == HOST) to_gpu(into, from, device);
  else if (into.device() == HOST) to_host(into, from, device);
  else copy_on_gpu(into, from, device.stream());
}

Storage* allocate_on(int64_t bytes, int32_t device) { return device_at(device).allocate(bytes); }
void wait_for(int32_t device) {
  Device& waited = device_at(device);
  Using use(waited);
  waited.wait();
}

constexpr Gpus FUNCTIONS{allocate_on, copy_with_gpu, wait_for};

std::mutex opening;
std::map<int32_t, std::unique_ptr<Device>>& devices() {
  static auto* kept = new std::map<int32_t, std::unique_ptr<Device>>;  // to the end of the process, whose contexts end with it
  return *kept;
}
pid_t opened_by = 0;

}  // namespace

bool is_dense(const Tensor& tensor) {
  Reach reach = reach_of(tensor.rank, tensor.sizes, tensor.strides);
  if (reach.low != 0 || reach.high + 1 != tensor.elements()) return false;
  for (int axis = 0; axis < tensor.rank; axis++)
    if (tensor.sizes[axis] > 1 && tensor.strides[axis] == 0) return false;
  return true;
}

// -- memory -------------------------------------------------------------------------------------------------------------

void give_back(Storage* storage) {
  auto* block = static_cast<Block*>(storage->owner);
  Device& device = block->device;
  std::lock_guard<std::mutex> hold(device.blocks_);
  auto& free = block->lent ? device.lent_ : block->pool->free;
  block->lent = false;
  free.emplace(block->bytes, block);
  device.cached_ += block->bytes;
}

Block* Device::reused(size_t bytes) {
  std::lock_guard<std::mutex> hold(blocks_);
  auto& free = (allocating ? allocating : pool_)->free;
  auto found = free.lower_bound(bytes);
  if (found == free.end() || !fits(found->first, bytes)) return nullptr;
  Block* block = found->second;
  free.erase(found);
  cached_ -= block->bytes;
  return block;
}

bool Device::take_back_lent() {
  std::lock_guard<std::recursive_mutex> alone(order);  // a context cannot be waited for while a stream of it captures
  std::multimap<size_t, Block*> free;
  {
    std::lock_guard<std::mutex> hold(blocks_);
    free.swap(lent_);
  }
  if (free.empty()) return false;
  Using use(*this);
  int code = driver().cuCtxSynchronize();  // the work of others too
  std::lock_guard<std::mutex> hold(blocks_);
  for (auto [size, block] : free) (code ? lent_ : block->pool->free).emplace(size, block);
  check(code, "cuCtxSynchronize");
  return true;
}

Storage* Device::allocate(int64_t bytes) {
  size_t count = rounded(bytes);
  Block* block = reused(count);
  if (!block && !allocating && take_back_lent()) block = reused(count);
  if (!block) {
    block = new Block{*this, raw(count), count, allocating ? allocating : pool_};
    held_ += count;
  }
  return new Storage{reinterpret_cast<char*>(block->address), bytes, give_back, block, number};
}

Address Device::raw(size_t bytes) {
  Using use(*this);
  Address found = 0;
  int code = driver().cuMemAlloc(&found, bytes);
  if (code == OUT_OF_MEMORY && !allocating) {  // a capture cannot wait
    release_cache();
    code = driver().cuMemAlloc(&found, bytes);
  }
  if (code == OUT_OF_MEMORY) {
    GpuError error(code, "cuMemAlloc");
    error.asked = bytes;
    driver().cuMemGetInfo(&error.available, &error.total);
    throw error;
  }
  check(code, "cuMemAlloc");
  return found;
}

void Device::release_cache() {
  take_back_lent();
  Using use(*this);
  wait();
  std::lock_guard<std::mutex> hold(blocks_);
  for (auto [bytes, block] : pool_->free) {
    driver().cuMemFree(block->address);
    held_ -= bytes, cached_ -= bytes;
    delete block;
  }
  pool_->free.clear();
}

void Device::keep(std::shared_ptr<Pool> pool) {
  std::lock_guard<std::mutex> hold(blocks_);
  for (auto [bytes, block] : pool->free) block->pool = pool_, pool_->free.emplace(bytes, block);
  pool->free.clear();
}

Stream Device::stream() const { return allocating ? captures_ : work_; }
void Device::wait() { AOTC_CHECKED(cuStreamSynchronize, stream()); }

Allocating::Allocating(std::shared_ptr<Pool> pool) { allocating = std::move(pool); }
Allocating::~Allocating() { allocating.reset(); }

void mark_lent(const Tensor& tensor) {
  if (tensor.storage->release == give_back) static_cast<Block*>(tensor.storage->owner)->lent = true;
}

// -- devices ------------------------------------------------------------------------------------------------------------

Device::Device(int32_t number) : number(number) {
  int device = 0;
  AOTC_CHECKED(cuDeviceGet, &device, number);
  char text[256] = {};
  AOTC_CHECKED(cuDeviceGetName, text, sizeof text, device);
  name = text;
  AOTC_CHECKED(cuDeviceGetAttribute, &major, MAJOR, device);
  AOTC_CHECKED(cuDeviceGetAttribute, &minor, MINOR, device);
  AOTC_CHECKED(cuDevicePrimaryCtxRetain, &context_, device);
  Using use(*this);
  for (Stream* each : {&work_, &captures_}) AOTC_CHECKED(cuStreamCreate, each, NON_BLOCKING);
}

bool is_open(int32_t number) {
  std::lock_guard<std::mutex> hold(opening);
  return devices().contains(number);
}

Device& device_at(int32_t number) {
  std::lock_guard<std::mutex> hold(opening);
  if (opened_by && opened_by != getpid()) throw GpuError("this process was forked after its parent had opened a GPU, and cannot use it: load in the child alone", NOT_INITIALIZED);
  auto& known = devices();
  auto found = known.find(number);
  if (found == known.end()) {
    const int there = driver().devices;
    opened_by = getpid();
    if (number < 0 || number >= there)
      throw GpuError("there is no GPU " + std::to_string(number) + ", the driver sees " + std::to_string(there), INVALID_DEVICE);
    found = known.emplace(number, std::make_unique<Device>(number)).first;
    gpus = &FUNCTIONS;
  }
  return *found->second;
}

}  // namespace aotc::gpu
