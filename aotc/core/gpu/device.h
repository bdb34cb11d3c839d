// A GPU: its context, its one stream, and its memory. Everything on it runs in the order of that stream, so that memory
// which was given back is used again at once. Captures have a stream of their own, on which nothing runs: other threads
// wait for the first one meanwhile, which no capture allows.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "../cpu/tensor.h"
#include "driver.h"

namespace aotc::gpu {

class Device;
struct Block;

// Freed blocks, kept by their size. The kernels of graphs have addresses, so what a capture allocates is of a pool of its own.
struct Pool {
  std::multimap<size_t, Block*> free;
};

struct Block {
  Device& device;
  Address address;
  size_t bytes;
  std::shared_ptr<Pool> pool;
  bool lent = false;  // to another library, whose streams may still read it when it is given back
};

class Device {
 public:
  const int32_t number;
  std::string name;
  int major = 0, minor = 0;
  std::recursive_mutex order;  // held while a call gives its work to the stream, and for a capture

  explicit Device(int32_t number);

  Stream stream() const;  // for the work of this thread: that of captures where it is `Allocating`
  cpu::Storage* allocate(int64_t bytes);
  Address raw(size_t bytes);  // of the driver; throws GpuError, where there is none left once freed blocks are given back
  void wait();                // until all work is done. Throws GpuError: a sticky one ends all later work
  void release_cache();       // gives the freed blocks to the driver
  void keep(std::shared_ptr<Pool> pool);  // its blocks are free for all

  size_t held() const { return held_; }  // bytes of blocks
  size_t cached() const { return cached_; }
  Context context() const { return context_; }

 private:
  friend void give_back(cpu::Storage*);
  Block* reused(size_t bytes);
  bool take_back_lent();  // whether there was any

  Context context_ = nullptr;
  Stream work_ = nullptr, captures_ = nullptr;
  std::mutex blocks_;
  std::shared_ptr<Pool> pool_ = std::make_shared<Pool>();
  std::multimap<size_t, Block*> lent_;  // given back by other libraries, free for all once the device has done its work
  std::atomic<size_t> held_ = 0, cached_ = 0;
};

// Opens it once in a process, and gives memory of GPUs to `cpu::new_empty` and `cpu::copy`. Throws GpuError, also for a
// number that there is none of, and in a process that was forked after the first was opened.
Device& device_at(int32_t number);
bool is_open(int32_t number);

// While it lives, the device is this thread's; a thread may have had another one, of another library.
class Using {
 public:
  explicit Using(const Device& device) { AOTC_CHECKED(cuCtxPushCurrent, device.context()); }
  ~Using() {
    Context before;
    driver().cuCtxPopCurrent(&before);
  }
  Using(const Using&) = delete;
};

// While it lives, this thread captures: it allocates from that pool.
class Allocating {
 public:
  explicit Allocating(std::shared_ptr<Pool> pool);
  ~Allocating();
  Allocating(const Allocating&) = delete;
};

bool is_dense(const cpu::Tensor& tensor);  // whether the elements fill their memory, in any order of axes

void mark_lent(const cpu::Tensor& tensor);  // memory of `Device::allocate`

}  // namespace aotc::gpu
