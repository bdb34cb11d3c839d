#include "library.h"

#include <dlfcn.h>

#include <new>

namespace aotc::cpu {

Library::Library(void* opened, const std::string& name, int32_t concurrency, Constants constants, Runner runner)
    : opened_(opened), name_(name), concurrency_(concurrency), constants_(std::move(constants)), runner_(runner) {}

Library::Library(void* opened, const Bucket& bucket, int32_t concurrency, Constants constants, Runner runner)
    : Library(opened, bucket.name, concurrency, std::move(constants), runner) {
  // The other one asks for events, which no capture of a CUDA graph can hold.
  delete_ = find<Delete>("Delete");
  run_ = find<Run>(runner.device == HOST ? "Run" : "RunSingleThreaded");
  outputs_ = count("GetNumOutputs");
  for (const Place& place : bucket.results) require(place.kind != Place::INDEX || place.index < outputs_, "a result that its library does not give");
  require(count("GetNumInputs") == bucket.arguments.size(), "its library takes another number of tensors");
}

Library::~Library() {
  if (container_) delete_(container_);
}

void Library::renew() {
  container_ = nullptr;
  new (&making_) std::mutex;  // a thread that the child does not have may hold the other
}

void* Library::container() const {
  if (container_) return container_;
  std::lock_guard<std::mutex> lock(making_);
  if (container_) return container_;
  set_failure("");
  void* made = nullptr;
  const std::string device = runner_.device == HOST ? "cpu" : "cuda:" + std::to_string(runner_.device);
  check(find<int32_t (*)(void**, size_t, const char*, const char*)>("CreateWithDevice")(&made, static_cast<size_t>(concurrency_), device.c_str(), nullptr));
  struct Entry { const char* name; Tensor* handle; };  // AOTInductorConstantMapEntry
  std::vector<Entry> entries;  // it keeps the handles, without owning them
  for (const auto& [name, tensor] : constants_) entries.push_back({name.c_str(), tensor.get()});
  std::unique_ptr<void, Delete> owned(made, delete_);
  if (!entries.empty())  // of the buffer in use, every one
    check(find<int32_t (*)(void*, const Entry*, size_t, bool, bool)>("UpdateUserManagedConstantBufferPairs")(made, entries.data(), entries.size(), false, true));
  return container_ = owned.release();
}

std::vector<Owned> Library::run(const std::vector<Tensor*>& inputs) const {
  void* container = this->container();
  std::vector<Tensor*> taken, made(outputs_, nullptr);
  for (const Tensor* each : inputs) taken.push_back(shared(*each));  // which the library drops
  set_failure("");
  int32_t status = run_(container, taken.data(), taken.size(), made.data(), made.size(), runner_.stream ? runner_.stream(runner_.device) : nullptr, nullptr);
  std::vector<Owned> results;
  for (Tensor* each : made) results.emplace_back(each);
  check(status);
  for (const Owned& each : results) require(each != nullptr, "a result that its library did not give");
  return results;
}

template <typename Function>
Function Library::find(const char* name) const {
  std::string symbol = std::string("AOTInductorModelContainer") + name;
  void* address = dlsym(opened_, symbol.c_str());
  if (!address) throw LibraryFailed("the library of bucket " + name_ + " has no " + symbol);
  return reinterpret_cast<Function>(address);
}

size_t Library::count(const char* name) const {
  size_t number = 0;
  check(find<int32_t (*)(void*, size_t*)>(name)(container(), &number));
  return number;
}

void Library::check(int32_t status) const {
  if (!status) return;
  const char* raised = nullptr;
  if (failure().empty())  // torch before 2.13 writes it to standard error
    if (void* last = dlsym(opened_, "AOTInductorGetLastError")) reinterpret_cast<int32_t (*)(const char**)>(last)(&raised);
  throw LibraryFailed("the library of bucket " + name_ + " failed: " + (!failure().empty() ? failure() : raised ? raised : "it wrote its reason to standard error"));
}

}  // namespace aotc::cpu
