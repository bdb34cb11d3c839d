"""`aotc verify --gate`: limits that a build must keep before it goes out.

- `gate_document`: `gate.yaml`, as typed data.
- `gate_inputs`: the trace and the earlier release that it names are there.
- `releases`: a start, and calls beside those of an earlier release, measured.
- `limits`: each limit with what was found.
- `markdown`: the report for a pull request.
"""
