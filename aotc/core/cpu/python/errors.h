// Exceptions of C++ as Python's, and Python's through C++.
#pragma once

#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <exception>
#include <new>

#include "../library.h"

namespace aotc::cpu {

struct Failed : std::exception {  // with a Python exception set
  const char* what() const noexcept override { return "a Python exception"; }
};

inline PyObject* checked(PyObject* object) {
  if (!object) throw Failed();
  return object;
}

// Runs what may throw C++'s exceptions. Null with a Python exception.
template <typename Run>
PyObject* translated(Run run) {
  try {
    return run();
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  } catch (const LibraryFailed& failed) {
    PyErr_SetString(PyExc_RuntimeError, failed.what());
    return nullptr;
  } catch (const std::exception& error) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, error.what());
    return nullptr;
  }
}

struct KeptError {  // a Python exception, set aside while code of others runs
  PyObject *type, *value, *trace;
  KeptError() { PyErr_Fetch(&type, &value, &trace); }
  ~KeptError() { PyErr_Restore(type, value, trace); }
};

}  // namespace aotc::cpu
