// Which features of the CPU are absent, whatever /proc/cpuinfo says: an emulator leaves that file as it is.
#pragma once

namespace aotc::cpu {

template <typename Put>
void each_absent_feature(Put put) {  // in Linux's names
  auto unless = [&](bool here, const char* name) {
    if (!here) put(name);
  };
  unless(__builtin_cpu_supports("avx"), "avx"), unless(__builtin_cpu_supports("avx2"), "avx2");
  unless(__builtin_cpu_supports("fma"), "fma"), unless(__builtin_cpu_supports("bmi"), "bmi1");
  unless(__builtin_cpu_supports("bmi2"), "bmi2"), unless(__builtin_cpu_supports("avx512f"), "avx512f");
  unless(__builtin_cpu_supports("avx512bw"), "avx512bw"), unless(__builtin_cpu_supports("avx512cd"), "avx512cd");
  unless(__builtin_cpu_supports("avx512dq"), "avx512dq"), unless(__builtin_cpu_supports("avx512vl"), "avx512vl");
  unless(__builtin_cpu_supports("avx512vnni"), "avx512_vnni"), unless(__builtin_cpu_supports("avx512bf16"), "avx512_bf16");
}

}  // namespace aotc::cpu
