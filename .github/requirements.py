"""Print what aotc needs to build, without torch: for a torch that aotc's own requirement does not allow yet."""

import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
needed = [*project["dependencies"], *extras["torch"], *extras["build"]]
print(*(each for each in needed if not each.startswith(("torch", "aotc["))), sep="\n")
