// A blocked product: panels of A and B are packed, converted to the type of the sums, and multiplied tile by tile in
// registers. The plan is that of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).
#include "gemm.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>

#include "floats.h"
#include "instructions.h"

namespace aotc::cpu {
namespace {

constexpr int64_t ROWS = 6;                 // of a tile
constexpr int64_t DEPTH = 512;              // of a panel, where sums are kept in C between panels
constexpr int64_t BLOCK = 64;               // panels of A, which stay in a core's cache while panels of B pass
constexpr int64_t SERIAL_BELOW = 1 << 16;   // multiplications

template <typename Sum>
struct Lanes {
  typedef Sum Vector __attribute__((vector_size(32)));
  static constexpr int64_t COUNT = 32 / sizeof(Sum), COLUMNS = 2 * COUNT;

  static Vector at(const Sum* address) {  // which need not be aligned
    Vector loaded;
    std::memcpy(&loaded, address, sizeof loaded);
    return loaded;
  }
  static void put(Sum* address, Vector value) { std::memcpy(address, &value, sizeof value); }
};

template <typename Sum>
class Panels {  // packed memory, aligned for vectors
 public:
  explicit Panels(int64_t count)
      : memory_(static_cast<Sum*>(::operator new(static_cast<size_t>(count) * sizeof(Sum), std::align_val_t{64}))) {}
  Sum* get() const { return memory_.get(); }

