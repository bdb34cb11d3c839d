#include "tensor_object.h"

namespace aotc::cpu {

PyTypeObject* tensor_type = nullptr;

PyObject* wrapped(Owned tensor, bool read_only) {
  auto alloc = reinterpret_cast<allocfunc>(PyType_GetSlot(tensor_type, Py_tp_alloc));
  PyObject* object = alloc(tensor_type, 0);
  if (!object) return nullptr;
  TensorObject* self = of(object);
  for (int axis = 0; axis < tensor->rank; axis++) self->strides[axis] = tensor->strides[axis] * itemsize_of(tensor->dtype);
  self->tensor = tensor.release(), self->read_only = read_only;
  return object;
}

PyObject* list_of(std::vector<Owned>& tensors) {
  PyObject* list = checked(PyList_New(static_cast<Py_ssize_t>(tensors.size())));
  for (size_t at = 0; at < tensors.size(); at++) PyList_SetItem(list, static_cast<Py_ssize_t>(at), wrapped(std::move(tensors[at]), false));
  return list;
}

std::vector<Tensor*> tensors_of(PyObject* list) {
  std::vector<Tensor*> tensors;
  for (Py_ssize_t at = 0; at < PyList_Size(list); at++) {
    PyObject* each = PyList_GetItem(list, at);
    require(is_tensor(each), "a tensor is expected");
    tensors.push_back(of(each)->tensor);
  }
  return tensors;
}

Owned tensor_over(void* data, int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                  void (*release)(Storage*), void* owner, int32_t device) {
  Reach reach = reach_of(rank, sizes, strides);
  int64_t width = itemsize_of(dtype);
  auto* storage = new Storage{static_cast<char*>(data) + reach.low * width, (reach.high - reach.low + 1) * width, release, owner, device};
  return Owned(new_tensor(storage, rank, sizes, strides, -reach.low, dtype));
}

namespace {

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
  const Tensor& own = *of(self)->tensor;
  std::string place = own.device() == HOST ? "" : " on GPU " + std::to_string(own.device());
  PyObject* text = shape ? PyUnicode_FromFormat("<aotc.standalone.Tensor %s %R%s>", name_of_dtype(own.dtype), shape, place.c_str()) : nullptr;
  Py_XDECREF(shape);
  return text;
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
PyMethodDef methods[] = {
    {"size", size, METH_O, nullptr},
    {"__dlpack__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(to_dlpack)), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"__dlpack_device__", dlpack_device, METH_NOARGS, nullptr},
    {}};
PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                       {Py_tp_repr, reinterpret_cast<void*>(representation)},
                       {Py_tp_getset, properties},
                       {Py_tp_methods, methods},
                       {Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
                       {0, nullptr}};
PyType_Spec spec = {"aotc.core._cpu.Tensor", sizeof(TensorObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

}  // namespace

PyObject* new_tensor_type() { return PyType_FromSpec(&spec); }

}  // namespace aotc::cpu
