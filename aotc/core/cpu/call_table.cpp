#include "call_table.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <sstream>
#include <tuple>

namespace aotc::cpu {
namespace {

constexpr const char* HEADING = "aotc-call-table 2";
constexpr size_t SHOWN_BUCKETS = 3;  // the nearest ones, that a miss explains
constexpr int MOST_DEPTH = 200;

// -- text -------------------------------------------------------------------------------------------------------------

struct Line {  // words, one at a time
  std::istringstream words;

  explicit Line(const std::string& text) : words(text) {}
  std::string word() {
    std::string found;
    if (!(words >> found)) throw std::runtime_error("a line of the call table ends too early");
    return found;
  }
  int64_t number() {
    std::string text = word();
    int64_t value = 0;
    auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (failed != std::errc() || end != text.data() + text.size())
      throw std::runtime_error("the call table has `" + text + "` where a number is expected");
    return value;
  }
  size_t index(size_t below, const char* what) {
    int64_t value = number();
    if (value < 0 || static_cast<size_t>(value) >= below)
      throw std::runtime_error(std::string("the call table names ") + what + " " + std::to_string(value) + ", of " + std::to_string(below));
    return static_cast<size_t>(value);
  }
  std::string text() {  // %20 for a space, as in a URL
    std::string raw = word(), made;
    for (size_t at = 0; at < raw.size(); at++) {
      unsigned value = 0;
      if (raw[at] == '%' && at + 2 < raw.size() &&
          std::from_chars(raw.data() + at + 1, raw.data() + at + 3, value, 16).ptr == raw.data() + at + 3)
        made += static_cast<char>(value), at += 2;
      else
        made += raw[at];
    }
    return made;
  }
  int32_t dtype() {
    std::string name = word();
    int32_t found = dtype_named(name.c_str());
    if (found < 0) throw std::runtime_error("the call table names the dtype `" + name + "`, which is unknown");
    return found;
  }
  std::string element(int32_t dtype) {  // its bytes, in hexadecimal
    std::string digits = word(), bytes;
    for (size_t at = 0; at + 1 < digits.size(); at += 2) {
      unsigned value = 0;
      if (std::from_chars(digits.data() + at, digits.data() + at + 2, value, 16).ptr == digits.data() + at + 2) bytes += static_cast<char>(value);
    }
    require(bytes.size() * 2 == digits.size() && bytes.size() == static_cast<size_t>(itemsize_of(dtype)), "an element of another size");
    return bytes;
  }
  Sizes sizes(int64_t count) {
    Sizes found;
    while (count-- > 0) found.push_back(number());
    return found;
  }
};

Form form_of(Line& line) {
  Form form{line.text(), line.dtype(), line.number(), {}, {}};
  int64_t rank = line.number();
  require(rank >= 0 && rank <= MOST_AXES && form.offset >= 0, "a tensor of the call table has another form");
  form.sizes = line.sizes(rank), form.strides = line.sizes(rank);
  return form;
}

Place place_of(Line& line, size_t inputs, size_t state) {
  std::string kind = line.word();
  if (kind == "input") return {Place::INPUT, line.index(inputs, "input")};
  if (kind == "state") return {Place::STATE, line.index(state, "state")};
  require(kind == "index", "a place of another kind");
  return {Place::INDEX, line.index(1 << 20, "output")};
}

// -- expressions ------------------------------------------------------------------------------------------------------

constexpr const char* UNARY[] = {"neg", "not", "abs", "==", "!=", "<", "<=", ">", ">="};  // the last six: in a `chain`
constexpr const char* BINARY[] = {"+", "-", "*", "//", "%"};
constexpr const char* SEVERAL[] = {"and", "or", "min", "max", "chain"};

template <size_t COUNT>
bool is_among(const char* const (&names)[COUNT], const std::string& name) {
  return std::find(names, names + COUNT, name) != names + COUNT;
}

Expression expression_of(Line& line, const std::vector<Dim>& dims, int depth = 0) {
  require(depth < MOST_DEPTH, "an expression of the call table is nested too deeply");
  std::string word = line.word();
  int64_t value = 0;
  auto [end, failed] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (failed == std::errc() && end == word.data() + word.size()) return {Expression::NUMBER, "", value, {}};
  if (word[0] == '@') {
    for (size_t at = 0; at < dims.size(); at++)
      if (dims[at].name == word.substr(1)) return {Expression::DIM, "", static_cast<int64_t>(at), {}};
    throw std::runtime_error("an expression of the call table has the dim `" + word.substr(1) + "`, which is unknown");
  }
  Expression made{Expression::UNARY, word, 0, {}};
  int64_t count = 1;
  if (is_among(BINARY, word)) made.kind = Expression::BINARY, count = 2;
  else if (is_among(SEVERAL, word)) made.kind = Expression::SEVERAL, count = line.number();
  else if (!is_among(UNARY, word)) throw std::runtime_error("an expression of the call table has `" + word + "`");
  require(count > 0, "an expression of the call table has no operands");
  while (count-- > 0) made.parts.push_back(expression_of(line, dims, depth + 1));
  return made;
}

using Value = std::optional<int64_t>;

Value arithmetic(const std::string& name, int64_t left, int64_t right) {
  int64_t value = 0;
  if (name == "+") return __builtin_add_overflow(left, right, &value) ? Value() : value;
  if (name == "-") return __builtin_sub_overflow(left, right, &value) ? Value() : value;
  if (name == "*") return __builtin_mul_overflow(left, right, &value) ? Value() : value;
  if (right == 0 || (right == -1 && left == INT64_MIN)) return {};
  int64_t rest = left % right;
  bool below = rest != 0 && (rest < 0) != (right < 0);  // Python rounds down
  if (name == "%") return below ? rest + right : rest;
  return left / right - below;
}

bool compared(const std::string& name, int64_t left, int64_t right) {
  if (name == "==") return left == right;
  if (name == "!=") return left != right;
  if (name == "<") return left < right;
  if (name == "<=") return left <= right;
  return name == ">" ? left > right : left >= right;
}

// As Python: what stands behind the first value that decides is not asked for.
Value several(const Expression& own, const Sizes& dims) {
  Value first = own.parts[0].at(dims);
  if (own.name == "chain") {
    Value left = first;
    for (size_t at = 1; at < own.parts.size(); at++) {
      Value right = own.parts[at].parts.empty() ? Value() : own.parts[at].parts[0].at(dims);
      if (!left || !right) return {};
      if (!compared(own.parts[at].name, *left, *right)) return 0;
      left = right;
    }
    return 1;
  }
  bool all = own.name == "and", any = own.name == "or";
  if (all || any) {
    for (const Expression& part : own.parts) {
      Value value = part.at(dims);
      if (!value) return {};
      if ((*value != 0) == any) return any;
    }
    return all;
  }
  for (const Expression& part : own.parts) {
    Value value = part.at(dims);
    if (!first || !value) return {};
    first = own.name == "min" ? std::min(*first, *value) : std::max(*first, *value);
  }
  return first;
}

}  // namespace

std::optional<int64_t> Expression::at(const Sizes& dims) const {
  if (kind == NUMBER) return value;
  if (kind == DIM) return dims[static_cast<size_t>(value)];
  if (kind == SEVERAL) return several(*this, dims);
  Value left = parts[0].at(dims);
  if (!left) return {};
  if (kind == BINARY) {
    Value right = parts[1].at(dims);
    return right ? arithmetic(name, *left, *right) : Value();
  }
  if (name == "not") return *left == 0;
  if (name == "neg") return arithmetic("-", 0, *left);
  require(name == "abs", "a comparison outside of a chain");
  return *left < 0 ? arithmetic("-", 0, *left) : left;
}

bool Expression::names(size_t dim) const {
  if (kind == DIM) return static_cast<size_t>(value) == dim;
  return std::any_of(parts.begin(), parts.end(), [dim](const Expression& part) { return part.names(dim); });
}

// -- the table --------------------------------------------------------------------------------------------------------

CallTable::CallTable(const std::string& text) {
  std::istringstream lines(text);
  std::string row;
  std::getline(lines, row);
  if (row != HEADING) throw std::runtime_error("the call table begins with `" + row.substr(0, 40) + "`, and this libaotc.so reads `" + HEADING + "`");
  bool whole = false;
  while (std::getline(lines, row)) {
    Line line(row);
    std::string kind = line.word();
    if (kind == "model") model = line.text(), target = line.text();
    else if (kind == "feature") features.push_back(line.word());
    else if (kind == "threads") threads = line.number();
    else if (kind == "weights") weights = line.number();
    else if (kind == "copies-layout") copies_layout = true;
    else if (kind == "dim") dims.push_back({line.text(), static_cast<size_t>(line.number()), line.number(), line.number(), line.number()});
    else if (kind == "input") {
      Input& input = inputs.emplace_back(Input{line.text(), line.dtype(), line.word(), {}, {}, {}, {}});
      for (int64_t rank = line.number(); rank > 0; rank--) {
        input.entries.push_back(line.text());
        input.sizes.push_back(expression_of(line, dims));
      }
      require(input.sizes.size() <= MOST_AXES, "an input of more than 16 axes");
    }
    else if (kind == "pad" || kind == "default") {
      Input& input = inputs[line.index(inputs.size(), "input")];
      if (kind == "default") input.filling = line.element(input.dtype);
      else {
        Growth& growth = input.growths.emplace_back(Growth{line.index(dims.size(), "dim"), false, ""});
        growth.edge = line.number();
        growth.filling = line.element(input.dtype);
      }
    }
    else if (kind == "output") outputs.push_back(line.text());
    else if (kind == "state") state.push_back(form_of(line));
    else if (kind == "bucket") buckets.push_back({line.text(), line.text(), line.number(), line.number(), {}, {}, {}, {}, {}, {}, {}, {}});
    else if (kind == "end") whole = true;
    else {
      require(!buckets.empty(), "the call table has a line of a bucket before the first bucket");
      Bucket& bucket = buckets.back();
      if (kind == "size") {
        int64_t size = line.number();
        bucket.extents.push_back({size, size, 1, size, false});
      }
      else if (kind == "range") bucket.extents.push_back({line.number(), line.number(), line.number(), line.number(), true});
      else if (kind == "condition") bucket.conditions.push_back({line.text(), expression_of(line, dims)});
      else if (kind == "constant") bucket.constants.push_back(form_of(line));
      else if (kind == "argument") bucket.arguments.push_back(place_of(line, inputs.size(), state.size()));
      else if (kind == "result") bucket.results.push_back(place_of(line, inputs.size(), state.size()));
      else if (kind == "written") bucket.written.push_back(place_of(line, inputs.size(), state.size()));
      else if (kind == "graph") bucket.graphs.push_back(line.sizes(static_cast<int64_t>(dims.size())));
      else if (kind == "grown") bucket.grown.push_back(line.index(dims.size(), "dim"));
      else if (kind == "crop") bucket.cuts.push_back({line.index(1 << 20, "output"), line.index(MOST_AXES, "axis"), expression_of(line, dims)});
      else throw std::runtime_error("the call table has a line `" + kind + "`, which this libaotc.so does not know");
    }
  }
  require(whole && !buckets.empty(), "the call table is cut off");
  for (const Bucket& bucket : buckets) {
    for (const Place& place : bucket.arguments) require(place.kind != Place::INDEX, "an argument of the call table is a result");
    require(bucket.extents.size() == dims.size() && (outputs.empty() || bucket.results.size() == outputs.size()), "a bucket of the call table has another form");
    for (const Extent& extent : bucket.extents) require(extent.multiple > 0, "a range of the call table has multiples of 0");
  }
  for (const Bucket& bucket : buckets)
    for (const Place& place : bucket.written) (place.kind == Place::INPUT ? written_inputs : written_state).insert(place.index);
  for (size_t at = 0; at < buckets.size(); at++) {
    Sizes sizes;
    for (const Extent& extent : buckets[at].extents) sizes.push_back(extent.min);
    if (!buckets[at].ranges()) fixed_.emplace(sizes, at);
  }
  for (const Dim& dim : dims)
    require(dim.input < inputs.size() && dim.axis >= 0 && static_cast<size_t>(dim.axis) < inputs[dim.input].sizes.size() && dim.scale > 0,
            "a dim of the call table is read where no axis is");
}

bool Bucket::ranges() const {
  return std::any_of(extents.begin(), extents.end(), [](const Extent& extent) { return extent.ranges; });
}

std::string Input::shape() const {
  std::string text;
  for (const std::string& entry : entries) text += (text.empty() ? "" : ", ") + entry;
  return "[" + text + "]";
}

int64_t Extent::distance(int64_t size) const { return size < min ? min - size : std::max<int64_t>(size - max, 0); }

int64_t Extent::at_least(int64_t size) const {
  int64_t least = std::max(size, min), rest = least % multiple, next = 0;
  bool over = __builtin_add_overflow(least, rest ? multiple - rest : 0, &next);
  return over || next > max ? size : next;
}

Sizes CallTable::padded_sizes(const Bucket& bucket, const Sizes& sizes) const {
  Sizes run = sizes;
  for (size_t dim : bucket.grown) run[dim] = bucket.extents[dim].at_least(run[dim]);
  return run;
}

// The sizes at which a bucket runs a call of `sizes`: nothing where it does not.
std::optional<Sizes> CallTable::run_sizes(const Bucket& bucket, const Sizes& sizes) const {
  Sizes run = padded_sizes(bucket, sizes);
  for (size_t at = 0; at < run.size(); at++)
    if (!bucket.extents[at].takes(run[at])) return {};
  if (bucket.ranges())
    for (const Condition& condition : bucket.conditions)
      if (!condition.holds.at(run).value_or(0)) return {};
  return run;
}

std::optional<int64_t> CallTable::elements(const Sizes& sizes) const {  // of all inputs
  int64_t sum = 0;
  for (const Input& input : inputs) {
    int64_t count = 1;
    for (const Expression& entry : input.sizes) {
      Value size = entry.at(sizes);
      if (!size || __builtin_mul_overflow(count, *size, &count)) return {};
    }
    if (__builtin_add_overflow(sum, count, &sum)) return {};
  }
  return sum;
}

// The bucket of these very sizes; else of the fixed ones that hold the call once it is padded that with the fewest elements;
// else of those with ranges the narrowest, then that tuned nearest above the sizes; else of these, once the call is padded,
// that with the fewest elements.
std::optional<Choice> CallTable::choose(const Sizes& sizes) const {
  if (auto found = fixed_.find(sizes); found != fixed_.end()) return Choice{&buckets[found->second], sizes, sizes};
  std::optional<Choice> found;
  std::tuple<int, int64_t, int64_t, int64_t> least;
  for (const Bucket& bucket : buckets) {  // in the order of `fixed_` where elements are equal
    bool ranges = bucket.ranges();
    if (!ranges && bucket.grown.empty()) continue;
    std::optional<Sizes> run = run_sizes(bucket, sizes);
    if (!run) continue;
    bool padded = *run != sizes;
    Value count = padded ? elements(*run) : 0;
    if (!count) return {};
    int64_t distance = 0;
    for (size_t at = 0; at < sizes.size(); at++)
      if (const Extent& extent = bucket.extents[at]; extent.ranges)
        distance += extent.tuned >= (*run)[at] ? extent.tuned - (*run)[at] : (int64_t{1} << 40) + (*run)[at] - extent.tuned;
    std::tuple<int, int64_t, int64_t, int64_t> own{ranges + (ranges && padded), *count, bucket.rank, distance};
    if (!found || own < least || (own == least && !ranges && *run < found->run)) found = Choice{&bucket, sizes, *run}, least = own;
  }
  return found;
}

std::vector<Issue> CallTable::obstacles(const Bucket& bucket, const Sizes& sizes) const {
  std::vector<Issue> found;
  Sizes run = padded_sizes(bucket, sizes);
  for (size_t at = 0; at < sizes.size(); at++) {
    const Extent& extent = bucket.extents[at];
    if (extent.takes(run[at])) continue;
    const std::string &name = dims[at].name, came = std::to_string(run[at]);
    bool pads = std::find(bucket.grown.begin(), bucket.grown.end(), at) != bucket.grown.end();
    bool helps = run[at] > 0 && !pads && (!bucket.ranges() || extent.takes(extent.at_least(run[at])));
    std::string taken = std::to_string(extent.min);
    if (extent.ranges) taken += ".." + std::to_string(extent.max) + (extent.multiple != 1 ? " step " + std::to_string(extent.multiple) : "");
    found.push_back({name + " is " + came + ", the bucket takes " + (pads && !extent.ranges ? "up to " : "") + taken + (helps ? " and its inputs are not padded" : ""),
                     "", taken, came, run[at] == 0 ? "leave out calls in which " + name + " is 0" : helps ? "give the inputs `pad: {" + name + ": …}` in the manifest" : ""});
  }
  for (const Condition& condition : bucket.conditions)
    if (bucket.ranges() && !condition.holds.at(run).value_or(0)) found.push_back({"the compiled code needs " + condition.text, "", condition.text, "", ""});
  return found;
}

std::vector<Rejected> CallTable::rejected(const Sizes& sizes, const Bucket* but) const {
  std::vector<std::pair<int64_t, const Bucket*>> near;
  for (const Bucket& bucket : buckets) {
    int64_t distance = 0;
    for (size_t at = 0; at < sizes.size(); at++) distance += bucket.extents[at].distance(sizes[at]);
    near.push_back({distance, &bucket});
  }
  std::sort(near.begin(), near.end());  // equal ones in their order
  std::vector<Rejected> found;
  for (size_t at = 0; at < std::min(near.size(), SHOWN_BUCKETS); at++)
    if (near[at].second != but) found.push_back({near[at].second, obstacles(*near[at].second, sizes)});
  return found;
}

std::optional<Sizes> CallTable::read(const std::vector<const Tensor*>& given, std::vector<Issue>& issues) const {
  Sizes sizes;
  bool whole = true;
  for (const Dim& dim : dims) {
    int64_t came = given[dim.input]->sizes[dim.axis], size = came - dim.offset;
    sizes.push_back(size / dim.scale);
    if (size >= 0 && size % dim.scale == 0) continue;
    const std::string &entry = inputs[dim.input].entries[static_cast<size_t>(dim.axis)], actual = std::to_string(came);
    issues.push_back({"no `" + dim.name + "` makes " + entry + " " + actual, inputs[dim.input].name + ".shape[" + std::to_string(dim.axis) + "]", entry, actual, ""});
    whole = false;
  }
  return whole ? std::optional(sizes) : std::nullopt;
}

Sizes strides_in(const std::string& layout, const Sizes& sizes) {
  std::vector<size_t> fastest_first;
  if (layout != "contiguous" && sizes.size() > 1) fastest_first.push_back(1);
  for (size_t axis = sizes.size(); axis-- > 0;)
    if (axis != 1 || layout == "contiguous") fastest_first.push_back(axis);
  Sizes strides(sizes.size());
  int64_t step = 1;
  for (size_t axis : fastest_first) strides[axis] = step, step *= std::max<int64_t>(sizes[axis], 1);
  return strides;
}

std::string shown(const int64_t* numbers, int64_t count) {
  std::string text = "[";
  for (int64_t at = 0; at < count; at++) text += (at ? ", " : "") + std::to_string(numbers[at]);
  return text + "]";
}

Issue expected_issue(const std::string& label, const std::string& expected, const std::string& actual, const std::string& where, const std::string& hint) {
  return {label + " " + expected + " is expected, " + actual + " came", where, expected, actual, hint};
}

}  // namespace aotc::cpu
