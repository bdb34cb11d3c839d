// A call of compiled code, in one call of C: the looks that Python takes in each call, and the run, which is a library's
// own on a CPU, and elsewhere a function of Python's.
//
// `aotc.runtime.native` arms it with what Python found in a call that ran, and asks it first in later ones. It answers
// with the result, or with NotImplemented: then Python does the whole call. It decides no miss and words no error.
// Every place of doubt is NotImplemented. Only headers that g++ reads in a few seconds are included; what they lack
// (the beginning of a tensor's Python object) `tensor_at` lets the loader compare before anything is armed.
//
// Python objects are borrowed from `spec` and from each plan's `keep`, which are held as long as these.
#include <Python.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/TensorBase.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <array>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

extern PyObject* THPVariable_Wrap(at::TensorBase&&);
extern "C" int aoti_torch_new_tensor_handle(void* tensor, void** handle);
extern "C" int aoti_torch_delete_tensor_object(void* handle);

namespace {

constexpr long INTERFACE = 2;  // NATIVE_INTERFACE of aotc/records.py
constexpr size_t MOST_PLANS = 16384;
constexpr auto AUTOGRAD = c10::autograd_dispatch_keyset_with_ADInplaceOrView;

struct TensorObject {  // the beginning of THPVariable
  PyObject_HEAD at::TensorBase tensor;
};

const at::TensorBase& tensor_of(PyObject* object) { return reinterpret_cast<TensorObject*>(object)->tensor; }

const void* address_of(const at::TensorBase& tensor) { return tensor.unsafeGetTensorImpl()->data(); }

struct Form {
  at::ScalarType dtype;
  std::vector<int64_t> sizes, strides;
  explicit Form(const at::TensorBase& tensor)
      : dtype(tensor.scalar_type()), sizes(tensor.sizes().vec()), strides(tensor.strides().vec()) {}
  bool is_of(const at::TensorBase& tensor) const {
    return tensor.scalar_type() == dtype && tensor.sizes().equals(sizes) && tensor.strides().equals(strides);
  }
};

struct Owned {  // a reference that is dropped with the GIL held
  PyObject* object;
  explicit Owned(PyObject* given) : object(given) { Py_XINCREF(object); }
  Owned(const Owned&) = delete;
  ~Owned() { Py_XDECREF(object); }
};

using Row = std::array<long, 4>;  // calls, padded calls, elements of the inputs, elements that ran: as of `Counters`

struct Plan {  // `launch` runs it, with a list of the leaves, or else `run`
  Owned keep;
  std::vector<Form> forms;
  size_t variant;
  Row counted;
  PyObject* launch = nullptr;
  int (*run)(void*, void**, size_t, void**, size_t, void*, void*) = nullptr;
  void* container = nullptr;
  std::vector<size_t> arguments;
  std::vector<at::TensorBase> state;
  size_t outputs = 0;
  PyObject *result = nullptr, *assemble = nullptr, *failed = nullptr, *tensors = nullptr;
  explicit Plan(PyObject* tuple) : keep(tuple) {}
};

struct Entry { PyObject *owner, *key, *value; };
struct Marked { PyObject* object; uint32_t version; const void* address; };
struct Held { PyObject* object; const void* address; Form form; };

struct Armed {
  Owned spec;
  std::vector<PyObject*> names, defaults, types, empty;
  std::vector<std::pair<size_t, bool>> tensors;  // places among the arguments, and which may require gradients
  size_t positional = 0;
  std::vector<Entry> constants, slots, attributes, gradients;
  std::vector<std::pair<PyObject*, PyObject*>> tables, lists, classes, readers;
  std::vector<std::pair<PyObject*, Py_ssize_t>> lengths;
  std::vector<Marked> marks;
  std::vector<Held> state;
  long grad = -1, inference = -1, of_input = 0, gpu = -1;
  c10::DispatchKeySet plain;  // of dense tensors on its device: no conj, no neg, not nested
  uint64_t included = 0, excluded = 0;
  std::unordered_multimap<uint64_t, std::shared_ptr<Plan>> plans;
  explicit Armed(PyObject* given) : spec(given) {}
};

struct Native {
  PyObject_HEAD std::shared_ptr<Armed> armed;
  std::vector<Row> counts;
};

// -- the looks ----------------------------------------------------------------------------------------------------

uint64_t included_now() {  // without what inference mode changes, which is looked at by itself
  return (c10::impl::tls_local_dispatch_key_set().included_ - AUTOGRAD).raw_repr();
}

uint64_t excluded_now() { return (c10::impl::tls_local_dispatch_key_set().excluded_ - AUTOGRAD).raw_repr(); }

bool modes_hold(const Armed& armed) {
  return included_now() == armed.included && excluded_now() == armed.excluded &&
         !at::impl::PythonTorchFunctionTLS::stack_len() && !c10::impl::TorchDispatchModeTLS::stack_len() &&
         (armed.grad < 0 || c10::GradMode::is_enabled() == armed.grad) &&
         (armed.inference < 0 || c10::InferenceMode::is_enabled() == armed.inference);
}

bool is_plain(const Armed& armed, PyObject* object) {
  for (PyObject* type : armed.types)
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) == type) return true;
  return false;
}

