// `aotc.core._evaluator`: a call of compiled code, decided and run in one call of C++.
//
// An `Evaluator` has the call table, which is complete when it is made, and the facts of its module and process, which
// `swap` replaces as a whole. A call gives the result, or NotImplemented: then Python makes the call, or says why not. If
// a check is inconclusive, the answer is NotImplemented; no miss is decided here and no error worded.
//
// Python objects are borrowed from the specification, from a plan's `keep` and from the facts, which are held.
#include <algorithm>
#include <array>
#include <cstring>
#include <ctime>
#include <unordered_map>

#include "binding.h"
#include "equal_constants.h"
#include "openmp.h"

namespace aotc {
namespace {

constexpr long INTERFACE = 2;  // of the tables: `INTERFACE` of aotc/runtime/native.py
constexpr size_t MOST_PLANS = 16384;

using Row = std::array<long, 4>;  // calls, padded calls, elements of the inputs, elements that ran: as of `Counters`

constexpr int FIRST_BITS = 13, SPANS = 25;  // of nanoseconds, as in `aotc.runtime.counters`

struct Counts {
  Row of_calls{};
  long nanoseconds = 0;
  std::array<long, SPANS> spans{};  // calls of up to 2^13, 2^14, ... ns, and of more

  void add(const Row& counted, long took) {
    for (size_t index = 0; index < counted.size(); index++) of_calls[index] += counted[index];
    nanoseconds += took;
    int bits = took > 1 ? 64 - __builtin_clzl(static_cast<unsigned long>(took - 1)) : 0;
    spans[static_cast<size_t>(std::clamp(bits - FIRST_BITS, 0, SPANS - 1))]++;
  }
};

long nanoseconds_now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000L + now.tv_nsec;
}

struct SizesHash {
  size_t operator()(const Sizes& sizes) const {
    uint64_t hash = 0;
    for (int64_t size : sizes) hash = (hash ^ static_cast<uint64_t>(size)) * 1099511628211u;
    return hash;
  }
};

struct TensorRow { size_t leaf; int32_t dtype; int64_t rank; bool differentiable; };
struct ConstantRow { size_t leaf; PyObject* value; };
struct DimRow { size_t leaf; int64_t axis, scale, offset; };

struct Library {  // of one variant; `run` is null where Python launches it
  int (*run)(void*, void**, size_t, void**, size_t, void*, void*) = nullptr;
  std::vector<size_t> arguments;  // places among the leaves and, after them, the module's tensors
  size_t outputs = 0;
  PyObject *result = nullptr, *assemble = nullptr, *failed = nullptr;
};

struct Plan {  // of one set of sizes
  Owned keep;
  size_t variant;
  Row counted;
  bool in_c;
  std::vector<Sizes> sizes, strides;  // of each tensor row
  PyObject* of_python;
  explicit Plan(PyObject* tuple) : keep(tuple) {}
};

Sizes sizes_of(PyObject* tuple) {
  Sizes sizes;
  for (PyObject* item : items_of(tuple)) sizes.push_back(PyLong_AsLongLong(item));
  return sizes;
}

PyObject* tuple_of(const Sizes& sizes) {
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(sizes.size()));
  for (size_t index = 0; tuple && index < sizes.size(); index++)
    PyTuple_SetItem(tuple, static_cast<Py_ssize_t>(index), PyLong_FromLongLong(sizes[index]));
  return tuple;
}

struct Table {
  Owned spec;
  Binding binding;
  std::vector<PyObject*> types;
  std::vector<uint64_t> keys;
  std::vector<TensorRow> tensors;
  std::vector<ConstantRow> constants;
  std::vector<DimRow> dims;
  std::vector<Library> libraries;
  long grad, inference, of_input, gpu;
  uint64_t included, excluded, unasked;  // `unasked`: of `excluded`, what other devices' modes change
  PyObject *is_followed, *plan, *launch, *restride;
  std::unordered_map<Sizes, std::shared_ptr<Plan>, SizesHash> plans;

