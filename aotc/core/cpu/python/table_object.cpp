// `aotc.core._cpu.Table`: a call table with what a load adds to its text, and calls by it.
#include "table_object.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../../equal_constants.h"
#include "../table_call.h"
#include "tensor_object.h"

namespace aotc::cpu {
namespace {

struct Held {  // references
  std::vector<PyObject*> objects;
  Held() = default;
  Held(const Held&) = delete;
  ~Held() {
    for (PyObject* each : objects) Py_XDECREF(each);
  }
};

struct LoadedTable {  // with what a load adds to its text
  struct Constant { Py_ssize_t leaf; PyObject* value; };
  struct Opened { Code code; PyObject* container; };  // `container()`: its address, of this process

  CallTable table;
  std::vector<Py_ssize_t> leaves;  // of the inputs
  std::vector<Constant> constants;
  std::vector<Opened> libraries;   // of the buckets
  Held kept;  // what holds the constants' values and the containers

  LoadedTable(const char* text, PyObject* places, PyObject* values, PyObject* opened);
};

struct TableObject { PyObject_HEAD LoadedTable* loaded; };

LoadedTable& loaded_table(PyObject* object) { return *reinterpret_cast<TableObject*>(object)->loaded; }

LoadedTable::LoadedTable(const char* text, PyObject* places, PyObject* values, PyObject* opened)
    : table(text) {
  kept.objects = {Py_NewRef(values), Py_NewRef(opened)};
  for (Py_ssize_t at = 0; at < PyTuple_Size(places); at++) leaves.push_back(PyLong_AsSsize_t(PyTuple_GetItem(places, at)));
  for (Py_ssize_t at = 0; at < PyTuple_Size(values); at++) {
    Constant& constant = constants.emplace_back();
    if (!PyArg_ParseTuple(PyTuple_GetItem(values, at), "nO", &constant.leaf, &constant.value)) break;
  }
  for (Py_ssize_t at = 0; !PyErr_Occurred() && at < PyTuple_Size(opened); at++) {
    Opened& library = libraries.emplace_back();
    PyObject* function;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(PyTuple_GetItem(opened, at), "OnO", &function, &count, &library.container)) break;
    void* address = PyLong_AsVoidPtr(function);
    std::memcpy(&library.code.run, &address, sizeof address);
    library.code.outputs = static_cast<size_t>(count);
  }
  if (PyErr_Occurred()) throw Failed();
  require(leaves.size() == table.inputs.size() && libraries.size() == table.buckets.size(), "a call table of another number of inputs or buckets");
}

// (text of the table, leaves of its inputs, constants as (leaf, value), libraries as (address of the run, outputs, container))
PyObject* new_table(PyTypeObject* type, PyObject* args, PyObject*) {
  const char* text;
  PyObject *places, *values, *opened;
  if (!PyArg_ParseTuple(args, "sO!O!O!", &text, &PyTuple_Type, &places, &PyTuple_Type, &values, &PyTuple_Type, &opened)) return nullptr;
  return translated([&] {
    auto loaded = std::make_unique<LoadedTable>(text, places, values, opened);
    PyObject* object = checked(reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0));
    reinterpret_cast<TableObject*>(object)->loaded = loaded.release();
    return object;
  });
}

