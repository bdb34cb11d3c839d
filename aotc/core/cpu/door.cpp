// `aotc.core._cpu`: the standalone runtime as an extension of Python.
//
// Its soname is that of a library, `libaotc_cpu.so`: compiled code that names it finds the functions of torch's C shim here.
// A `Tensor` is what Python has in its hands: over the memory of any object that has a buffer or DLPack, or its own.
// None of it imports a package.
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <omp.h>

#include <cstring>
#include <string>
#include <vector>

#include "../equal_constants.h"
#include "../openmp.h"
#include "cpu_features.h"
#include "dlpack.h"
#include "table_call.h"

namespace aotc::cpu {
namespace {

constexpr uint32_t DL_VERSION = 1;
constexpr uint64_t DL_READ_ONLY = 1;
constexpr const char *CAPSULE = "dltensor", *CAPSULE_VERSIONED = "dltensor_versioned";

// -- the object -------------------------------------------------------------------------------------------------------

struct Object {
  PyObject_HEAD Tensor* tensor;
  bool read_only;
  Py_ssize_t sizes[MOST_AXES], strides[MOST_AXES];  // for buffers: strides in bytes
};

PyTypeObject* tensor_type = nullptr;  // made once, with the module

Object* of(PyObject* object) { return reinterpret_cast<Object*>(object); }

PyObject* wrapped(Tensor* tensor, bool read_only) {  // takes the tensor over
  auto alloc = reinterpret_cast<allocfunc>(PyType_GetSlot(tensor_type, Py_tp_alloc));
  PyObject* object = alloc(tensor_type, 0);
  if (!object) {
    drop(tensor);
    return nullptr;
  }
  Object* self = of(object);
  self->tensor = tensor, self->read_only = read_only;
  for (int axis = 0; axis < tensor->rank; axis++) {
    self->sizes[axis] = tensor->sizes[axis];
    self->strides[axis] = tensor->strides[axis] * itemsize_of(tensor->dtype);
  }
  return object;
}

// Runs what may throw C++'s exceptions. Null with a Python exception.
template <typename Run>
PyObject* translated(Run run) {
  try {
    return run();
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  } catch (const std::exception& error) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, error.what());
    return nullptr;
  }
}

struct Failed : std::exception {  // with a Python exception set
  const char* what() const noexcept override { return "a Python exception"; }
};

PyObject* checked(PyObject* object) {
  if (!object) throw Failed();
  return object;
}

struct KeptError {  // a Python exception, set aside while code of others runs
  PyObject *type, *value, *trace;
  KeptError() { PyErr_Fetch(&type, &value, &trace); }
  ~KeptError() { PyErr_Restore(type, value, trace); }
};

// Releases an owner of memory, which may need the GIL, from any thread.
template <typename Owner, void (*RELEASE)(Owner*)>
void release_owner(Storage* storage) {
  if (!Py_IsInitialized()) return;
  PyGILState_STATE state = PyGILState_Ensure();
  {
    KeptError kept;
    RELEASE(static_cast<Owner*>(storage->owner));
  }
  PyGILState_Release(state);
}

void release_buffer(Py_buffer* buffer) {
  PyBuffer_Release(buffer);
  delete buffer;
}
template <typename Managed>
void release_managed(Managed* managed) {
  if (managed->deleter) managed->deleter(managed);
}

// A tensor over memory of an owner whose first element lies at `data`; the owner is released with it, or where this throws
// stays the caller's.
Tensor* tensor_over(void* data, int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                    void (*release)(Storage*), void* owner) {
  Reach reach = reach_of(rank, sizes, strides);
  int64_t width = itemsize_of(dtype);
  auto* storage = new Storage{static_cast<char*>(data) + reach.low * width, (reach.high - reach.low + 1) * width, release, owner};
  return new_tensor(storage, rank, sizes, strides, -reach.low, dtype);
}

// -- from a buffer ----------------------------------------------------------------------------------------------------