bool may_be_given(const Armed& armed, const at::TensorBase& tensor, bool differentiable) {
  if ((tensor.key_set() - AUTOGRAD - c10::autocast_dispatch_keyset) != armed.plain) return false;
  if (armed.gpu >= 0 && tensor.device().index() != armed.gpu) return false;
  if (tensor.requires_grad() && (armed.of_input || (c10::GradMode::is_enabled() && !differentiable))) return false;
  return !tensor.numel() || address_of(tensor);
}

bool equal_constant(PyObject* value, PyObject* expected) {
  if (value == expected) return true;
  if (Py_TYPE(value) != Py_TYPE(expected)) return false;
  if (PyFloat_CheckExact(value)) {
    double one = PyFloat_AS_DOUBLE(value), other = PyFloat_AS_DOUBLE(expected);
    return !std::memcmp(&one, &other, sizeof one);
  }
  return (PyLong_CheckExact(value) || PyUnicode_CheckExact(value)) && PyObject_RichCompareBool(value, expected, Py_EQ) == 1;
}

PyObject* held_at(PyObject* dict, PyObject* key) {  // None where the key is absent, as `dict.get`
  PyObject* value = PyDict_GetItemWithError(dict, key);
  return value ? value : Py_None;
}

bool same_in_step(PyObject* now, PyObject* copy) {
  if (PyDict_GET_SIZE(now) != PyDict_GET_SIZE(copy)) return false;
  Py_ssize_t at = 0, there = 0;
  PyObject *key, *value, *other_key, *other;
  while (PyDict_Next(now, &at, &key, &value))
    if (!PyDict_Next(copy, &there, &other_key, &other) || key != other_key || value != other) return false;
  return true;
}

bool same_items(PyObject* now, PyObject* copy) {
  if (PyList_GET_SIZE(now) != PyList_GET_SIZE(copy)) return false;
  for (Py_ssize_t index = 0; index < PyList_GET_SIZE(now); index++)
    if (PyList_GET_ITEM(now, index) != PyList_GET_ITEM(copy, index)) return false;
  return true;
}

bool module_is_as_it_was(const Armed& armed) {
  for (auto& [owner, key, value] : armed.slots)
    if (held_at(owner, key) != value) return false;
  for (auto& [now, copy] : armed.tables)
    if (!same_in_step(now, copy)) return false;
  for (auto& [now, copy] : armed.lists)
    if (!same_items(now, copy)) return false;
  for (PyObject* table : armed.empty)
    if (PyDict_GET_SIZE(table)) return false;
  for (auto& [object, type] : armed.classes)
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != type) return false;
  for (auto& [attributes, length] : armed.lengths)
    if (PyDict_GET_SIZE(attributes) != length) return false;
  for (auto& [object, version, address] : armed.marks)
    if (tensor_of(object)._version() != version || address_of(tensor_of(object)) != address) return false;
  for (auto& [object, address, form] : armed.state)
    if (address_of(tensor_of(object)) != address || !form.is_of(tensor_of(object))) return false;
  for (auto& [owner, key, value] : armed.gradients) {
    PyObject* tensor = held_at(owner, key);
    if (tensor != Py_None && !is_plain(armed, tensor)) return false;
    if ((tensor != Py_None && tensor_of(tensor).requires_grad()) != (value == Py_True)) return false;
  }
  return true;
}

