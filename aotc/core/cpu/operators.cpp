// The operators that the standalone runtime has, under their names in torch's C shim
// (torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h): products of matrices, attention, convolution.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "floats.h"
#include "gemm.h"
#include "tensor.h"
#include "instructions.h"

typedef float Eight __attribute__((vector_size(32)));
#if defined(__aarch64__)
static Eight Sleef_expf8_u10(Eight x) {  // `sleef.h` is for x86-64
  for (int lane = 0; lane < 8; lane++) x[lane] = std::exp(x[lane]);
  return x;
}
#else
extern "C" Eight Sleef_expf8_u10(Eight);
#endif

namespace aotc::cpu {
namespace {

// `run(index)` for each index below `count`, by several threads where `parallel`. No exception may leave a thread of
// OpenMP's: one of them is thrown at the end.
template <typename Run>
void each_of(int64_t count, bool parallel, Run run) {
  std::string failed;
#pragma omp parallel for schedule(dynamic) if (parallel)
  for (int64_t index = 0; index < count; index++) {
    try {
      run(index);
    } catch (const std::exception& error) {
#pragma omp critical(aotc_failed)
      failed = error.what();
    }
  }
  if (!failed.empty()) throw std::runtime_error(failed);
}

Matrix matrix_of(const Tensor& tensor, int first, int64_t further = 0) {  // its axes `first` and the next
  return {tensor.bytes() + further * itemsize_of(tensor.dtype), tensor.strides[first], tensor.strides[first + 1]};
}

// -- products of matrices ---------------------------------------------------------------------------------------------

void put_summand(const Tensor& out, const Tensor& summand, double beta) {
  bool in_place = out.bytes() == summand.bytes() && out.rank == summand.rank &&
                  std::equal(out.strides, out.strides + out.rank, summand.strides);
  if (beta != 0 && !in_place) copy(out, summand);
}

// out = alpha * a @ b + beta * out, of two axes or, in batches, of three.
void product(const Tensor& out, const Tensor& a, const Tensor& b, double beta, double alpha, int rank) {
  int row = rank - 2, column = rank - 1;
  require(a.rank == rank && b.rank == rank && out.rank == rank, "an operand has another number of axes");
  require(a.dtype == b.dtype && a.dtype == out.dtype, "operands of different dtypes");
  require(a.sizes[column] == b.sizes[row] && out.sizes[row] == a.sizes[row] && out.sizes[column] == b.sizes[column] &&
              (rank == 2 || (a.sizes[0] == b.sizes[0] && out.sizes[0] == a.sizes[0])),
          "operands whose sizes do not fit");
  int64_t batches = rank == 3 ? out.sizes[0] : 1;
  each_of(batches, batches > 1, [&](int64_t at) {
    auto part = [&](const Tensor& of) { return matrix_of(of, row, rank == 3 ? at * of.strides[0] : 0); };
    gemm(out.dtype, out.sizes[row], out.sizes[column], a.sizes[column], alpha, part(a), part(b), beta, part(out));
  });
}

// -- attention --------------------------------------------------------------------------------------------------------

template <typename From, typename To>
Owned converted(const Tensor& from, int32_t dtype) {  // without gaps
  Owned dense(new_dense_like(from));
  copy(*dense, from);
  Owned made(new_empty(dense->rank, dense->sizes, dense->strides, dtype));
  const From* source = dense->as<From>();
  To* target = made->as<To>();
  for (int64_t at = 0, count = dense->elements(); at < count; at++) target[at] = static_cast<To>(static_cast<float>(source[at]));
  return made;
}

// exp(row - max) in place. Gives the sum and the maximum; a row of nothing but -inf becomes 0.
float exponentials(float* row, int64_t count, float& most) {
  Eight highest = Eight{} - INFINITY;
  int64_t at = 0;
  for (; at + 8 <= count; at += 8) {
    Eight here;
    std::memcpy(&here, row + at, sizeof here);
    highest = here > highest || here != here ? here : highest;  // NaN stays
  }
  most = -INFINITY;
  auto raise = [&](float value) { most = value > most || value != value ? value : most; };
  for (int lane = 0; lane < 8; lane++) raise(highest[lane]);
  for (; at < count; at++) raise(row[at]);
  if (most == -INFINITY) {
    std::fill(row, row + count, 0.0f);
    return 0;
  }
  Eight sums = {};
  float sum = 0;
  for (at = 0; at + 8 <= count; at += 8) {
    Eight here;
    std::memcpy(&here, row + at, sizeof here);
    here = Sleef_expf8_u10(here - most);
    std::memcpy(row + at, &here, sizeof here);
    sums += here;
  }
  for (; at < count; at++) sum += row[at] = std::exp(row[at] - most);
  for (int lane = 0; lane < 8; lane++) sum += sums[lane];
  return sum;
}

// Added to the scores of one row: of float32, or of bool (false: not looked at). Steps of an axis that is broadcast are 0.
struct Mask {
  const Tensor* tensor = nullptr;
  int64_t steps[4] = {};

