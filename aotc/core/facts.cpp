#include "facts.h"

#include <algorithm>

namespace aotc {

std::vector<PyObject*> items_of(PyObject* tuple) {
  std::vector<PyObject*> items;
  for (Py_ssize_t index = 0; index < PyTuple_Size(tuple); index++) items.push_back(PyTuple_GetItem(tuple, index));
  return items;
}

PyObject* field(PyObject* spec, const char* name) {
  PyObject* value = PyDict_GetItemString(spec, name);
  if (!value) throw std::runtime_error(std::string("no field ") + name);
  return value;
}

std::vector<PyObject*> rows(PyObject* spec, const char* name) {
  PyObject* tuple = field(spec, name);
  if (!PyTuple_Check(tuple)) throw std::runtime_error(std::string("no tuple ") + name);
  return items_of(tuple);
}

long whole(PyObject* number) {
  long value = PyLong_AsLong(number);
  if (value == -1 && PyErr_Occurred()) throw std::runtime_error("not an int");
  return value;
}

namespace {

PyObject* held_at(PyObject* dict, PyObject* key) {  // None where the key is absent, as `dict.get`
  PyObject* value = PyDict_GetItemWithError(dict, key);
  return value ? value : Py_None;
}

bool same_in_step(PyObject* now, PyObject* copy) {
  if (PyDict_Size(now) != PyDict_Size(copy)) return false;
  Py_ssize_t at = 0, there = 0;
  PyObject *key, *value, *other_key, *other;
  while (PyDict_Next(now, &at, &key, &value))
    if (!PyDict_Next(copy, &there, &other_key, &other) || key != other_key || value != other) return false;
  return true;
}

bool same_items(PyObject* now, PyObject* copy) {
  if (PyList_Size(now) != PyList_Size(copy)) return false;
  for (Py_ssize_t index = 0; index < PyList_Size(now); index++)
    if (PyList_GetItem(now, index) != PyList_GetItem(copy, index)) return false;
  return true;
}

bool has_class(PyObject* object, PyObject* type) { return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type; }

}  // namespace

Facts::Facts(PyObject* spec) : spec_(spec), tensors_(field(spec, "tensors")) {
  auto entries = [&](const char* name, std::vector<Entry>& into) {
    for (PyObject* row : rows(spec, name))
      into.push_back({PyTuple_GetItem(row, 0), PyTuple_GetItem(row, 1), PyTuple_GetItem(row, 2)});
  };
  auto pairs = [&](const char* name, std::vector<Pair>& into) {
    for (PyObject* row : rows(spec, name)) into.push_back({PyTuple_GetItem(row, 0), PyTuple_GetItem(row, 1)});
  };
  entries("slots", slots_), entries("attributes", attributes_), entries("gradients", gradients_);
  pairs("tables", tables_), pairs("lists", lists_), pairs("classes", classes_), pairs("readers", readers_);
  empty_ = rows(spec, "empty");
  for (PyObject* row : rows(spec, "lengths"))
    lengths_.push_back({PyTuple_GetItem(row, 0), whole(PyTuple_GetItem(row, 1))});
  for (PyObject* row : rows(spec, "written"))
    written_.push_back({PyTuple_GetItem(row, 0), whole(PyTuple_GetItem(row, 1)),
                        PyLong_AsVoidPtr(PyTuple_GetItem(row, 2))});
  for (PyObject* row : rows(spec, "placed")) {
    PyObject* same = PyTuple_GetItem(row, 2);
    Layout layout = torch_door::layout_of(same);
    placed_.push_back({PyTuple_GetItem(row, 0), PyLong_AsVoidPtr(PyTuple_GetItem(row, 1)), layout.dtype,
                       torch_door::keys_of(same), Sizes(layout.sizes, layout.sizes + layout.rank),
                       Sizes(layout.strides, layout.strides + layout.rank)});
  }
  for (PyObject* container : rows(spec, "containers"))
    containers_.push_back(container == Py_None ? nullptr : PyLong_AsVoidPtr(container));
  if (PyErr_Occurred()) throw std::runtime_error("a row of another form");
}

bool Facts::hold() const {
  for (auto& [owner, key, value] : slots_)
    if (held_at(owner, key) != value) return false;
  for (auto& [now, copy] : tables_)
    if (!same_in_step(now, copy)) return false;
  for (auto& [now, copy] : lists_)
    if (!same_items(now, copy)) return false;
  for (PyObject* table : empty_)
    if (PyDict_Size(table)) return false;
  for (auto& [object, type] : classes_)
    if (!has_class(object, type)) return false;
  for (auto& [object, length] : lengths_)
    if (PyObject_Size(object) != length) return false;
  for (auto& [tensor, version, address] : written_)
    if (torch_door::version_of(tensor) != version || torch_door::address_of(tensor) != address) return false;
  for (auto& [tensor, address, dtype, keys, sizes, strides] : placed_) {
    if (torch_door::keys_of(tensor) != keys || torch_door::address_of(tensor) != address) return false;
    Layout now = torch_door::layout_of(tensor);
    if (now.dtype != dtype || !std::equal(sizes.begin(), sizes.end(), now.sizes, now.sizes + now.rank) ||
        !std::equal(strides.begin(), strides.end(), now.strides, now.strides + now.rank))
      return false;
  }
  for (auto& [owner, key, value] : gradients_) {
    PyObject* tensor = held_at(owner, key);  // one of `placed_`, or as it was in `tables_`
    if ((tensor != Py_None && torch_door::requires_grad(tensor)) != (value == Py_True)) return false;
  }
  // What runs Python's code comes last.
  for (auto& [object, name, value] : attributes_) {
    PyObject* now = PyObject_GetAttr(object, name);
    Py_XDECREF(now);
    if (now != value) return false;
  }
  for (auto& [read, expected] : readers_) {
    PyObject* now = PyObject_CallNoArgs(read);
    bool same = now && (now == expected || PyObject_RichCompareBool(now, expected, Py_EQ) == 1);
    Py_XDECREF(now);
    if (!same) return false;
  }
  return true;
}

}  // namespace aotc
