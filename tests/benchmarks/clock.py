"""What a reading of the clock costs in the extension, which times each call by two: python tests/benchmarks/clock.py"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

SOURCE = r"""
#include <cstdio>
#include <ctime>
int main() {
  const int readings = 20'000'000;
  timespec now;
  long sum = 0;
  clock_t began = clock();
  for (int n = 0; n < readings; n++) { clock_gettime(CLOCK_MONOTONIC, &now); sum += now.tv_nsec; }
  double seconds = double(clock() - began) / CLOCKS_PER_SEC;
  printf("%.1f ns of CPU time a reading%s\n", 1e9 * seconds / readings, sum ? "" : " ");
}
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "clock.cpp", Path(folder) / "clock"
        source.write_text(SOURCE)
        subprocess.run(["g++", "-O2", source, "-o", program], check=True)
        print(subprocess.run([program], capture_output=True, text=True, check=True).stdout.strip())


if __name__ == "__main__":
    main()