// The dtype of a buffer's items, in the words of Python's `struct`. -1 for another byte order, objects and structures.
int32_t dtype_of_format(const char* format, Py_ssize_t itemsize) {
  if (!format) format = "B";
  if (*format == '@' || *format == '=' || *format == '<') format++;
  std::string code = format;
  auto sized = [&](std::initializer_list<int32_t> among) {
    for (int32_t dtype : among)
      if (itemsize_of(dtype) == itemsize) return dtype;
    return int32_t{-1};
  };
  if (code == "?") return itemsize == 1 ? BOOL : -1;
  if (code == "Zf" || code == "Zd") return sized({COMPLEX64, COMPLEX128});
  if (code.size() != 1) return -1;
  if (std::strchr("efd", code[0])) return sized({FLOAT16, FLOAT32, FLOAT64});
  if (std::strchr("bhilqn", code[0])) return sized({INT8, INT16, INT32, INT64});
  if (std::strchr("BHILQN", code[0])) return sized({UINT8, UINT16, UINT32, UINT64});
  return -1;
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

// -- from DLPack ------------------------------------------------------------------------------------------------------

PyObject* capsule_of(PyObject* object) {
  PyObject* method = checked(PyObject_GetAttrString(object, "__dlpack__"));
  PyObject *none = PyTuple_New(0), *options = Py_BuildValue("{s(ii)}", "max_version", 1, 0);
  PyObject* capsule = none && options ? PyObject_Call(method, none, options) : nullptr;
  if (!capsule && PyErr_ExceptionMatches(PyExc_TypeError)) {  // a producer from before DLPack 1.0
    PyErr_Clear();
    capsule = PyObject_CallNoArgs(method);
  }
  Py_XDECREF(none);
  Py_XDECREF(options);
  Py_DECREF(method);
  return capsule;
}

bool takes(const DLManagedTensor&) { return true; }
bool takes(const DLManagedTensorVersioned& managed) { return managed.version.major == DL_VERSION; }
bool is_read_only(const DLManagedTensor&) { return false; }  // those could not be exported
bool is_read_only(const DLManagedTensorVersioned& managed) { return managed.flags & DL_READ_ONLY; }

// Takes a capsule's tensor over, whose deleter runs once, with the last tensor over its memory. Null for another capsule;
// throws, and takes nothing, where no tensor can be made.
template <typename Managed>
PyObject* consumed(PyObject* capsule, const char* name, const char* used) {
  if (!PyCapsule_IsValid(capsule, name)) return nullptr;
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
  if (!takes(*managed)) return nullptr;
  const DLTensor& given = managed->dl_tensor;
  int32_t dtype = dtype_of(given.dtype);
  require(dtype >= 0, "its dtype is one of DLPack's that no tensor holds here");
  require(given.ndim >= 0 && given.ndim <= MOST_AXES && (!given.ndim || given.shape), "it has not 0 to 16 axes");
  Tensor* tensor = tensor_over(static_cast<char*>(given.data) + given.byte_offset, given.ndim, given.shape, given.strides,
                               dtype, release_owner<Managed, release_managed<Managed>>, managed);
  if (PyCapsule_SetName(capsule, used)) throw Failed();
  return wrapped(tensor, is_read_only(*managed));
}

PyObject* from_dlpack(PyObject* object) {
  PyObject* device = checked(PyObject_CallMethod(object, "__dlpack_device__", nullptr));
  int kind = 0, number = 0;
  bool known = PyArg_ParseTuple(device, "ii", &kind, &number);
  Py_DECREF(device);
  if (!known) return nullptr;
  if (kind != kDLCPU && kind != kDLCUDAHost)
    return PyErr_Format(PyExc_BufferError, "it lies on the device %d:%d of DLPack, and not in the CPU's memory", kind, number);
  PyObject* capsule = capsule_of(object);
  if (!capsule) return nullptr;
  PyObject* made = nullptr;
  try {
    made = consumed<DLManagedTensorVersioned>(capsule, CAPSULE_VERSIONED, "used_dltensor_versioned");
    if (!made) made = consumed<DLManagedTensor>(capsule, CAPSULE, "used_dltensor");
    require(made, "`__dlpack__` gave no capsule of DLPack 0 or 1, or one that was taken before");
  } catch (const std::exception& error) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_BufferError, error.what());
  }
  KeptError kept;
  Py_DECREF(capsule);  // an unconsumed capsule deletes its tensor
  return made;
}

PyObject* viewed(PyObject*, PyObject* object) {
  return translated([&]() -> PyObject* {
    if (PyObject_TypeCheck(object, tensor_type)) return Py_NewRef(object);
    if (PyObject_CheckBuffer(object)) return from_buffer(object);
    if (PyObject_HasAttrString(object, "__dlpack__") && PyObject_HasAttrString(object, "__dlpack_device__"))
      return from_dlpack(object);
    Py_RETURN_NONE;  // it has neither
  });
}

// -- new ones ---------------------------------------------------------------------------------------------------------

