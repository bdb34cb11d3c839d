// Copies of tensors of which some share memory, as a model's outputs that are views of one another. Those share it in the
// copies, too: a later write to one shows in the other.
#pragma once

#include <map>
#include <vector>

#include "../cpu/tensor.h"

namespace aotc::gpu {

struct Span { int64_t first, end; };  // in bytes of a storage
using SharedSpans = std::map<cpu::Storage*, Span>;

// The storages in which spans of several of these tensors meet, each with the span of all its tensors.
SharedSpans shared_spans(const std::vector<cpu::Owned>& tensors);

// `copy_of` copies a tensor whose storage is not among those, and such a span, as a tensor of its bytes.
std::vector<cpu::Owned> copies_of(const std::vector<cpu::Owned>& tensors, const SharedSpans& spans, cpu::Owned (*copy_of)(const cpu::Tensor&));

}  // namespace aotc::gpu
