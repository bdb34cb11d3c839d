"""`aotc audit`: the advisories that are of the artifacts of a store.

- `audit`: the live tags of stores, their artifacts, and what applies to each unit
- `rebuild`: the commands that build the affected models again
- `sarif`: what was found, for viewers of code scans
"""
