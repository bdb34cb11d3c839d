// A bucket's code on a GPU: launched directly, or as the CUDA graphs that were captured of it.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "../cpu/library.h"
#include "device.h"

namespace aotc::gpu {

struct Graph;

class GpuCode : public cpu::Code {
 public:
  // Throws as `cpu::Library`, and GpuError.
  GpuCode(void* opened, const cpu::Bucket& bucket, cpu::Library::Constants constants, Device& device);
  GpuCode(const GpuCode&) = delete;
  ~GpuCode() override;

  // Throws GpuError where the driver has failed, also within the library.
  std::vector<cpu::Owned> run(const std::vector<cpu::Tensor*>& inputs) const override;
  void renew() override {}  // a forked child can use no GPU
  void* container() const override { return library_->container(); }

  // Captures the graph for inputs of these sizes and layouts, whose values are not read. The module's tensors are used where
  // they lie, and are as before; a call with others is launched directly. Throws as `run`.
  void capture(const std::vector<cpu::Tensor*>& inputs) const;

  int64_t launches() const { return launches_; }  // of graphs

 private:
  std::vector<cpu::Owned> launch(const std::vector<cpu::Tensor*>& inputs) const;
  std::vector<int64_t> form_of(const std::vector<cpu::Tensor*>& inputs) const;  // the sizes of those that are not the module's
  std::vector<const char*> places_of(const std::vector<cpu::Tensor*>& inputs) const;  // of the module's
  void record(Graph& graph, const std::vector<cpu::Tensor*>& inputs) const;
  template <typename Run>
  auto in_order(Run run) const;

  struct Use { bool of_module, written; };  // of an argument; a graph uses the module's tensors where they lie

  Device& device_;
  std::vector<Use> uses_;
  std::unique_ptr<cpu::Library> library_;
  std::shared_ptr<Pool> pool_ = std::make_shared<Pool>();  // of the graphs: one runs at a time
  mutable std::map<std::vector<int64_t>, std::unique_ptr<Graph>> graphs_;
  mutable std::atomic<int64_t> launches_ = 0;
};

}  // namespace aotc::gpu
