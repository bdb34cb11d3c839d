// The module's functions that make tensors, and look at their memory.
#include <optional>
#include <string>
#include <vector>

#include "tensor_object.h"

namespace aotc::cpu {
namespace {

std::vector<int64_t> numbers(PyObject* tuple) {
  std::vector<int64_t> found;
  require(PyTuple_Check(tuple) && PyTuple_Size(tuple) <= MOST_AXES, "a tuple of at most 16 numbers is expected");
  for (Py_ssize_t at = 0; at < PyTuple_Size(tuple); at++) {
    found.push_back(PyLong_AsLongLong(PyTuple_GetItem(tuple, at)));
    if (PyErr_Occurred()) throw Failed();
  }
  return found;
}

struct Lie {  // how a tensor lies in memory, from tuples of Python
  std::vector<int64_t> sizes, strides;
  int64_t rank;

  Lie(PyObject* of_sizes, PyObject* of_strides)
      : sizes(numbers(of_sizes)), strides(numbers(of_strides)), rank(static_cast<int64_t>(sizes.size())) {
    require(sizes.size() == strides.size(), "as many sizes as strides are expected");
  }
};

int32_t dtype_for(const char* name) {
  int32_t dtype = dtype_named(name);
  if (dtype < 0) throw std::runtime_error(std::string("there is no dtype ") + name);
  return dtype;
}

PyObject* placed(PyObject*, PyObject* args) {  // (buffer, offset in bytes, dtype, sizes, strides)
  PyObject *object, *sizes, *strides;
  const char* name;
  long long offset;
  if (!PyArg_ParseTuple(args, "OLsOO", &object, &offset, &name, &sizes, &strides)) return nullptr;
  return translated([&]() -> PyObject* {
    Lie lie(sizes, strides);
    int32_t dtype = dtype_for(name);
    int64_t bytes = storage_bytes(lie.rank, lie.sizes.data(), lie.strides.data(), dtype);
    auto* buffer = new Py_buffer;
    if (PyObject_GetBuffer(object, buffer, PyBUF_SIMPLE)) {
      delete buffer;
      return nullptr;
    }
    bool fits = offset >= 0 && offset <= buffer->len && bytes <= buffer->len - offset, read_only = buffer->readonly;
    auto* storage = new Storage{static_cast<char*>(buffer->buf) + offset, bytes, release_owner<Py_buffer, release_buffer>, buffer};
    Owned made(new_tensor(storage, lie.rank, lie.sizes.data(), lie.strides.data(), 0, dtype));
    require(fits, "the tensor lies beyond the end of the memory");
    return wrapped(std::move(made), read_only);
  });
}

PyObject* copied(PyObject*, PyObject* args) {  // (tensor, sizes, strides): into new memory, repeated where it is smaller;
  PyObject *object, *sizes = nullptr, *strides = nullptr;  // (tensor): without gaps, axes in the order of its strides
  if (!PyArg_ParseTuple(args, "O!|OO", tensor_type, &object, &sizes, &strides)) return nullptr;
  return translated([&] {
    const Tensor& from = *of(object)->tensor;
    Owned made;
    std::optional<Lie> lie;
    if (strides) lie.emplace(sizes, strides);
    {
      WithoutLock unlocked;
      made.reset(lie ? new_empty(lie->rank, lie->sizes.data(), lie->strides.data(), from.dtype) : new_dense_like(from));
      copy(*made, from);
    }
    return wrapped(std::move(made), false);
  });
}

PyObject* strided(PyObject*, PyObject* args) {  // (tensor, sizes, strides, offset, dtype): a view, in elements of that dtype
  PyObject *object, *sizes, *strides;
  const char* name = nullptr;
  long long offset = 0;
  if (!PyArg_ParseTuple(args, "O!OO|Lz", tensor_type, &object, &sizes, &strides, &offset, &name)) return nullptr;
  return translated([&] {
    Lie lie(sizes, strides);
    const Tensor& from = *of(object)->tensor;
    int32_t dtype = name && *name ? dtype_for(name) : from.dtype;
    Reach reach = reach_of(lie.rank, lie.sizes.data(), lie.strides.data());
    int64_t width = itemsize_of(dtype), own = from.offset * itemsize_of(from.dtype), items = from.storage->bytes / width, first;
    require(own % width == 0 && !__builtin_add_overflow(own / width, offset, &first), "a view between two elements");
    require(reach.high < reach.low || (first >= -reach.low && first < items - reach.high), "a view beyond the tensor's memory");
    from.storage->keep();
    return wrapped(Owned(new_tensor(from.storage, lie.rank, lie.sizes.data(), lie.strides.data(), first, dtype)), of(object)->read_only);
  });
}

bool speaks_dlpack(PyObject* object) {
  KeptError kept;
  return PyObject_HasAttrString(object, "__dlpack__") && PyObject_HasAttrString(object, "__dlpack_device__");
}

PyObject* view(PyObject*, PyObject* args) {  // (object, number of a GPU)
  PyObject* object;
  int device = HOST;
  return PyArg_ParseTuple(args, "O|i", &object, &device) ? viewed(object, device) : nullptr;
}

}  // namespace

PyObject* viewed(PyObject* object, int32_t device) {
  return translated([&]() -> PyObject* {
    if (is_tensor(object)) {
      int32_t own = of(object)->tensor->device();
      if (own == HOST || own == device) return Py_NewRef(object);
      return PyErr_Format(PyExc_BufferError, "it lies on GPU %d", own);
    }
    if (PyObject_CheckBuffer(object)) {
      PyObject* made = from_buffer(object);
      if (made || !PyErr_ExceptionMatches(PyExc_Exception) || !speaks_dlpack(object)) return made;
      PyObject *type, *reason, *traceback;
      PyErr_Fetch(&type, &reason, &traceback);
      Py_buffer buffer;
      if (!PyObject_GetBuffer(object, &buffer, PyBUF_FULL_RO)) {  // its elements were refused
        PyBuffer_Release(&buffer), PyErr_Restore(type, reason, traceback);
        return nullptr;
      }
      PyErr_Clear();  // as of an array of JAX that lies on a GPU
      Py_XDECREF(type), Py_XDECREF(reason), Py_XDECREF(traceback);
    }
    if (speaks_dlpack(object)) return from_dlpack(object, device);
    Py_RETURN_NONE;
  });
}

PyMethodDef tensor_functions[] = {{"view", view, METH_VARARGS, nullptr},
                                  {"placed", placed, METH_VARARGS, nullptr},
                                  {"copied", copied, METH_VARARGS, nullptr},
                                  {"strided", strided, METH_VARARGS, nullptr},
                                  {}};

}  // namespace aotc::cpu
