"""Run the model of an exported folder from Python, with ctypes alone: neither aotc, torch nor numpy is needed.

This file lies in the folder that `aotc export REF --standalone FOLDER` wrote:

    from aotc_exported import ExportedModel

    model = ExportedModel()  # of the folder in which this file lies
    y = model(x)             # an array of numpy in, an array of numpy out
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_OK, _ERROR_INPUT = 0, 3
_FORMATS = {  # of Python's `struct`, by DLPack's code and bits
    (0, 8): "b",
    (0, 16): "h",
    (0, 32): "i",
    (0, 64): "q",
    (1, 8): "B",
    (1, 16): "H",
    (1, 32): "I",
    (1, 64): "Q",
    (2, 16): "e",
    (2, 32): "f",
    (2, 64): "d",
    (6, 8): "?",
}
_CODES = {**dict.fromkeys("bhilqn", 0), **dict.fromkeys("BHILQN", 1), **dict.fromkeys("efd", 2), "?": 6}
_CPU = 1
_RECORDS_RO = 0x1C  # PyBUF_RECORDS_RO
_CAPSULE = b"dltensor"


class ExportedModelError(RuntimeError):
    """What `aotc_error` of aotc.h says. Attribute: `status`, an AotcStatus of aotc.h."""

    def __init__(self, words: str, status: int) -> None:
        super().__init__(words)
        self.status = status


class InputMismatchError(ExportedModelError, ValueError):
    """No bucket takes the call; each difference is said, with both values."""

    def __init__(self, words: str) -> None:
        super().__init__(words, _ERROR_INPUT)


class ExportedModel:
    """The model of a folder. Many threads may call it.

    Attributes: `inputs` and `outputs`, their names; `forms`, of each input, as `float32 [batch, 128, 256]`.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, *, concurrency: int = 1) -> None:
        """Up to `concurrency` calls run in one bucket's code at a time, others wait. Raises ExportedModelError."""
        where = os.fspath(folder or Path(__file__).parent)
        self._model = ctypes.c_void_p()
        self._library = _library(where)
        _check(self._library, self._library.aotc_load(os.fsencode(where), concurrency, ctypes.byref(self._model)))
        self.inputs = self._names("input_name", self._library.aotc_input_count(self._model))
        self.forms = self._names("input_form", len(self.inputs))
        self.outputs = self._names("output_name", self._library.aotc_output_count(self._model))

    def _names(self, what: str, count: int) -> list[str]:
        read = getattr(self._library, f"aotc_{what}")
        return [read(self._model, index).decode() for index in range(count)]

    def __repr__(self) -> str:
        inputs = ", ".join(f"{name}: {form}" for name, form in zip(self.inputs, self.forms, strict=True))
        return f"<ExportedModel({inputs})>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result: one array, or a dict of arrays by their names.

        Takes arrays in the order of `inputs`, or by name: of numpy, buffers (bytes, memoryview, array.array), and what
        speaks DLPack in the CPU's memory. They are read where they lie. Results are arrays of the library that made the
        first input; for buffers, a memoryview; an ExportedTensor, which speaks DLPack, for a dtype that these lack.
        Raises InputMismatchError, ExportedModelError, and TypeError for arguments that are missing or unexpected.
        """
        given = dict(zip(self.inputs, args, strict=False))
        if len(args) > len(self.inputs) or given.keys() & kwargs or {*given, *kwargs} != {*self.inputs}:
            named = ", ".join([f"{len(args)} without a name", *kwargs])
            raise TypeError(f"the model takes {', '.join(self.inputs)}; {named} came")
        values = [{**given, **kwargs}[name] for name in self.inputs]
        views, differences = [], []
        for name, value in zip(self.inputs, values, strict=True):
            try:
                views.append(_InputView(value))
            except Exception as error:  # libraries raise what they like where an array cannot be exported
                differences.append(f"{name}: a {type(value).__name__} cannot be read: {error}")
        if differences:
            raise InputMismatchError("\n".join(differences))
        inputs = (_DLTensor * len(views))(*(view.tensor for view in views))
        outputs = (ctypes.POINTER(_DLManagedTensor) * len(self.outputs))()
        _check(self._library, self._library.aotc_run(self._model, inputs, len(inputs), outputs, len(outputs)))
        results = [_giving_like(values[0] if values else None)(ExportedTensor(each)) for each in outputs]
        return results[0] if self.outputs == ["output"] else dict(zip(self.outputs, results, strict=True))

    def __del__(self) -> None:
        if getattr(self, "_model", None):
            self._library.aotc_destroy(self._model)


def set_num_threads(count: int, folder: str | os.PathLike[str] | None = None) -> None:
    """How many threads a call that this thread makes uses. Raises ValueError below 1."""
    if count < 1:
        raise ValueError(f"{count} threads were asked for, and a call needs one")
    _library(os.fspath(folder or Path(__file__).parent)).aotc_set_num_threads(count)


# -- the library, and DLPack's structures ------------------------------------------------------------------------------


class _DLTensor(ctypes.Structure):
    _fields_ = (
        *(("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)),
        *(("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)),
        *(("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64))),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        *(("tensor", _DLTensor), ("context", ctypes.c_void_p)),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    )


class _PyBuffer(ctypes.Structure):  # Py_buffer
    _fields_ = (
        *(("address", ctypes.c_void_p), ("owner", ctypes.c_void_p), ("bytes", ctypes.c_ssize_t)),
        *(("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int), ("ndim", ctypes.c_int)),
        *(("format", ctypes.c_char_p), ("shape", ctypes.POINTER(ctypes.c_ssize_t))),
        *(("strides", ctypes.POINTER(ctypes.c_ssize_t)), ("suboffsets", ctypes.c_void_p)),
        ("internal", ctypes.c_void_p),
    )


@functools.cache
def _library(folder: str) -> ctypes.CDLL:
    try:  # code finds its runtime by name: a process has one, that of its first folder
        library = ctypes.CDLL("libaotc.so", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        library = ctypes.CDLL(os.path.abspath(os.path.join(folder, "libaotc.so")))  # noqa: PTH100, PTH118
    model = ctypes.c_void_p
    library.aotc_load.argtypes = (ctypes.c_char_p, ctypes.c_int32, ctypes.POINTER(model))
    library.aotc_run.argtypes = (model, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32)
    library.aotc_destroy.argtypes, library.aotc_destroy.restype = (model,), None
    library.aotc_set_num_threads.argtypes, library.aotc_error.restype = (ctypes.c_int32,), ctypes.c_char_p
    library.aotc_input_count.argtypes = library.aotc_output_count.argtypes = (model,)
    for read in (library.aotc_input_name, library.aotc_input_form, library.aotc_output_name):
        read.argtypes, read.restype = (model, ctypes.c_int32), ctypes.c_char_p
    return library


def _check(library: ctypes.CDLL, status: int) -> None:
    if status != _OK:
        words = (library.aotc_error() or b"").decode(errors="replace")
        raise InputMismatchError(words) if status == _ERROR_INPUT else ExportedModelError(words, status)


_python = ctypes.PyDLL(None)  # `ctypes.pythonapi` is everybody's, and so are the types of its functions' arguments
_get_buffer, _release_buffer = _python.PyObject_GetBuffer, _python.PyBuffer_Release
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release_buffer.argtypes, _release_buffer.restype = (ctypes.POINTER(_PyBuffer),), None
_pointer_of, _new_capsule = _python.PyCapsule_GetPointer, _python.PyCapsule_New
_pointer_of.argtypes, _pointer_of.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_new_capsule.restype = ctypes.py_object


# -- inputs and results ------------------------------------------------------------------------------------------------


class _InputView:
    """A DLTensor over the memory of an array, which it holds. Raises what its library raises, and ValueError."""

    def __init__(self, value: Any) -> None:
        self._buffer: _PyBuffer | None = None
        try:
            memoryview(value).release()
        except (TypeError, BufferError, ValueError):  # no buffer, or of a dtype that buffers lack
            self._kept = value.__dlpack__()
            managed = ctypes.cast(_pointer_of(self._kept, _CAPSULE), ctypes.POINTER(_DLManagedTensor)).contents
            self.tensor = managed.tensor
            return
        self._buffer = buffer = _PyBuffer()
        _get_buffer(value, ctypes.byref(buffer), _RECORDS_RO)
        code = _CODES.get((buffer.format or b"B").decode().lstrip("@=<"))
        steps = [buffer.strides[axis] for axis in range(buffer.ndim)]
        if code is None or any(step % buffer.itemsize for step in steps):
            raise ValueError(f"its items are `{(buffer.format or b'B').decode()}`, and lie {steps} bytes apart")
        numbers = ctypes.c_int64 * buffer.ndim
        self._shape = numbers(*(buffer.shape[axis] for axis in range(buffer.ndim)))
        self._strides = numbers(*(step // buffer.itemsize for step in steps))
        form = (_CPU, 0, buffer.ndim, code, 8 * buffer.itemsize, 1)
        self.tensor = _DLTensor(buffer.address, *form, self._shape, self._strides, 0)

    def __del__(self) -> None:
        if self._buffer is not None and self._buffer.owner:
            _release_buffer(ctypes.byref(self._buffer))


class ExportedTensor:
    """A result, contiguous, in memory of its own. It can be taken through DLPack once: the taker then owns it.

    Attributes: `shape`; `code` and `bits` of DLPack's dtype.
    """

    def __init__(self, managed: Any) -> None:
        self._managed, self._lock = managed, threading.Lock()
        tensor = managed.contents.tensor
        self.shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
        self.code, self.bits = tensor.code, tensor.bits

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0

    def __dlpack__(self, **_: Any) -> Any:
        """Raises BufferError where it was taken before."""
        with self._lock:
            managed, self._managed = self._managed, None
        if managed is None:
            raise BufferError("the result was taken before")
        return _new_capsule(ctypes.cast(managed, ctypes.c_void_p), _CAPSULE, None)

    def memory(self) -> Any:
        """The bytes of the values, in an object that has a buffer and holds this tensor."""
        count = math.prod(self.shape) * self.bits // 8
        kind = ctypes.c_char * count
        values: Any = kind.from_address(self._managed.contents.tensor.data) if count else kind()
        values.owner = self
        return values

    def __del__(self) -> None:
        if getattr(self, "_managed", None) is not None:
            self._managed.contents.deleter(ctypes.cast(self._managed, ctypes.c_void_p))


def _giving_like(value: Any) -> Callable[[ExportedTensor], Any]:
    kind = type(value).__module__.partition(".")[0]
    if kind == "numpy":
        return _as_numpy
    if kind == "torch":
        return sys.modules["torch"].from_dlpack  # type: ignore[no-any-return]
    if hasattr(value, "__array_namespace__"):
        return value.__array_namespace__().from_dlpack  # type: ignore[no-any-return]
    return _as_memoryview


def _as_numpy(tensor: ExportedTensor) -> Any:
    if (form := _FORMATS.get((tensor.code, tensor.bits))) is None:
        return tensor
    return sys.modules["numpy"].frombuffer(tensor.memory(), form).reshape(tensor.shape)


def _as_memoryview(tensor: ExportedTensor) -> Any:
    form = _FORMATS.get((tensor.code, tensor.bits))
    if form is None or form == "e":  # which a memoryview does not take
        return tensor
    flat: Any = memoryview(tensor.memory()).cast("B")
    return flat.cast(form, tensor.shape) if math.prod(tensor.shape) else flat.cast(form)
