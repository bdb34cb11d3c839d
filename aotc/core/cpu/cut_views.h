// Outputs without their pads. One that is a view of another is a view of that one's copy, as in eager.
#pragma once

#include <map>
#include <vector>

#include "call_table.h"
#include "tensor.h"

namespace aotc::cpu {

// In the place of outputs with sizes, copies without gaps of that part, and views of such copies.
void cut_back(std::vector<Owned>& outputs, const std::map<size_t, Sizes>& sizes);

}  // namespace aotc::cpu