std::vector<int64_t> numbers(PyObject* tuple) {
  std::vector<int64_t> found;
  require(PyTuple_Check(tuple) && PyTuple_Size(tuple) <= MOST_AXES, "a tuple of at most 16 numbers is expected");
  for (Py_ssize_t at = 0; at < PyTuple_Size(tuple); at++) {
    found.push_back(PyLong_AsLongLong(PyTuple_GetItem(tuple, at)));
    if (PyErr_Occurred()) throw Failed();
  }
  return found;
}

int32_t dtype_for(const char* name) {
  int32_t dtype = dtype_named(name);
  if (dtype < 0) throw std::runtime_error(std::string("there is no dtype ") + name);
  return dtype;
}

PyObject* placed(PyObject*, PyObject* args) {  // (buffer, offset in bytes, dtype, sizes, strides)
  PyObject *object, *of_sizes, *of_strides;
  const char* name;
  long long offset;
  if (!PyArg_ParseTuple(args, "OLsOO", &object, &offset, &name, &of_sizes, &of_strides)) return nullptr;
  return translated([&]() -> PyObject* {
    std::vector<int64_t> sizes = numbers(of_sizes), strides = numbers(of_strides);
    int32_t dtype = dtype_for(name);
    require(sizes.size() == strides.size(), "as many sizes as strides are expected");
    int64_t bytes = storage_bytes(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype);
    auto* buffer = new Py_buffer;
    if (PyObject_GetBuffer(object, buffer, PyBUF_SIMPLE)) {
      delete buffer;
      return nullptr;
    }
    bool fits = offset >= 0 && offset <= buffer->len && bytes <= buffer->len - offset, read_only = buffer->readonly;
    auto* storage = new Storage{static_cast<char*>(buffer->buf) + offset, bytes, release_owner<Py_buffer, release_buffer>, buffer};
    if (!fits) {
      storage->drop();
      throw std::runtime_error("the tensor lies beyond the end of the memory");
    }
    return wrapped(new_tensor(storage, static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), 0, dtype), read_only);
  });
}

PyObject* copied(PyObject*, PyObject* args) {  // (tensor, sizes, strides): into new memory, repeated where it is smaller
  PyObject *object, *of_sizes, *of_strides;
  if (!PyArg_ParseTuple(args, "O!OO", tensor_type, &object, &of_sizes, &of_strides)) return nullptr;
  return translated([&] {
    std::vector<int64_t> sizes = numbers(of_sizes), strides = numbers(of_strides);
    require(sizes.size() == strides.size(), "as many sizes as strides are expected");
    const Tensor& from = *of(object)->tensor;
    Tensor* made = new_empty(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), from.dtype);
    PyObject* result = wrapped(made, false);
    if (result) copy(*made, from);
    return result;
  });
}

PyObject* strided(PyObject*, PyObject* args) {  // (tensor, sizes, strides, offset, dtype): a view, in elements of that dtype
  PyObject *object, *of_sizes, *of_strides;
  const char* name = nullptr;
  long long offset = 0;
  if (!PyArg_ParseTuple(args, "O!OO|Lz", tensor_type, &object, &of_sizes, &of_strides, &offset, &name)) return nullptr;
  return translated([&] {
    std::vector<int64_t> sizes = numbers(of_sizes), strides = numbers(of_strides);
    const Tensor& from = *of(object)->tensor;
    int32_t dtype = name && *name ? dtype_for(name) : from.dtype;
    require(sizes.size() == strides.size(), "as many sizes as strides are expected");
    auto rank = static_cast<int64_t>(sizes.size());
    Reach reach = reach_of(rank, sizes.data(), strides.data());
    int64_t width = itemsize_of(dtype), own = from.offset * itemsize_of(from.dtype), items = from.storage->bytes / width, first;
    require(own % width == 0 && !__builtin_add_overflow(own / width, offset, &first), "a view between two elements");
    require(reach.high < reach.low || (first >= -reach.low && first < items - reach.high), "a view beyond the tensor's memory");
    from.storage->keep();
    return wrapped(new_tensor(from.storage, rank, sizes.data(), strides.data(), first, dtype), of(object)->read_only);
  });
}

PyObject* dense(PyObject*, PyObject* object) {  // a copy without gaps, axes in the order of the tensor's strides
  if (!PyObject_TypeCheck(object, tensor_type)) return PyErr_Format(PyExc_TypeError, "a tensor is expected");
  return translated([&] {
    const Tensor& from = *of(object)->tensor;
    Tensor* made = new_dense_like(from);
    copy(*made, from);
    return wrapped(made, false);
  });
}

