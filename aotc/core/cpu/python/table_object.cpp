// `aotc.core._cpu.Table`: a call table with what a load adds to its text, and calls by it.
#include "table_object.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../../equal_constants.h"
#include "../../gpu/gpu_code.h"
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

  CallTable table;
  std::vector<Py_ssize_t> leaves;  // of the inputs
  std::vector<Constant> constants;
  std::vector<std::unique_ptr<Code>> codes;  // of the buckets
  int32_t device;
  Held kept;  // the constants' values

  LoadedTable(const char* text, PyObject* places, PyObject* values, PyObject* opened, int concurrency, int device);
};

struct TableObject { PyObject_HEAD LoadedTable* loaded; };

LoadedTable& loaded_table(PyObject* object) { return *reinterpret_cast<TableObject*>(object)->loaded; }

Library::Constants frozen_weights(PyObject* pairs) {
  Library::Constants found;
  for (Py_ssize_t at = 0; at < PyTuple_Size(pairs); at++) {
    const char* name;
    PyObject* tensor;
    if (!PyArg_ParseTuple(PyTuple_GetItem(pairs, at), "sO!", &name, tensor_type, &tensor)) throw Failed();
    found.emplace_back(name, Owned(shared(*of(tensor)->tensor)));
  }
  return found;
}

LoadedTable::LoadedTable(const char* text, PyObject* places, PyObject* values, PyObject* opened, int concurrency, int device)
    : table(text), device(device) {
  kept.objects = {Py_NewRef(values)};
  for (Py_ssize_t at = 0; at < PyTuple_Size(places); at++) leaves.push_back(PyLong_AsSsize_t(PyTuple_GetItem(places, at)));
  for (Py_ssize_t at = 0; at < PyTuple_Size(values); at++) {
    Constant& constant = constants.emplace_back();
    if (!PyArg_ParseTuple(PyTuple_GetItem(values, at), "nO", &constant.leaf, &constant.value)) throw Failed();
  }
  if (PyErr_Occurred()) throw Failed();
  bool fits = leaves.size() == table.inputs.size() && PyTuple_Size(opened) == static_cast<Py_ssize_t>(table.buckets.size());
  require(fits, "a call table of another number of inputs or buckets");
  for (const Bucket& bucket : table.buckets) {
    PyObject *handle, *weights;
    if (!PyArg_ParseTuple(PyTuple_GetItem(opened, static_cast<Py_ssize_t>(codes.size())), "OO!", &handle, &PyTuple_Type, &weights)) throw Failed();
    void* library = PyLong_AsVoidPtr(handle);
    if (device == HOST) codes.push_back(std::make_unique<Library>(library, bucket, concurrency, frozen_weights(weights)));
    else codes.push_back(std::make_unique<gpu::GpuCode>(library, bucket, frozen_weights(weights), gpu::device_at(device)));
  }
}