bool python_agrees(const Armed& armed) {  // what runs Python's code comes last
  for (auto& [object, name, value] : armed.attributes) {
    PyObject* now = PyObject_GetAttr(object, name);
    Py_XDECREF(now);
    if (now != value) return false;
  }
  for (auto& [read, expected] : armed.readers) {
    PyObject* now = PyObject_CallNoArgs(read);
    bool same = now && (now == expected || PyObject_RichCompareBool(now, expected, Py_EQ) == 1);
    Py_XDECREF(now);
    if (!same) return false;
  }
  return true;
}

bool bound(const Armed& armed, PyObject* args, PyObject* kwargs, std::vector<PyObject*>& values) {
  size_t given = PyTuple_GET_SIZE(args), keywords = kwargs ? PyDict_GET_SIZE(kwargs) : 0, used = 0;
  if (given > armed.positional) return false;
  for (size_t index = 0; index < armed.names.size(); index++) {
    PyObject* value = index < given ? PyTuple_GET_ITEM(args, index) : nullptr;
    if (!value && keywords && armed.names[index] != Py_None && (value = PyDict_GetItemWithError(kwargs, armed.names[index])))
      used++;
    if (!value) value = armed.defaults[index];
    if (value == Py_NotImplemented) return false;
    values.push_back(value);
  }
  return used == keywords;
}

std::shared_ptr<Plan> plan_for(const Armed& armed, const std::vector<PyObject*>& values) {
  uint64_t hash = 0;
  for (auto& [index, differentiable] : armed.tensors) {
    PyObject* object = values[index];
    if (!is_plain(armed, object) || !may_be_given(armed, tensor_of(object), differentiable)) return nullptr;
    for (int64_t size : tensor_of(object).sizes()) hash = (hash ^ static_cast<uint64_t>(size)) * 1099511628211u;
  }
  auto [first, last] = armed.plans.equal_range(hash);
  for (; first != last; ++first) {
    size_t next = 0;
    bool fits = true;
    for (auto& [index, _] : armed.tensors)
      fits = fits && first->second->forms[next++].is_of(tensor_of(values[index]));
    if (fits) return first->second;
  }
  return nullptr;
}

// -- the run ------------------------------------------------------------------------------------------------------

PyObject* list_of(const std::vector<PyObject*>& values) {
  PyObject* list = PyList_New(values.size());
  for (size_t index = 0; list && index < values.size(); index++) PyList_SET_ITEM(list, index, Py_NewRef(values[index]));
  return list;
}

PyObject* wrapped(void* handle) {  // takes the handle over
  PyObject* tensor = THPVariable_Wrap(std::move(*static_cast<at::TensorBase*>(handle)));
  aoti_torch_delete_tensor_object(handle);
  return tensor;
}

PyObject* result_of(const Plan& plan, const std::vector<PyObject*>& values, std::vector<void*>& outputs) {
  if (plan.result == Py_True) return wrapped(outputs[0]);
  bool as_tuple = plan.result == Py_False;
  PyObject* result = as_tuple ? PyTuple_New(outputs.size()) : PyList_New(outputs.size());
  for (size_t index = 0; index < outputs.size(); index++) {
    PyObject* tensor = wrapped(outputs[index]);
    as_tuple ? PyTuple_SET_ITEM(result, index, tensor) : PyList_SET_ITEM(result, index, tensor);
  }
  if (as_tuple) return result;
  PyObject* leaves = list_of(values);
  PyObject* built = leaves ? PyObject_CallFunctionObjArgs(plan.assemble, result, leaves, plan.tensors, nullptr) : nullptr;
  Py_XDECREF(leaves);
  Py_DECREF(result);
  return built;
}

