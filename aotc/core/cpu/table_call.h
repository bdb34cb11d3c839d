// One call by the call table: `decide` says whether a bucket takes it, `run` pads, runs the code, crops and writes back.
#pragma once

#include "call_table.h"

namespace aotc::cpu {

struct Code {  // of a bucket's library: AOTInductorModelContainerRun, its container, and how many tensors it gives
  using Run = int32_t (*)(void*, Tensor**, size_t, Tensor**, size_t, void*, void*);
  Run run = nullptr;
  void* container = nullptr;
  size_t outputs = 0;
};

struct Given {  // an input: null where the call leaves it out
  Owned tensor;
  bool read_only = false;
};

class TableCall {
 public:
  std::vector<Given> given;     // one for each input of the table
  std::vector<Owned> ran;       // as the code runs with them: padded, in the layout that was compiled
  std::vector<Owned> outputs;   // of the library, cropped
  std::optional<Choice> choice;
  int64_t copies = 0;           // inputs that were copied into that layout

  explicit TableCall(const CallTable& table) : table_(table) {}

  void fill();  // inputs that are left out and have a default; of one whose sizes no other has, nothing

  // Whether a bucket takes the call; else `reasons` has the lines. `state` are the module's tensors.
  bool decide(const std::vector<Tensor*>& state, std::vector<std::string>& reasons);

  // The library's status; `code` is that of the bucket that was chosen. Throws std::runtime_error for a damaged table.
  int32_t run(const Code& code, const std::vector<Tensor*>& state);
  bool padded() const { return choice->asked != choice->run; }

 private:
  void place();   // `ran`, from `given`
  void finish();  // crops, and writes to the caller's memory
  void compare_memory(const std::vector<Tensor*>& state, std::vector<std::string>& reasons) const;

  const CallTable& table_;
};

bool lies_as(const Tensor& tensor, const Sizes& strides);  // the stride of an axis of one element is any

}  // namespace aotc::cpu