// (text of the table, leaves of its inputs, constants as (leaf, value), libraries as (handle of dlopen, frozen weights as
// (name, tensor)), concurrency, number of a GPU)
PyObject* new_table(PyTypeObject* type, PyObject* args, PyObject*) {
  const char* text;
  PyObject *places, *values, *opened;
  int concurrency, device = HOST;
  if (!PyArg_ParseTuple(args, "sO!O!O!i|i", &text, &PyTuple_Type, &places, &PyTuple_Type, &values, &PyTuple_Type, &opened, &concurrency, &device)) return nullptr;
  return translated([&] {
    auto loaded = std::make_unique<LoadedTable>(text, places, values, opened, concurrency, device);
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
    PyObject* view = viewed(value, loaded.device);
    if (!view && !PyErr_ExceptionMatches(PyExc_Exception)) throw Failed();  // a signal's, as Ctrl-C
    if (!view) PyErr_Clear();
    views.objects.push_back(view);
    if (!view || view == Py_None) return false;
    call.given.push_back({Owned(shared(*of(view)->tensor)), of(view)->read_only});
  }
  return true;
}

bool same_lie(const Tensor& one, const Tensor& other) {
  return one.bytes() == other.bytes() && std::equal(one.sizes, one.sizes + one.rank, other.sizes) && std::equal(one.strides, one.strides + one.rank, other.strides);
}

// (leaves, tensors of the module): None for a miss; else the bucket, the leaves with tensors in the place of arrays, those
// with which the code ran, what it gave, how many inputs were copied, and whether it was padded.
PyObject* call_by_table(PyObject* self, PyObject* args) {
  PyObject *given, *of_module;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &given, &PyList_Type, &of_module)) return nullptr;
  return translated([&]() -> PyObject* {
    const LoadedTable& loaded = loaded_table(self);
    for (const LoadedTable::Constant& constant : loaded.constants)
      if (!equal_constant(PyList_GetItem(given, constant.leaf), constant.value)) Py_RETURN_NONE;
    TableCall call(loaded.table, loaded.device);
    Held views;
    if (!take_inputs(loaded, given, call, views)) Py_RETURN_NONE;
    call.fill();
    std::vector<Tensor*> state = tensors_of(of_module);
    std::vector<Issue> issues;
    if (!call.decide(state, issues)) Py_RETURN_NONE;
    auto bucket = static_cast<size_t>(call.choice->bucket - loaded.table.buckets.data());
    {
      WithoutLock unlocked;
      call.run(*loaded.codes[bucket], state);
    }
    PyObject *leaves = checked(PyList_GetSlice(given, 0, PyList_Size(given))), *ran = checked(PyList_GetSlice(given, 0, PyList_Size(given)));
    for (size_t at = 0; at < call.given.size(); at++) {
      PyObject* view = views.objects[at] == Py_None ? wrapped(Owned(shared(*call.given[at].tensor)), false) : Py_NewRef(views.objects[at]);
      bool same = view && same_lie(*of(view)->tensor, *call.ran[at]);
      PyList_SetItem(ran, loaded.leaves[at], same ? Py_NewRef(view) : wrapped(std::move(call.ran[at]), false));
      PyList_SetItem(leaves, loaded.leaves[at], view);
    }
    return Py_BuildValue("(nNNNnN)", static_cast<Py_ssize_t>(bucket), leaves, ran, list_of(call.outputs), static_cast<Py_ssize_t>(call.copies), PyBool_FromLong(call.padded()));
  });
}

PyObject* tuple_of(const std::vector<Issue>& issues) {  // as `aotc.errors.Issue` takes them
  PyObject* tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(issues.size())));
  for (size_t at = 0; at < issues.size(); at++) {
    const Issue& each = issues[at];
    PyTuple_SetItem(tuple, static_cast<Py_ssize_t>(at), Py_BuildValue("(sssss)", each.words.c_str(), each.where.c_str(), each.expected.c_str(), each.actual.c_str(), each.hint.c_str()));
  }
  return tuple;
}

// (leaves with tensors, None for one that is left out; tensors of the module): the bucket by the call's sizes, None where
// there is none; the sizes, None where they cannot be read; what the call does not keep; and why the nearest other buckets
// do not take it.
PyObject* explain_by_table(PyObject* self, PyObject* args) {
  PyObject *leaves, *of_module;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &leaves, &PyList_Type, &of_module)) return nullptr;
  return translated([&] {
    const LoadedTable& loaded = loaded_table(self);
    TableCall call(loaded.table);
    for (Py_ssize_t leaf : loaded.leaves) {
      PyObject* value = PyList_GetItem(leaves, leaf);
      if (!value) throw Failed();
      if (is_tensor(value)) call.given.push_back({Owned(shared(*of(value)->tensor)), of(value)->read_only});
      else call.given.push_back({});
    }
    call.fill();
    std::vector<Issue> issues;
    call.decide(tensors_of(of_module), issues);
    auto place = [&](const Bucket* bucket) { return static_cast<Py_ssize_t>(bucket - loaded.table.buckets.data()); };
    PyObject* bucket = call.choice ? PyLong_FromSsize_t(place(call.choice->bucket)) : Py_NewRef(Py_None);
    PyObject* sizes = call.asked ? PyTuple_New(static_cast<Py_ssize_t>(call.asked->size())) : Py_NewRef(Py_None);
    PyObject* rejected = checked(PyList_New(0));
    if (call.asked) {
      for (size_t at = 0; sizes && at < call.asked->size(); at++) PyTuple_SetItem(sizes, static_cast<Py_ssize_t>(at), PyLong_FromLongLong((*call.asked)[at]));
      for (const Rejected& each : loaded.table.rejected(*call.asked, call.choice ? call.choice->bucket : nullptr)) {
        PyObject* row = Py_BuildValue("(nN)", place(each.bucket), tuple_of(each.issues));
        if (row) PyList_Append(rejected, row), Py_DECREF(row);
      }
    }
    return Py_BuildValue("(NNNN)", bucket, sizes, tuple_of(issues), rejected);
  });
}

