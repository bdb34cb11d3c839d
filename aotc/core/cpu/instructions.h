// The instructions of arithmetic: on x86-64 those of AVX2's level, x86-64-v3, on aarch64 those that each of its CPUs has.
// Sources of arithmetic include this last. All others are for every CPU of the architecture, as compilers do by default.
#if defined(__x86_64__)
#pragma GCC target("avx2,bmi,bmi2,f16c,fma,lzcnt,movbe")
#endif
