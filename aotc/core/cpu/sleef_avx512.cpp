// SLEEF's names of sixteen floats and eight doubles. Only code that was built for AVX512 calls them.
#include "instructions.h"

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512dq")
#define BYTES 64
#define F_SUFFIX f16
#define D_SUFFIX d8
#define LIBMVEC(name, arguments) _ZGVeN8##arguments##_##name
#include "sleef.h"
#endif