PyObject* renew_libraries(PyObject* self, PyObject*) {  // in a forked child
  for (const auto& code : loaded_table(self).codes) code->renew();
  Py_RETURN_NONE;
}

PyObject* containers(PyObject* self, PyObject*) {  // their addresses
  return translated([&]() -> PyObject* {
    std::vector<void*> made;
    for (const auto& code : loaded_table(self).codes) made.push_back(code->container());
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(made.size()));
    for (size_t at = 0; list && at < made.size(); at++) PyList_SetItem(list, static_cast<Py_ssize_t>(at), PyLong_FromVoidPtr(made[at]));
    return list;
  });
}

void capture_graph(const LoadedTable& loaded, size_t at, const Sizes& dims, const std::vector<Tensor*>& state) {
  std::vector<Owned> made;
  std::vector<Tensor*> inputs;
  for (const Place& place : loaded.table.buckets[at].arguments) {
    if (place.kind == Place::INPUT) made.push_back(empty_input(loaded.table.inputs[place.index], dims, loaded.device));
    inputs.push_back(place.kind == Place::INPUT ? made.back().get() : state[place.index]);
  }
  static_cast<const gpu::GpuCode&>(*loaded.codes[at]).capture(inputs);
}

// (tensors of the module): captures the graphs that the table names.
PyObject* capture_graphs(PyObject* self, PyObject* of_module) {
  return translated([&]() -> PyObject* {
    const LoadedTable& loaded = loaded_table(self);
    require(PyList_Check(of_module) && loaded.device != HOST, "the tensors of a module on a GPU are expected");
    std::vector<Tensor*> state = tensors_of(of_module);
    {
      WithoutLock unlocked;
      for (size_t at = 0; at < loaded.codes.size(); at++)
        for (const Sizes& dims : loaded.table.buckets[at].graphs) capture_graph(loaded, at, dims, state);
      gpu::device_at(loaded.device).release_cache();  // of the runs before the captures
    }
    Py_RETURN_NONE;
  });
}

PyObject* graph_launches(PyObject* self, PyObject*) {
  int64_t count = 0;
  for (const auto& code : loaded_table(self).codes)
    if (auto* of_gpu = dynamic_cast<const gpu::GpuCode*>(code.get())) count += of_gpu->launches();
  return PyLong_FromLongLong(count);
}

PyMethodDef methods[] = {{"capture", capture_graphs, METH_O, nullptr},
                         {"graph_launches", graph_launches, METH_NOARGS, nullptr},
                         {"call", call_by_table, METH_VARARGS, nullptr},
                         {"explain", explain_by_table, METH_VARARGS, nullptr},
                         {"renew", renew_libraries, METH_NOARGS, nullptr},
                         {"containers", containers, METH_NOARGS, nullptr},
                         {}};
PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(new_table)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(delete_table)},
                       {Py_tp_methods, methods},
                       {0, nullptr}};
PyType_Spec spec = {"aotc.core._cpu.Table", sizeof(TableObject), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

PyObject* new_table_type() { return PyType_FromSpec(&spec); }

}  // namespace aotc::cpu
