"""Run the blocks of a page in the working folder, as a reader would: `python run_page.py BLOCKS.json`.

Python blocks share one namespace, bash blocks one environment: what a block exports is there for the next.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd()))
namespace: dict[str, object] = {"__name__": "page"}
for language, code, where in json.loads(Path(sys.argv[1]).read_text()):
    print(f"--- {where}", flush=True)
    if language == "python":
        exec(compile(code, where, "exec"), namespace)
    else:
        ran = subprocess.run(["bash", "-euo", "pipefail", "-c", f"{code}\nenv -0 > .variables"], check=False)
        if ran.returncode:
            sys.exit(f"{where}: exit code {ran.returncode}")
        os.environ.update(line.split("=", 1) for line in Path(".variables").read_text().split("\0") if line)
