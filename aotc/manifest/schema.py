"""The manifest's JSON Schema (draft 2020-12), for editors and for the first pass of the checks.

Titles are noun phrases: a mistake is reported as "expected <title>". `examples` hold known values where a pattern
stands for a list of them, so that a near miss can be named.
"""

from __future__ import annotations

from typing import Any

from aotc.machine.gpus import known_targets
from aotc.machine.targets import CPU_LEVELS

Schema = dict[str, Any]

VERSION = 1

# `$(?!\n)` is the end of the text for Python and for ECMAScript; `$` alone lets a last newline pass.
MODEL_NAME = r"^(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]*$(?!\n)"
IDENTIFIER = r"^[A-Za-z_][A-Za-z0-9_]*$(?!\n)"
REGION = r"^[^.\s]+(\.[^.\s]+)*$(?!\n)"
RECORDED = r"^[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors#[A-Za-z0-9][A-Za-z0-9._-]*$(?!\n)"
FACTORY = r"^[^:]+:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$(?!\n)"

FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")
DTYPES = (
    *FLOAT_DTYPES,
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    *("complex32", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"),
)
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_CPUS = tuple(reversed(CPU_LEVELS))
LAYOUTS = ("contiguous", "channels_last", "channels_last_3d")
INITS = ("randn", "ones", "zeros", "padding")
MAX_SIZE = 2**63 - 1

_SIZE: Schema = {
    "type": "integer",
    "minimum": 0,
    "maximum": MAX_SIZE,
    "title": "a size (an integer of 0 or more)",
}
_BOOL: Schema = {"type": "boolean", "title": "true or false"}
_SCALAR_TYPES = ["number", "boolean"]
_DIM_NAME: Schema = {"pattern": IDENTIFIER, "title": "a dim's name (letters, digits and `_`)"}


def _mapping(title: str, properties: Schema, required: tuple[str, ...] = (), **more: Any) -> Schema:
    """A mapping with these keys and no others."""
    schema = {"type": "object", "title": title, "properties": properties, "additionalProperties": False, **more}
    return {**schema, "required": list(required)} if required else schema


def _one_of(title: str, values: tuple[Any, ...], description: str) -> Schema:
    return {"enum": list(values), "title": title, "description": description}


_RANGE_LIST: Schema = {
    "type": "array",
    "title": "a range [low, high] of two sizes",
    "items": _SIZE,
    "minItems": 2,
    "maxItems": 2,
}
_RANGE = _mapping(
    "a range like {range: [1, 512], multiple_of: 8, tune_at: 512}",
    {
        "range": {**_RANGE_LIST, "description": "The smallest and the largest size, both included."},
        "multiple_of": {
            "type": "integer",
            "minimum": 1,
            "maximum": MAX_SIZE,
            "title": "an integer of 1 or more",
            "description": "Only sizes that this divides are in the range.",
        },
        "tune_at": {**_SIZE, "description": "The size that kernels are tuned at. Default: the largest in the range."},
    },
    required=("range",),
)
_BUCKET_SIZE: Schema = {
    "description": "A fixed size, a range [low, high], or {range: [low, high], multiple_of: 8, tune_at: 512}.",
    "if": {"type": "array"},
    "then": _RANGE_LIST,
    "else": {
        "if": {"type": "object"},
        "then": _RANGE,
        "else": {**_SIZE, "title": "a size (an integer of 0 or more), [low, high] or {range: [low, high]}"},
    },
}
_GRID_SIZE: Schema = {
    "if": {"type": "object"},
    "then": _RANGE,
    "else": {**_SIZE, "title": "a size (an integer of 0 or more) or {range: [low, high]}"},
}
_SHAPE_ENTRY: Schema = {
    "description": "A size, a dim, or an expression over dims such as `2*seq`.",
    "if": {"type": "string"},
    "else": {**_SIZE, "title": "a size (an integer of 0 or more), a dim, or an expression over dims"},
}
_ONE_INIT: Schema = {
    "if": {"type": "object"},
    "then": _mapping(
        "{randint: [low, high]}, {constant: value} or {recorded: FILE.safetensors#NAME}",
        {
            "randint": {
                "type": "array",
                "title": "[low, high] of two integers or expressions over dims, high excluded",
                "items": {
                    "if": {"type": "string"},
                    "else": {"type": "integer", "title": "an integer, a dim, or an expression over dims"},
                },
                "minItems": 2,
                "maxItems": 2,
            },
            "constant": {"type": _SCALAR_TYPES, "title": "a number or a bool"},
            "recorded": {
                "type": "string",
                "pattern": RECORDED,
                "title": "FILE.safetensors#NAME, a file beside the manifest",
                "description": "Values of recorded calls, as aotc.record keeps them beside the manifest.",
            },
        },
        minProperties=1,
        maxProperties=1,
    ),
    "else": {
        "type": "string",
        "title": "an init (randn, ones, zeros, padding, {randint: [low, high]}, {constant: value}, {recorded: …} or "
        "package.module:function)",
        "pattern": "^(randn|ones|zeros|padding|[^:]+:.+)$",
        "examples": list(INITS),
    },
}
_INIT: Schema = {
    "description": "How example values are made. Default: randn; for integers and bools 0 or 1 at random. A list: the "
    "model may do other things with other values, so regions are found, and outputs verified, with each.",
    "if": {"type": "array"},
    "then": {"type": "array", "title": "a list of inits", "items": _ONE_INIT, "minItems": 1, "uniqueItems": True},
    "else": _ONE_INIT,
}
_TENSOR = _mapping(
    "a tensor",
    {
        "shape": {
            "type": "array",
            "title": "a shape (a list of sizes, dims and expressions over dims)",
            "items": _SHAPE_ENTRY,
        },
        "dtype": _one_of("a dtype", DTYPES, "Default: the model's dtype, else float32."),
        "init": _INIT,
        "layout": _one_of("a layout", LAYOUTS, "channels_last needs 4 dimensions, channels_last_3d needs 5."),
        "requires_grad": {**_BOOL, "description": "With `train: true`: the backward computes this input's gradient."},
        "pad": {
            "type": "object",
            "title": "a mapping of dims to pad values",
            "description": "May grow along these dims to reach a bucket: filled with a value, or with the last slice.",
            "propertyNames": _DIM_NAME,
            "additionalProperties": {
                "if": {"type": "string"},
                "then": {"enum": ["edge"], "title": "`edge` or a value"},
                "else": {"type": _SCALAR_TYPES, "title": "a number, a bool or `edge`"},
            },
        },
        "default": {
            "type": _SCALAR_TYPES,
            "title": "a number or a bool",
            "description": "What the tensor is filled with where a call leaves it out or passes None, for which the "
            "model itself does the same: the build compares both.",
        },
    },
    required=("shape",),
)
_TUPLE: Schema = {
    "description": "{tuple: [1, 4, 4]}: a tuple of inputs.",
    "properties": {
        "tuple": {"type": "array", "title": "a list of a tuple's items", "items": {"$ref": "#/$defs/input"}},
    },
}
_INPUT: Schema = {
    "description": "A tensor (a mapping with `shape`), a nested mapping or list of inputs, {tuple: [1, 4, 4]} for a "
    "tuple, or a constant.",
    "if": {"type": "object", "anyOf": [{"required": [mark]} for mark in ("shape", "dtype", "init")]},
    "then": _TENSOR,
    "else": {
        "if": {"type": "object", "required": ["tuple"], "maxProperties": 1},
        "then": _TUPLE,
        "else": {
            "additionalProperties": {"$ref": "#/$defs/input"},
            "items": {"$ref": "#/$defs/input"},
        },
    },
}
_CROP: Schema = {
    "description": "Cut outputs back to the request's sizes along these dims; a mapping names each axis per output.",
    "if": {"type": "object"},
    "then": {
        "additionalProperties": {
            "type": "array",
            "title": "a list with a dim or null for each axis",
            "items": {"type": ["string", "null"], "title": "a dim or null"},
        },
    },
    "else": {
        "type": "array",
        "title": "a list of dims, or a mapping of output paths to lists of dims",
        "items": {"type": "string", "title": "a dim"},
        "uniqueItems": True,
    },
}

_SHARED: Schema = {
    "kwargs": {
        "type": "object",
        "title": "a mapping",
        "description": "Keyword arguments of the factory. A value {factory: …, kwargs: …} is made by that factory.",
    },
    "dtype": _one_of(
        "a floating dtype or null", (*FLOAT_DTYPES, None), "The module is cast to it. Default: as the factory built it."
    ),
    "mode": _one_of(f"a mode ({', '.join(MODES)})", MODES, "A mode of torch.compile. Default: max-autotune."),
    "weights": _one_of(
        "`live` or `frozen`",
        ("live", "frozen"),
        "live (default): one artifact serves every checkpoint. frozen: weights are folded into the code.",
    ),
    "targets": {
        "type": "array",
        "title": "a list of targets",
        "description": "What to compile for. Default: [native], this machine.",
        "minItems": 1,
        "uniqueItems": True,
        "items": {
            "type": "string",
            "title": f"a target (native, {', '.join(_CPUS)}, cuda or cuda:sm_NN)",
            "pattern": rf"^(native|{'|'.join(_CPUS)}|cuda|cuda:sm_[0-9]{{2,3}})$(?!\n)",
            "examples": ["native", *_CPUS, "cuda", *known_targets()],
        },
    },
    "options": {"type": "object", "title": "a mapping", "description": "Options of Inductor, such as cpp.simdlen."},
    "patches": {
        "type": "object",
        "title": "a mapping",
        "description": "Patches of torch, by name, that are switched off.",
        "additionalProperties": _BOOL,
    },
    "buckets": {
        "type": "array",
        "title": "a list of buckets",
        "description": "Each gives every dim of the model a size or a range.",
        "items": {
            "type": "object",
            "title": "a bucket like {batch: 1, seq: 128}",
            "propertyNames": _DIM_NAME,
            "additionalProperties": {"$ref": "#/$defs/size"},
        },
    },
    "grid": {
        "type": "object",
        "title": "a grid like {batch: [1, 8], seq: [128, 512]}",
        "description": "For each dim a list of sizes; the product is added to the buckets.",
        "propertyNames": _DIM_NAME,
        "additionalProperties": {
            "type": "array",
            "title": "a list of sizes",
            "minItems": 1,
            "items": {"$ref": "#/$defs/gridSize"},
        },
    },
    "outputs": _mapping("a mapping with `crop`", {"crop": _CROP}, description="What happens to padded outputs."),
    "autocast": _one_of(
        "bfloat16, float16 or null", ("bfloat16", "float16", None), "The model runs under autocast to this dtype."
    ),
    "float32_matmul_precision": _one_of(
        "highest, high or medium",
        ("highest", "high", "medium"),
        "As torch.set_float32_matmul_precision: high and medium let float32 products use TF32. The service must match.",
    ),
    "make_contiguous": {**_BOOL, "description": "Copy inputs that are not contiguous, instead of refusing them."},
    "cuda_graphs": _one_of(
        "auto, always or never", ("auto", "always", "never"), "auto (default): what measures faster at build."
    ),
    "graph_sizes": {
        "type": "object",
        "title": "a mapping of dims to lists of sizes",
        "description": "The sizes within ranges for which CUDA graphs are captured.",
        "propertyNames": _DIM_NAME,
        "additionalProperties": {"type": "array", "title": "a list of sizes", "items": _SIZE, "uniqueItems": True},
    },
    "train": {**_BOOL, "description": "Compile forward and backward of the module in train mode."},
    "activation_memory": {
        "type": "number",
        "minimum": 0,
        "maximum": 1,
        "title": "a number from 0 to 1",
        "description": "With `train: true`: the share of the activations that may be kept for the backward, which "
        "computes the others again. Default: 1.",
    },
    "runtime": _one_of(
        "`any` or `standalone`",
        ("any", "standalone"),
        "standalone: the code must run without torch; the build avoids operators, and refuses those that remain.",
    ),
    "ptx": {**_BOOL, "description": "Keep PTX too, so that GPUs of later generations can run the code."},
}
_MODEL = _mapping(
    "a model",
    {
        "factory": {
            "type": "string",
            "title": "a factory (package.module:name or path/to/file.py:name)",
            "description": "A callable that returns the module, importable from the manifest's or the working folder.",
            "pattern": FACTORY,
        },
        "inputs": {
            "title": "a mapping of inputs, or `auto` for a model of transformers",
            "description": "By the names of the parameters of forward or `method`; `auto` for a model of transformers.",
            "if": {"type": "string"},
            "then": {"enum": ["auto"], "title": "`auto` or a mapping of inputs"},
            "else": {
                "type": "object",
                "title": "a mapping of inputs",
                "propertyNames": {"pattern": IDENTIFIER, "title": "a parameter's name (letters, digits and `_`)"},
                "additionalProperties": {"$ref": "#/$defs/input"},
            },
        },
        "method": {
            "type": "string",
            "title": "a method's name (letters, digits and `_`)",
            "description": "The method of the module that is compiled. Default: forward.",
            "pattern": IDENTIFIER,
        },
        "regions": {
            "type": "array",
            "title": "a list of patterns",
            "description": "Submodules that are compiled on their own, identical ones once; the rest of the model "
            "stays eager. Paths as in named_modules(); `*` and `?` stand for letters within one name of a path.",
            "minItems": 1,
            "uniqueItems": True,
            "items": {
                "type": "string",
                "title": "a pattern of submodules' paths, like blocks.*",
                "pattern": REGION,
                "examples": ["blocks.*", "model.layers.*"],
            },
        },
        "parallel": {
            "type": "object",
            "title": "a dim of a device mesh with its number of ranks, like {tensor: 2}",
            "description": "The factory makes the part of one rank; the code is compiled once for all ranks.",
            "minProperties": 1,
            "maxProperties": 1,
            "propertyNames": _DIM_NAME,
            "additionalProperties": {"type": "integer", "minimum": 2, "maximum": 4096, "title": "2 ranks or more"},
        },
        **_SHARED,
    },
    required=("factory", "inputs"),
)

SCHEMA: Schema = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "description": "Models, their inputs, and the shape buckets that aotc compiles them for. The order of keys, in any "
    "mapping, has no meaning.",
    **_mapping(
        "aotc manifest",
        {
            "version": {"const": VERSION, "title": f"version {VERSION}", "description": "The manifest's version."},
            "picks": {
                "type": "string",
                "minLength": 1,
                "title": "a pick file's path, relative to the manifest",
                "description": "Autotune picks to take, as `aotc picks REF --export FILE` wrote them.",
            },
            "defaults": _mapping(
                "a mapping of defaults",
                _SHARED,
                description="What models say unless they say otherwise. A model's value replaces the default whole.",
            ),
            "models": {
                "type": "object",
                "title": "a mapping of models, at least one",
                "minProperties": 1,
                "propertyNames": {
                    "pattern": MODEL_NAME,
                    "maxLength": 128,  # as of a tag in a registry
                    "title": "a model's name (at most 128 letters, digits, `.`, `_`, `-`; first a letter or digit; "
                    "no `..`)",
                },
                "additionalProperties": _MODEL,
            },
        },
        required=("version", "models"),
    ),
    "$defs": {"size": _BUCKET_SIZE, "gridSize": _GRID_SIZE, "input": _INPUT},
}
