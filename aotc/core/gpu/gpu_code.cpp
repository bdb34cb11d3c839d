#include "gpu_code.h"

#include "shared_copies.h"

namespace aotc::gpu {

using namespace aotc::cpu;

// Its kernels read and write fixed addresses: inputs are copied to the graph's own before each launch, results from its own
// after it. It serves calls with the module's tensors that lie where those of the capture lay, and keeps none of them.
struct Graph {
  std::vector<Owned> inputs, outputs;  // null for the module's tensors
  SharedSpans shared;                  // where outputs share memory
  std::vector<const char*> places;     // of the module's tensors, in the order of the arguments
  void* launched = nullptr;            // CUgraphExec

  Graph() = default;
  Graph(const Graph&) = delete;
  ~Graph() { forget(); }
  void forget() {
    if (launched) driver().cuGraphExecDestroy(launched);
    launched = nullptr;
    outputs.clear(), shared.clear();
  }
};

namespace {

Owned like(const Tensor& tensor) { return Owned(new_empty(tensor.rank, tensor.sizes, tensor.strides, tensor.dtype, tensor.device())); }

Owned copy_of(const Tensor& tensor) {
  Owned made = like(tensor);
  copy(*made, tensor);
  return made;
}

void clear(const Tensor& tensor) {
  char zeros[16] = {};
  Storage place{zeros, sizeof zeros, [](Storage*) {}};  // never dropped: this reference stays
  copy(tensor, Tensor{&place, 0, 0, tensor.dtype, {}, {}});
}

}  // namespace

// Runs while this thread alone gives work to the device. An error of the driver that a library's function met, or that ends
// all work, comes out as it is.
template <typename Run>
auto GpuCode::in_order(Run run) const {
  std::lock_guard<std::recursive_mutex> hold(device_.order);
  Using use(device_);
  try {
    return run();
  } catch (const LibraryFailed&) {
    if (std::exception_ptr cause = failure_cause()) {
      try {
        std::rethrow_exception(cause);
      } catch (const GpuError&) {
        throw;
      } catch (const std::exception&) {
      }
    }
    device_.wait();
    throw;
  }
}

GpuCode::GpuCode(void* opened, const Bucket& bucket, Library::Constants constants, Device& device) : device_(device) {
  for (const Place& argument : bucket.arguments) {
    bool written = false;
    for (const Place& each : bucket.written) written = written || (each.kind == argument.kind && each.index == argument.index);
    uses_.push_back({argument.kind == Place::STATE, written});
  }
  in_order([&] { library_ = std::make_unique<Library>(opened, bucket, 1, std::move(constants), Runner{device.number, [](int32_t number) { return device_at(number).stream(); }}); });
}

GpuCode::~GpuCode() {
  try {
    Using use(device_);
    graphs_.clear();
    library_.reset();
    device_.keep(pool_);
  } catch (const std::exception&) {  // the context is lost, and its memory with it
  }
}

std::vector<Owned> GpuCode::run(const std::vector<Tensor*>& inputs) const {
  return in_order([&] { return launch(inputs); });
}

std::vector<int64_t> GpuCode::form_of(const std::vector<Tensor*>& inputs) const {
  std::vector<int64_t> form;
  for (size_t at = 0; at < uses_.size(); at++)
    if (!uses_[at].of_module) form.insert(form.end(), inputs[at]->sizes, inputs[at]->sizes + inputs[at]->rank);
  return form;
}

std::vector<Owned> GpuCode::launch(const std::vector<Tensor*>& inputs) const {
  auto found = graphs_.empty() ? graphs_.end() : graphs_.find(form_of(inputs));
  if (found == graphs_.end() || !found->second->launched || found->second->places != places_of(inputs)) return library_->run(inputs);
  Graph& graph = *found->second;
  for (size_t at = 0; at < uses_.size(); at++)
    if (!uses_[at].of_module) copy(*graph.inputs[at], *inputs[at]);
  AOTC_CHECKED(cuGraphLaunch, graph.launched, device_.stream());
  launches_++;
  for (size_t at = 0; at < uses_.size(); at++)
    if (!uses_[at].of_module && uses_[at].written) copy(*inputs[at], *graph.inputs[at]);
  return copies_of(graph.outputs, graph.shared, copy_of);
}

std::vector<const char*> GpuCode::places_of(const std::vector<Tensor*>& inputs) const {
  std::vector<const char*> places;
  for (size_t at = 0; at < uses_.size(); at++)
    if (uses_[at].of_module) places.push_back(inputs[at]->bytes());
  return places;
}

void GpuCode::capture(const std::vector<Tensor*>& inputs) const {
  in_order([&] {
    std::unique_ptr<Graph>& graph = graphs_[form_of(inputs)];
    if (!graph) {
      graph = std::make_unique<Graph>();
      for (size_t at = 0; at < uses_.size(); at++) graph->inputs.push_back(uses_[at].of_module ? nullptr : like(*inputs[at]));
    }
    record(*graph, inputs);
  });
}

// Runs the code once before, on inputs of zeros and copies of what it writes to: that loads kernels, which a capture cannot.
void GpuCode::record(Graph& graph, const std::vector<Tensor*>& inputs) const {
  graph.forget();
  std::vector<Owned> copies;
  std::vector<Tensor*> tried, captured;
  for (size_t at = 0; at < uses_.size(); at++) {
    captured.push_back(uses_[at].of_module ? inputs[at] : graph.inputs[at].get());
    if (!uses_[at].of_module) clear(*captured[at]);
    bool keeps = uses_[at].of_module && uses_[at].written;
    if (keeps) copies.push_back(copy_of(*captured[at]));
    tried.push_back(keeps ? copies.back().get() : captured[at]);
  }
  library_->run(tried);
  device_.release_cache();  // of that run: the graph's memory is its own
  graph.places = places_of(inputs);
  Allocating from(pool_);
  void* recorded = nullptr;
  AOTC_CHECKED(cuStreamBeginCapture, device_.stream(), RELAXED);
  try {
    graph.outputs = library_->run(captured);
  } catch (...) {
    if (!driver().cuStreamEndCapture(device_.stream(), &recorded) && recorded) driver().cuGraphDestroy(recorded);
    throw;
  }
  AOTC_CHECKED(cuStreamEndCapture, device_.stream(), &recorded);
  graph.shared = shared_spans(graph.outputs);
  int code = driver().cuGraphInstantiate(&graph.launched, recorded, 0);
  driver().cuGraphDestroy(recorded);
  check(code, "cuGraphInstantiateWithFlags");
}

}  // namespace aotc::gpu
