// The module's functions for GPUs, whose memory tensors may lie in.
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

PyObject* to_host(PyObject*, PyObject* object) {  // (tensor): itself where it lies in the CPU's memory, else a copy
  if (!is_tensor(object)) return PyErr_Format(PyExc_TypeError, "a tensor is expected");
  return translated([&]() -> PyObject* {
    const Tensor& from = *of(object)->tensor;
    if (from.device() == HOST) return Py_NewRef(object);
    Owned made;
    {
      WithoutLock unlocked;
      made.reset(new_dense_like(from, HOST));
      copy(*made, from);
    }
    return wrapped(std::move(made), false);
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
