"""Runs a notebook's code cells in a process of its own, as IPython does: by their source, which `linecache` keeps, in a
`__main__` without a file.

    python cells.py NOTEBOOK.ipynb

A cell's output is not looked at; what a cell raises ends the process.
"""

from __future__ import annotations

import json
import linecache
import sys
import types
from pathlib import Path


def run_cells(cells: list[str]) -> None:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    for number, source in enumerate(cells, 1):
        name = f"<ipython-input-{number}-cell>"
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        exec(compile(source, name, "exec"), vars(main))


if __name__ == "__main__":
    notebook = json.loads(Path(sys.argv[1]).read_text())
    run_cells(["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"])
