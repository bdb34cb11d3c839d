"""The keys of a manifest, stated once: their types, ranges, defaults, and what they mean.

`aotc.manifest.structure` checks a manifest against these types, `ModelSpec` inherits the keys that it keeps, and
`editor_schema` generates the JSON Schema for editors. A title is a noun phrase: a mistake is reported as "expected
<title>". `examples` are known values where a pattern stands for a list of them, so that a near miss can be named.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType, field

from aotc.machine.gpus import known_targets
from aotc.machine.targets import CPU_LEVELS
from aotc.records import TUPLE, Extent, Mode, Record

# `$(?!\n)` is the end of the text for Python and for ECMAScript; `$` alone lets a last newline pass.
MODEL_NAME = r"^(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]*$(?!\n)"
FACTORY = r"^[^:]+:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$(?!\n)"
_IDENTIFIER = r"^[A-Za-z_][A-Za-z0-9_]*$(?!\n)"
_REGION = r"^[^.\s]+(\.[^.\s]+)*$(?!\n)"
_RECORDED = r"^[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors#[A-Za-z0-9][A-Za-z0-9._-]*$(?!\n)"

FloatDtype = Literal["float64", "float32", "float16", "bfloat16"]
_Float8 = Literal["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
_Complex = Literal["complex32", "complex64", "complex128"]
_Integer = Literal["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
_Dtype = Literal[FloatDtype, _Float8, _Complex, _Integer, "bool"]
DTYPES: tuple[str, ...] = get_args(_Dtype)
INITS = ("randn", "ones", "zeros", "padding")
MAX_SIZE = 2**63 - 1

_UNIQUE = {"uniqueItems": True}  # msgspec has no such constraint

_Dim = Annotated[str, Meta(pattern=_IDENTIFIER, title="a dim's name (letters, digits and `_`)")]
_Scalar = Annotated[int | float | bool, Meta(title="a number or a bool")]
_Size = Annotated[Extent, Meta(title="a size (an integer of 0 or more)")]
_Ends = Annotated[list[_Size], Meta(min_length=2, max_length=2, title="a range [low, high] of two sizes")]

_CPUS = tuple(reversed(CPU_LEVELS))
_TARGET = Meta(
    pattern=rf"^(native|{'|'.join(_CPUS)}|cuda|cuda:sm_[0-9]{{2,3}}(@(aarch64|x86_64))?)$(?!\n)",
    title=f"a target (native, {', '.join(_CPUS)}, cuda or cuda:sm_NN)",
    examples=["native", *_CPUS, "cuda", *known_targets()],
)


class ModelSettings(Record, frozen=True, kw_only=True):
    """What a model says, or takes from `defaults`, and a `ModelSpec` keeps."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory. A value {factory: …, kwargs: …} is made by that factory."""
    dtype: Annotated[FloatDtype | None, Meta(title="a floating dtype or null")] = None
    """The module is cast to it. Default: as the factory built it."""
    mode: Annotated[Mode, Meta(title=f"a mode ({', '.join(get_args(Mode))})")] = "max-autotune"
    """A mode of torch.compile."""
    weights: Annotated[Literal["live", "frozen"], Meta(title="`live` or `frozen`")] = "live"
    """live: one artifact serves every checkpoint. frozen: weights are folded into the code."""
    targets: Annotated[
        tuple[Annotated[str, _TARGET], ...], Meta(min_length=1, title="a list of targets", extra_json_schema=_UNIQUE)
    ] = ("native",)
    """What to compile for; `native` is this machine."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of Inductor, such as cpp.simdlen."""
    patches: dict[str, bool] = field(default_factory=dict)
    """Patches of torch, by name, that are switched off."""
    autocast: Literal["bfloat16", "float16"] | None = None
    """The model runs under autocast to this dtype."""
    float32_matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """As torch.set_float32_matmul_precision: high and medium let float32 products use TF32. The service must match."""
    make_contiguous: bool = False
    """Copy inputs that are not contiguous, instead of refusing them."""
    cuda_graphs: Literal["auto", "always", "never"] = "auto"
    """How a GPU launches. auto: what measures faster at build."""
    graph_sizes: Annotated[
        dict[_Dim, Annotated[list[_Size], Meta(title="a list of sizes", extra_json_schema=_UNIQUE)]],
        Meta(title="a mapping of dims to lists of sizes"),
    ] = field(default_factory=dict)
    """The sizes within ranges for which CUDA graphs are captured."""
    train: bool = False
    """Compile forward and backward of the module in train mode."""
    activation_memory: Annotated[float, Meta(ge=0, le=1, title="a number from 0 to 1")] = 1.0
    """With `train: true`: the share of the activations that may be kept for the backward, which computes the others
    again."""
    runtime: Annotated[Literal["any", "standalone"], Meta(title="`any` or `standalone`")] = "any"
    """standalone: the code must run without torch; the build avoids operators, and refuses those that remain."""
    ptx: bool = False
    """Keep PTX too, so that GPUs of later generations can run the code."""


