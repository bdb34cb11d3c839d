// The features of this CPU, in Linux's names.
#pragma once

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#if defined(__aarch64__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif

namespace aotc::cpu {

#if defined(__aarch64__)

// As the kernel tells each process (`asm/hwcap.h`), since an emulator leaves /proc/cpuinfo as it is; and the length of
// SVE's vectors in bits, as `sve256`.
// As `aotc.machine.hwcap` says them.
inline std::vector<std::string> features_of_this_cpu() {
  constexpr const char* FIRST[] = {
      "fp", "asimd", "evtstrm", "aes", "pmull", "sha1", "sha2", "crc32", "atomics", "fphp", "asimdhp",
      "cpuid", "asimdrdm", "jscvt", "fcma", "lrcpc", "dcpop", "sha3", "sm3", "sm4", "asimddp", "sha512",
      "sve", "asimdfhm", "dit", "uscat", "ilrcpc", "flagm", "ssbs", "sb", "paca", "pacg"};
  constexpr const char* SECOND[] = {
      "dcpodp", "sve2", "sveaes", "svepmull", "svebitperm", "svesha3", "svesm4", "flagm2", "frint",
      "svei8mm", "svef32mm", "svef64mm", "svebf16", "i8mm", "bf16", "dgh", "rng", "bti"};
  std::vector<std::string> found;
  auto put = [&](const auto& names, unsigned long bits) {
    unsigned long bit = 1;
    for (const char* name : names) {
      if (bits & bit) found.emplace_back(name);
      bit <<= 1;
    }
  };
  put(FIRST, getauxval(AT_HWCAP)), put(SECOND, getauxval(AT_HWCAP2));
  if (int length = prctl(PR_SVE_GET_VL); length > 0)
    found.push_back("sve" + std::to_string((length & PR_SVE_VL_LEN_MASK) * 8));
  return found;
}

template <typename Put>
void each_absent_feature(Put) {}  // what the kernel tells is so

#else

// Which features are absent, whatever /proc/cpuinfo says: an emulator leaves that file as it is.
template <typename Put>
void each_absent_feature(Put put) {
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

inline std::vector<std::string> features_of_this_cpu() {
  std::ifstream lines("/proc/cpuinfo");
  std::string line, feature;
  while (std::getline(lines, line) && line.rfind("flags", 0)) continue;
  std::istringstream words(line);
  std::vector<std::string> found;
  while (words >> feature) found.push_back(feature);
  each_absent_feature([&](const char* name) { std::erase(found, name); });
  return found;
}

#endif

}  // namespace aotc::cpu
