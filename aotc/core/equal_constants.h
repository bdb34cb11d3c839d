// Whether an argument is the constant that compiled code was built for: None, a bool, a number or a text.
#pragma once

#include <Python.h>

#include <cstring>

namespace aotc {

inline bool equal_constant(PyObject* value, PyObject* expected) {
  if (value == expected) return true;
  if (Py_TYPE(value) != Py_TYPE(expected)) return false;
  if (PyFloat_CheckExact(value)) {
    double one = PyFloat_AsDouble(value), other = PyFloat_AsDouble(expected);
    return !std::memcmp(&one, &other, sizeof one);
  }
  return (PyLong_CheckExact(value) || PyUnicode_CheckExact(value)) && PyObject_RichCompareBool(value, expected, Py_EQ) == 1;
}

}  // namespace aotc
