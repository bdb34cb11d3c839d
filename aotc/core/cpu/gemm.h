// The product of two matrices.
#pragma once

#include "tensor.h"

namespace aotc::cpu {

struct Matrix {  // `data` is the first element; steps in elements
  const char* data;
  int64_t row, column;
};

// C = alpha * A @ B + beta * C, of M x K and K x N; C is not read where beta is 0. Of float32, float64, and of bfloat16
// and float16, whose products are summed in float32. Throws std::runtime_error for other dtypes. By OpenMP's
// threads where the product is large; within a parallel region there is but one.
void gemm(int32_t dtype, int64_t m, int64_t n, int64_t k, double alpha, Matrix a, Matrix b, double beta, Matrix c);

}  // namespace aotc::cpu
