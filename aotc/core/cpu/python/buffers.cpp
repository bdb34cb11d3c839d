// Python's buffers: tensors over the memory of objects that have one, and the buffer of a tensor.
#include <cstring>
#include <string>

#include "tensor_object.h"

namespace aotc::cpu {
namespace {

// A dtype in the words of Python's `struct`, and other letters that are one where their items have its size.
struct Format { int32_t dtype; const char *own, *letters; };
constexpr Format FORMATS[] = {
    {BOOL, "?", ""},
    {INT8, "b", "bhilqn"},  {INT16, "h", "bhilqn"},  {INT32, "i", "bhilqn"},  {INT64, "q", "bhilqn"},
    {UINT8, "B", "BHILQN"}, {UINT16, "H", "BHILQN"}, {UINT32, "I", "BHILQN"}, {UINT64, "Q", "BHILQN"},
    {FLOAT16, "e", "efd"},  {FLOAT32, "f", "efd"},   {FLOAT64, "d", "efd"},
    {COMPLEX64, "Zf", ""},  {COMPLEX128, "Zd", ""},
};

const char* format_of(int32_t dtype) {  // null where Python has none
  for (const Format& each : FORMATS)
    if (each.dtype == dtype) return each.own;
  return nullptr;
}

int32_t dtype_of_format(const char* format, Py_ssize_t itemsize) {  // -1 for another byte order, objects and structures
  if (!format) format = "B";
  if (*format == '@' || *format == '=' || *format == '<') format++;
  bool one_letter = std::strlen(format) == 1;
  for (const Format& each : FORMATS)
    if (itemsize_of(each.dtype) == itemsize && (!std::strcmp(format, each.own) || (one_letter && std::strchr(each.letters, *format)))) return each.dtype;
  return -1;
}

}  // namespace

void release_buffer(Py_buffer* buffer) {
  PyBuffer_Release(buffer);
  delete buffer;
}

PyObject* from_buffer(PyObject* object) {
  auto* buffer = new Py_buffer;  // it may hold addresses of itself
  if (PyObject_GetBuffer(object, buffer, PyBUF_RECORDS_RO)) {
    delete buffer;
    return nullptr;
  }
  try {
    int32_t dtype = dtype_of_format(buffer->format, buffer->itemsize);
    if (dtype < 0) throw std::runtime_error(std::string("its items are `") + (buffer->format ? buffer->format : "") + "`, which no tensor holds");
    require(buffer->ndim <= MOST_AXES, "it has more than 16 axes");
    int64_t sizes[MOST_AXES] = {}, strides[MOST_AXES] = {};
    for (int axis = 0; axis < buffer->ndim; axis++) {
      sizes[axis] = buffer->shape[axis], strides[axis] = buffer->strides[axis] / buffer->itemsize;
      require(sizes[axis] < 2 || buffer->strides[axis] % buffer->itemsize == 0, "its strides are not multiples of the size of its items");
    }
    bool read_only = buffer->readonly;
    return wrapped(tensor_over(buffer->buf, buffer->ndim, sizes, strides, dtype, release_owner<Py_buffer, release_buffer>, buffer), read_only);
  } catch (const std::exception& error) {
    release_buffer(buffer);
    PyErr_SetString(PyExc_BufferError, error.what());
    return nullptr;
  }
}

int get_buffer(PyObject* object, Py_buffer* buffer, int flags) {
  TensorObject* self = of(object);
  Tensor& own = *self->tensor;
  const char* format = format_of(own.dtype);
  std::string reason;
  int64_t dense = 1;
  bool contiguous = true;
  for (int axis = own.rank - 1; axis >= 0; axis--) {
    contiguous = contiguous && (own.sizes[axis] == 1 || own.strides[axis] == dense);
    dense *= own.sizes[axis];
  }
  if (own.device() != HOST) reason = "the tensor lies on a GPU";
  if (!format) reason = std::string("Python's buffers have no dtype ") + name_of_dtype(own.dtype);
  if (self->read_only && (flags & PyBUF_WRITABLE)) reason = "the tensor is read-only";
  if ((flags & PyBUF_STRIDES) != PyBUF_STRIDES && !contiguous) reason = "the tensor has strides";
  if (!reason.empty()) {
    PyErr_SetString(PyExc_BufferError, reason.c_str());
    buffer->obj = nullptr;
    return -1;
  }
  static char nothing[64];
  *buffer = Py_buffer{};
  buffer->buf = own.bytes() ? own.bytes() : nothing;
  buffer->obj = Py_NewRef(object);
  buffer->itemsize = itemsize_of(own.dtype), buffer->len = dense * buffer->itemsize;
  buffer->readonly = self->read_only, buffer->ndim = own.rank;
  buffer->format = flags & PyBUF_FORMAT ? const_cast<char*>(format) : nullptr;
  buffer->shape = flags & PyBUF_ND ? own.sizes : nullptr;
  buffer->strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES ? self->strides : nullptr;
  return 0;
}

}  // namespace aotc::cpu
