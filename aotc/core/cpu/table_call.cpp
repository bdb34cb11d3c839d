#include "table_call.h"

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace aotc::cpu {
namespace {

Sizes sizes_of(const Tensor& tensor) { return Sizes(tensor.sizes, tensor.sizes + tensor.rank); }

Owned viewed(const Tensor& tensor, const Sizes& sizes, const int64_t* strides, int64_t further = 0) {
  tensor.storage->keep();
  return Owned(new_tensor(tensor.storage, static_cast<int64_t>(sizes.size()), sizes.data(), strides, tensor.offset + further, tensor.dtype));
}

Owned empty_in(const std::string& layout, const Sizes& sizes, int32_t dtype) {
  return Owned(new_empty(static_cast<int64_t>(sizes.size()), sizes.data(), strides_in(layout, sizes).data(), dtype));
}

Owned scalar_of(const std::string& bytes, int32_t dtype) {
  Owned made(new_empty(0, nullptr, nullptr, dtype));
  std::memcpy(made->bytes(), bytes.data(), bytes.size());
  return made;
}

// A copy with the axis grown at its end. An empty axis has no last slice, and is filled with the element.
Owned grown(const Tensor& tensor, size_t axis, int64_t size, const Growth& growth, const std::string& layout) {
  Sizes sizes = sizes_of(tensor), slice = sizes;
  require(size >= sizes[axis], "an input is smaller in the larger bucket");
  slice[axis] = 1;
  bool edge = growth.edge && sizes[axis];
  Owned filling = edge ? viewed(tensor, slice, tensor.strides, (sizes[axis] - 1) * tensor.strides[axis]) : scalar_of(growth.filling, tensor.dtype);
  sizes[axis] = size;
  Owned made = empty_in(layout, sizes, tensor.dtype);
  copy(*made, *filling);
  copy(*viewed(*made, sizes_of(tensor), made->strides), tensor);
  return made;
}

bool overlaps_itself(const Tensor& tensor) {  // or might: as `aotc.tensors.strides`
  std::vector<std::pair<int64_t, int64_t>> axes;
  for (int axis = 0; axis < tensor.rank; axis++)
    if (tensor.sizes[axis] > 1) axes.push_back({std::abs(tensor.strides[axis]), tensor.sizes[axis]});
  std::sort(axes.begin(), axes.end());
  int64_t reach = 0;
  for (auto [step, size] : axes) {
    if (step <= reach) return true;
    reach += step * (size - 1);
  }
  return false;
}

void compare(const Tensor& tensor, const Input& input, bool copies, std::vector<std::string>& reasons) {
  auto differs = [&](const std::string& words) { reasons.push_back("`" + input.name + "`: " + words); };
  if (tensor.dtype != input.dtype)
    differs(std::string("dtype ") + name_of_dtype(input.dtype) + " is expected, " + name_of_dtype(tensor.dtype) + " came");
  if (tensor.rank != static_cast<int32_t>(input.sizes.size()))
    return differs(input.shown + " is expected, " + shown(tensor.sizes, tensor.rank) + " came");
  int64_t width = itemsize_of(tensor.dtype);
  if (tensor.elements() && !tensor.bytes()) differs("a tensor with values in memory is expected, one without came");
  else if (tensor.elements() && reinterpret_cast<uintptr_t>(tensor.bytes()) % static_cast<uintptr_t>(width))
    differs("its address is not aligned to " + std::to_string(width) + " bytes, the size of an element");
  if (!copies && !lies_as(tensor, strides_in(input.layout, sizes_of(tensor))))
    differs("the layout " + input.layout + " is expected, strides " + shown(tensor.strides, tensor.rank) + " came");
}

}  // namespace

bool lies_as(const Tensor& tensor, const Sizes& strides) {
  if (!tensor.elements()) return true;
  for (int axis = 0; axis < tensor.rank; axis++)
    if (tensor.sizes[axis] != 1 && tensor.strides[axis] != strides[static_cast<size_t>(axis)]) return false;
  return true;
}

void TableCall::fill() {
  auto size_of = [&](const Expression& entry) -> int64_t {
    if (entry.kind == Expression::NUMBER) return entry.value;
    int64_t found = -1;
    for (size_t at = 0; at < given.size(); at++)
      for (size_t axis = 0; !table_.inputs[at].filling && given[at].tensor && axis < table_.inputs[at].sizes.size(); axis++)
        if (table_.inputs[at].sizes[axis] == entry && axis < static_cast<size_t>(given[at].tensor->rank)) found = given[at].tensor->sizes[axis];
    return found;
  };
  for (size_t at = 0; at < given.size(); at++) {
    const Input& input = table_.inputs[at];
    if (given[at].tensor || !input.filling) continue;
    Sizes sizes;
    for (const Expression& entry : input.sizes) sizes.push_back(size_of(entry));
    if (std::any_of(sizes.begin(), sizes.end(), [](int64_t size) { return size < 0; })) continue;
    given[at].tensor = empty_in(input.layout, sizes, input.dtype);
    copy(*given[at].tensor, *scalar_of(*input.filling, input.dtype));
  }
}

bool TableCall::decide(const std::vector<Tensor*>& state, std::vector<std::string>& reasons) {
  std::vector<const Tensor*> tensors;
  bool sized = true;
  for (size_t at = 0; at < given.size(); at++) {
    tensors.push_back(given[at].tensor.get());
    sized = sized && tensors[at] && tensors[at]->rank == static_cast<int32_t>(table_.inputs[at].sizes.size());
    if (tensors[at]) compare(*tensors[at], table_.inputs[at], table_.copies_layout, reasons);
  }
  if (int now = omp_get_max_threads(); table_.threads && table_.threads != now)
    reasons.push_back("built for " + std::to_string(table_.threads) + " threads, there are " + std::to_string(now) + " now: call aotc_set_num_threads");
  if (sized) choice = table_.choose(tensors, reasons);
  if (choice) compare_memory(state, reasons);
  return choice && reasons.empty();
}

// What the code writes to may not be shared: between inputs, nor with the module's tensors.
void TableCall::compare_memory(const std::vector<Tensor*>& state, std::vector<std::string>& reasons) const {
  const std::set<size_t>&inputs = table_.written_inputs, &buffers = table_.written_state;
  if (inputs.empty() && buffers.empty()) return;
  auto name = [&](size_t at) { return "`" + table_.inputs[at].name + "`"; };
  for (size_t at : inputs) {
    const Tensor& tensor = *given[at].tensor;
    for (size_t other = 0; other < given.size(); other++)
      if (other != at && overlap(tensor, *given[other].tensor)) reasons.push_back(name(other) + ": it shares memory with " + name(at) + ", to which the model writes");
    if (given[at].read_only) reasons.push_back(name(at) + ": the model writes to it, and it is read-only");
    if (tensor.elements() && overlaps_itself(tensor)) reasons.push_back(name(at) + ": the model writes to it, and its elements share memory");
  }
  for (size_t at = 0; at < given.size(); at++)
    for (size_t place = 0; place < state.size(); place++)
      if ((inputs.contains(at) || buffers.contains(place)) && overlap(*given[at].tensor, *state[place]))
        reasons.push_back(name(at) + ": it shares memory with `" + table_.state[place].name + "`, and the model writes to one of them");
}

void TableCall::place() {
  for (size_t at = 0; at < given.size(); at++) {
    const Tensor& tensor = *given[at].tensor;
    const Input& input = table_.inputs[at];
    Sizes sizes = sizes_of(tensor), strides = strides_in(input.layout, sizes);
    Owned laid;
    if (lies_as(tensor, strides)) {
      laid = viewed(tensor, sizes, strides.data());
      if (!laid->storage->bytes) laid->storage->bytes = storage_bytes(laid->rank, laid->sizes, laid->strides, laid->dtype);
    }
    else laid = empty_in(input.layout, sizes, tensor.dtype), copy(*laid, tensor), copies++;
    for (size_t axis = 0; padded() && axis < input.sizes.size(); axis++) {
      std::optional<int64_t> size = input.sizes[axis].at(choice->run);
      require(size.has_value(), "an input has no size in the larger bucket");
      if (*size == laid->sizes[axis]) continue;
      size_t dim = 0;
      while (dim < choice->run.size() && !(choice->run[dim] != choice->asked[dim] && input.sizes[axis].names(dim))) dim++;
      auto growth = std::find_if(input.growths.begin(), input.growths.end(), [dim](const Growth& each) { return each.dim == dim; });
      require(growth != input.growths.end(), "an input is padded without a rule");
      laid = grown(*laid, axis, *size, *growth, input.layout);
    }
    ran.push_back(std::move(laid));
  }
}

int32_t TableCall::run(const Code& code, const std::vector<Tensor*>& state) {
  place();
  std::vector<Tensor*> inputs, made(code.outputs, nullptr);
  for (const Place& place : choice->bucket->arguments)  // which the library takes over
    inputs.push_back(shared(place.kind == Place::INPUT ? *ran[place.index] : *state[place.index]));
  set_failure("");
  int32_t status = code.run(code.container, inputs.data(), inputs.size(), made.data(), made.size(), nullptr, nullptr);
  for (Tensor* tensor : made) outputs.emplace_back(tensor);
  if (status) return status;
  for (const Owned& each : outputs) require(each != nullptr, "a result that its library did not give");
  finish();
  return status;
}

void TableCall::finish() {
  const Bucket& bucket = *choice->bucket;
  std::map<size_t, Sizes> cut;
  for (const Cut& each : bucket.cuts) {
    if (!padded()) break;
    std::optional<int64_t> asked = each.size.at(choice->asked), whole = each.size.at(choice->run);
    if (asked == whole) continue;
    require(each.output < outputs.size(), "an output that its library does not give");
    Sizes& sizes = cut.try_emplace(each.output, sizes_of(*outputs[each.output])).first->second;
    if (each.axis >= sizes.size() || !asked || *asked < 0 || *asked > sizes[each.axis])
      throw std::runtime_error("output " + std::to_string(each.output) + " of shape " + shown(sizes.data(), static_cast<int64_t>(sizes.size())) + " has no axis " + std::to_string(each.axis) + " to cut");
    sizes[each.axis] = *asked;
  }
  for (auto& [output, sizes] : cut) {
    Owned part = viewed(*outputs[output], sizes, outputs[output]->strides);
    Owned made(new_dense_like(*part));
    copy(*made, *part);
    outputs[output] = std::move(made);
  }
  for (const Place& place : bucket.written) {
    if (place.kind != Place::INPUT || ran[place.index]->bytes() == given[place.index].tensor->bytes()) continue;
    const Tensor& into = *given[place.index].tensor;
    copy(into, *viewed(*ran[place.index], sizes_of(into), ran[place.index]->strides));
  }
}

}  // namespace aotc::cpu
