// One call by the call table: `decide` says whether a bucket takes it, `run` pads, runs the code, crops and writes back.
#pragma once

#include "library.h"

namespace aotc::cpu {

struct Given {  // an input: null where the call leaves it out
  Owned tensor;
  bool read_only = false;
};

class TableCall {
 public:
  std::vector<Given> given;     // one for each input of the table
  std::vector<Owned> ran;       // as the code runs with them: padded, in the layout that was compiled
  std::vector<Owned> outputs;   // of the library, cropped
  std::optional<Sizes> asked;   // the call's dims
  std::optional<Choice> choice;
  int64_t copies = 0;           // inputs that were copied into that layout

  // The code runs with tensors on that device: others are copied there.
  explicit TableCall(const CallTable& table, int32_t device = HOST) : table_(table), device_(device) {}

  void fill();  // inputs that are left out and have a default; of one whose sizes no other has, nothing

  // Whether a bucket takes the call; else `issues` says what is wrong apart from the sizes of buckets. `state` are the
  // module's tensors.
  bool decide(const std::vector<Tensor*>& state, std::vector<Issue>& issues);

  // `code` is that of the bucket that was chosen. Throws LibraryFailed, and std::runtime_error for a damaged table.
  void run(const Code& code, const std::vector<Tensor*>& state);
  bool padded() const { return choice->asked != choice->run; }

 private:
  void place();   // `ran`, from `given`
  void finish();  // crops, and writes to the caller's memory
  void compare(size_t at, std::vector<Issue>& issues) const;
  void compare_memory(const std::vector<Tensor*>& state, std::vector<Issue>& issues) const;

  const CallTable& table_;
  int32_t device_;
};

Owned empty_input(const Input& input, const Sizes& dims, int32_t device);  // without values
bool lies_as(const Tensor& tensor, const Sizes& strides);  // the stride of an axis of one element is any

}  // namespace aotc::cpu
