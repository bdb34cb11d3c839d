#include "cut_views.h"

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>

namespace aotc::cpu {
namespace {

struct Axis { int64_t size, stride, size_of_copy, stride_of_copy; };  // of a padded tensor, and of its copy

Tensor part_of(const Tensor& tensor, const Sizes& sizes) {  // no owner of its storage
  Tensor part = tensor;
  std::copy(sizes.begin(), sizes.end(), part.sizes);
  return part;
}

// From the outermost one; those that follow one another without a gap in both are one. Nothing where `padded` has gaps, or its
// copy no element.
std::optional<std::vector<Axis>> axes_of(const Tensor& padded, const Tensor& copy) {
  std::vector<Axis> all, axes;
  for (int axis = 0; axis < padded.rank; axis++) all.push_back({padded.sizes[axis], padded.strides[axis], copy.sizes[axis], copy.strides[axis]});
  std::sort(all.begin(), all.end(), [](const Axis& one, const Axis& other) { return std::tie(one.stride, one.size) < std::tie(other.stride, other.size); });
  int64_t expected = 1;
  for (const Axis& outer : all) {
    if (!outer.size_of_copy || (outer.size != 1 && outer.stride != expected)) return std::nullopt;
    if (outer.size == 1) continue;
    expected = outer.size * outer.stride;
    bool follows = !axes.empty() && axes.back().size == axes.back().size_of_copy && outer.stride_of_copy == axes.back().size * axes.back().stride_of_copy;
    if (follows) axes.back().size_of_copy *= outer.size_of_copy, axes.back().size *= outer.size;
    else axes.push_back(outer);
  }
  std::reverse(axes.begin(), axes.end());
  return axes;
}

std::vector<int64_t> steps_of(int64_t distance, const std::vector<Axis>& axes) {  // along each axis
  std::vector<int64_t> steps;
  for (const Axis& axis : axes) steps.push_back(distance / axis.stride), distance %= axis.stride;
  return steps;
}

int64_t distance_of(const std::vector<int64_t>& steps, const std::vector<Axis>& axes) {  // in elements of the copy
  int64_t distance = 0;
  for (size_t at = 0; at < axes.size(); at++) distance += steps[at] * axes[at].stride_of_copy;
  return distance;
}

// The tensor of the copy with the elements of `view`, which is one of `padded`; null where the copy lacks one, or no strides
// reach them.
Owned moved(const Tensor& view, const Tensor& padded, const Tensor& copy, const std::vector<Axis>& axes) {
  std::vector<int64_t> place = steps_of(view.offset - padded.offset, axes), last = place;
  std::array<int64_t, MOST_AXES> strides{};
  for (int axis = 0; axis < view.rank; axis++) {
    std::vector<int64_t> steps = steps_of(view.strides[axis], axes);
    strides[axis] = distance_of(steps, axes);
    for (size_t at = 0; at < axes.size(); at++) last[at] += steps[at] * (view.sizes[axis] - 1);
  }
  for (size_t at = 0; at < axes.size(); at++)
    if (last[at] >= axes[at].size_of_copy) return nullptr;
  copy.storage->keep();
  return Owned(new_tensor(copy.storage, view.rank, view.sizes, strides.data(), copy.offset + distance_of(place, axes), view.dtype));
}

bool holds(const Tensor& whole, const Tensor& tensor) {
  auto end = [](const Tensor& each) { return each.offset + reach_of(each.rank, each.sizes, each.strides).high; };
  bool same = whole.storage == tensor.storage && whole.dtype == tensor.dtype && tensor.elements() && whole.elements();
  return same && whole.offset <= tensor.offset && end(tensor) <= end(whole);
}

}  // namespace

void cut_back(std::vector<Owned>& outputs, const std::map<size_t, Sizes>& sizes) {
  std::vector<Owned> made(outputs.size());
  auto part = [&](size_t at) { auto own = sizes.find(at); return own == sizes.end() ? *outputs[at] : part_of(*outputs[at], own->second); };
  auto copied = [&](size_t at) {
    Tensor kept = part(at);
    Owned whole(new_dense_like(kept));
    copy(*whole, kept);
    return whole;
  };
  for (size_t whole = 0; whole < outputs.size() && !sizes.empty(); whole++) {
    std::vector<size_t> inside;
    for (size_t at = 0; at < outputs.size() && !made[whole]; at++)
      if (at != whole && !made[at] && (sizes.count(whole) || sizes.count(at)) && holds(*outputs[whole], *outputs[at])) inside.push_back(at);
    if (inside.empty()) continue;
    Owned copy = sizes.count(whole) ? copied(whole) : Owned(shared(*outputs[whole]));
    std::optional<std::vector<Axis>> axes = axes_of(*outputs[whole], *copy);
    bool held = false;
    for (size_t at : inside)
      if (axes) made[at] = moved(part(at), *outputs[whole], *copy, *axes), held = held || made[at];
    if (held) made[whole] = std::move(copy);
  }
  for (const auto& cut : sizes)
    if (!made[cut.first]) made[cut.first] = copied(cut.first);
  for (size_t at = 0; at < outputs.size(); at++)
    if (made[at]) outputs[at] = std::move(made[at]);
}

}  // namespace aotc::cpu