PyObject* run_library(const std::shared_ptr<Plan>& plan, const std::vector<PyObject*>& values) {
  std::vector<void*> inputs, outputs(plan->outputs, nullptr);
  for (size_t position : plan->arguments) {
    const at::TensorBase& tensor =
        position < values.size() ? tensor_of(values[position]) : plan->state[position - values.size()];
    aoti_torch_new_tensor_handle(const_cast<at::TensorBase*>(&tensor), &inputs.emplace_back());
  }
  int status;
  Py_BEGIN_ALLOW_THREADS
  status = plan->run(plan->container, inputs.data(), inputs.size(), outputs.data(), outputs.size(), nullptr, nullptr);
  Py_END_ALLOW_THREADS
  if (status) {  // Python words it, from what the library keeps of its last error in this thread
    PyObject* leaves = list_of(values);
    Py_XDECREF(leaves ? PyObject_CallOneArg(plan->failed, leaves) : nullptr);
    Py_XDECREF(leaves);
    for (void* handle : outputs)
      if (handle) aoti_torch_delete_tensor_object(handle);
    return nullptr;
  }
  return result_of(*plan, values, outputs);
}

PyObject* run(Native* self, std::shared_ptr<Plan> plan, const std::vector<PyObject*>& values) {
  PyObject* result;
  if (plan->launch) {
    PyObject* leaves = list_of(values);
    result = leaves ? PyObject_CallOneArg(plan->launch, leaves) : nullptr;
    Py_XDECREF(leaves);
  } else {
    result = run_library(plan, values);
  }
  if (result && result != Py_NotImplemented)
    for (size_t index = 0; index < plan->counted.size(); index++)
      self->counts[plan->variant][index] += plan->counted[index];
  return result;
}

PyObject* call(PyObject* object, PyObject* args, PyObject* kwargs) {
  auto* self = reinterpret_cast<Native*>(object);
  std::shared_ptr<Armed> armed = self->armed;  // another thread may arm it anew
  std::shared_ptr<Plan> plan;
  std::vector<PyObject*> values;
  try {
    if (armed && modes_hold(*armed)) {
      values.reserve(armed->names.size());
      bool holds = bound(*armed, args, kwargs, values) && (plan = plan_for(*armed, values));
      for (auto& [index, value, _] : armed->constants)
        holds = holds && equal_constant(values[PyLong_AsSsize_t(index)], value);
      if (!holds || !module_is_as_it_was(*armed) || !python_agrees(*armed)) plan = nullptr;
    }
  } catch (...) {
    plan = nullptr;
  }
  if (!plan) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;  // a signal's, as Ctrl-C
    PyErr_Clear();
    Py_RETURN_NOTIMPLEMENTED;
  }
  return run(self, plan, values);
}

// -- arming -------------------------------------------------------------------------------------------------------

std::vector<PyObject*> items_of(PyObject* tuple) {
  std::vector<PyObject*> items;
  for (Py_ssize_t index = 0; index < PyTuple_Size(tuple); index++) items.push_back(PyTuple_GetItem(tuple, index));
  return items;
}

std::vector<PyObject*> field(PyObject* spec, const char* name) {  // a tuple of the spec
  PyObject* tuple = PyDict_GetItemString(spec, name);
  if (!tuple || !PyTuple_Check(tuple)) throw std::runtime_error(std::string("no tuple ") + name);
  return items_of(tuple);
}

std::vector<std::pair<PyObject*, PyObject*>> pairs(PyObject* spec, const char* name) {
  std::vector<std::pair<PyObject*, PyObject*>> found;
  for (PyObject* item : field(spec, name)) found.push_back({PyTuple_GetItem(item, 0), PyTuple_GetItem(item, 1)});
  return found;
}

std::vector<Entry> entries(PyObject* spec, const char* name) {
  std::vector<Entry> found;
  for (PyObject* item : field(spec, name))
    found.push_back({PyTuple_GetItem(item, 0), PyTuple_GetItem(item, 1), PyTuple_GetItem(item, 2)});
  return found;
}

long number(PyObject* spec, const char* name) { return PyLong_AsLong(PyDict_GetItemString(spec, name)); }

