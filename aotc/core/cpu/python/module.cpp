// `aotc.core._cpu`: the standalone runtime as an extension of Python.
//
// Its soname is that of a library, `libaotc_cpu.so`: compiled code that names it finds the functions of torch's C shim here.
// None of it imports a package.
#include "errors.h"

#include <omp.h>

#include "../../openmp.h"
#include "../cpu_features.h"
#include "table_object.h"
#include "tensor_object.h"

namespace aotc::cpu {
namespace {

PyObject* threads(PyObject*, PyObject* args) {
  int count = 0;
  if (!PyArg_ParseTuple(args, "|i", &count)) return nullptr;
  if (count > 0) omp_set_num_threads(count);
  return PyLong_FromLong(omp_get_max_threads());
}

PyObject* spin(PyObject*, PyObject*) {
  spin_briefly(omp_get_max_threads());
  Py_RETURN_NONE;
}

PyObject* absent_features(PyObject*, PyObject*) {  // of the CPU, in Linux's names: an emulator leaves /proc/cpuinfo as it is
  PyObject* names = PyList_New(0);
  each_absent_feature([&](const char* name) {
    PyObject* text = names ? PyUnicode_FromString(name) : nullptr;
    if (text) PyList_Append(names, text), Py_DECREF(text);
  });
  return names;
}

PyMethodDef methods[] = {{"threads", threads, METH_VARARGS, nullptr},
                         {"spin_briefly", spin, METH_NOARGS, nullptr},
                         {"absent_features", absent_features, METH_NOARGS, nullptr},
                         {}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cpu", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace aotc::cpu

PyMODINIT_FUNC PyInit__cpu() {
  using namespace aotc::cpu;
  PyObject* module = PyModule_Create(&definition);
  bool made = module && !PyModule_AddFunctions(module, tensor_functions) && !PyModule_AddFunctions(module, gpu_functions);
  gpu_error = made ? PyErr_NewException("aotc.core._cpu.GpuError", PyExc_RuntimeError, nullptr) : nullptr;
  PyObject* type = gpu_error && !PyModule_AddObjectRef(module, "GpuError", gpu_error) ? new_tensor_type() : nullptr;
  PyObject* table = type ? new_table_type() : nullptr;
  if (!table || PyModule_AddObjectRef(module, "Tensor", type) || PyModule_AddObjectRef(module, "Table", table)) return nullptr;
  tensor_type = reinterpret_cast<PyTypeObject*>(type);
  return module;
}