  explicit Mask(const Tensor* given) : tensor(given) {
    if (!tensor) return;
    require(tensor->rank <= 4, "a mask of more than four axes");
    require(tensor->dtype == BOOL || tensor->dtype == FLOAT32, "a mask of another dtype than bool and float32");
    for (int axis = 0; axis < tensor->rank; axis++)
      steps[4 - tensor->rank + axis] = tensor->sizes[axis] == 1 ? 0 : tensor->strides[axis];
  }
  void add_to(float* row, int64_t count, int64_t batch, int64_t head, int64_t query) const {
    if (!tensor) return;
    int64_t first = batch * steps[0] + head * steps[1] + query * steps[2];
    if (tensor->dtype == FLOAT32) {
      const float* added = tensor->as<float>() + first;
      for (int64_t at = 0; at < count; at++) row[at] += added[at * steps[3]];
    } else {
      const bool* seen = tensor->as<bool>() + first;
      for (int64_t at = 0; at < count; at++)
        if (!seen[at * steps[3]]) row[at] = -INFINITY;
    }
  }
};

struct Attention { const Tensor &query, &key, &value, &out, &sums; const Mask& mask; double scale; bool causal; };

void attend_rows(const Attention& of, int64_t batch, int64_t head, int64_t first, int64_t count) {
  auto part = [&](const Tensor& tensor, int64_t row) {
    return matrix_of(tensor, 2, batch * tensor.strides[0] + head * tensor.strides[1] + row * tensor.strides[2]);
  };
  const int64_t keys = of.key.sizes[2], looked_at = of.causal ? std::min(keys, first + count) : keys;
  const auto scores = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(count * looked_at));
  const Matrix in_scores{reinterpret_cast<char*>(scores.get()), looked_at, 1}, key = part(of.key, 0);
  gemm(FLOAT32, count, looked_at, of.query.sizes[3], of.scale, part(of.query, first), {key.data, key.column, key.row}, 0,
       in_scores);
  std::vector<float> inverse(static_cast<size_t>(count));
  for (int64_t row = 0; row < count; row++) {
    float *of_row = scores.get() + row * looked_at, most;
    int64_t here = of.causal ? std::min(looked_at, first + row + 1) : looked_at;
    of.mask.add_to(of_row, here, batch, head, first + row);
    float sum = exponentials(of_row, here, most);
    std::fill(of_row + here, of_row + looked_at, 0.0f);
    inverse[row] = sum == 0 ? 0 : 1 / sum;
    of.sums.as<float>()[batch * of.sums.strides[0] + head * of.sums.strides[1] + (first + row) * of.sums.strides[2]] =
        most + std::log(sum);
  }
  Matrix out = part(of.out, first);
  gemm(FLOAT32, count, of.value.sizes[3], looked_at, 1, in_scores, part(of.value, 0), 0, out);
  for (int64_t row = 0; row < count; row++) {
    float* target = reinterpret_cast<float*>(const_cast<char*>(out.data)) + row * out.row;
    if (out.column == 1)
      for (int64_t column = 0; column < of.value.sizes[3]; column++) target[column] *= inverse[row];
    else
      for (int64_t column = 0; column < of.value.sizes[3]; column++) target[column * out.column] *= inverse[row];
  }
}

// softmax(scale * query @ key^T + mask) @ value, and the logarithms of the sums. Axes: batch, head, place, feature.
void attention(const Tensor& query, const Tensor& key, const Tensor& value, bool causal, const Tensor* mask, double scale,
               Owned& out, Owned& sums) {
  require(query.rank == 4 && key.rank == 4 && value.rank == 4, "operands of another number of axes than four");
  require(query.dtype == FLOAT32 && key.dtype == FLOAT32 && value.dtype == FLOAT32, "operands of another dtype");
  require(key.sizes[3] == query.sizes[3] && value.sizes[2] == key.sizes[2] && value.sizes[3] == query.sizes[3] &&
              key.sizes[0] == query.sizes[0] && key.sizes[1] == query.sizes[1],
          "operands whose sizes do not fit");
  out.reset(new_dense_like(query));
  const int64_t batches = query.sizes[0], heads = query.sizes[1], places = query.sizes[2];
  const int64_t sizes[] = {batches, heads, places}, strides[] = {places * heads, 1, heads};
  sums.reset(new_empty(3, sizes, strides, FLOAT32));
  constexpr int64_t SCORES = 1 << 16;  // of a block, which stay in a core's cache
  const int64_t rows = std::clamp<int64_t>(SCORES / std::max<int64_t>(key.sizes[2], 1), 48, 384);
  const int64_t blocks = (places + rows - 1) / rows;
  const Mask added(mask);
  const Attention of{query, key, value, *out, *sums, added, scale, causal};
  each_of(batches * heads * blocks, true, [&](int64_t task) {
    int64_t first = task % blocks * rows, head = task / blocks % heads, batch = task / blocks / heads;
    attend_rows(of, batch, head, first, std::min(rows, places - first));
  });
}

template <typename Narrow>
void attention_of(const Tensor& query, const Tensor& key, const Tensor& value, bool causal, const Tensor* mask,
                  double scale, Owned& out, Owned& sums) {
  auto wide = [](const Tensor& tensor) { return converted<Narrow, float>(tensor, FLOAT32); };
  Owned wide_mask = mask && mask->dtype == query.dtype ? wide(*mask) : nullptr, wide_out;
  attention(*wide(query), *wide(key), *wide(value), causal, wide_mask ? wide_mask.get() : mask, scale, wide_out, sums);
  out = converted<float, Narrow>(*wide_out, query.dtype);
}

// -- convolution ------------------------------------------------------------------------------------------------------

constexpr int SPACE = 3;  // axes of space; those that a tensor lacks have one element

struct Space {
  int64_t sizes[SPACE] = {1, 1, 1}, strides[SPACE] = {0, 0, 0};
  int64_t count() const { return sizes[0] * sizes[1] * sizes[2]; }
};

Space space_of(const Tensor& tensor) {
  Space space;
  for (int axis = 2; axis < tensor.rank; axis++) {
    int at = SPACE - tensor.rank + axis;
    space.sizes[at] = tensor.sizes[axis], space.strides[at] = tensor.strides[axis];
  }
  return space;
}

// Whether torch takes the tensor for one in channels last: `is_channels_last_strides` of c10/core/MemoryFormat.h.
bool in_channels_last(const Tensor& tensor) {
  if (tensor.rank < 4 || tensor.strides[1] == 0) return false;
  std::vector<int> order{1};
  for (int axis = tensor.rank - 1; axis > 1; axis--) order.push_back(axis);
  order.push_back(0);
  int64_t least = 0;
  for (int axis : order) {
    if (tensor.sizes[axis] == 0 || tensor.strides[axis] < least) return false;
    if (axis == 0 && least == tensor.strides[1]) return false;
    least = tensor.strides[axis] * std::max<int64_t>(tensor.sizes[axis], 1);
  }
  return true;
}

struct Window { int64_t stride[SPACE] = {1, 1, 1}, padding[SPACE] = {}, dilation[SPACE] = {1, 1, 1}; };

struct Columns {  // of one image, each the pixels under one tap of the window
  Space image, places, taps;
  Window window;
  int64_t channel_stride;                // of the image
  int64_t of_channel, of_tap, of_place;  // steps in `data`
  float* data;

