// The call table, as `aotc.standalone.call_rows` writes it: what a call must be, and which bucket runs it. The rules, and
// the words of a miss, are those of `aotc.call_table`.
#pragma once

#include <map>
#include <optional>
#include <set>
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
  bool names(size_t dim) const;
  bool operator==(const Expression&) const = default;
};

struct Issue {  // what a call does not keep, as `aotc.errors.Issue`
  std::string words, where, expected, actual, hint;
};

struct Form {  // of a tensor in the file of weights
  std::string name;
  int32_t dtype;
  int64_t offset;  // in bytes
  Sizes sizes, strides;
};

struct Dim { std::string name; size_t input; int64_t axis, scale, offset; };

struct Growth {  // how an input is padded along a dim: with its last slice (`edge`), or with an element of these bytes
  size_t dim;
  bool edge;
  std::string filling;
};

struct Input {
  std::string name;
  int32_t dtype;
  std::string layout;
  std::vector<std::string> entries;  // the shape in the manifest's words
  std::vector<Expression> sizes;
  std::vector<Growth> growths;
  std::optional<std::string> filling;  // an element's bytes: of the tensor of a call that leaves this one out

  std::string shape() const;  // `[batch, 128]`
};

struct Extent {  // the sizes of one dim that a bucket takes; of a fixed one, `min` is `max`
  int64_t min, max, multiple, tuned;
  bool ranges;
  bool takes(int64_t size) const { return min <= size && size <= max && size % multiple == 0; }
  int64_t at_least(int64_t size) const;  // the next size that is taken; `size` past the last
  int64_t distance(int64_t size) const;
};

struct Place {  // of a tensor among those that the library gives, the inputs, or the state
  enum Kind { INDEX, INPUT, STATE } kind;
  size_t index;
};

struct Cut {  // of an axis of what the library gives, where the call was padded: its size in the caller's dims
  size_t output, axis;
  Expression size;
};

struct Condition {
  std::string text;
  Expression holds;
};

struct Bucket {
  std::string name, library;
  int64_t bytes, rank;  // of the library; among buckets with ranges, the narrowest first
  std::vector<Extent> extents;
  std::vector<Condition> conditions;
  std::vector<Form> constants;
  std::vector<Place> arguments, results, written;
  std::vector<Sizes> graphs;       // of a GPU: the dims at which the code is launched as a CUDA graph
  std::vector<size_t> grown;  // the dims along which a call is padded
  std::vector<Cut> cuts;

  bool ranges() const;
};

struct Choice {  // the bucket that runs a call, the call's dims, and those at which it runs
  const Bucket* bucket;
  Sizes asked, run;
};

struct Rejected {  // a bucket that does not run a call, and why
  const Bucket* bucket;
  std::vector<Issue> issues;
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
  std::set<size_t> written_inputs, written_state;  // to which the code of any bucket writes

  explicit CallTable(const std::string& text);  // throws std::runtime_error for a text of another form

  // The dims of a call whose inputs have as many axes as they must; nothing where no size of a dim explains an axis.
  std::optional<Sizes> read(const std::vector<const Tensor*>& inputs, std::vector<Issue>& issues) const;
  std::optional<Choice> choose(const Sizes& dims) const;
  std::vector<Rejected> rejected(const Sizes& dims, const Bucket* but) const;  // the nearest buckets

 private:
  Sizes padded_sizes(const Bucket& bucket, const Sizes& dims) const;
  std::optional<Sizes> run_sizes(const Bucket& bucket, const Sizes& dims) const;
  std::optional<int64_t> elements(const Sizes& dims) const;
  std::vector<Issue> obstacles(const Bucket& bucket, const Sizes& dims) const;

  std::map<Sizes, size_t> fixed_;  // the buckets without ranges, by their sizes
};

Sizes strides_in(const std::string& layout, const Sizes& sizes);
std::string shown(const int64_t* numbers, int64_t count);  // `[2, 128]`
Issue expected_issue(const std::string& label, const std::string& expected, const std::string& actual, const std::string& where, const std::string& hint = "");

}  // namespace aotc::cpu