 private:
  struct Delete { void operator()(Sum* memory) const { ::operator delete(memory, std::align_val_t{64}); } };
  std::unique_ptr<Sum, Delete> memory_;
};

// A square of COUNT x COUNT, transposed in registers.
template <typename Sum>
void turn(Sum* into, int64_t to, const Sum* from, int64_t step) {
  using Vector = typename Lanes<Sum>::Vector;
  constexpr int64_t COUNT = Lanes<Sum>::COUNT;
  using Places = decltype(Vector{} < Vector{});
  Places low, high;
  for (int64_t at = 0; at < COUNT; at++) low[at] = at / 2 + (at % 2) * COUNT, high[at] = low[at] + COUNT / 2;
  Vector rows[COUNT], mixed[COUNT];
#pragma GCC unroll 8
  for (int64_t at = 0; at < COUNT; at++) rows[at] = Lanes<Sum>::at(from + at * step);
#pragma GCC unroll 4
  for (int64_t round = 1; round < COUNT; round *= 2) {
#pragma GCC unroll 4
    for (int64_t at = 0; at < COUNT / 2; at++) {
      mixed[2 * at] = __builtin_shuffle(rows[at], rows[at + COUNT / 2], low);
      mixed[2 * at + 1] = __builtin_shuffle(rows[at], rows[at + COUNT / 2], high);
    }
#pragma GCC unroll 8
    for (int64_t at = 0; at < COUNT; at++) rows[at] = mixed[at];
  }
#pragma GCC unroll 8
  for (int64_t at = 0; at < COUNT; at++) Lanes<Sum>::put(into + at * to, rows[at]);
}

// `width` elements along `across` for each of `depth` steps; what is missing to a whole panel is 0.
template <int64_t WIDTH, typename In, typename Sum>
void pack(Sum* into, const In* from, int64_t across, int64_t along, int64_t width, int64_t depth) {
  if (width == WIDTH && across == 1) {
    for (int64_t step = 0; step < depth; step++)
      for (int64_t at = 0; at < WIDTH; at++) into[step * WIDTH + at] = static_cast<Sum>(from[step * along + at]);
    return;
  }
  int64_t done = 0;
  if constexpr (std::is_same_v<In, Sum> && WIDTH % Lanes<Sum>::COUNT == 0) {
    constexpr int64_t COUNT = Lanes<Sum>::COUNT;
    if (width == WIDTH && along == 1)
      for (; done + COUNT <= depth; done += COUNT)
        for (int64_t at = 0; at < WIDTH; at += COUNT) turn(into + done * WIDTH + at, WIDTH, from + at * across + done, across);
  }
  for (; done < depth; done++)
    for (int64_t at = 0; at < WIDTH; at++)
      into[done * WIDTH + at] = at < width ? static_cast<Sum>(from[at * across + done * along]) : Sum{0};
}

template <typename Out, typename Sum>
struct Target {  // a part of C
  Out* data;
  int64_t row, column, rows, columns;
  Sum alpha, beta;
};

template <typename Out, typename Sum>
void multiply_tile(int64_t depth, const Sum* a, const Sum* b, const Target<Out, Sum>& c) {
  using Vector = typename Lanes<Sum>::Vector;
  constexpr int64_t COUNT = Lanes<Sum>::COUNT, COLUMNS = Lanes<Sum>::COLUMNS;
  Vector sums[ROWS][2] = {};
  for (int64_t step = 0; step < depth; step++, a += ROWS, b += COLUMNS) {
    Vector first = Lanes<Sum>::at(b), second = Lanes<Sum>::at(b + COUNT);
#pragma GCC unroll 6
    for (int64_t row = 0; row < ROWS; row++) sums[row][0] += a[row] * first, sums[row][1] += a[row] * second;
  }
  if constexpr (std::is_same_v<Out, Sum>) {
    if (c.rows == ROWS && c.columns == COLUMNS && c.column == 1) {
#pragma GCC unroll 6
      for (int64_t row = 0; row < ROWS; row++) {
        for (int half = 0; half < 2; half++) {
          Sum* target = c.data + row * c.row + half * COUNT;
          Vector sum = c.alpha * sums[row][half];
          Lanes<Sum>::put(target, c.beta == 0 ? sum : sum + c.beta * Lanes<Sum>::at(target));
        }
      }
      return;
    }
  }
  for (int64_t row = 0; row < c.rows; row++)
    for (int64_t column = 0; column < c.columns; column++) {
      Out& target = c.data[row * c.row + column * c.column];
      Sum sum = c.alpha * sums[row][column / COUNT][column % COUNT];
      target = static_cast<Out>(c.beta == 0 ? sum : sum + c.beta * static_cast<Sum>(target));
    }
}

// One row of A: each element of B is read once, in the order in which it lies, and nothing is packed.
template <typename Sum>
void multiply_row(int64_t n, int64_t k, Sum alpha, const Sum* a, const Sum* b, int64_t b_row, int64_t b_column, Sum beta,
                  Sum* c, int64_t c_column) {
  using Vector = typename Lanes<Sum>::Vector;
  constexpr int64_t COUNT = Lanes<Sum>::COUNT;
  auto put = [&](int64_t column, Sum sum) {
    Sum& target = c[column * c_column];
    target = beta == 0 ? alpha * sum : alpha * sum + beta * target;
  };
  if (b_row == 1) {
#pragma omp parallel for if (n * k > SERIAL_BELOW)
    for (int64_t column = 0; column < n; column++) {
      const Sum* of_column = b + column * b_column;
      Vector sums[2] = {};
      int64_t step = 0;
      for (; step + 2 * COUNT <= k; step += 2 * COUNT)
        for (int half = 0; half < 2; half++)
          sums[half] += Lanes<Sum>::at(of_column + step + half * COUNT) * Lanes<Sum>::at(a + step + half * COUNT);
      Sum sum = 0;
      sums[0] += sums[1];
      for (int64_t lane = 0; lane < COUNT; lane++) sum += sums[0][lane];
      for (; step < k; step++) sum += a[step] * of_column[step];
      put(column, sum);
    }
    return;
  }
  constexpr int64_t WIDE = 64;
#pragma omp parallel for if (n * k > SERIAL_BELOW)
  for (int64_t first = 0; first < n; first += WIDE) {
    Sum sums[WIDE] = {};
    int64_t width = std::min(WIDE, n - first);
    for (int64_t step = 0; step < k; step++) {
      const Sum* of_row = b + step * b_row + first * b_column;
      for (int64_t at = 0; at < width; at++) sums[at] += a[step] * of_row[at * b_column];
    }
    for (int64_t at = 0; at < width; at++) put(first + at, sums[at]);
  }
}

template <typename In, typename Sum>
void multiply(int64_t m, int64_t n, int64_t k, Sum alpha, Matrix of_a, Matrix of_b, Sum beta, Matrix of_c) {
  constexpr int64_t COLUMNS = Lanes<Sum>::COLUMNS;
  const In *a = reinterpret_cast<const In*>(of_a.data), *b = reinterpret_cast<const In*>(of_b.data);
  In* c = reinterpret_cast<In*>(const_cast<char*>(of_c.data));
  if constexpr (std::is_same_v<In, Sum>)
    if (m == 1 && of_a.column == 1)
      return multiply_row(n, k, alpha, a, b, of_b.row, of_b.column, beta, c, of_c.column);
  const int64_t most = std::is_same_v<In, Sum> ? DEPTH : k;  // sums in C of a narrow type would be rounded
  const int64_t a_panels = (m + ROWS - 1) / ROWS, b_panels = (n + COLUMNS - 1) / COLUMNS;
  const int64_t longest = std::min(k, most), threads = m * n * k > SERIAL_BELOW && !omp_in_parallel() ? omp_get_max_threads() : 1;
  const Panels<Sum> a_packed(a_panels * ROWS * longest), b_packed(threads * COLUMNS * longest);
#pragma omp parallel num_threads(threads)
  {
    Sum* b_panel = b_packed.get() + omp_get_thread_num() * COLUMNS * longest;  // in the nearest cache of this thread
    for (int64_t first = 0; first < k; first += most) {
      const int64_t depth = std::min(most, k - first);
#pragma omp for
      for (int64_t panel = 0; panel < a_panels; panel++)
        pack<ROWS>(a_packed.get() + panel * ROWS * depth, a + first * of_a.column + panel * ROWS * of_a.row, of_a.row,
                   of_a.column, std::min(ROWS, m - panel * ROWS), depth);
#pragma omp for collapse(2)
      for (int64_t block = 0; block < a_panels; block += BLOCK)
        for (int64_t column = 0; column < b_panels; column++) {
          pack<COLUMNS>(b_panel, b + first * of_b.row + column * COLUMNS * of_b.column, of_b.column, of_b.row,
                        std::min(COLUMNS, n - column * COLUMNS), depth);
          for (int64_t row = block; row < std::min(a_panels, block + BLOCK); row++)
            multiply_tile<In, Sum>(
                depth, a_packed.get() + row * ROWS * depth, b_panel,
                {c + row * ROWS * of_c.row + column * COLUMNS * of_c.column, of_c.row, of_c.column,
                 std::min(ROWS, m - row * ROWS), std::min(COLUMNS, n - column * COLUMNS), alpha, first ? Sum{1} : beta});
        }
    }
  }
}

template <typename In, typename Sum>
void product(int64_t m, int64_t n, int64_t k, double alpha, Matrix a, Matrix b, double beta, Matrix c) {
  if (k == 0 || alpha == 0) {
    In* data = reinterpret_cast<In*>(const_cast<char*>(c.data));
    for (int64_t row = 0; row < m; row++)
      for (int64_t column = 0; column < n; column++) {
        In& target = data[row * c.row + column * c.column];
        target = static_cast<In>(beta == 0 ? Sum{0} : static_cast<Sum>(beta) * static_cast<Sum>(target));
      }
  } else if (c.column != 1 && c.row == 1) {  // as its transpose, whose rows lie side by side
    multiply<In, Sum>(n, m, k, static_cast<Sum>(alpha), {b.data, b.column, b.row}, {a.data, a.column, a.row},
                      static_cast<Sum>(beta), {c.data, c.column, c.row});
  } else {
    multiply<In, Sum>(m, n, k, static_cast<Sum>(alpha), a, b, static_cast<Sum>(beta), c);
  }
}

}  // namespace

void gemm(int32_t dtype, int64_t m, int64_t n, int64_t k, double alpha, Matrix a, Matrix b, double beta, Matrix c) {
  if (!m || !n) return;
  if (dtype == FLOAT32) return product<float, float>(m, n, k, alpha, a, b, beta, c);
  if (dtype == FLOAT64) return product<double, double>(m, n, k, alpha, a, b, beta, c);
  if (dtype == BFLOAT16) return product<BFloat16, float>(m, n, k, alpha, a, b, beta, c);
  if (dtype == FLOAT16) return product<Float16, float>(m, n, k, alpha, a, b, beta, c);
  const char* name = name_of_dtype(dtype);
  throw std::runtime_error(std::string("a product of matrices of ") + (name ? name : "another dtype") +
                           ", which the standalone runtime does not have");
}

}  // namespace aotc::cpu