PyObject* overlapped(PyObject*, PyObject* args) {  // (tensor, list): the places in it of tensors in the memory of this one
  PyObject *object, *others;
  if (!PyArg_ParseTuple(args, "O!O!", tensor_type, &object, &PyList_Type, &others)) return nullptr;
  return translated([&] {
    PyObject* found = checked(PyList_New(0));
    for (Py_ssize_t at = 0; at < PyList_Size(others); at++) {
      PyObject* other = PyList_GetItem(others, at);
      if (!PyObject_TypeCheck(other, tensor_type) || !overlap(*of(object)->tensor, *of(other)->tensor)) continue;
      PyObject* place = PyLong_FromSsize_t(at);
      if (place) PyList_Append(found, place), Py_DECREF(place);
    }
    return found;
  });
}

PyObject* same_bits(PyObject*, PyObject* args) {  // (tensor, tensor): of one dtype and shape, byte by byte
  PyObject *one, *other;
  if (!PyArg_ParseTuple(args, "O!O!", tensor_type, &one, tensor_type, &other)) return nullptr;
  return translated([&]() -> PyObject* {
    const Tensor *tensors[] = {of(one)->tensor, of(other)->tensor};
    if (tensors[0]->dtype != tensors[1]->dtype || tensors[0]->rank != tensors[1]->rank) Py_RETURN_FALSE;
    for (int axis = 0; axis < tensors[0]->rank; axis++)
      if (tensors[0]->sizes[axis] != tensors[1]->sizes[axis]) Py_RETURN_FALSE;
    Tensor* dense[2];
    for (int at = 0; at < 2; at++) {
      dense[at] = new_empty(tensors[at]->rank, tensors[at]->sizes, nullptr, tensors[at]->dtype);
      copy(*dense[at], *tensors[at]);
    }
    auto count = static_cast<size_t>(dense[0]->elements() * itemsize_of(dense[0]->dtype));
    bool equal = !std::memcmp(dense[0]->bytes(), dense[1]->bytes(), count);
    drop(dense[0]), drop(dense[1]);
    return PyBool_FromLong(equal);
  });
}

// -- what a tensor says of itself -------------------------------------------------------------------------------------

PyObject* tuple_of(const int64_t* numbers, int count) {
  PyObject* tuple = PyTuple_New(count);
  for (int at = 0; tuple && at < count; at++) PyTuple_SetItem(tuple, at, PyLong_FromLongLong(numbers[at]));
  return tuple;
}

PyObject* get_shape(PyObject* self, void*) { return tuple_of(of(self)->tensor->sizes, of(self)->tensor->rank); }
PyObject* get_strides(PyObject* self, void*) { return tuple_of(of(self)->tensor->strides, of(self)->tensor->rank); }
PyObject* get_dtype(PyObject* self, void*) { return PyUnicode_FromString(name_of_dtype(of(self)->tensor->dtype)); }
PyObject* get_address(PyObject* self, void*) { return PyLong_FromVoidPtr(of(self)->tensor->bytes()); }
PyObject* get_read_only(PyObject* self, void*) { return PyBool_FromLong(of(self)->read_only); }
PyObject* get_itemsize(PyObject* self, void*) { return PyLong_FromLongLong(itemsize_of(of(self)->tensor->dtype)); }

PyObject* size(PyObject* self, PyObject* axis) {
  long at = PyLong_AsLong(axis);
  if (PyErr_Occurred()) return nullptr;
  if (at < 0 || at >= of(self)->tensor->rank) return PyErr_Format(PyExc_IndexError, "the tensor has no axis %ld", at);
  return PyLong_FromLongLong(of(self)->tensor->sizes[at]);
}

PyObject* representation(PyObject* self) {
  PyObject* shape = get_shape(self, nullptr);
  PyObject* text = shape ? PyUnicode_FromFormat("<aotc.standalone.Tensor %s %R>", name_of_dtype(of(self)->tensor->dtype), shape) : nullptr;
  Py_XDECREF(shape);
  return text;
}

PyObject* dlpack_device(PyObject*, PyObject*) { return Py_BuildValue("(ii)", kDLCPU, 0); }

// A capsule that a consumer renames; an unconsumed one deletes its tensor itself.
template <typename Managed>
PyObject* capsule_with(Managed* managed, const char* name) {
  PyObject* capsule = PyCapsule_New(managed, name, [](PyObject* own) {
    const char* now = PyCapsule_GetName(own);
    if (std::strcmp(now, CAPSULE) && std::strcmp(now, CAPSULE_VERSIONED)) return;
    auto* kept = static_cast<Managed*>(PyCapsule_GetPointer(own, now));
    kept->deleter(kept);
  });
  if (!capsule) managed->deleter(managed);
  return capsule;
}

