// The call table of an exported folder, as `aotc.standalone.exporting.call_rows` writes it: what a call must be, and which
// bucket runs it. The rules are those of `aotc.call_table`.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tensor.h"

namespace aotc::cpu {

using Sizes = std::vector<int64_t>;

// Arithmetic over dims, in prefix notation. No value: a division by zero, or a number of more than 64 bits.
struct Expression {
  enum Kind { NUMBER, DIM, UNARY, BINARY, SEVERAL } kind;
  std::string name;  // of the operator
  int64_t value;     // the number, or the dim's place
  std::vector<Expression> parts;

  std::optional<int64_t> at(const Sizes& dims) const;
};

struct Form {  // of a tensor in the file of weights
  std::string name;
  int32_t dtype;
  int64_t offset;  // in bytes
  Sizes sizes, strides;
};

struct Dim { std::string name; size_t input; int64_t axis, scale, offset; };

struct Input {
  std::string name, shown;  // `shown`: the dtype and the shape, in the manifest's words
  int32_t dtype;
  std::string layout;
  std::vector<Expression> sizes;
};

struct Extent {  // the sizes of one dim that a bucket takes; of a fixed one, `min` is `max`
  int64_t min, max, multiple, tuned;
  bool ranges;
  bool takes(int64_t size) const { return min <= size && size <= max && size % multiple == 0; }
};

struct Place {  // of a tensor among those that the library gives, the inputs, or the state
  enum Kind { INDEX, INPUT, STATE } kind;
  size_t index;
};

struct Bucket {
  std::string name, library;
  int64_t bytes, rank;  // of the library; among buckets with ranges, the narrowest first
  std::vector<Extent> extents;
  std::vector<Expression> conditions;
  std::vector<Form> constants;
  std::vector<Place> arguments, results;

  bool ranges() const;
};

struct CallTable {
  std::string model, target;
  std::vector<std::string> features, outputs;  // of the CPU, in Linux's names; names of the results
  int64_t threads = 0, weights = 0;            // how many the code was built for (0: any); bytes of the file of weights
  bool copies_layout = false;
  std::vector<Dim> dims;
  std::vector<Input> inputs;
  std::vector<Form> state;
  std::vector<Bucket> buckets;

  explicit CallTable(const std::string& text);  // throws std::runtime_error for a text of another form

  // The bucket that runs inputs of these shapes; null for a miss, of which `reasons` gets the lines.
  const Bucket* choose(const std::vector<const Tensor*>& inputs, std::vector<std::string>& reasons) const;

 private:
  const Bucket* best(const Sizes& dims) const;
  std::string obstacle(const Bucket& bucket, const Sizes& dims) const;
};

Sizes strides_in(const std::string& layout, const Sizes& sizes);
std::string shown(const int64_t* numbers, int64_t count);  // `[2, 128]`

}  // namespace aotc::cpu
