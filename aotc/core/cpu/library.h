// A bucket's library, by the interface of AOTInductor (torch/csrc/inductor/aoti_runtime/interface.h).
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include "call_table.h"

namespace aotc::cpu {

struct LibraryFailed : std::runtime_error {  // in the library's words
  using std::runtime_error::runtime_error;
};

class Code {  // of a bucket, as a call runs it
 public:
  virtual ~Code() = default;
  virtual std::vector<Owned> run(const std::vector<Tensor*>& inputs) const = 0;  // throws LibraryFailed
  virtual void renew() = 0;  // in a forked child whose parent had other threads
  virtual void* container() const = 0;
};

struct Runner {  // where a library runs. On a GPU it is that thread's, and calls of the library follow one another
  int32_t device = HOST;
  void* (*stream)(int32_t device) = nullptr;  // of this thread
};

class Library : public Code {  // several threads may run it: `concurrency` of them at a time, others wait
 public:
  using Constants = std::vector<std::pair<std::string, Owned>>;  // frozen weights

  // `opened` is of dlopen, and stays open. Throws LibraryFailed, and std::runtime_error where it is not the bucket's.
  Library(void* opened, const Bucket& bucket, int32_t concurrency, Constants constants, Runner runner = {});
  Library(const Library&) = delete;
  ~Library() override;

  std::vector<Owned> run(const std::vector<Tensor*>& inputs) const override;

  // The next call makes a container of its own. The one that the child inherits may wait for threads that were inside at
  // the fork, of which the child has none: it is left as it is.
  void renew() override;
  void* container() const override;

 private:
  using Run = int32_t (*)(void*, Tensor**, size_t, Tensor**, size_t, void*, void*);
  using Delete = int32_t (*)(void*);

  Library(void* opened, const std::string& name, int32_t concurrency, Constants constants, Runner runner);
  template <typename Function>
  Function find(const char* name) const;
  void check(int32_t status) const;
  size_t count(const char* name) const;

  void* opened_;
  std::string name_;
  int32_t concurrency_;
  Constants constants_;
  Runner runner_;
  Run run_ = nullptr;
  Delete delete_ = nullptr;
  size_t outputs_ = 0;
  mutable std::mutex making_;
  mutable std::atomic<void*> container_ = nullptr;
};

}  // namespace aotc::cpu
