// The weights of a model, from the CPU's memory to a GPU at the speed of the bus.
#pragma once

#include <vector>

#include "device.h"

namespace aotc::gpu {

// Copies on the device, each with its tensor's strides; one that lies there already is shared. Throws GpuError.
std::vector<cpu::Owned> uploaded(const std::vector<cpu::Tensor*>& tensors, Device& device);

}  // namespace aotc::gpu