void delete_table(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  delete reinterpret_cast<TableObject*>(object)->loaded;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

struct WithoutLock {  // of Python
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutLock() { PyEval_RestoreThread(state); }
};

// The inputs of a call, of which `views` holds the tensors, None for one that is left out. False where one is none.
bool take_inputs(const LoadedTable& loaded, PyObject* given, TableCall& call, Held& views) {
  for (size_t at = 0; at < loaded.leaves.size(); at++) {
    PyObject* value = PyList_GetItem(given, loaded.leaves[at]);
    if (!value) throw Failed();
    if (value == Py_None && loaded.table.inputs[at].filling) {
      views.objects.push_back(Py_NewRef(Py_None));
      call.given.push_back({});
      continue;
    }
    PyObject* view = viewed(nullptr, value);
    if (!view && !PyErr_ExceptionMatches(PyExc_Exception)) throw Failed();  // a signal's, as Ctrl-C
    if (!view) PyErr_Clear();
    views.objects.push_back(view);
    if (!view || view == Py_None) return false;
    call.given.push_back({Owned(shared(*of(view)->tensor)), of(view)->read_only});
  }
  return true;
}

PyObject* list_of(std::vector<Owned>& tensors) {
  PyObject* list = checked(PyList_New(static_cast<Py_ssize_t>(tensors.size())));
  for (size_t at = 0; at < tensors.size(); at++) PyList_SetItem(list, static_cast<Py_ssize_t>(at), wrapped(std::move(tensors[at]), false));
  return list;
}

bool same_lie(const Tensor& one, const Tensor& other) {
  return one.bytes() == other.bytes() && std::equal(one.sizes, one.sizes + one.rank, other.sizes) && std::equal(one.strides, one.strides + one.rank, other.strides);
}

// (leaves, tensors of the module): None for a miss; else the bucket, the leaves with tensors in the place of arrays, those
// with which the code ran, what it gave (None where it failed), how many inputs were copied, and whether it was padded.
PyObject* call_by_table(PyObject* self, PyObject* args) {
  PyObject *given, *of_module;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &given, &PyList_Type, &of_module)) return nullptr;
  return translated([&]() -> PyObject* {
    const LoadedTable& loaded = loaded_table(self);
    for (const LoadedTable::Constant& constant : loaded.constants)
      if (!equal_constant(PyList_GetItem(given, constant.leaf), constant.value)) Py_RETURN_NONE;
    TableCall call(loaded.table);
    Held views;
    if (!take_inputs(loaded, given, call, views)) Py_RETURN_NONE;
    call.fill();
    std::vector<Tensor*> state;
    for (Py_ssize_t at = 0; at < PyList_Size(of_module); at++) {
      PyObject* each = PyList_GetItem(of_module, at);
      require(is_tensor(each), "a tensor is expected");
      state.push_back(of(each)->tensor);
    }
    std::vector<std::string> reasons;
    if (!call.decide(state, reasons)) Py_RETURN_NONE;
    auto bucket = static_cast<size_t>(call.choice->bucket - loaded.table.buckets.data());
    Code code = loaded.libraries[bucket].code;
    PyObject* container = checked(PyObject_CallNoArgs(loaded.libraries[bucket].container));
    code.container = PyLong_AsVoidPtr(container);
    Py_DECREF(container);
    if (PyErr_Occurred()) throw Failed();
    int32_t status;
    {
      WithoutLock unlocked;
      status = call.run(code, state);
    }
    PyObject *leaves = checked(PyList_GetSlice(given, 0, PyList_Size(given))), *ran = checked(PyList_GetSlice(given, 0, PyList_Size(given)));
    for (size_t at = 0; at < call.given.size(); at++) {
      PyObject* view = views.objects[at] == Py_None ? wrapped(Owned(shared(*call.given[at].tensor)), false) : Py_NewRef(views.objects[at]);
      bool same = view && same_lie(*of(view)->tensor, *call.ran[at]);
      PyList_SetItem(ran, loaded.leaves[at], same ? Py_NewRef(view) : wrapped(std::move(call.ran[at]), false));
      PyList_SetItem(leaves, loaded.leaves[at], view);
    }
    PyObject* outputs = status ? Py_NewRef(Py_None) : list_of(call.outputs);
    return Py_BuildValue("(nNNNnN)", static_cast<Py_ssize_t>(bucket), leaves, ran, outputs, static_cast<Py_ssize_t>(call.copies), PyBool_FromLong(call.padded()));
  });
}

// (leaves, tensors or None): the same, with a tensor for each that is left out and has a default.
PyObject* filled_by_table(PyObject* self, PyObject* leaves) {
  return translated([&] {
    const LoadedTable& loaded = loaded_table(self);
    TableCall call(loaded.table);
    require(PyList_Check(leaves), "a list is expected");
    for (Py_ssize_t leaf : loaded.leaves) {
      PyObject* value = PyList_GetItem(leaves, leaf);
      if (!value) throw Failed();
      call.given.push_back({Owned(is_tensor(value) ? shared(*of(value)->tensor) : nullptr)});
    }
    call.fill();
    PyObject* filled = checked(PyList_GetSlice(leaves, 0, PyList_Size(leaves)));
    for (size_t at = 0; at < call.given.size(); at++)
      if (call.given[at].tensor && PyList_GetItem(leaves, loaded.leaves[at]) == Py_None)
        PyList_SetItem(filled, loaded.leaves[at], wrapped(std::move(call.given[at].tensor), false));
    return filled;
  });
}

PyMethodDef methods[] = {{"call", call_by_table, METH_VARARGS, nullptr},
                         {"filled", filled_by_table, METH_O, nullptr},
                         {}};
PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(new_table)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(delete_table)},
                       {Py_tp_methods, methods},
                       {0, nullptr}};
PyType_Spec spec = {"aotc.core._cpu.Table", sizeof(TableObject), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

PyObject* new_table_type() { return PyType_FromSpec(&spec); }

}  // namespace aotc::cpu