PyObject* arm(PyObject* object, PyObject* spec) {  // `aotc.runtime.native.spec_of` says what is in it
  auto* self = reinterpret_cast<Native*>(object);
  try {
    auto armed = std::make_shared<Armed>(spec);
    armed->names = field(spec, "names"), armed->defaults = field(spec, "defaults");
    armed->types = field(spec, "types"), armed->empty = field(spec, "empty");
    for (auto& [index, differentiable] : pairs(spec, "tensors"))
      armed->tensors.push_back({PyLong_AsSize_t(index), differentiable == Py_True});
    armed->positional = number(spec, "positional");
    armed->constants = entries(spec, "constants"), armed->slots = entries(spec, "slots");
    armed->attributes = entries(spec, "attributes"), armed->gradients = entries(spec, "gradients");
    armed->tables = pairs(spec, "tables"), armed->lists = pairs(spec, "lists");
    armed->classes = pairs(spec, "classes"), armed->readers = pairs(spec, "readers");
    for (auto& [attributes, length] : pairs(spec, "lengths"))
      armed->lengths.push_back({attributes, PyLong_AsSsize_t(length)});
    for (auto& [tensor, version, address] : entries(spec, "marks"))
      armed->marks.push_back(
          {tensor, static_cast<uint32_t>(PyLong_AsUnsignedLong(version)), PyLong_AsVoidPtr(address)});
    for (auto& [tensor, address, same] : entries(spec, "state"))
      armed->state.push_back({tensor, PyLong_AsVoidPtr(address), Form(tensor_of(same))});
    armed->grad = number(spec, "grad"), armed->inference = number(spec, "inference");
    armed->of_input = number(spec, "of_input"), armed->gpu = number(spec, "gpu");
    armed->plain = c10::DispatchKeySet(armed->gpu < 0 ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
    armed->included = included_now(), armed->excluded = excluded_now();
    self->counts.resize(number(spec, "variants"));
    if (PyErr_Occurred()) return nullptr;
    self->armed.swap(armed);
    Py_RETURN_NONE;
  } catch (const std::exception& error) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, error.what());
    return nullptr;
  }
}

PyObject* disarm(PyObject* object, PyObject*) {  // lets go of all that it holds
  std::shared_ptr<Armed> armed;
  reinterpret_cast<Native*>(object)->armed.swap(armed);
  Py_RETURN_NONE;
}

struct Given {  // the beginning of what `add` and `add_launched` are given
  PyObject* leaves;
  Py_ssize_t variant;
  long padded, request, ran;
};

template <typename Fill>
PyObject* added(PyObject* object, const Given& given, PyObject* kept, Fill fill) {  // takes `kept` over
  auto* self = reinterpret_cast<Native*>(object);
  Owned keep(kept);
  Py_XDECREF(kept);
  if (!kept) return nullptr;
  if (!self->armed || self->armed->plans.size() >= MOST_PLANS) Py_RETURN_NONE;
  try {
    auto plan = std::make_shared<Plan>(kept);
    uint64_t hash = 0;
    for (PyObject* leaf : items_of(given.leaves)) {
      plan->forms.emplace_back(tensor_of(leaf));
      for (int64_t size : plan->forms.back().sizes) hash = (hash ^ static_cast<uint64_t>(size)) * 1099511628211u;
    }
    plan->variant = given.variant, plan->counted = {1, given.padded, given.request, given.ran};
    fill(*plan);
    if (PyErr_Occurred()) return nullptr;
    self->armed->plans.emplace(hash, plan);
    Py_RETURN_NONE;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
    return nullptr;
  }
}

// (leaves, variant, (padded, request, ran), launch): `launch(leaves)` is the result, or NotImplemented
PyObject* add_launched(PyObject* object, PyObject* args) {
  Given given;
  PyObject* launch;
  if (!PyArg_ParseTuple(args, "O!n(lll)O", &PyTuple_Type, &given.leaves, &given.variant, &given.padded, &given.request,
                        &given.ran, &launch))
    return nullptr;
  return added(object, given, PyTuple_Pack(1, launch), [&](Plan& plan) { plan.launch = launch; });
}

