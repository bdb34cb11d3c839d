// From a call's arguments to leaves: rows of the call table for parameters, containers and defaults.
#pragma once

#include "facts.h"

namespace aotc {

// The leaves of a call, held: another thread may change the containers in which they came.
struct Leaves {
  std::vector<PyObject*> values;
  Leaves() = default;
  Leaves(const Leaves&) = delete;
  ~Leaves() {
    for (PyObject* value : values) Py_XDECREF(value);
  }
  void put(size_t index, PyObject* value) {  // takes no reference over
    Py_XINCREF(value);
    std::swap(values[index], value);
    Py_XDECREF(value);
  }
};

PyObject* list_of(const std::vector<PyObject*>& values);  // a new list

class Binding {
 public:
  explicit Binding(PyObject* spec);
  bool read(PyObject* args, PyObject* kwargs, Leaves& leaves) const;  // false: Python says why, or takes it

 private:
  struct Node {  // where the leaves of one argument are: a leaf, a list of nodes, or a mapping of names to nodes
    enum { LEAF, LIST, TUPLE, MAPPING } kind;
    size_t leaf = 0;
    std::vector<Node> parts;
    std::vector<PyObject*> names;
  };
  struct Parameter { PyObject *name, *fallback; Node tree; bool empty_is_none; };

  static Node node_of(PyObject* tree);
  bool take(const Node& node, PyObject* value, Leaves& leaves) const;
  bool in_order(PyObject* kwargs) const;

  std::vector<Parameter> parameters_;
  std::vector<PyObject*> ordered_, lists_, tuples_;  // the classes that stand for a list and for a tuple
  std::vector<std::pair<size_t, PyObject*>> makers_;
  size_t positional_, count_;
  bool any_order_;
  Owned no_members_;
};

}  // namespace aotc
