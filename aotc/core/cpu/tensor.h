// Tensors of the standalone runtime: what a handle of AOTInductor's C shim points to where there is no torch.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#define AOTC_EXPORTED extern "C" __attribute__((visibility("default")))

namespace aotc::cpu {

enum DType : int32_t {  // the numbers of c10::ScalarType
  UINT8, INT8, INT16, INT32, INT64, FLOAT16, FLOAT32, FLOAT64, COMPLEX32, COMPLEX64, COMPLEX128, BOOL,
  BFLOAT16 = 15, FLOAT8_E5M2 = 23, FLOAT8_E4M3FN, FLOAT8_E5M2FNUZ, FLOAT8_E4M3FNUZ, UINT16, UINT32, UINT64,
};

int64_t itemsize_of(int32_t dtype);         // bytes; throws std::runtime_error for an unknown dtype
const char* name_of_dtype(int32_t dtype);   // as torch calls it, without `torch.`; null for an unknown one
int32_t dtype_named(const char* name);      // -1 where there is none of that name

constexpr int MOST_AXES = 16;
constexpr int32_t HOST = -1;  // as a device: the CPU's memory. Others are the numbers of GPUs

// Memory, shared by tensors. `release` is called once, by the thread that drops the last reference.
struct Storage {
  char* data;
  int64_t bytes;
  void (*release)(Storage*);
  void* owner = nullptr;
  int32_t device = HOST;
  std::atomic<int64_t> references{1};

  void keep() { references.fetch_add(1, std::memory_order_relaxed); }
  void drop() {
    if (references.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      release(this);
      delete this;
    }
  }
};

struct Tensor {  // sizes, strides and the offset are in elements
  Storage* storage;
  int64_t offset;
  int32_t rank, dtype;
  int64_t sizes[MOST_AXES], strides[MOST_AXES];

  int32_t device() const { return storage->device; }
  char* bytes() const { return storage->data + offset * itemsize_of(dtype); }
  template <typename T>
  T* as() const { return reinterpret_cast<T*>(bytes()); }
  int64_t elements() const {
    int64_t count = 1;
    for (int axis = 0; axis < rank; axis++) count *= sizes[axis];
    return count;
  }
};

inline void require(bool holds, const char* words) {
  if (!holds) throw std::runtime_error(words);
}

// `strides` may be null: without gaps, the last axis fastest. The new tensor takes over the caller's reference.
Tensor* new_tensor(Storage* storage, int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t offset,
                   int32_t dtype);
Tensor* new_empty(int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device = HOST);
Tensor* new_dense_like(const Tensor& tensor);  // without gaps, axes in the order of the tensor's strides
Tensor* new_dense_like(const Tensor& tensor, int32_t device);
Tensor* shared(const Tensor& tensor);          // the same memory
void drop(Tensor* tensor);                     // null does nothing
struct Drop { void operator()(Tensor* tensor) const { drop(tensor); } };
using Owned = std::unique_ptr<Tensor, Drop>;
void copy(const Tensor& into, const Tensor& from);  // of one dtype; `from` is broadcast

// What `core/gpu` does for memory of GPUs, once one is opened; null before, and where there is no such code.
struct Gpus {
  Storage* (*allocate)(int64_t bytes, int32_t device);
  void (*copy)(const Tensor& into, const Tensor& from);  // where one of them, or both, lie on a GPU
  void (*wait)(int32_t device);                          // until it has done its work
};
extern const Gpus* gpus;

// How far elements lie before and behind the first one, in elements: {0, -1} where there are none. Throws where no memory
// holds them. `strides` may be null, and negative.
struct Reach { int64_t low, high; };
Reach reach_of(int64_t rank, const int64_t* sizes, const int64_t* strides);
int64_t storage_bytes(int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype);  // no stride below 0
bool overlap(const Tensor& one, const Tensor& other);  // whether a byte is of both

// What the last function of this thread that failed has said, and the exception: null where none was caught then.
void set_failure(const char* words);
const std::string& failure();
std::exception_ptr failure_cause();

using Status = int32_t;  // AOTITorchError: 0 where all went well

template <typename Run>
Status guarded(Run run) {
  try {
    run();
    return 0;
  } catch (const std::exception& error) {
    set_failure(error.what());
    return 1;
  }
}

}  // namespace aotc::cpu
