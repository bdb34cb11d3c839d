#include "upload.h"

#include <algorithm>
#include <cstring>
#include <system_error>
#include <thread>

namespace aotc::gpu {

using namespace aotc::cpu;

namespace {

// The driver copies pageable memory at about 7 GB/s and pinned memory at 55. To pin as much memory as a model has takes
// longer than that saves, so that threads fill a few pinned buffers in turn: `aotc.runtime.checkpoints.staged`, without torch.
constexpr size_t CHUNK = size_t{4} << 20;
constexpr size_t OF_A_LANE = size_t{128} << 20;  // of which it saves more than its two buffers cost
constexpr size_t MOST_LANES = 8;

struct Chunk {
  Address into;
  const char* from;
  size_t bytes;
};

// Two pinned buffers on the way to a GPU. One thread uses it, with the GPU's context.
class Lane {
 public:
  Lane() {
    if (driver().cuMemHostAlloc(&buffers_, 2 * CHUNK, 0)) buffers_ = nullptr;  // a limit on locked memory: as pageable memory
    AOTC_CHECKED(cuStreamCreate, &stream_, NON_BLOCKING);
    for (Event& each : sent_) AOTC_CHECKED(cuEventCreate, &each, 0);
  }
  ~Lane() {
    if (stream_) driver().cuStreamSynchronize(stream_);
    for (Event each : sent_)
      if (each) driver().cuEventDestroy(each);
    if (stream_) driver().cuStreamDestroy(stream_);
    if (buffers_) driver().cuMemFreeHost(buffers_);
  }
  Lane(const Lane&) = delete;

  void send(const Chunk& chunk) {
    auto from = reinterpret_cast<Address>(chunk.from);
    if (buffers_) {
      AOTC_CHECKED(cuEventSynchronize, sent_[slot_]);
      char* buffer = static_cast<char*>(buffers_) + slot_ * CHUNK;
      std::memcpy(buffer, chunk.from, chunk.bytes);
      from = reinterpret_cast<Address>(buffer);
    }
    AOTC_CHECKED(cuMemcpyAsync, chunk.into, from, chunk.bytes, stream_);
    AOTC_CHECKED(cuEventRecord, sent_[slot_], stream_);
    slot_ = 1 - slot_;
  }
  void finish() { AOTC_CHECKED(cuStreamSynchronize, stream_); }

 private:
  void* buffers_ = nullptr;
  Stream stream_ = nullptr;
  Event sent_[2] = {};
  size_t slot_ = 0;
};

void send_all(const std::vector<Chunk>& chunks, size_t lanes, Device& device) {
  std::atomic<size_t> next = 0;
  std::mutex failing;
  std::exception_ptr failed;
  auto drive = [&] {
    try {
      Using use(device);
      Lane lane;
      for (size_t at = next++; at < chunks.size(); at = next++) lane.send(chunks[at]);
      lane.finish();
    } catch (...) {
      next = chunks.size();
      std::lock_guard<std::mutex> hold(failing);
      if (!failed) failed = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  try {
    while (threads.size() + 1 < lanes) threads.emplace_back(drive);
  } catch (const std::system_error&) {  // a limit on threads: those that there are do it
  }
  drive();
  for (std::thread& each : threads) each.join();
  if (failed) std::rethrow_exception(failed);
}

}  // namespace

std::vector<Owned> uploaded(const std::vector<Tensor*>& tensors, Device& device) {
  std::lock_guard<std::recursive_mutex> hold(device.order);
  Using use(device);
  auto size_of = [](const Tensor& from) { return static_cast<size_t>(from.elements() * itemsize_of(from.dtype)); };
  auto by_lanes = [](const Tensor& from) { return from.device() == HOST && is_dense(from); };
  size_t bytes = 0;
  for (const Tensor* from : tensors)
    if (by_lanes(*from)) bytes += size_of(*from);
  size_t lanes = std::min({MOST_LANES, bytes / OF_A_LANE, size_t{std::max(std::thread::hardware_concurrency(), 2u)}});
  std::vector<Owned> made;
  std::vector<Chunk> chunks;
  for (const Tensor* from : tensors) {
    if (from->device() == device.number) {
      made.emplace_back(shared(*from));
      continue;
    }
    made.emplace_back(new_empty(from->rank, from->sizes, from->strides, from->dtype, device.number));
    if (lanes < 2 || !by_lanes(*from)) {
      copy(*made.back(), *from);
      continue;
    }
    auto into = reinterpret_cast<Address>(made.back()->bytes());
    for (size_t begin = 0; begin < size_of(*from); begin += CHUNK)
      chunks.push_back({into + begin, from->bytes() + begin, std::min(CHUNK, size_of(*from) - begin)});
  }
  if (!chunks.empty()) {
    device.wait();  // what used the memory before has ended
    send_all(chunks, lanes, device);
  }
  return made;
}

}  // namespace aotc::gpu