class RangeKeys(Record, frozen=True):
    """Sizes from a low to a high one; one variant with dynamic shapes takes them all."""

    range: _Ends
    """The smallest and the largest size, both included."""
    multiple_of: Annotated[int, Meta(ge=1, le=MAX_SIZE, title="an integer of 1 or more")] = 1
    """Only sizes that this divides are in the range."""
    tune_at: _Size | UnsetType = UNSET
    """The size that kernels are tuned at. Default: the largest in the range."""


_Range = Annotated[RangeKeys, Meta(title="a range like {range: [1, 512], multiple_of: 8, tune_at: 512}")]
_GridSize = Annotated[Extent | _Range, Meta(title="a size (an integer of 0 or more) or {range: [low, high]}")]
_BucketSize = Annotated[
    Extent | _Ends | _Range, Meta(title="a size (an integer of 0 or more), [low, high] or {range: [low, high]}")
]


class OutputsKeys(Record, frozen=True):
    """What happens to padded outputs."""

    crop: Annotated[
        Annotated[list[Annotated[str, Meta(title="a dim")]], Meta(extra_json_schema=_UNIQUE)]
        | dict[
            str,
            Annotated[
                list[Annotated[str | None, Meta(title="a dim or null")]],
                Meta(title="a list with a dim or null for each axis"),
            ],
        ],
        Meta(title="a list of dims, or a mapping of output paths to lists of dims"),
    ] = field(default_factory=list)
    """Cut outputs back to the request's sizes along these dims; a mapping names each axis per output."""


class DefaultsKeys(ModelSettings, frozen=True, kw_only=True):
    """What models say unless they say otherwise. A model's value replaces the default whole."""

    buckets: Annotated[
        list[Annotated[dict[_Dim, _BucketSize], Meta(title="a bucket like {batch: 1, seq: 128}")]],
        Meta(title="a list of buckets"),
    ] = field(default_factory=list)
    """Each gives every dim of the model a size or a range."""
    grid: Annotated[
        dict[_Dim, Annotated[list[_GridSize], Meta(min_length=1, title="a list of sizes")]],
        Meta(title="a grid like {batch: [1, 8], seq: [128, 512]}"),
    ] = field(default_factory=dict)
    """For each dim a list of sizes; the product is added to the buckets."""
    outputs: Annotated[OutputsKeys, Meta(title="a mapping with `crop`")] = field(default_factory=OutputsKeys)
    """What happens to padded outputs."""


class RecipeKeys(Record, frozen=True):
    """How example values are made, where a word does not say it: exactly one of these keys."""

    randint: Annotated[
        Annotated[
            list[Annotated[int | str, Meta(title="an integer, a dim, or an expression over dims")]],
            Meta(min_length=2, max_length=2),
        ]
        | UnsetType,
        Meta(title="[low, high] of two integers or expressions over dims, high excluded"),
    ] = UNSET
    """Integers from low to high, high excluded."""
    constant: _Scalar | UnsetType = UNSET
    """The same value everywhere."""
    recorded: Annotated[
        Annotated[str, Meta(pattern=_RECORDED)] | UnsetType,
        Meta(title="FILE.safetensors#NAME, a file beside the manifest"),
    ] = UNSET
    """Values of recorded calls, as aotc.record keeps them beside the manifest."""