PyObject* dlpack(PyObject* self, PyObject* args, PyObject* options) {
  static const char* names[] = {"stream", "max_version", "dl_device", "copy", nullptr};
  PyObject *stream = Py_None, *version = Py_None, *device = Py_None, *copied = Py_None;
  if (!PyArg_ParseTupleAndKeywords(args, options, "|$OOOO", const_cast<char**>(names), &stream, &version, &device, &copied))
    return nullptr;
  int kind = kDLCPU, number = 0;
  if (device != Py_None && !PyArg_ParseTuple(device, "ii", &kind, &number)) return nullptr;
  if (kind != kDLCPU) return PyErr_Format(PyExc_BufferError, "the tensor lies in the CPU's memory, and not on device %d", kind);
  if (stream != Py_None) return PyErr_Format(PyExc_BufferError, "memory of the CPU has no streams");
  long major = 0;
  if (version != Py_None && PyTuple_Check(version) && PyTuple_Size(version)) major = PyLong_AsLong(PyTuple_GetItem(version, 0));
  if (PyErr_Occurred()) return nullptr;
  const Tensor& own = *of(self)->tensor;
  bool read_only = of(self)->read_only, versioned = major >= static_cast<long>(DL_VERSION);
  DLDataType dtype = dlpack_dtype(own.dtype);
  if (!dtype.bits) return PyErr_Format(PyExc_BufferError, "DLPack has no dtype %s", name_of_dtype(own.dtype));
  if (read_only && !versioned) return PyErr_Format(PyExc_BufferError, "the tensor is read-only, which DLPack before 1.0 cannot say");
  return translated([&] {
    Tensor* kept = nullptr;
    if (copied == Py_True) copy(*(kept = new_dense_like(own)), own), read_only = false;
    else kept = shared(own);
    DLTensor given{kept->bytes(), {kDLCPU, 0}, kept->rank, dtype, kept->sizes, kept->strides, 0};
    if (!versioned) {
      auto deleter = [](DLManagedTensor* managed) { drop(static_cast<Tensor*>(managed->manager_ctx)), delete managed; };
      return capsule_with(new DLManagedTensor{given, kept, deleter}, CAPSULE);
    }
    auto deleter = [](DLManagedTensorVersioned* managed) { drop(static_cast<Tensor*>(managed->manager_ctx)), delete managed; };
    return capsule_with(
        new DLManagedTensorVersioned{{DL_VERSION, 0}, kept, deleter, read_only ? DL_READ_ONLY : 0, given}, CAPSULE_VERSIONED);
  });
}

const char* format_of(int32_t dtype) {  // in the words of Python's `struct`; null where it has none
  switch (dtype) {
    case UINT8: return "B";
    case INT8: return "b";
    case INT16: return "h";
    case UINT16: return "H";
    case INT32: return "i";
    case UINT32: return "I";
    case INT64: return "q";
    case UINT64: return "Q";
    case FLOAT16: return "e";
    case FLOAT32: return "f";
    case FLOAT64: return "d";
    case COMPLEX64: return "Zf";
    case COMPLEX128: return "Zd";
    case BOOL: return "?";
  }
  return nullptr;
}

int get_buffer(PyObject* object, Py_buffer* buffer, int flags) {
  Object* self = of(object);
  const Tensor& own = *self->tensor;
  const char* format = format_of(own.dtype);
  std::string reason;
  int64_t dense = 1;
  bool contiguous = true;
  for (int axis = own.rank - 1; axis >= 0; axis--) {
    contiguous = contiguous && (own.sizes[axis] == 1 || own.strides[axis] == dense);
    dense *= own.sizes[axis];
  }
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
  buffer->shape = flags & PyBUF_ND ? self->sizes : nullptr;
  buffer->strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES ? self->strides : nullptr;
  return 0;
}

void dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  drop(of(object)->tensor);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

PyGetSetDef properties[] = {{"shape", get_shape, nullptr, nullptr, nullptr},
                            {"strides", get_strides, nullptr, nullptr, nullptr},
                            {"dtype", get_dtype, nullptr, nullptr, nullptr},
                            {"address", get_address, nullptr, nullptr, nullptr},
                            {"itemsize", get_itemsize, nullptr, nullptr, nullptr},
                            {"read_only", get_read_only, nullptr, nullptr, nullptr},
                            {}};
