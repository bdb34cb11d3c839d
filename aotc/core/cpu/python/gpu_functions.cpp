// The module's functions for GPUs, whose memory tensors may lie in.
#include "../../gpu/shared_copies.h"
#include "../../gpu/upload.h"
#include "table_object.h"
#include "tensor_object.h"

namespace aotc::cpu {

PyObject* gpu_error = nullptr;

namespace {

PyObject* open_gpu(PyObject*, PyObject* args) {  // (number): its name, capability in two numbers, and the driver's version
  int number;
  if (!PyArg_ParseTuple(args, "i", &number)) return nullptr;
  return translated([&] {
    const gpu::Device* device;
    {
      WithoutLock unlocked;
      device = &gpu::device_at(number);
    }
    return Py_BuildValue("(siii)", device->name.c_str(), device->major, device->minor, gpu::driver().version);
  });
}

PyObject* to_gpu(PyObject*, PyObject* args) {  // (list of tensors, number): copies with their strides, or those that lie there
  PyObject* list;
  int number;
  if (!PyArg_ParseTuple(args, "O!i", &PyList_Type, &list, &number)) return nullptr;
  return translated([&] {
    std::vector<Tensor*> tensors = tensors_of(list);
    std::vector<Owned> made;
    {
      WithoutLock unlocked;
      made = gpu::uploaded(tensors, gpu::device_at(number));
    }
    return list_of(made);
  });
}

Owned host_copy_of(const Tensor& tensor) {
  Owned made(new_dense_like(tensor, HOST));
  copy(*made, tensor);
  return made;
}

PyObject* to_host(PyObject*, PyObject* list) {  // (list of tensors): themselves where they lie in the CPU's memory, else copies
  if (!PyList_Check(list)) return PyErr_Format(PyExc_TypeError, "a list of tensors is expected");
  return translated([&] {
    std::vector<Owned> made;
    for (const Tensor* each : tensors_of(list))
      if (each->device() != HOST) made.emplace_back(shared(*each));
    {
      WithoutLock unlocked;
      made = gpu::copies_of(made, gpu::shared_spans(made), host_copy_of);
    }
    PyObject* result = checked(PyList_GetSlice(list, 0, PyList_Size(list)));
    auto next = made.begin();
    for (Py_ssize_t at = 0; at < PyList_Size(result); at++)
      if (of(PyList_GetItem(result, at))->tensor->device() != HOST) PyList_SetItem(result, at, wrapped(std::move(*next++), false));
    return result;
  });
}

PyObject* gpu_bytes(PyObject*, PyObject* args) {  // (number): of its memory that this process holds, and of that what is free
  int number;
  if (!PyArg_ParseTuple(args, "i", &number)) return nullptr;
  return translated([&] {
    const gpu::Device& device = gpu::device_at(number);
    return Py_BuildValue("(nn)", static_cast<Py_ssize_t>(device.held()), static_cast<Py_ssize_t>(device.cached()));
  });
}

PyObject* release_gpu(PyObject*, PyObject* args) {  // (number): gives memory that is free to the driver
  int number;
  if (!PyArg_ParseTuple(args, "i", &number)) return nullptr;
  return translated([&] {
    {
      WithoutLock unlocked;
      gpu::device_at(number).release_cache();
    }
    return Py_NewRef(Py_None);
  });
}

}  // namespace

PyMethodDef gpu_functions[] = {{"open_gpu", open_gpu, METH_VARARGS, nullptr},
                               {"to_gpu", to_gpu, METH_VARARGS, nullptr},
                               {"to_host", to_host, METH_O, nullptr},
                               {"gpu_bytes", gpu_bytes, METH_VARARGS, nullptr},
                               {"release_gpu", release_gpu, METH_VARARGS, nullptr},
                               {}};

}  // namespace aotc::cpu
