// What `cut_back` makes of outputs in one memory. Each line of standard input has the memory's number of elements, and of each
// output its offset, number of axes, sizes, strides, and, behind 1, the sizes that are left of it, or 0. Prints of each output
// the first one whose memory it has, -1 for the one of before and where it has no element, and its offset, sizes, strides and
// elements.
#include <iostream>
#include <numeric>
#include <sstream>

#include "../../aotc/core/cpu/cut_views.h"

using namespace aotc::cpu;

void print(const Tensor& tensor, int axis, int64_t place) {
  if (axis == tensor.rank) std::cout << " " << static_cast<int64_t>(tensor.as<float>()[place]);
  else for (int64_t at = 0; at < tensor.sizes[axis]; at++) print(tensor, axis + 1, place + at * tensor.strides[axis]);
}

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream numbers(line);
    auto next = [&] { int64_t number; numbers >> number; return number; };
    auto some = [&](int64_t count) { Sizes read(static_cast<size_t>(count)); for (int64_t& each : read) each = next(); return read; };
    int64_t count = next(), outputs_count = next();
    Owned memory(new_empty(1, &count, nullptr, FLOAT32));
    std::iota(memory->as<float>(), memory->as<float>() + count, 0.f);
    std::vector<Owned> outputs;
    std::map<size_t, Sizes> left;
    for (int64_t at = 0; at < outputs_count; at++) {
      int64_t offset = next(), rank = next();
      Sizes sizes = some(rank), strides = some(rank);
      memory->storage->keep();
      outputs.emplace_back(new_tensor(memory->storage, rank, sizes.data(), strides.data(), offset, FLOAT32));
      if (next()) left[static_cast<size_t>(at)] = some(rank);
    }
    cut_back(outputs, left);
    for (const Owned& output : outputs) {
      int64_t first = 0;
      while (outputs[static_cast<size_t>(first)]->storage != output->storage) first++;
      std::cout << (!output->elements() || output->storage == memory->storage ? -1 : first) << " " << output->offset;
      for (int axis = 0; axis < output->rank; axis++) std::cout << " " << output->sizes[axis];
      for (int axis = 0; axis < output->rank; axis++) std::cout << " " << output->strides[axis];
      print(*output, 0, 0);
      std::cout << ";";
    }
    std::cout << std::endl;
  }
}