PyMethodDef methods_of_tensor[] = {
    {"size", size, METH_O, nullptr},
    {"__dlpack__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(dlpack)), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"__dlpack_device__", dlpack_device, METH_NOARGS, nullptr},
    {}};
PyType_Slot slots_of_tensor[] = {{Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                                 {Py_tp_repr, reinterpret_cast<void*>(representation)},
                                 {Py_tp_getset, properties},
                                 {Py_tp_methods, methods_of_tensor},
                                 {Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
                                 {0, nullptr}};
PyType_Spec spec_of_tensor = {"aotc.core._cpu.Tensor", sizeof(Object), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots_of_tensor};

// -- calls by the call table ------------------------------------------------------------------------------------------

struct LoadedTable {  // with what a load adds to its text
  struct Constant { Py_ssize_t leaf; PyObject* value; };
  struct Opened { Code code; PyObject* container; };  // `container()`: its address, of this process

  CallTable table;
  std::vector<Py_ssize_t> leaves;  // of the inputs
  std::vector<Constant> constants;
  std::vector<Opened> libraries;   // of the buckets
  PyObject *kept_constants, *kept_libraries;

  LoadedTable(const char* text, PyObject* places, PyObject* values, PyObject* opened);
  LoadedTable(const LoadedTable&) = delete;
  ~LoadedTable() { Py_DECREF(kept_constants), Py_DECREF(kept_libraries); }
};

struct TableObject { PyObject_HEAD LoadedTable* loaded; };

LoadedTable& loaded_table(PyObject* object) { return *reinterpret_cast<TableObject*>(object)->loaded; }

LoadedTable::LoadedTable(const char* text, PyObject* places, PyObject* values, PyObject* opened)
    : table(text), kept_constants(Py_NewRef(values)), kept_libraries(Py_NewRef(opened)) {
  for (Py_ssize_t at = 0; at < PyTuple_Size(places); at++) leaves.push_back(PyLong_AsSsize_t(PyTuple_GetItem(places, at)));
  for (Py_ssize_t at = 0; at < PyTuple_Size(values); at++) {
    Constant& constant = constants.emplace_back();
    if (!PyArg_ParseTuple(PyTuple_GetItem(values, at), "nO", &constant.leaf, &constant.value)) break;
  }
  for (Py_ssize_t at = 0; !PyErr_Occurred() && at < PyTuple_Size(opened); at++) {
    Opened& library = libraries.emplace_back();
    PyObject* function;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(PyTuple_GetItem(opened, at), "OnO", &function, &count, &library.container)) break;
    void* address = PyLong_AsVoidPtr(function);
    std::memcpy(&library.code.run, &address, sizeof address);
    library.code.outputs = static_cast<size_t>(count);
  }
  bool fits = !PyErr_Occurred() && leaves.size() == table.inputs.size() && libraries.size() == table.buckets.size();
  if (!fits) Py_DECREF(kept_constants), Py_DECREF(kept_libraries);
  require(fits, "a call table of another number of inputs or buckets");
}

// (text of the table, leaves of its inputs, constants as (leaf, value), libraries as (address of the run, outputs, container))
PyObject* new_table(PyTypeObject* type, PyObject* args, PyObject*) {
  const char* text;
  PyObject *places, *values, *opened;
  if (!PyArg_ParseTuple(args, "sO!O!O!", &text, &PyTuple_Type, &places, &PyTuple_Type, &values, &PyTuple_Type, &opened)) return nullptr;
  return translated([&] {
    auto loaded = std::make_unique<LoadedTable>(text, places, values, opened);
    PyObject* object = checked(reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0));
    reinterpret_cast<TableObject*>(object)->loaded = loaded.release();
    return object;
  });
}

void delete_table(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  delete reinterpret_cast<TableObject*>(object)->loaded;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

struct Held {  // references
  std::vector<PyObject*> objects;
  Held() = default;
  Held(const Held&) = delete;
  ~Held() {
    for (PyObject* each : objects) Py_XDECREF(each);
  }
};

struct WithoutLock {  // of Python
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutLock() { PyEval_RestoreThread(state); }
};

// The inputs of a call, of which `views` holds the tensors, None for one that is left out. False where one is none.
bool take_inputs(const LoadedTable& loaded, PyObject* given, TableCall& call, Held& views) {
  for (size_t at = 0; at < loaded.leaves.size(); at++) {
    PyObject* value = PyList_GetItem(given, loaded.leaves[at]);
    if (!value) throw Failed();
    if (value == Py_None && loaded.table.inputs[at].filling) {
      views.objects.push_back(Py_NewRef(Py_None));
      call.given.push_back({});
      continue;
    }
    PyObject* view = viewed(nullptr, value);
    if (!view && !PyErr_ExceptionMatches(PyExc_Exception)) throw Failed();  // a signal's, as Ctrl-C
    if (!view) PyErr_Clear();
    views.objects.push_back(view);
    if (!view || view == Py_None) return false;
    call.given.push_back({Owned(shared(*of(view)->tensor)), of(view)->read_only});
  }
  return true;
}

PyObject* list_of(std::vector<Owned>& tensors) {
  PyObject* list = checked(PyList_New(static_cast<Py_ssize_t>(tensors.size())));
  for (size_t at = 0; at < tensors.size(); at++) PyList_SetItem(list, static_cast<Py_ssize_t>(at), wrapped(tensors[at].release(), false));
  return list;
}

bool same_lie(const Tensor& one, const Tensor& other) {
  return one.bytes() == other.bytes() && std::equal(one.sizes, one.sizes + one.rank, other.sizes) && std::equal(one.strides, one.strides + one.rank, other.strides);
}

// (leaves, tensors of the module): None for a miss; else the bucket, the leaves with tensors in the place of arrays, those
// with which the code ran, what it gave (None where it failed), how many inputs were copied, and whether it was padded.
PyObject* call_by_table(PyObject* self, PyObject* args) {
  PyObject *given, *of_module;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &given, &PyList_Type, &of_module)) return nullptr;
  return translated([&]() -> PyObject* {
    const LoadedTable& loaded = loaded_table(self);
    for (const LoadedTable::Constant& constant : loaded.constants)
      if (!equal_constant(PyList_GetItem(given, constant.leaf), constant.value)) Py_RETURN_NONE;
    TableCall call(loaded.table);
    Held views;
    if (!take_inputs(loaded, given, call, views)) Py_RETURN_NONE;
    call.fill();
    std::vector<Tensor*> state;
    for (Py_ssize_t at = 0; at < PyList_Size(of_module); at++) {
      PyObject* each = PyList_GetItem(of_module, at);
      require(PyObject_TypeCheck(each, tensor_type), "a tensor is expected");
      state.push_back(of(each)->tensor);
    }
    std::vector<std::string> reasons;
    if (!call.decide(state, reasons)) Py_RETURN_NONE;
    auto bucket = static_cast<size_t>(call.choice->bucket - loaded.table.buckets.data());
    Code code = loaded.libraries[bucket].code;
    PyObject* container = checked(PyObject_CallNoArgs(loaded.libraries[bucket].container));
    code.container = PyLong_AsVoidPtr(container);
    Py_DECREF(container);
    if (PyErr_Occurred()) throw Failed();
    int32_t status;
    {
      WithoutLock unlocked;
      status = call.run(code, state);
    }
    PyObject *leaves = checked(PyList_GetSlice(given, 0, PyList_Size(given))), *ran = checked(PyList_GetSlice(given, 0, PyList_Size(given)));
    for (size_t at = 0; at < call.given.size(); at++) {
      PyObject* view = views.objects[at] == Py_None ? wrapped(shared(*call.given[at].tensor), false) : Py_NewRef(views.objects[at]);
      bool same = view && same_lie(*of(view)->tensor, *call.ran[at]);
      PyList_SetItem(ran, loaded.leaves[at], same ? Py_NewRef(view) : wrapped(call.ran[at].release(), false));
      PyList_SetItem(leaves, loaded.leaves[at], view);
    }
    PyObject* outputs = status ? Py_NewRef(Py_None) : list_of(call.outputs);
    return Py_BuildValue("(nNNNnN)", static_cast<Py_ssize_t>(bucket), leaves, ran, outputs, static_cast<Py_ssize_t>(call.copies), PyBool_FromLong(call.padded()));
  });
}

