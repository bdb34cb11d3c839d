#include "tensor.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <vector>

namespace aotc::cpu {
namespace {

constexpr int64_t ALIGNMENT = 64;
constexpr int64_t MOST = int64_t{1} << 58;  // elements, so that their bytes are a number

struct Known { int32_t dtype; int64_t itemsize; const char* name; };
constexpr Known KNOWN[] = {
    {UINT8, 1, "uint8"}, {INT8, 1, "int8"}, {INT16, 2, "int16"}, {INT32, 4, "int32"}, {INT64, 8, "int64"},
    {FLOAT16, 2, "float16"}, {FLOAT32, 4, "float32"}, {FLOAT64, 8, "float64"}, {COMPLEX32, 4, "complex32"},
    {COMPLEX64, 8, "complex64"}, {COMPLEX128, 16, "complex128"}, {BOOL, 1, "bool"}, {BFLOAT16, 2, "bfloat16"},
    {FLOAT8_E5M2, 1, "float8_e5m2"}, {FLOAT8_E4M3FN, 1, "float8_e4m3fn"}, {FLOAT8_E5M2FNUZ, 1, "float8_e5m2fnuz"},
    {FLOAT8_E4M3FNUZ, 1, "float8_e4m3fnuz"}, {UINT16, 2, "uint16"}, {UINT32, 4, "uint32"}, {UINT64, 8, "uint64"},
};

const Known* known(int32_t dtype) {
  for (const Known& each : KNOWN)
    if (each.dtype == dtype) return &each;
  return nullptr;
}

thread_local std::string last_failure;
thread_local std::exception_ptr last_cause;

// Calls `run(into, from, count, step, step)` for each row of the last axis, addresses and steps in bytes.
template <typename Run>
void each_row(const Tensor& into, const Tensor& from, Run run) {
  if (!into.elements()) return;
  int64_t width = itemsize_of(into.dtype), index[MOST_AXES] = {}, steps[MOST_AXES] = {};
  require(from.rank <= into.rank, "a copy into fewer axes");
  for (int axis = 0; axis < into.rank; axis++) {
    int there = axis - (into.rank - from.rank);
    bool repeats = there < 0 || (from.sizes[there] == 1 && into.sizes[axis] != 1);
    require(repeats || from.sizes[there] == into.sizes[axis], "a copy between different sizes");
    steps[axis] = repeats ? 0 : from.strides[there] * width;
  }
  int last = into.rank - 1;
  for (;;) {
    char *target = into.bytes(), *source = from.bytes();
    for (int axis = 0; axis < last; axis++)
      target += index[axis] * into.strides[axis] * width, source += index[axis] * steps[axis];
    if (last < 0) return run(target, source, int64_t{1}, width, width);
    run(target, source, into.sizes[last], into.strides[last] * width, steps[last]);
    int axis = last - 1;
    while (axis >= 0 && ++index[axis] == into.sizes[axis]) index[axis--] = 0;
    if (axis < 0) return;
  }
}

template <typename T>
void copy_row(char* target, const char* source, int64_t count, int64_t target_step, int64_t source_step) {
  for (int64_t at = 0; at < count; at++) std::memcpy(target + at * target_step, source + at * source_step, sizeof(T));
}

}  // namespace

int64_t itemsize_of(int32_t dtype) {
  const Known* found = known(dtype);
  if (!found) throw std::runtime_error("dtype " + std::to_string(dtype) + " is unknown to the standalone runtime");
  return found->itemsize;
}

const char* name_of_dtype(int32_t dtype) {
  const Known* found = known(dtype);
  return found ? found->name : nullptr;
}

int32_t dtype_named(const char* name) {
  for (const Known& each : KNOWN)
    if (!std::strcmp(each.name, name)) return each.dtype;
  return -1;
}

const Gpus* gpus = nullptr;

void set_failure(const char* words) { last_failure = words, last_cause = std::current_exception(); }
const std::string& failure() { return last_failure; }
std::exception_ptr failure_cause() { return last_cause; }

Reach reach_of(int64_t rank, const int64_t* sizes, const int64_t* strides) {
  Reach reach{0, 0};
  int64_t dense = 1;
  for (int64_t axis = 0; axis < rank; axis++)
    if (sizes[axis] == 0) return {0, -1};
  for (int64_t axis = rank - 1; axis >= 0; axis--) {
    int64_t step = strides ? strides[axis] : dense, further, &end = step < 0 ? reach.low : reach.high;
    bool overflows = __builtin_mul_overflow(sizes[axis] - 1, step, &further) || __builtin_add_overflow(end, further, &end) ||
                     __builtin_mul_overflow(dense, sizes[axis], &dense);
    require(!overflows && sizes[axis] > 0 && dense < MOST && reach.high < MOST && reach.low > -MOST, "sizes that no memory holds");
  }
  return reach;
}

int64_t storage_bytes(int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype) {
  Reach reach = reach_of(rank, sizes, strides);
  require(reach.low == 0, "strides below 0");
  return (reach.high + 1) * itemsize_of(dtype);
}

Tensor* new_tensor(Storage* storage, int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t offset,
                   int32_t dtype) {
  require(rank <= MOST_AXES, "a tensor of more than 16 axes");
  auto* tensor = new Tensor{storage, offset, static_cast<int32_t>(rank), dtype, {}, {}};
  int64_t dense = 1;
  for (int64_t axis = rank - 1; axis >= 0; axis--) {
    int64_t step = strides ? strides[axis] : dense;
    tensor->sizes[axis] = sizes[axis], tensor->strides[axis] = -MOST < step && step < MOST ? step : 0;  // of size 1
    dense *= std::max<int64_t>(sizes[axis], 1);
  }
  return tensor;
}

Tensor* new_empty(int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device) {
  int64_t bytes = storage_bytes(rank, sizes, strides, dtype);
  if (device != HOST) {
    require(gpus, "memory of a GPU is asked for, and none was opened");
    return new_tensor(gpus->allocate(bytes, device), rank, sizes, strides, 0, dtype);
  }
  void* memory = nullptr;
  if (posix_memalign(&memory, ALIGNMENT, static_cast<size_t>(std::max<int64_t>(bytes, 1)))) throw std::bad_alloc();
  auto* storage = new Storage{static_cast<char*>(memory), bytes, [](Storage* own) { std::free(own->data); }};
  return new_tensor(storage, rank, sizes, strides, 0, dtype);
}

Tensor* new_dense_like(const Tensor& tensor) { return new_dense_like(tensor, tensor.device()); }

Tensor* new_dense_like(const Tensor& tensor, int32_t device) {
  int order[MOST_AXES];
  std::iota(order, order + tensor.rank, 0);
  std::stable_sort(order, order + tensor.rank,
                   [&](int one, int other) { return tensor.strides[one] > tensor.strides[other]; });
  int64_t strides[MOST_AXES], dense = 1;
  for (int place = tensor.rank - 1; place >= 0; place--)
    strides[order[place]] = dense, dense *= std::max<int64_t>(tensor.sizes[order[place]], 1);
  return new_empty(tensor.rank, tensor.sizes, strides, tensor.dtype, device);
}

Tensor* shared(const Tensor& tensor) {
  tensor.storage->keep();
  return new Tensor(tensor);
}

void drop(Tensor* tensor) {
  if (!tensor) return;
  tensor->storage->drop();
  delete tensor;
}

void copy(const Tensor& into, const Tensor& from) {
  require(into.dtype == from.dtype, "a copy between dtypes");
  if (into.device() != HOST || from.device() != HOST) return gpus->copy(into, from);
  int64_t width = itemsize_of(into.dtype);
  each_row(into, from, [width](char* target, const char* source, int64_t count, int64_t step, int64_t source_step) {
    if (step == width && source_step == width) std::memcpy(target, source, static_cast<size_t>(count * width));
    else if (width == 1) copy_row<uint8_t>(target, source, count, step, source_step);
    else if (width == 2) copy_row<uint16_t>(target, source, count, step, source_step);
    else if (width == 4) copy_row<uint32_t>(target, source, count, step, source_step);
    else if (width == 8) copy_row<uint64_t>(target, source, count, step, source_step);
    else copy_row<char[16]>(target, source, count, step, source_step);
  });
}

bool overlap(const Tensor& one, const Tensor& other) {
  char *first = nullptr, *end = nullptr;  // of the bytes that both span
  for (const Tensor* tensor : {&one, &other}) {
    Reach reach = reach_of(tensor->rank, tensor->sizes, tensor->strides);
    int64_t width = itemsize_of(tensor->dtype);
    char *low = tensor->bytes() + reach.low * width, *high = tensor->bytes() + (reach.high + 1) * width;
    first = tensor == &one ? low : std::max(first, low), end = tensor == &one ? high : std::min(end, high);
  }
  if (first >= end) return false;
  std::vector<bool> of_one(static_cast<size_t>(end - first));
  bool found = false;
  for (const Tensor* tensor : {&one, &other}) {
    int64_t width = itemsize_of(tensor->dtype);
    each_row(*tensor, *tensor, [&](char* target, const char*, int64_t count, int64_t step, int64_t) {
      for (int64_t at = 0; at < count && !found; at++, target += step)
        for (char* byte = std::max(target, first); byte < std::min(target + width, end); byte++) {
          auto place = static_cast<size_t>(byte - first);
          if (tensor == &one) of_one[place] = true;
          else found = found || of_one[place];
        }
    });
  }
  return found;
}

}  // namespace aotc::cpu
