#include "shared_copies.h"

#include <algorithm>

namespace aotc::gpu {

using namespace aotc::cpu;

namespace {

constexpr int64_t WIDEST = 16;  // bytes of an element of the widest dtype

Span span_of(const Tensor& tensor) {
  int64_t first = tensor.offset * itemsize_of(tensor.dtype);
  return {first, first + storage_bytes(tensor.rank, tensor.sizes, tensor.strides, tensor.dtype)};
}

}  // namespace

SharedSpans shared_spans(const std::vector<Owned>& tensors) {
  SharedSpans found;
  for (size_t at = 0; at < tensors.size(); at++)
    for (size_t before = 0; before < at; before++) {
      if (tensors[at]->storage != tensors[before]->storage) continue;
      Span one = span_of(*tensors[at]), other = span_of(*tensors[before]);
      if (std::max(one.first, other.first) < std::min(one.end, other.end)) found[tensors[at]->storage] = one;
    }
  for (const Owned& tensor : tensors)
    if (auto place = found.find(tensor->storage); place != found.end()) {
      Span own = span_of(*tensor), &all = place->second;
      all = {std::min(all.first, own.first) / WIDEST * WIDEST, std::max(all.end, own.end)};
    }
  return found;
}

std::vector<Owned> copies_of(const std::vector<Owned>& tensors, const SharedSpans& spans, Owned (*copy_of)(const Tensor&)) {
  std::vector<Owned> made;
  std::map<Storage*, Owned> parts;
  for (const Owned& tensor : tensors) {
    auto found = spans.find(tensor->storage);
    if (found == spans.end()) {
      made.push_back(copy_of(*tensor));
      continue;
    }
    const Span& span = found->second;
    Owned& part = parts[tensor->storage];
    if (!part) part = copy_of(Tensor{tensor->storage, span.first, 1, UINT8, {span.end - span.first}, {1}});
    part->storage->keep();
    int64_t offset = tensor->offset - span.first / itemsize_of(tensor->dtype);
    made.emplace_back(new_tensor(part->storage, tensor->rank, tensor->sizes, tensor->strides, offset, tensor->dtype));
  }
  return made;
}

}  // namespace aotc::gpu