// (leaves, tensors or None): the same, with a tensor for each that is left out and has a default.
PyObject* filled_by_table(PyObject* self, PyObject* leaves) {
  return translated([&] {
    const LoadedTable& loaded = loaded_table(self);
    TableCall call(loaded.table);
    require(PyList_Check(leaves), "a list is expected");
    for (Py_ssize_t leaf : loaded.leaves) {
      PyObject* value = PyList_GetItem(leaves, leaf);
      if (!value) throw Failed();
      call.given.push_back({Owned(PyObject_TypeCheck(value, tensor_type) ? shared(*of(value)->tensor) : nullptr)});
    }
    call.fill();
    PyObject* filled = checked(PyList_GetSlice(leaves, 0, PyList_Size(leaves)));
    for (size_t at = 0; at < call.given.size(); at++)
      if (call.given[at].tensor && PyList_GetItem(leaves, loaded.leaves[at]) == Py_None)
        PyList_SetItem(filled, loaded.leaves[at], wrapped(call.given[at].tensor.release(), false));
    return filled;
  });
}

PyMethodDef methods_of_table[] = {{"call", call_by_table, METH_VARARGS, nullptr},
                                  {"filled", filled_by_table, METH_O, nullptr},
                                  {}};
PyType_Slot slots_of_table[] = {{Py_tp_new, reinterpret_cast<void*>(new_table)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(delete_table)},
                                {Py_tp_methods, methods_of_table},
                                {0, nullptr}};