  int64_t rows() const { return places.sizes[0] * places.sizes[1]; }  // of places

  // `run(elements, pixel, first, end)` for each tap of each of the rows: where the elements of its places begin, where the
  // pixel of its place 0 would lie, and which places have a pixel within the image.
  template <typename Run>
  void each_tap(int64_t first_row, int64_t last_row, Run run) const {
    const int64_t width = places.sizes[2], step = window.stride[2];
    auto reached = [&](int axis, int64_t place, int64_t tap) {
      return place * window.stride[axis] - window.padding[axis] + tap * window.dilation[axis];
    };
    for (int64_t row = first_row; row < last_row; row++)
      for (int64_t tap = 0; tap < taps.count(); tap++) {
        const int64_t tap_x = tap % taps.sizes[2], tap_y = tap / taps.sizes[2] % taps.sizes[1],
                      tap_z = tap / taps.sizes[2] / taps.sizes[1];
        const int64_t x = reached(2, 0, tap_x), y = reached(1, row % places.sizes[1], tap_y),
                      z = reached(0, row / places.sizes[1], tap_z);
        const bool within = y >= 0 && y < image.sizes[1] && z >= 0 && z < image.sizes[0] && x < image.sizes[2];
        const int64_t first = within ? std::min(width, (std::max<int64_t>(-x, 0) + step - 1) / step) : width;
        const int64_t end = within ? std::clamp((image.sizes[2] - x + step - 1) / step, first, width) : width;
        run(data + tap * of_tap + row * width * of_place,
            z * image.strides[0] + y * image.strides[1] + x * image.strides[2], first, end);
      }
  }