  explicit Table(PyObject* given);
  bool modes_hold(const torch_door::Modes& now) const;
  bool takes(PyObject* object, const TensorRow& row, bool gradients) const;
  bool holds_constants(const Leaves& leaves) const;
  bool read_sizes(const Leaves& leaves, Sizes& sizes) const;
  std::shared_ptr<Plan> plan_for(const Sizes& sizes);
  bool fits(const Plan& plan, const Leaves& leaves, std::vector<std::pair<size_t, size_t>>& other_strides) const;
};

Table::Table(PyObject* given) : spec(given), binding(field(given, "binding")), types(rows(given, "types")) {
  for (PyObject* item : rows(given, "keys")) keys.push_back(PyLong_AsUnsignedLongLongMask(item));
  for (PyObject* row : rows(given, "tensors"))
    tensors.push_back({static_cast<size_t>(whole(PyTuple_GetItem(row, 0))),
                       static_cast<int32_t>(whole(PyTuple_GetItem(row, 1))), whole(PyTuple_GetItem(row, 2)),
                       PyTuple_GetItem(row, 3) == Py_True});
  for (PyObject* row : rows(given, "constants"))
    constants.push_back({static_cast<size_t>(whole(PyTuple_GetItem(row, 0))), PyTuple_GetItem(row, 1)});
  for (PyObject* row : rows(given, "dims"))
    dims.push_back({static_cast<size_t>(whole(PyTuple_GetItem(row, 0))), whole(PyTuple_GetItem(row, 1)),
                    whole(PyTuple_GetItem(row, 2)), whole(PyTuple_GetItem(row, 3))});
  for (PyObject* row : rows(given, "libraries")) {
    Library& library = libraries.emplace_back();
    if (row == Py_None) continue;
    void* address = PyLong_AsVoidPtr(PyTuple_GetItem(row, 0));
    std::memcpy(&library.run, &address, sizeof address);
    for (PyObject* place : items_of(PyTuple_GetItem(row, 1))) library.arguments.push_back(whole(place));
    library.outputs = whole(PyTuple_GetItem(row, 2));
    library.result = PyTuple_GetItem(row, 3), library.assemble = PyTuple_GetItem(row, 4);
    library.failed = PyTuple_GetItem(row, 5);
  }
  grad = whole(field(given, "grad")), inference = whole(field(given, "inference"));
  of_input = whole(field(given, "of_input")), gpu = whole(field(given, "gpu"));
  included = PyLong_AsUnsignedLongLongMask(field(given, "included"));
  excluded = PyLong_AsUnsignedLongLongMask(field(given, "excluded"));
  unasked = PyLong_AsUnsignedLongLongMask(field(given, "unasked"));
  is_followed = field(given, "is_followed"), plan = field(given, "plan");
  launch = field(given, "launch"), restride = field(given, "restride");
  if (PyErr_Occurred()) throw std::runtime_error("a row of another form");
}

bool Table::modes_hold(const torch_door::Modes& now) const {
  if (now.included != included || (now.excluded & ~unasked) != excluded || now.dispatch_modes ||
      (grad >= 0 && now.gradients != grad) || (inference >= 0 && now.inference != inference))
    return false;
  if (!now.function_modes) return true;
  PyObject* followed = PyObject_CallNoArgs(is_followed);  // a default device is such a mode, and changes nothing here
  Py_XDECREF(followed);
  return followed == Py_False;
}

bool Table::takes(PyObject* object, const TensorRow& row, bool gradients) const {
  if (std::find(types.begin(), types.end(), reinterpret_cast<PyObject*>(Py_TYPE(object))) == types.end()) return false;
  if (std::find(keys.begin(), keys.end(), torch_door::keys_of(object)) == keys.end()) return false;
  if (gpu >= 0 && torch_door::device_index_of(object) != gpu) return false;
  return !torch_door::requires_grad(object) || !(of_input || (gradients && !row.differentiable));
}