// (leaves, variant, (padded, request, ran), run, container, arguments, outputs, result, assemble, tensors, failed, library)
PyObject* add(PyObject* object, PyObject* args) {
  Given given;
  PyObject *arguments, *result, *assemble, *tensors, *failed, *library;
  unsigned long long address, container;
  Py_ssize_t outputs;
  if (!PyArg_ParseTuple(args, "O!n(lll)KKO!nOOO!OO", &PyTuple_Type, &given.leaves, &given.variant, &given.padded,
                        &given.request, &given.ran, &address, &container, &PyTuple_Type, &arguments, &outputs, &result,
                        &assemble, &PyList_Type, &tensors, &failed, &library))
    return nullptr;
  return added(object, given, PyTuple_Pack(5, result, assemble, tensors, failed, library), [&](Plan& plan) {
    std::memcpy(&plan.run, &address, sizeof plan.run);
    plan.container = reinterpret_cast<void*>(container);
    for (PyObject* position : items_of(arguments)) plan.arguments.push_back(PyLong_AsSize_t(position));
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(tensors); index++)
      plan.state.push_back(tensor_of(PyList_GET_ITEM(tensors, index)));
    plan.outputs = outputs;
    plan.result = result, plan.assemble = assemble, plan.failed = failed, plan.tensors = tensors;
  });
}

PyObject* counts(PyObject* object, PyObject*) {  // of each variant
  auto* self = reinterpret_cast<Native*>(object);
  PyObject* list = PyList_New(0);
  for (auto& [calls, padded, request, ran] : self->counts) {
    PyObject* row = Py_BuildValue("(llll)", calls, padded, request, ran);
    if (!list || !row || PyList_Append(list, row)) return nullptr;
    Py_DECREF(row);
  }
  return list;
}

// -- the class ----------------------------------------------------------------------------------------------------

PyObject* create(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<Native*>(type->tp_alloc(type, 0));
  if (self) {
    new (&self->armed) std::shared_ptr<Armed>();
    new (&self->counts) std::vector<Row>();
  }
  return reinterpret_cast<PyObject*>(self);
}

int traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  auto* self = reinterpret_cast<Native*>(object);
  if (self->armed) {
    Py_VISIT(self->armed->spec.object);
    for (auto& [_, plan] : self->armed->plans) Py_VISIT(plan->keep.object);
  }
  return 0;
}

int clear(PyObject* object) {
  std::shared_ptr<Armed> armed;
  reinterpret_cast<Native*>(object)->armed.swap(armed);
  return 0;
}

void dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  auto* self = reinterpret_cast<Native*>(object);
  PyTypeObject* type = Py_TYPE(object);
  self->armed.~shared_ptr();
  self->counts.~vector();
  type->tp_free(object);
  Py_DECREF(type);
}

PyObject* tensor_at(PyObject*, PyObject* tensor) {  // what `_cdata` says, if tensors begin as `TensorObject` does
  void* first;
  std::memcpy(&first, reinterpret_cast<char*>(tensor) + offsetof(TensorObject, tensor), sizeof first);
  return PyLong_FromVoidPtr(first);
}

PyMethodDef native_methods[] = {
    {"arm", arm, METH_O, nullptr},       {"disarm", disarm, METH_NOARGS, nullptr},
    {"add", add, METH_VARARGS, nullptr}, {"add_launched", add_launched, METH_VARARGS, nullptr},
    {"counts", counts, METH_NOARGS, nullptr}, {}};
PyType_Slot native_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(create)},         {Py_tp_call, reinterpret_cast<void*>(call)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},  {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},    {Py_tp_methods, native_methods},
    {0, nullptr}};
PyType_Spec native_spec = {
    "aotc_native_call.Native", sizeof(Native), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, native_slots};
PyMethodDef methods[] = {{"tensor_at", tensor_at, METH_O, nullptr}, {}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "aotc_native_call", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_aotc_native_call() {
  PyObject* module = PyModule_Create(&definition);
  PyObject* type = module ? PyType_FromSpec(&native_spec) : nullptr;
  if (!type || PyModule_AddObject(module, "Native", type) || PyModule_AddIntConstant(module, "INTERFACE", INTERFACE))
    return nullptr;
  return module;
}
