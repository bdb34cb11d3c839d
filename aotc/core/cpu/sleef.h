// SLEEF's vector functions by their names, which Inductor's code calls and torch brings (https://sleef.org): written
// with glibc's libmvec. A float function is computed in double, so that its error stays below 0.6 units in the last
// place (SLEEF's `u10` allows 1.0), but for `exp` and `tanh`, which attention and activations call. A double one is
// libm's, lane by lane.
//
// Included by one file for each width, after it has defined the BYTES of a vector, the suffixes F_SUFFIX and D_SUFFIX of
// such vectors in SLEEF's names, and LIBMVEC(name, arguments) for libmvec's names.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float FLOATS __attribute__((vector_size(BYTES)));
typedef double DOUBLES __attribute__((vector_size(BYTES)));
typedef float HALF __attribute__((vector_size(BYTES / 2)));

namespace {

inline void halves(FLOATS x, DOUBLES& low, DOUBLES& high) {
  HALF each[2];
  memcpy(each, &x, sizeof each);
  low = __builtin_convertvector(each[0], DOUBLES), high = __builtin_convertvector(each[1], DOUBLES);
}

inline FLOATS joined(DOUBLES low, DOUBLES high) {
  HALF each[2] = {__builtin_convertvector(low, HALF), __builtin_convertvector(high, HALF)};
  FLOATS x;
  memcpy(&x, each, sizeof x);
  return x;
}

// exp(x) = 2^n * exp(r), where r is at most half of log(2). The polynomial interpolates exp at Chebyshev's points. Over all
// floats the error is below 0.99 units in the last place.
inline FLOATS exp_of(FLOATS x) {
  typedef decltype(x < x) INTEGERS;
  constexpr float ROUNDING = 0x1.8p+23f;  // a sum with it has no fraction, and its bits count on from ROUNDING's
  x = x > 89.0f ? FLOATS{} + 89.0f : x < -104.0f ? FLOATS{} - 104.0f : x;
  FLOATS n = x * 0x1.715476p+0f + ROUNDING;
  INTEGERS power = (INTEGERS)n - 0x4b400000, half = power >> 1;
  n -= ROUNDING;
  FLOATS r = x - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f;  // log(2) in two parts, of which n times the first is exact
  constexpr float FACTORS[] = {0.0013933685841038823f, 0.00833331048488617f, 0.041666463017463684f, 0.1666666716337204f, 0.5f};
  FLOATS sum = FLOATS{} + 0.00019891030387952924f;
  for (float factor : FACTORS) sum = sum * r + factor;
  sum = sum * (r * r) + r + 1.0f;
  auto power_of_two = [](INTEGERS exponent) { return (FLOATS)((exponent + 127) << 23); };
  return sum * power_of_two(half) * power_of_two(power - half);  // in two steps, since 2^n may be no float
}

// Below 1 a polynomial, from there on 1 - 2 / (exp(2x) + 1). Over all floats the error is below 0.97 units in the last
// place.
inline FLOATS tanh_of(FLOATS x) {
  typedef decltype(x < x) INTEGERS;
  constexpr float FACTORS[] = {0.00033743251697160304f, -0.0012417645193636417f, 0.0034780751448124647f, -0.008826114237308502f,
                               0.021862544119358063f, -0.053967591375112534f, 0.13333331048488617f, -0.3333333432674408f};
  const INTEGERS sign = (INTEGERS)x & INT32_MIN;
  const FLOATS size = (FLOATS)((INTEGERS)x ^ sign), square = x * x;
  FLOATS sum = FLOATS{} - 4.8398924263892695e-05f;
  for (float factor : FACTORS) sum = sum * square + factor;
  const FLOATS small = size + size * (square * sum), large = 1.0f - 2.0f / (exp_of(2.0f * size) + 1.0f);
  return (FLOATS)((INTEGERS)(size < 1.0f ? small : large) | sign);
}

inline double lgamma_of(double x) {  // `lgamma` writes the sign to a variable of the process
  int sign;
  return lgamma_r(x, &sign);
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define PASTED_(one, other, last) one##other##last
#define PASTED(one, other, last) PASTED_(one, other, last)
#define SLEEF_F(name, precision) PASTED(Sleef_##name, F_SUFFIX, precision)
#define SLEEF_D(name, precision) PASTED(Sleef_##name, D_SUFFIX, precision)

#define LANES(vector, type) static_cast<int>(sizeof(vector) / sizeof(type))

// By libmvec in double, of one argument and of two.
#define ONE(name, precision)                                                       \
  extern "C" DOUBLES LIBMVEC(name, v)(DOUBLES);                                    \
  EXPORTED FLOATS SLEEF_F(name, precision)(FLOATS x) {                             \
    DOUBLES low, high;                                                             \
    halves(x, low, high);                                                          \
    return joined(LIBMVEC(name, v)(low), LIBMVEC(name, v)(high));                  \
  }                                                                                \
  BY_LANES(name, name, precision)
#define TWO(name, precision)                                                       \
  extern "C" DOUBLES LIBMVEC(name, vv)(DOUBLES, DOUBLES);                          \
  EXPORTED FLOATS SLEEF_F(name, precision)(FLOATS x, FLOATS y) {                   \
    DOUBLES x_low, x_high, y_low, y_high;                                          \
    halves(x, x_low, x_high), halves(y, y_low, y_high);                            \
    return joined(LIBMVEC(name, vv)(x_low, y_low), LIBMVEC(name, vv)(x_high, y_high)); \
  }                                                                                \
  BY_LANES_OF_TWO(name, precision)

// By libm, lane by lane.
#define BY_LANES(name, of_double, precision)                                       \
  EXPORTED DOUBLES SLEEF_D(name, precision)(DOUBLES x) {                           \
    for (int lane = 0; lane < LANES(DOUBLES, double); lane++) x[lane] = of_double(x[lane]); \
    return x;                                                                      \
  }
#define BY_LANES_OF_TWO(name, precision)                                           \
  EXPORTED DOUBLES SLEEF_D(name, precision)(DOUBLES x, DOUBLES y) {                \
    for (int lane = 0; lane < LANES(DOUBLES, double); lane++) x[lane] = name(x[lane], y[lane]); \
    return x;                                                                      \
  }
#define FLOATS_BY_LANES(name, of_float, precision)                                 \
  EXPORTED FLOATS SLEEF_F(name, precision)(FLOATS x) {                             \
    for (int lane = 0; lane < LANES(FLOATS, float); lane++) x[lane] = of_float(x[lane]); \
    return x;                                                                      \
  }
#define FLOATS_BY_LANES_OF_TWO(name, of_float, precision)                          \
  EXPORTED FLOATS SLEEF_F(name, precision)(FLOATS x, FLOATS y) {                   \
    for (int lane = 0; lane < LANES(FLOATS, float); lane++) x[lane] = of_float(x[lane], y[lane]); \
    return x;                                                                      \
  }

EXPORTED FLOATS SLEEF_F(exp, _u10)(FLOATS x) { return exp_of(x); }
BY_LANES(exp, exp, _u10)
EXPORTED FLOATS SLEEF_F(tanh, _u10)(FLOATS x) { return tanh_of(x); }
BY_LANES(tanh, tanh, _u10)
ONE(exp2, _u10)
ONE(expm1, _u10)
ONE(log, _u10)
ONE(log2, _u10)
ONE(log10, _u10)
ONE(log1p, _u10)
ONE(sin, _u10)
ONE(cos, _u10)
ONE(tan, _u10)
ONE(sinh, _u10)
ONE(cosh, _u10)
ONE(asin, _u10)
ONE(acos, _u10)
ONE(atan, _u10)
ONE(asinh, _u10)
ONE(acosh, _u10)
ONE(atanh, _u10)
ONE(erf, _u10)
ONE(erfc, _u15)
TWO(pow, _u10)
TWO(atan2, _u10)
TWO(hypot, _u05)
BY_LANES(lgamma, lgamma_of, _u10)
FLOATS_BY_LANES(lgamma, lgamma_of, _u10)
BY_LANES_OF_TWO(fmod, )
FLOATS_BY_LANES_OF_TWO(fmod, fmodf, )
BY_LANES_OF_TWO(copysign, )
FLOATS_BY_LANES_OF_TWO(copysign, copysignf, )
BY_LANES_OF_TWO(nextafter, )
FLOATS_BY_LANES_OF_TWO(nextafter, nextafterf, )

EXPORTED FLOATS SLEEF_F(sin, _u35)(FLOATS x) { return SLEEF_F(sin, _u10)(x); }
EXPORTED FLOATS SLEEF_F(cos, _u35)(FLOATS x) { return SLEEF_F(cos, _u10)(x); }

struct FLOATS_2 { FLOATS x, y; };  // as Sleef___m256_2
struct DOUBLES_2 { DOUBLES x, y; };
EXPORTED FLOATS_2 SLEEF_F(sincos, _u10)(FLOATS x) { return {SLEEF_F(sin, _u10)(x), SLEEF_F(cos, _u10)(x)}; }
EXPORTED DOUBLES_2 SLEEF_D(sincos, _u10)(DOUBLES x) { return {SLEEF_D(sin, _u10)(x), SLEEF_D(cos, _u10)(x)}; }
