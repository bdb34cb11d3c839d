#include "table_call.h"

#include "cut_views.h"

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

Owned empty_in(const std::string& layout, const Sizes& sizes, int32_t dtype, int32_t device) {
  return Owned(new_empty(static_cast<int64_t>(sizes.size()), sizes.data(), strides_in(layout, sizes).data(), dtype, device));
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
  Owned made = empty_in(layout, sizes, tensor.dtype, tensor.device());
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

// An input of other sizes than `expected` says; where it has as many axes, with what to change in the manifest.
Issue shape_issue(const Input& input, const Tensor& tensor, const std::string& expected) {
  std::vector<std::string> fixed;
  for (size_t axis = 0; axis < input.sizes.size() && input.sizes.size() == static_cast<size_t>(tensor.rank); axis++)
    if (input.sizes[axis].kind == Expression::NUMBER && input.sizes[axis].value != tensor.sizes[axis] &&
        std::find(fixed.begin(), fixed.end(), input.entries[axis]) == fixed.end())
      fixed.push_back(input.entries[axis]);
  std::string hint;
  for (const std::string& each : fixed) hint += (hint.empty() ? "the manifest fixes " : " and ") + each;
  if (!hint.empty()) hint += " in `shape:`: where a size varies, write a dim there, give its sizes in the buckets, and build again";
  return expected_issue("shape", expected, shown(tensor.sizes, tensor.rank), input.name, hint);
}

}  // namespace

Owned empty_input(const Input& input, const Sizes& dims, int32_t device) {
  Sizes sizes;
  for (const Expression& entry : input.sizes) {
    sizes.push_back(entry.at(dims).value_or(-1));
    require(sizes.back() >= 0, "an input has no size for a graph");
  }
  return empty_in(input.layout, sizes, input.dtype, device);
}

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
    given[at].tensor = empty_in(input.layout, sizes, input.dtype, HOST);
    copy(*given[at].tensor, *scalar_of(*input.filling, input.dtype));
  }
}

bool TableCall::decide(const std::vector<Tensor*>& state, std::vector<Issue>& issues) {
  std::vector<const Tensor*> tensors;
  bool sized = true;
  for (size_t at = 0; at < given.size(); at++) {
    const Input& input = table_.inputs[at];
    const Tensor* tensor = tensors.emplace_back(given[at].tensor.get());
    bool of_rank = tensor && tensor->rank == static_cast<int32_t>(input.sizes.size());
    if (tensor && !of_rank) issues.push_back(shape_issue(input, *tensor, input.shape()));
    sized = sized && of_rank;
  }
  if (sized) asked = table_.read(tensors, issues);
  if (asked) choice = table_.choose(*asked);
  for (size_t at = 0; at < given.size(); at++)
    if (tensors[at]) compare(at, issues);
  if (choice && issues.empty()) compare_memory(state, issues);
  if (int now = omp_get_max_threads(); table_.threads && table_.threads != now) {
    std::string expected = std::to_string(table_.threads), actual = std::to_string(now);
    issues.push_back({"built with num threads " + expected + ", it is " + actual + " now", "", expected, actual, "call set_num_threads, or drop the option `cpp.dynamic_threads: false`"});
  }
  return choice && issues.empty();
}

void TableCall::compare(size_t at, std::vector<Issue>& issues) const {
  const Tensor& tensor = *given[at].tensor;
  const Input& input = table_.inputs[at];
  if (tensor.dtype != input.dtype)
    issues.push_back(expected_issue("dtype", name_of_dtype(input.dtype), name_of_dtype(tensor.dtype), input.name, "convert it, or build the model for that dtype"));
  bool fits = true, fixed = true;
  auto expected = [&](size_t axis) { return input.sizes[axis].at(*asked).value_or(-1); };
  for (size_t axis = 0; asked && axis < input.sizes.size(); axis++) {
    bool equal = expected(axis) == tensor.sizes[axis];
    fits = fits && equal, fixed = fixed && (equal || input.sizes[axis].kind != Expression::NUMBER);
  }
  int64_t width = itemsize_of(tensor.dtype);
  if (choice && !fits) {
    Sizes sizes;
    for (size_t axis = 0; axis < input.sizes.size(); axis++) sizes.push_back(expected(axis));
    issues.push_back(shape_issue(input, tensor, shown(sizes.data(), static_cast<int64_t>(sizes.size()))));
  }
  else if (asked && !fixed) issues.push_back(shape_issue(input, tensor, input.shape()));
  else if (tensor.elements() && !tensor.bytes()) issues.push_back({"a tensor with values in memory is expected, one without came", input.name, "", "", ""});
  else if (tensor.elements() && reinterpret_cast<uintptr_t>(tensor.bytes()) % static_cast<uintptr_t>(width))
    issues.push_back({"its address is not aligned to " + std::to_string(width) + " bytes, the size of an element", input.name, "", "", "pass a copy of it"});
  if (!table_.copies_layout && !lies_as(tensor, strides_in(input.layout, sizes_of(tensor)))) {
    std::string strides = shown(tensor.strides, tensor.rank);
    issues.push_back({"the layout " + input.layout + " is expected, strides " + strides + " came", input.name, input.layout, strides,
                      "pass a copy in that layout (numpy.ascontiguousarray), or set `make_contiguous: true` in the manifest"});
  }
}