  void fill(int64_t row, int64_t channels, const float* pixels) const {
    const int64_t width = places.sizes[2], step = window.stride[2] * image.strides[2];
    each_tap(row, row + 1, [&](float* elements, int64_t pixel, int64_t first, int64_t end) {
      if (of_channel == 1) {
        for (int64_t place = 0; place < width; place++, elements += of_place)
          if (place < first || place >= end) std::fill_n(elements, channels, 0.0f);
          else put(elements, pixels + pixel + place * step, channels, channel_stride);
      } else {
        for (int64_t channel = 0; channel < channels; channel++, elements += of_channel) {
          std::fill(elements, elements + first, 0.0f), std::fill(elements + end, elements + width, 0.0f);
          put(elements + first, pixels + pixel + first * step + channel * channel_stride, end - first, step);
        }
      }
    });
  }

  void add_to(float* pixels, int64_t channel) const {
    const int64_t step = window.stride[2] * image.strides[2];
    each_tap(0, rows(), [&](const float* elements, int64_t pixel, int64_t first, int64_t end) {
      float* target = pixels + pixel + channel * channel_stride;
      for (int64_t place = first; place < end; place++) target[place * step] += elements[channel * of_channel + place];
    });
  }

 private:
  static void put(float* target, const float* source, int64_t count, int64_t step) {
    if (step == 1) std::copy_n(source, count, target);
    else for (int64_t at = 0; at < count; at++) target[at] = source[at * step];
  }
};

struct Convolution {
  const Tensor &input, &weight;
  const Tensor* bias;
  Window window;
  int64_t groups;
  const int64_t* output_padding;
  bool transposed;
};

void check_convolution(const Convolution& of) {
  int rank = of.input.rank;
  require(rank >= 3 && rank <= 2 + SPACE && of.weight.rank == rank, "other axes than a batch, channels and one to three of space");
  require(of.input.dtype == FLOAT32 && of.weight.dtype == FLOAT32 && (!of.bias || of.bias->dtype == FLOAT32),
          "numbers of another dtype than float32");
  int64_t channels = of.transposed ? of.weight.sizes[0] : of.weight.sizes[1] * of.groups;
  require(of.groups > 0 && of.input.sizes[1] == channels && of.weight.sizes[0] % of.groups == 0, "channels that do not fit");
}

Owned empty_output(const Convolution& of) {
  const Space image = space_of(of.input), taps = space_of(of.weight);
  int rank = of.input.rank;
  int64_t sizes[2 + SPACE], strides[2 + SPACE];
  sizes[0] = of.input.sizes[0], sizes[1] = of.transposed ? of.weight.sizes[1] * of.groups : of.weight.sizes[0];
  for (int axis = 2; axis < rank; axis++) {
    int at = SPACE - rank + axis;
    int64_t reach = of.window.dilation[at] * (taps.sizes[at] - 1) + 1, step = of.window.stride[at];
    const int64_t room = image.sizes[at] + 2 * of.window.padding[at] - reach;
    sizes[axis] = of.transposed ? (image.sizes[at] - 1) * step - 2 * of.window.padding[at] + reach + of.output_padding[axis - 2]
                                : room < 0 ? -1 : room / step + 1;
    require(sizes[axis] >= 0, "a window that is larger than the image");
  }
  bool channels_last = in_channels_last(of.input) || in_channels_last(of.weight);
  int64_t step = channels_last ? sizes[1] : 1;
  for (int axis = rank - 1; axis > 1; axis--) strides[axis] = step, step *= std::max<int64_t>(sizes[axis], 1);
  strides[1] = channels_last ? 1 : step, strides[0] = channels_last ? step : step * sizes[1];
  return Owned(new_empty(rank, sizes, strides, FLOAT32));
}

void fill_with_bias(const Tensor& out, const Tensor* bias) {
  float zero = 0;
  Storage storage{reinterpret_cast<char*>(&zero), sizeof zero, [](Storage*) {}};
  Tensor repeated{&storage, 0, out.rank, FLOAT32, {}, {}};
  std::fill(repeated.sizes, repeated.sizes + out.rank, 1);
  if (bias) {
    repeated.storage = bias->storage, repeated.offset = bias->offset;
    repeated.sizes[1] = bias->sizes[0], repeated.strides[1] = bias->strides[0];
  }
  copy(out, repeated);
}

// The weight with the taps of a channel side by side, or with the channels of a tap.
Owned weight_in_order(const Tensor& weight, bool channels_last) {
  int64_t strides[2 + SPACE], taps = 1, step = channels_last ? weight.sizes[1] : 1;
  for (int axis = weight.rank - 1; axis > 1; axis--) strides[axis] = step * taps, taps *= weight.sizes[axis];
  strides[1] = channels_last ? 1 : taps, strides[0] = taps * weight.sizes[1];
  bool lies_so = true;
  for (int axis = 0; axis < weight.rank; axis++) lies_so = lies_so && (weight.sizes[axis] == 1 || weight.strides[axis] == strides[axis]);
  if (lies_so) return Owned(shared(weight));
  Owned ordered(new_empty(weight.rank, weight.sizes, strides, weight.dtype));
  copy(*ordered, weight);
  return ordered;
}

const Matrix moved(const Tensor& tensor, int64_t further, int64_t row, int64_t column) {
  return {tensor.bytes() + further * static_cast<int64_t>(sizeof(float)), row, column};
}

Owned convolved(const Convolution& of) {
  check_convolution(of);
  Owned out = empty_output(of);
  if (!out->elements()) return out;
  fill_with_bias(*out, of.bias);
  if (!of.input.elements() || !of.weight.elements()) return out;
  // A transposed convolution goes the other way: from the places of the window to the image, which is the output.
  const Tensor &image = of.transposed ? *out : of.input, &places = of.transposed ? of.input : *out;
  const bool last = !of.transposed && in_channels_last(*out);
  const Space in_image = space_of(image), in_places = space_of(places), taps = space_of(of.weight);
  Owned dense_places;  // whose pixels lie with one step
  const Tensor* flat = &places;
  for (int axis = 2; axis + 1 < places.rank; axis++)
    if (places.sizes[axis] > 1 && places.strides[axis] != places.strides[axis + 1] * places.sizes[axis + 1]) flat = nullptr;
  if (!flat) {
    dense_places.reset(new_empty(places.rank, places.sizes, nullptr, FLOAT32));
    copy(*dense_places, places);
    flat = dense_places.get();
  }
  const Owned weight = weight_in_order(of.weight, last);
  const int64_t channels = image.sizes[1] / of.groups, filters = places.sizes[1] / of.groups;
  const int64_t count = in_places.count(), rows = channels * taps.count(), pixel = flat->strides[flat->rank - 1];
  const int64_t tasks = of.input.sizes[0] * of.groups;
  const bool by_task = tasks >= 2 * omp_get_max_threads();  // else the threads share one
  each_of(tasks, by_task, [&](int64_t task) {
    int64_t batch = task / of.groups, group = task % of.groups;
    const auto memory = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(rows * count));
    Columns columns{in_image, in_places, taps, of.window, image.strides[1],
                    last ? 1 : taps.count() * count, last ? channels : count, last ? rows : 1, memory.get()};
    float* pixels = image.as<float>() + batch * image.strides[0] + group * channels * image.strides[1];
    const Matrix in_columns{reinterpret_cast<char*>(memory.get()), last ? 1 : count, last ? rows : 1};
    const Matrix of_places = moved(*flat, batch * flat->strides[0] + group * filters * flat->strides[1], flat->strides[1], pixel);
    const Matrix kernel = moved(*weight, group * filters * weight->strides[0], weight->strides[0], 1);
    if (of.transposed) {
      gemm(FLOAT32, rows, count, filters, 1, {kernel.data, 1, kernel.row}, of_places, 0, in_columns);
      each_of(channels, !by_task, [&](int64_t channel) { columns.add_to(pixels, channel); });
      return;
    }
    each_of(columns.rows(), !by_task, [&](int64_t row) { columns.fill(row, channels, pixels); });
    gemm(FLOAT32, filters, count, rows, 1, kernel, in_columns, 1, of_places);
  });
  return out;
}

