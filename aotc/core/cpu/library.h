// A bucket's library, by the interface of AOTInductor (torch/csrc/inductor/aoti_runtime/interface.h).
#pragma once

#include <atomic>
#include <mutex>
#include <utility>

#include "call_table.h"

namespace aotc::cpu {

struct LibraryFailed : std::runtime_error {  // in the library's words
  using std::runtime_error::runtime_error;
};

class Library {  // several threads may run it: `concurrency` of them at a time, others wait
 public:
  using Constants = std::vector<std::pair<std::string, Owned>>;  // frozen weights

  // `opened` is of dlopen, and stays open. Throws LibraryFailed, and std::runtime_error where it is not the bucket's.
  Library(void* opened, const Bucket& bucket, int32_t concurrency, Constants constants);
  Library(const Library&) = delete;
  ~Library();

  std::vector<Owned> run(const std::vector<Tensor*>& inputs) const;  // throws LibraryFailed

  // In a forked child whose parent had other threads: the next call makes a container of its own. The one that it inherits
  // may wait for threads that were inside at the fork, of which the child has none: it is left as it is.
  void renew();
  void* container() const;

 private:
  using Run = int32_t (*)(void*, Tensor**, size_t, Tensor**, size_t, void*, void*);

  Library(void* opened, const std::string& name, int32_t concurrency, Constants constants);
  template <typename Function>
  Function find(const char* name) const;
  void check(int32_t status) const;
  size_t count(const char* name) const;

  void* opened_;
  std::string name_;
  int32_t concurrency_;
  Constants constants_;
  Run run_ = nullptr;
  size_t outputs_ = 0;
  mutable std::mutex making_;
  mutable std::atomic<void*> container_ = nullptr;
};

}  // namespace aotc::cpu