bool Table::holds_constants(const Leaves& leaves) const {
  for (auto& [leaf, value] : constants)
    if (!equal_constant(leaves.values[leaf], value)) return false;
  return true;
}

bool Table::read_sizes(const Leaves& leaves, Sizes& sizes) const {
  for (auto& [leaf, axis, scale, offset] : dims) {
    int64_t size = torch_door::layout_of(leaves.values[leaf]).sizes[axis] - offset;
    if (size % scale) return false;
    sizes.push_back(size / scale);
  }
  return true;
}

std::shared_ptr<Plan> Table::plan_for(const Sizes& sizes) {
  if (auto known = plans.find(sizes); known != plans.end()) return known->second;
  PyObject* asked = tuple_of(sizes);
  PyObject* answer = asked ? PyObject_CallFunctionObjArgs(plan, asked, nullptr) : nullptr;
  Py_XDECREF(asked);
  if (!answer || answer == Py_None) {
    Py_XDECREF(answer);
    return nullptr;
  }
  auto made = std::make_shared<Plan>(answer);
  Py_DECREF(answer);
  made->variant = whole(PyTuple_GetItem(answer, 0));
  made->counted = {1, whole(PyTuple_GetItem(answer, 1)), whole(PyTuple_GetItem(answer, 2)),
                   whole(PyTuple_GetItem(answer, 3))};
  made->in_c = PyTuple_GetItem(answer, 4) == Py_True;
  for (PyObject* shape : items_of(PyTuple_GetItem(answer, 5))) {
    made->sizes.push_back(sizes_of(PyTuple_GetItem(shape, 0)));
    made->strides.push_back(sizes_of(PyTuple_GetItem(shape, 1)));
  }
  made->of_python = PyTuple_GetItem(answer, 6);
  if (made->sizes.size() != tensors.size() || made->variant >= libraries.size() || PyErr_Occurred())
    throw std::runtime_error("a plan of another form");
  if (plans.size() >= MOST_PLANS) plans.clear();
  plans.emplace(sizes, made);
  return made;
}

// `other_strides`: places (of a leaf, of its row) where the strides of axes with one element are not those of the plan.
bool Table::fits(const Plan& plan, const Leaves& leaves, std::vector<std::pair<size_t, size_t>>& other_strides) const {
  for (size_t index = 0; index < tensors.size(); index++) {
    PyObject* tensor = leaves.values[tensors[index].leaf];
    Layout layout = torch_door::layout_of(tensor);
    const Sizes &sizes = plan.sizes[index], &strides = plan.strides[index];
    bool has_elements = true, differs = false;
    for (size_t axis = 0; axis < sizes.size(); axis++) {
      if (layout.sizes[axis] != sizes[axis]) return false;
      has_elements = has_elements && sizes[axis];
      if (layout.strides[axis] == strides[axis]) continue;
      if (sizes[axis] != 1) return false;
      differs = true;
    }
    if (has_elements && !torch_door::address_of(tensor)) return false;
    if (differs) other_strides.push_back({tensors[index].leaf, index});
  }
  return true;
}

struct Evaluator {
  PyObject_HEAD std::shared_ptr<Table> table;
  std::shared_ptr<Facts> facts;
  std::vector<Counts> counts;
  PyObject* observer;  // called with the sizes of each call that the library runs; or null
};

Evaluator* of(PyObject* object) { return reinterpret_cast<Evaluator*>(object); }

// -- the run ----------------------------------------------------------------------------------------------------------

PyObject* result_of(const Library& library, const Leaves& given, PyObject* tensors, std::vector<void*>& outputs) {
  if (library.result == Py_True) return torch_door::wrapped(outputs[0]);
  bool as_tuple = library.result == Py_False;
  auto count = static_cast<Py_ssize_t>(outputs.size());
  PyObject* result = as_tuple ? PyTuple_New(count) : PyList_New(count);
  for (Py_ssize_t index = 0; index < count; index++) {
    PyObject* tensor = torch_door::wrapped(outputs[index]);
    as_tuple ? PyTuple_SetItem(result, index, tensor) : PyList_SetItem(result, index, tensor);
  }
  if (as_tuple) return result;
  PyObject* leaves = list_of(given.values);
  PyObject* built = leaves ? PyObject_CallFunctionObjArgs(library.assemble, result, leaves, tensors, nullptr) : nullptr;
  Py_XDECREF(leaves);
  Py_DECREF(result);
  return built;
}