template <typename Run>
int32_t guarded(const char* name, Run run) {
  try {
    run();
    return 0;
  } catch (const std::exception& error) {
    set_failure((std::string(name) + ": " + error.what()).c_str());
    return 1;
  }
}

}  // namespace
}  // namespace aotc::cpu

using namespace aotc::cpu;

AOTC_EXPORTED int32_t aoti_torch_cpu_mm_out(Tensor* out, Tensor* a, Tensor* b) {
  return guarded("mm", [&] { product(*out, *a, *b, 0, 1, 2); });
}
AOTC_EXPORTED int32_t aoti_torch_cpu_bmm_out(Tensor* out, Tensor* a, Tensor* b) {
  return guarded("bmm", [&] { product(*out, *a, *b, 0, 1, 3); });
}
AOTC_EXPORTED int32_t aoti_torch_cpu_addmm_out(Tensor* out, Tensor* summand, Tensor* a, Tensor* b, double beta, double alpha) {
  return guarded("addmm", [&] {
    put_summand(*out, *summand, beta);
    product(*out, *a, *b, beta, alpha, 2);
  });
}
AOTC_EXPORTED int32_t aoti_torch_cpu_baddbmm_out(Tensor* out, Tensor* summand, Tensor* a, Tensor* b, double beta, double alpha) {
  return guarded("baddbmm", [&] {
    put_summand(*out, *summand, beta);
    product(*out, *a, *b, beta, alpha, 3);
  });
}
AOTC_EXPORTED int32_t aoti_torch_cpu__linear_pointwise(Tensor* input, Tensor* weight, Tensor** bias, const char* then,
                                                       const double**, int64_t, const char**, Tensor** result) {
  return guarded("linear", [&] {
    require(std::string(then) == "none", "a function of the result");
    require(input->rank == 2 && weight->rank == 2, "an operand has another number of axes");
    Owned turned(shared(*weight));
    std::swap(turned->sizes[0], turned->sizes[1]), std::swap(turned->strides[0], turned->strides[1]);
    const int64_t sizes[] = {input->sizes[0], weight->sizes[0]};
    Owned out(new_empty(2, sizes, nullptr, input->dtype));
    if (bias) put_summand(*out, **bias, 1);
    product(*out, *input, *turned, bias ? 1 : 0, 1, 2);
    *result = out.release();
  });
}
AOTC_EXPORTED int32_t aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu(
    Tensor* query, Tensor* key, Tensor* value, double dropout, int32_t causal, Tensor** mask, double* scale,
    Tensor** out, Tensor** sums) {
  return guarded("attention", [&] {
    require(dropout == 0, "dropout");
    double factor = scale ? *scale : 1 / std::sqrt(static_cast<double>(query->sizes[3]));
    Owned made, logarithms;
    auto attend = query->dtype == BFLOAT16 ? attention_of<BFloat16> : query->dtype == FLOAT16 ? attention_of<Float16> : attention;
    attend(*query, *key, *value, causal != 0, mask ? *mask : nullptr, factor, made, logarithms);
    *out = made.release(), *sums = logarithms.release();
  });
}
AOTC_EXPORTED int32_t aoti_torch_cpu_convolution(Tensor* input, Tensor* weight, Tensor** bias, const int64_t* stride,
                                                 int64_t strides, const int64_t* padding, int64_t paddings,
                                                 const int64_t* dilation, int64_t dilations, int32_t transposed,
                                                 const int64_t* output_padding, int64_t, int64_t groups, Tensor** out) {
  return guarded("convolution", [&] {
    int64_t axes = input->rank - 2;
    Convolution of{*input, *weight, bias ? *bias : nullptr, {}, groups, output_padding, transposed != 0};
    require(axes >= 1 && axes <= SPACE, "other axes than a batch, channels and one to three of space");
    auto put = [&](int64_t* into, const int64_t* from, int64_t count) {  // one number may be that of all axes
      for (int64_t axis = 0; axis < axes; axis++) into[SPACE - axes + axis] = from[count == 1 ? 0 : axis];
    };
    put(of.window.stride, stride, strides), put(of.window.padding, padding, paddings);
    put(of.window.dilation, dilation, dilations);
    *out = convolved(of).release();
  });
}