PyType_Spec spec_of_table = {"aotc.core._cpu.Table", sizeof(TableObject), 0, Py_TPFLAGS_DEFAULT, slots_of_table};

// -- libraries --------------------------------------------------------------------------------------------------------

PyObject* said(PyObject*, PyObject*) { return PyUnicode_DecodeUTF8(failure().data(), static_cast<Py_ssize_t>(failure().size()), "replace"); }

PyObject* handle_of(PyObject*, PyObject* object) {  // a new one, which `drop_handle` drops
  if (!PyObject_TypeCheck(object, tensor_type)) return PyErr_Format(PyExc_TypeError, "a tensor is expected");
  return PyLong_FromVoidPtr(shared(*of(object)->tensor));
}

PyObject* drop_handle(PyObject*, PyObject* handle) {
  auto* tensor = static_cast<Tensor*>(PyLong_AsVoidPtr(handle));
  if (PyErr_Occurred()) return nullptr;
  drop(tensor);
  Py_RETURN_NONE;
}

PyObject* threads(PyObject*, PyObject* args) {
  int count = 0;
  if (!PyArg_ParseTuple(args, "|i", &count)) return nullptr;
  if (count > 0) omp_set_num_threads(count);
  return PyLong_FromLong(omp_get_max_threads());
}

PyObject* absent_features(PyObject*, PyObject*) {  // of the CPU, in Linux's names: an emulator leaves /proc/cpuinfo as it is
  PyObject* names = PyList_New(0);
  each_absent_feature([&](const char* name) {
    PyObject* text = names ? PyUnicode_FromString(name) : nullptr;
    if (text) PyList_Append(names, text), Py_DECREF(text);
  });
  return names;
}

PyObject* add_teams(PyObject*, PyObject* threads) {
  long count = PyLong_AsLong(threads);
  return PyErr_Occurred() ? nullptr : PyLong_FromLong(add_idle_teams(static_cast<int>(count)));
}

PyMethodDef methods[] = {{"view", viewed, METH_O, nullptr},
                         {"strided", strided, METH_VARARGS, nullptr},
                         {"dense", dense, METH_O, nullptr},
                         {"overlapped", overlapped, METH_VARARGS, nullptr},
                         {"same_bits", same_bits, METH_VARARGS, nullptr},
                         {"absent_features", absent_features, METH_NOARGS, nullptr},
                         {"add_idle_teams", add_teams, METH_O, nullptr},
                         {"placed", placed, METH_VARARGS, nullptr},
                         {"copied", copied, METH_VARARGS, nullptr},
                         {"failure", said, METH_NOARGS, nullptr},
                         {"handle_of", handle_of, METH_O, nullptr},
                         {"drop_handle", drop_handle, METH_O, nullptr},
                         {"threads", threads, METH_VARARGS, nullptr},
                         {}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cpu", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace aotc::cpu

PyMODINIT_FUNC PyInit__cpu() {
  PyObject* module = PyModule_Create(&aotc::cpu::definition);
  PyObject* type = module ? PyType_FromSpec(&aotc::cpu::spec_of_tensor) : nullptr;
  PyObject* table = type ? PyType_FromSpec(&aotc::cpu::spec_of_table) : nullptr;
  if (!table || PyModule_AddObjectRef(module, "Tensor", type) || PyModule_AddObjectRef(module, "Table", table)) return nullptr;
  aotc::cpu::tensor_type = reinterpret_cast<PyTypeObject*>(type);
  return module;
}