PyObject* run_library(const Library& library, void* container, PyObject* tensors, const Leaves& ran, const Leaves& given) {
  std::vector<void*> inputs, outputs(library.outputs, nullptr);
  for (size_t place : library.arguments) {
    PyObject* tensor = place < ran.values.size()
                           ? ran.values[place]
                           : PyList_GetItem(tensors, static_cast<Py_ssize_t>(place - ran.values.size()));
    inputs.push_back(torch_door::new_handle(torch_door::handle_of(tensor)));
  }
  int status;
  Py_BEGIN_ALLOW_THREADS
  status = library.run(container, inputs.data(), inputs.size(), outputs.data(), outputs.size(), nullptr, nullptr);
  Py_END_ALLOW_THREADS
  if (!status) return result_of(library, given, tensors, outputs);
  PyObject* leaves = list_of(given.values);  // Python words it, from what the library keeps of this thread's last error
  Py_XDECREF(leaves ? PyObject_CallFunctionObjArgs(library.failed, leaves, nullptr) : nullptr);
  Py_XDECREF(leaves);
  for (void* handle : outputs)
    if (handle) torch_door::dropped(handle);
  return nullptr;
}

PyObject* launched(const Table& table, const Plan& plan, PyObject* tensors, const Leaves& ran, const Leaves& given) {
  PyObject *first = list_of(ran.values), *second = &ran == &given ? Py_XNewRef(first) : list_of(given.values);
  PyObject* result = nullptr;
  if (first && second)
    result = PyObject_CallFunctionObjArgs(table.launch, plan.of_python, tensors, first, second, nullptr);
  Py_XDECREF(first);
  Py_XDECREF(second);
  return result;
}

PyObject* not_implemented() {
  if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;  // a signal's, as Ctrl-C
  PyErr_Clear();
  Py_RETURN_NOTIMPLEMENTED;
}

bool observed(PyObject* observer, const Sizes& sizes) {
  if (!observer) return true;
  Py_INCREF(observer);
  PyObject* tuple = tuple_of(sizes);
  PyObject* done = tuple ? PyObject_CallFunctionObjArgs(observer, tuple, nullptr) : nullptr;
  Py_XDECREF(tuple);
  Py_XDECREF(done);
  Py_DECREF(observer);
  return done;
}

PyObject* call(PyObject* object, PyObject* args, PyObject* kwargs) {
  long began = nanoseconds_now();
  Evaluator* self = of(object);
  std::shared_ptr<Table> table = self->table;
  std::shared_ptr<Facts> facts = self->facts;  // another thread may swap them
  std::shared_ptr<Plan> plan;
  Leaves given, strided;
  const Leaves* ran = &given;
  Sizes sizes;
  try {
    torch_door::Modes modes = torch_door::modes();
    if (!facts || !table->modes_hold(modes) || !table->binding.read(args, kwargs, given)) return not_implemented();
    for (const TensorRow& row : table->tensors) {
      PyObject* tensor = given.values[row.leaf];
      if (!table->takes(tensor, row, modes.gradients)) return not_implemented();
      Layout layout = torch_door::layout_of(tensor);
      if (layout.dtype != row.dtype || layout.rank != row.rank) return not_implemented();
    }
    std::vector<std::pair<size_t, size_t>> other_strides;
    if (!table->holds_constants(given) || !table->read_sizes(given, sizes) || !(plan = table->plan_for(sizes)) ||
        !table->fits(*plan, given, other_strides) || !facts->hold())
      return not_implemented();
    if (!other_strides.empty()) {
      strided.values.assign(given.values.size(), nullptr);
      for (size_t leaf = 0; leaf < given.values.size(); leaf++) strided.put(leaf, given.values[leaf]);
      for (auto& [leaf, row] : other_strides) {
        PyObject* shape = PyTuple_GetItem(PyTuple_GetItem(plan->keep.object, 5), static_cast<Py_ssize_t>(row));
        PyObject* view = PyObject_CallFunctionObjArgs(table->restride, given.values[leaf], PyTuple_GetItem(shape, 1),
                                                      nullptr);
        if (!view) return not_implemented();
        strided.put(leaf, view);
        Py_DECREF(view);
      }
      ran = &strided;
    }
  } catch (...) {
    return not_implemented();
  }
  const Library& library = table->libraries[plan->variant];
  void* container = facts->container(plan->variant);
  bool in_c = plan->in_c && container;
  if (in_c && !observed(self->observer, sizes)) return nullptr;
  PyObject* result = in_c ? run_library(library, container, facts->tensors(), *ran, given)
                          : launched(*table, *plan, facts->tensors(), *ran, given);
  if (result && result != Py_NotImplemented) self->counts[plan->variant].add(plan->counted, nanoseconds_now() - began);
  return result;
}

