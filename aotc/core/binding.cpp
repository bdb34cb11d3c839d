#include "binding.h"

namespace aotc {
namespace {

bool equal_names(PyObject* one, PyObject* other) {
  return one == other || (PyUnicode_Check(one) && PyObject_RichCompareBool(one, other, Py_EQ) == 1);
}

}  // namespace

PyObject* list_of(const std::vector<PyObject*>& values) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(values.size()));
  for (size_t index = 0; list && index < values.size(); index++)
    PyList_SetItem(list, static_cast<Py_ssize_t>(index), Py_NewRef(values[index]));
  return list;
}

Binding::Binding(PyObject* spec)
    : ordered_(rows(spec, "ordered")),
      lists_(rows(spec, "lists")),
      tuples_(rows(spec, "tuples")),
      positional_(whole(field(spec, "positional"))),
      count_(whole(field(spec, "leaves"))),
      any_order_(field(spec, "any_order") == Py_True),
      no_members_(PyDict_New()) {
  Py_DECREF(no_members_.object);  // `Owned` has taken a reference of its own
  for (PyObject* row : rows(spec, "parameters"))
    parameters_.push_back({PyTuple_GetItem(row, 0), PyTuple_GetItem(row, 1), node_of(PyTuple_GetItem(row, 2)),
                           PyTuple_GetItem(row, 3) == Py_True});
  for (PyObject* row : rows(spec, "makers"))
    makers_.push_back({whole(PyTuple_GetItem(row, 0)), PyTuple_GetItem(row, 1)});
}

Binding::Node Binding::node_of(PyObject* tree) {
  Node node{Node::LEAF};
  if (PyLong_Check(tree)) {
    node.leaf = whole(tree);
  } else if (PyList_Check(tree)) {
    bool is_tuple = PyList_Size(tree) && PyUnicode_Check(PyList_GetItem(tree, 0));  // ["tuple", …]
    node.kind = is_tuple ? Node::TUPLE : Node::LIST;
    for (Py_ssize_t index = is_tuple; index < PyList_Size(tree); index++)
      node.parts.push_back(node_of(PyList_GetItem(tree, index)));
  } else if (PyDict_Check(tree)) {
    node.kind = Node::MAPPING;
    Py_ssize_t at = 0;
    PyObject *name, *part;
    while (PyDict_Next(tree, &at, &name, &part)) node.names.push_back(name), node.parts.push_back(node_of(part));
  } else {
    throw std::runtime_error("a tree of another form");
  }
  return node;
}

bool Binding::take(const Node& node, PyObject* value, Leaves& leaves) const {
  if (node.kind == Node::LEAF) {
    leaves.put(node.leaf, value);
    return true;
  }
  if (node.kind != Node::MAPPING) {
    bool known = false;
    for (PyObject* type : node.kind == Node::TUPLE ? tuples_ : lists_) known = known || reinterpret_cast<PyObject*>(Py_TYPE(value)) == type;
    bool is_list = PyList_Check(value);
    if (!known || static_cast<size_t>(is_list ? PyList_Size(value) : PyTuple_Size(value)) != node.parts.size())
      return false;
    for (size_t index = 0; index < node.parts.size(); index++) {
      auto at = static_cast<Py_ssize_t>(index);
      if (!take(node.parts[index], is_list ? PyList_GetItem(value, at) : PyTuple_GetItem(value, at), leaves))
        return false;
    }
    return true;
  }
  if (!PyDict_CheckExact(value) || static_cast<size_t>(PyDict_Size(value)) != node.names.size()) return false;
  Py_ssize_t at = 0;
  size_t index = 0;
  PyObject *name, *item;
  while (PyDict_Next(value, &at, &name, &item)) {
    if (!PyUnicode_CheckExact(name)) return false;
    if (any_order_) {
      for (index = 0; index < node.names.size() && !equal_names(node.names[index], name);) index++;
      if (index == node.names.size()) return false;
    } else if (!equal_names(node.names[index], name)) {
      return false;
    }
    if (!take(node.parts[index++], item, leaves)) return false;
  }
  return true;
}

bool Binding::in_order(PyObject* kwargs) const {
  if (ordered_.empty()) return true;
  size_t next = 0;
  Py_ssize_t at = 0;
  PyObject *name, *value;
  while (kwargs && PyDict_Next(kwargs, &at, &name, &value))
    for (size_t index = 0; index < ordered_.size(); index++)
      if (equal_names(ordered_[index], name) && index != next++) return false;
  return next == ordered_.size();
}

bool Binding::read(PyObject* args, PyObject* kwargs, Leaves& leaves) const {
  size_t given = PyTuple_Size(args), keywords = kwargs ? PyDict_Size(kwargs) : 0, used = 0;
  if (given > positional_ || !in_order(kwargs)) return false;
  leaves.values.assign(count_, nullptr);
  for (size_t index = 0; index < parameters_.size(); index++) {
    const Parameter& parameter = parameters_[index];
    PyObject* value = index < given ? PyTuple_GetItem(args, static_cast<Py_ssize_t>(index)) : nullptr;
    if (!value && keywords && parameter.name != Py_None && (value = PyDict_GetItemWithError(kwargs, parameter.name)))
      used++;
    if (!value) value = parameter.fallback;
    if (value == Py_NotImplemented) return false;
    if (parameter.empty_is_none && (value == Py_None || (PyDict_CheckExact(value) && !PyDict_Size(value))))
      value = parameter.tree.kind == Node::LEAF ? Py_None : no_members_.object;
    if (!take(parameter.tree, value, leaves)) return false;
  }
  if (used != keywords) return false;
  for (PyObject* leaf : leaves.values)
    if (!leaf) return false;
  for (auto& [index, make] : makers_) {
    if (leaves.values[index] != Py_None) continue;
    PyObject* list = list_of(leaves.values);
    PyObject* made = list ? PyObject_CallFunctionObjArgs(make, list, nullptr) : nullptr;
    Py_XDECREF(list);
    if (!made) return false;
    leaves.put(index, made);
    Py_DECREF(made);
  }
  return true;
}

}  // namespace aotc