_RECIPE = "{randint: [low, high]}, {constant: value} or {recorded: FILE.safetensors#NAME}"
_INIT = Meta(
    title="an init (randn, ones, zeros, padding, {randint: [low, high]}, {constant: value}, {recorded: …} or "
    "package.module:function)"
)
_Init = Annotated[
    Annotated[str, Meta(pattern="^(randn|ones|zeros|padding|[^:]+:.+)$", examples=list(INITS))]
    | Annotated[RecipeKeys, Meta(title=_RECIPE)],
    _INIT,
]
_Inits = Annotated[list[_Init], Meta(min_length=1, title="a list of inits", extra_json_schema=_UNIQUE)]


class TensorKeys(Record, frozen=True):
    """A tensor that the model takes."""

    shape: Annotated[
        list[
            Annotated[Extent | str, Meta(title="a size (an integer of 0 or more), a dim, or an expression over dims")]
        ],
        Meta(title="a shape (a list of sizes, dims and expressions over dims)"),
    ]
    """Sizes, dims, and expressions over dims such as `2*seq`."""
    dtype: Annotated[_Dtype | UnsetType, Meta(title="a dtype")] = UNSET
    """Default: the model's dtype, else float32."""
    init: Annotated[_Init | _Inits | UnsetType, _INIT] = UNSET
    """How example values are made. Default: randn; for integers and bools 0 or 1 at random. A list: the model may do
    other things with other values, so regions are found, and outputs verified, with each."""
    layout: Annotated[Literal["contiguous", "channels_last", "channels_last_3d"], Meta(title="a layout")] = "contiguous"
    """channels_last needs 4 dimensions, channels_last_3d needs 5."""
    requires_grad: bool = False
    """With `train: true`: the backward computes this input's gradient."""
    pad: Annotated[
        dict[
            _Dim,
            Annotated[
                Annotated[Literal["edge"], Meta(title="`edge` or a value")] | int | float | bool,
                Meta(title="a number, a bool or `edge`"),
            ],
        ],
        Meta(title="a mapping of dims to pad values"),
    ] = field(default_factory=dict)
    """May grow along these dims to reach a bucket: filled with a value, or with the last slice."""
    default: _Scalar | UnsetType = UNSET
    """What the tensor is filled with where a call leaves it out or passes None, for which the model itself does the
    same: the build compares both."""


TENSOR_KEYS = frozenset(TensorKeys.__struct_fields__)
TENSOR_MARKS = frozenset({"shape", "dtype", "init"})


def is_tensor(value: Any) -> bool:
    """Whether this part of a manifest describes a tensor."""
    return isinstance(value, Mapping) and not TENSOR_MARKS.isdisjoint(value)


def is_tuple(value: Any) -> bool:
    """Whether this part of a manifest describes a tuple: `{tuple: [1, 4, 4]}`."""
    return isinstance(value, Mapping) and value.keys() == {TUPLE}


def kind_of_input(value: Any) -> Any:
    """The type that an input of this form must have."""
    if isinstance(value, Mapping):
        return _Tensor if is_tensor(value) else _Tuple if is_tuple(value) else _Nested
    return _Listed if isinstance(value, list) else Any


_INPUT_REF = {"$ref": "#/$defs/Input"}
_Input = Annotated[Any, Meta(extra_json_schema=_INPUT_REF, extra={"kind": kind_of_input})]
_Tensor = Annotated[TensorKeys, Meta(title="a tensor")]
_Tuple = dict[str, Annotated[list[_Input], Meta(title="a list of a tuple's items")]]
_Nested = dict[str, _Input]
_Listed = list[_Input]
_Parameter = Annotated[str, Meta(pattern=_IDENTIFIER, title="a parameter's name (letters, digits and `_`)")]
_Factory = Annotated[str, Meta(pattern=FACTORY, title="a factory (package.module:name or path/to/file.py:name)")]
_Pattern = Annotated[
    str,
    Meta(
        pattern=_REGION,
        title="a pattern of submodules' paths, like blocks.*",
        examples=["blocks.*", "model.layers.*"],
    ),
]


