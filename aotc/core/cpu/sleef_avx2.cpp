// SLEEF's names of eight floats and four doubles.
#include "instructions.h"

#if defined(__x86_64__)
#define BYTES 32
#define F_SUFFIX f8
#define D_SUFFIX d4
#define LIBMVEC(name, arguments) _ZGVdN4##arguments##_##name
#include "sleef.h"
#endif