// What the code writes to may not be shared: between inputs, nor with the module's tensors.
void TableCall::compare_memory(const std::vector<Tensor*>& state, std::vector<Issue>& issues) const {
  const std::set<size_t>&inputs = table_.written_inputs, &buffers = table_.written_state;
  if (inputs.empty() && buffers.empty()) return;
  auto found = [&](size_t at, const std::string& words, const char* hint) { issues.push_back({words, table_.inputs[at].name, "", "", hint}); };
  auto shares = [&](size_t at, const std::string& owner) { found(at, "shares memory with " + owner + ", which the model writes to", "pass a clone of one of them"); };
  for (size_t at = 0; at < given.size(); at++)
    for (size_t other = at + 1; other < given.size(); other++)
      if ((inputs.contains(at) || inputs.contains(other)) && overlap(*given[at].tensor, *given[other].tensor)) {
        size_t owner = inputs.contains(at) ? at : other;
        shares(at + other - owner, "`" + table_.inputs[owner].name + "`");
      }
  for (size_t at : inputs) {
    const Tensor& tensor = *given[at].tensor;
    if (given[at].read_only) found(at, "the model writes to it, and it is read-only", "pass a copy");
    if (tensor.elements() && overlaps_itself(tensor))
      found(at, "the model writes to it, and elements lie at one place: its strides are " + shown(tensor.strides, tensor.rank), "pass a clone");
  }
  for (size_t at = 0; at < given.size(); at++)
    for (size_t place = 0; place < state.size(); place++) {
      bool written = buffers.contains(place);
      if (!(written || inputs.contains(at)) || !overlap(*given[at].tensor, *state[place])) continue;
      if (written) shares(at, "the buffer `" + table_.state[place].name + "`");
      else found(at, "is written to by the model, and shares memory with the module's `" + table_.state[place].name + "`", "pass a clone");
    }
}

void TableCall::place() {
  for (size_t at = 0; at < given.size(); at++) {
    const Tensor& tensor = *given[at].tensor;
    const Input& input = table_.inputs[at];
    Sizes sizes = sizes_of(tensor), strides = strides_in(input.layout, sizes);
    Owned laid;
    if (tensor.device() == device_ && lies_as(tensor, strides)) {
      laid = viewed(tensor, sizes, strides.data());
      if (!laid->storage->bytes) laid->storage->bytes = storage_bytes(laid->rank, laid->sizes, laid->strides, laid->dtype);
    }
    else laid = empty_in(input.layout, sizes, tensor.dtype, device_), copy(*laid, tensor), copies += !lies_as(tensor, strides);
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

void TableCall::run(const Code& code, const std::vector<Tensor*>& state) {
  try {
    place();
    std::vector<Tensor*> inputs;
    for (const Place& place : choice->bucket->arguments)
      inputs.push_back(place.kind == Place::INPUT ? ran[place.index].get() : state[place.index]);
    outputs = code.run(inputs);
    finish();
  } catch (...) {
    try {
      if (device_ != HOST) gpus->wait(device_);  // copies may read and write the caller's memory yet
    } catch (const std::exception&) {
    }
    throw;
  }
  if (device_ != HOST) gpus->wait(device_);  // an error on the GPU is that of its call
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
  cut_back(outputs, cut);
  for (const Place& place : bucket.written) {
    if (place.kind != Place::INPUT || ran[place.index]->bytes() == given[place.index].tensor->bytes()) continue;
    const Tensor& into = *given[place.index].tensor;
    copy(into, *viewed(*ran[place.index], sizes_of(into), ran[place.index]->strides));
  }
}

}  // namespace aotc::cpu
