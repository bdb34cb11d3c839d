// Exceptions of C++ as Python's, and Python's through C++.
#pragma once

#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <exception>
#include <new>

#include "../../gpu/driver.h"
#include "../library.h"

namespace aotc::cpu {

struct Failed : std::exception {  // with a Python exception set
  const char* what() const noexcept override { return "a Python exception"; }
};

inline PyObject* checked(PyObject* object) {
  if (!object) throw Failed();
  return object;
}

extern PyObject* gpu_error;  // `GpuError`, made once, with the module

inline void raise_gpu_error(const gpu::GpuError& error) {
  PyObject* values = Py_BuildValue("(siNnnn)", error.what(), error.code, PyBool_FromLong(!error.name.empty()), static_cast<Py_ssize_t>(error.asked), static_cast<Py_ssize_t>(error.available), static_cast<Py_ssize_t>(error.total));
  if (values) PyErr_SetObject(gpu_error, values), Py_DECREF(values);
}

// Runs what may throw C++'s exceptions. Null with a Python exception.
template <typename Run>
PyObject* translated(Run run) {
  try {
    return run();
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  } catch (const gpu::GpuError& error) {
    raise_gpu_error(error);
    return nullptr;
  } catch (const LibraryFailed& failed) {
    PyErr_SetString(PyExc_RuntimeError, failed.what());
    return nullptr;
  } catch (const std::exception& error) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, error.what());
    return nullptr;
  }
}

struct WithoutLock {  // of Python
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutLock() { PyEval_RestoreThread(state); }
};

struct KeptError {  // a Python exception, set aside while code of others runs
  PyObject *type, *value, *trace;
  KeptError() { PyErr_Fetch(&type, &value, &trace); }
  ~KeptError() { PyErr_Restore(type, value, trace); }
};

}  // namespace aotc::cpu