class ModelKeys(DefaultsKeys, frozen=True, kw_only=True):
    """A model to compile."""

    factory: _Factory
    """A callable that returns the module, importable from the manifest's or the working folder."""
    inputs: Annotated[
        Annotated[Literal["auto"], Meta(title="`auto` or a mapping of inputs")] | dict[_Parameter, _Input],
        Meta(title="a mapping of inputs, or `auto` for a model of transformers"),
    ]
    """By the names of the parameters of forward or `method`; `auto` for a model of transformers."""
    method: Annotated[str, Meta(pattern=_IDENTIFIER, title="a method's name (letters, digits and `_`)")] = "forward"
    """The method of the module that is compiled."""
    regions: Annotated[list[_Pattern], Meta(min_length=1, title="a list of patterns", extra_json_schema=_UNIQUE)] = (
        field(default_factory=list)
    )
    """Submodules that are compiled on their own, identical ones once; the rest of the model stays eager. Paths as in
    named_modules(); `*` and `?` stand for letters within one name of a path."""
    parallel: Annotated[
        dict[_Dim, Annotated[int, Meta(ge=2, le=4096, title="2 ranks or more")]],
        Meta(min_length=1, max_length=1, title="a dim of a device mesh with its number of ranks, like {tensor: 2}"),
    ] = field(default_factory=dict)
    """The factory makes the part of one rank; the code is compiled once for all ranks."""


_ModelName = Annotated[
    str,
    Meta(
        pattern=MODEL_NAME,
        max_length=128,  # as of a tag in a registry
        title="a model's name (at most 128 letters, digits, `.`, `_`, `-`; first a letter or digit; no `..`)",
    ),
]


class ManifestKeys(Record, frozen=True, kw_only=True):
    """Models, their inputs, and the shape buckets that aotc compiles them for. The order of keys, in any mapping, has
    no meaning."""

    version: Annotated[Literal[1], Meta(title="version 1")]
    """The manifest's version."""
    models: Annotated[
        dict[_ModelName, Annotated[ModelKeys, Meta(title="a model")]],
        Meta(min_length=1, title="a mapping of models, at least one"),
    ]
    """Each model by its name, which is the name of its artifacts."""
    defaults: Annotated[DefaultsKeys, Meta(title="a mapping of defaults")] = field(default_factory=DefaultsKeys)
    """What models say unless they say otherwise. A model's value replaces the default whole."""
    picks: Annotated[str, Meta(min_length=1, title="a pick file's path, relative to the manifest")] | UnsetType = UNSET
    """Autotune picks to take, as `aotc picks REF --export FILE` wrote them."""


ManifestForm = Annotated[ManifestKeys, Meta(title="aotc manifest")]


def editor_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of manifests, for editors."""
    types = (ManifestKeys, _Tensor, _Tuple)
    (_, tensor, of_tuple), parts = msgspec.json.schema_components(types, ref_template="#/$defs/{name}")
    for name, part in parts.items():
        del part["title"]  # the class's name
        part["description"] = " ".join(part["description"].split())
        for key, schema in part["properties"].items():
            schema["description"] = _descriptions(globals()[name])[key]
    parts["RecipeKeys"] |= {"minProperties": 1, "maxProperties": 1}
    parts["Input"] = {
        "description": "A tensor (a mapping with `shape`), a nested mapping or list of inputs, {tuple: [1, 4, 4]} for "
        "a tuple, or a constant.",
        "if": {"type": "object", "anyOf": [{"required": [mark]} for mark in sorted(TENSOR_MARKS)]},
        "then": tensor,
        "else": {
            "if": {"type": "object", "required": [TUPLE], "maxProperties": 1},
            "then": of_tuple,
            "else": {"additionalProperties": _INPUT_REF, "items": _INPUT_REF},
        },
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **parts.pop("ManifestKeys"), "$defs": parts}


def _descriptions(keys: type) -> dict[str, str]:
    """The text below each key, in the source of the class and of its bases."""
    found: dict[str, str] = {}
    for base in keys.__mro__[: keys.__mro__.index(Record)]:
        (definition,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(definition, ast.ClassDef)
        for key, text in itertools.pairwise(definition.body):
            match key, text:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(str(said))):
                    found[name] = " ".join(said.split())
    return found