// -- the class --------------------------------------------------------------------------------------------------------

template <typename Make>
bool made(Make make) {  // false with an exception
  try {
    make();
    return true;
  } catch (const std::exception& error) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, error.what());
    return false;
  }
}

PyObject* create(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* spec;
  if (!PyArg_ParseTuple(args, "O!", &PyDict_Type, &spec)) return nullptr;
  auto alloc = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  PyObject* object = alloc(type, 0);
  if (!object) return nullptr;
  Evaluator* self = of(object);
  new (&self->table) std::shared_ptr<Table>();
  new (&self->facts) std::shared_ptr<Facts>();
  new (&self->counts) std::vector<Counts>();
  self->observer = nullptr;
  if (made([&] {
        self->table = std::make_shared<Table>(spec);
        self->counts.resize(self->table->libraries.size());
      }))
    return object;
  Py_DECREF(object);
  return nullptr;
}

PyObject* swap(PyObject* object, PyObject* spec) {  // None: holds nothing of the module, and runs nothing
  std::shared_ptr<Facts> facts;
  if (spec != Py_None && !made([&] { facts = std::make_shared<Facts>(spec); })) return nullptr;
  of(object)->facts.swap(facts);
  Py_RETURN_NONE;
}

PyObject* observe(PyObject* object, PyObject* observer) {  // None: no observer
  PyObject* before = of(object)->observer;
  of(object)->observer = observer == Py_None ? nullptr : Py_NewRef(observer);
  Py_XDECREF(before);
  Py_RETURN_NONE;
}

PyObject* counts(PyObject* object, PyObject*) {  // of each variant, a row as of `Counters`
  PyObject* list = PyList_New(0);
  for (const Counts& counts : of(object)->counts) {
    Sizes row(counts.of_calls.begin(), counts.of_calls.end());
    row.push_back(counts.nanoseconds);
    row.insert(row.end(), counts.spans.begin(), counts.spans.end());
    PyObject* tuple = tuple_of(row);
    if (!list || !tuple || PyList_Append(list, tuple)) return nullptr;
    Py_DECREF(tuple);
  }
  return list;
}

int traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Evaluator* self = of(object);
  if (self->table) {
    Py_VISIT(self->table->spec.object);
    for (auto& [_, plan] : self->table->plans) Py_VISIT(plan->keep.object);
  }
  if (self->facts) Py_VISIT(self->facts->spec());
  Py_VISIT(self->observer);
  return 0;
}

int clear(PyObject* object) {
  std::shared_ptr<Facts> facts;
  of(object)->facts.swap(facts);
  PyObject* observer = of(object)->observer;
  of(object)->observer = nullptr;
  Py_XDECREF(observer);
  return 0;
}

void dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  Evaluator* self = of(object);
  PyTypeObject* type = Py_TYPE(object);
  self->facts.~shared_ptr();
  self->table.~shared_ptr();
  self->counts.~vector();
  Py_XDECREF(self->observer);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

PyMethodDef methods_of_evaluator[] = {{"swap", swap, METH_O, nullptr}, {"observe", observe, METH_O, nullptr}, {"counts", counts, METH_NOARGS, nullptr}, {}};
PyType_Slot slots_of_evaluator[] = {{Py_tp_new, reinterpret_cast<void*>(create)},
                                    {Py_tp_call, reinterpret_cast<void*>(call)},
                                    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                                    {Py_tp_clear, reinterpret_cast<void*>(clear)},
                                    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                                    {Py_tp_methods, methods_of_evaluator},
                                    {0, nullptr}};
PyType_Spec spec_of_evaluator = {"aotc.core._evaluator.Evaluator", sizeof(Evaluator), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots_of_evaluator};

// -- the module -------------------------------------------------------------------------------------------------------

PyObject* open_door(PyObject*, PyObject* samples) {  // a tuple of (tensor, its dispatch keys, its address in C++)
  if (!torch_door::open(samples)) return nullptr;
  Py_RETURN_NONE;
}

PyObject* know_modes(PyObject*, PyObject* args) {
  unsigned long long included, excluded;
  if (!PyArg_ParseTuple(args, "KK", &included, &excluded)) return nullptr;
  torch_door::know_modes(included, excluded);
  Py_RETURN_NONE;
}

PyObject* described(PyObject*, PyObject* tensor) {  // what the door says of a tensor, to be compared with Python's words
  Layout layout = torch_door::layout_of(tensor);
  PyObject *sizes = PyList_New(layout.rank), *strides = PyList_New(layout.rank);
  for (int64_t axis = 0; axis < layout.rank; axis++) {
    PyList_SetItem(sizes, axis, PyLong_FromLongLong(layout.sizes[axis]));
    PyList_SetItem(strides, axis, PyLong_FromLongLong(layout.strides[axis]));
  }
  return Py_BuildValue("(iNNNKiO)", layout.dtype, sizes, strides,
                       PyLong_FromVoidPtr(const_cast<void*>(torch_door::address_of(tensor))),
                       static_cast<unsigned long long>(torch_door::keys_of(tensor)),
                       torch_door::device_index_of(tensor), torch_door::requires_grad(tensor) ? Py_True : Py_False);
}

PyObject* modes_now(PyObject*, PyObject*) {
  torch_door::Modes now = torch_door::modes();
  return Py_BuildValue("(KKOO)", static_cast<unsigned long long>(now.included),
                       static_cast<unsigned long long>(now.excluded), now.gradients ? Py_True : Py_False,
                       now.inference ? Py_True : Py_False);
}

PyObject* add_teams(PyObject*, PyObject* threads) {
  long count = PyLong_AsLong(threads);
  return PyErr_Occurred() ? nullptr : PyLong_FromLong(add_idle_teams(static_cast<int>(count)));
}

PyMethodDef methods[] = {{"open", open_door, METH_O, nullptr},
                         {"described", described, METH_O, nullptr},
                         {"modes", modes_now, METH_NOARGS, nullptr},
                         {"add_idle_teams", add_teams, METH_O, nullptr},
                         {"know_modes", know_modes, METH_VARARGS, nullptr},
                         {}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_evaluator", nullptr, -1, methods};

}  // namespace
}  // namespace aotc

PyMODINIT_FUNC PyInit__evaluator() {
  PyObject* module = PyModule_Create(&aotc::definition);
  PyObject* type = module ? PyType_FromSpec(&aotc::spec_of_evaluator) : nullptr;
  if (!type || PyModule_AddObjectRef(module, "Evaluator", type) ||
      PyModule_AddIntConstant(module, "INTERFACE", aotc::INTERFACE))
    return nullptr;
  Py_DECREF(type);
  return module;
}
