// The door to torch: its tensors and modes, through what its libraries export. No header of torch is read: its C shim
// (`aoti_torch_*`) has a stable interface, a few exported functions of C++ are called by their mangled names, and where
// the dispatch keys of a tensor lie is found, and checked, at the open. A name that is missing, or a value that is not
// what Python says, is an ImportError: Python then makes every call.
#include "tensors.h"

#include <dlfcn.h>

#include <cstring>

namespace aotc::torch_door {
namespace {

using Status = int32_t;
constexpr size_t TENSOR_IN_OBJECT = sizeof(PyObject);  // THPVariable: the Python object's head, then an at::Tensor
constexpr size_t MOST_BYTES_OF_IMPL = 200;             // TensorImpl has more

struct LocalKeys { uint64_t included, excluded; };  // c10::impl::PODLocalDispatchKeySet

struct Functions {
  Status (*get_data_ptr)(void*, void**);
  Status (*get_dtype)(void*, int32_t*);
  Status (*get_dim)(void*, int64_t*);
  Status (*get_sizes)(void*, int64_t**);
  Status (*get_strides)(void*, int64_t**);
  Status (*get_device_index)(void*, int32_t*);
  Status (*new_tensor_handle)(void*, void**);
  Status (*delete_tensor_object)(void*);
  bool (*requires_grad)(const void* impl);
  int64_t (*version)(const void* tensor);
  bool (*gradients)();
  int64_t (*function_modes)();
  int64_t (*dispatch_modes)();
  PyObject* (*wrap)(void* tensor);  // at::TensorBase&&
  void* torch;                      // the library in which the variables of a thread are looked up
} call;

size_t keys_in_impl = 0;
uint64_t included_by_modes = 0, excluded_by_modes = 0;

constexpr const char* LOCAL_KEYS = "_ZN3c104impl26raw_local_dispatch_key_setE";

const void* impl_of(PyObject* tensor) { return *static_cast<void**>(handle_of(tensor)); }

LocalKeys* local_keys() {
  static thread_local LocalKeys* keys = nullptr;
  if (!keys) keys = static_cast<LocalKeys*>(dlsym(call.torch, LOCAL_KEYS));
  return keys;
}

bool found(const char* name, void* where) {
  void* symbol = dlsym(call.torch, name);
  if (!symbol) {
    PyErr_Format(PyExc_ImportError, "torch exports no %s", name);
    return false;
  }
  std::memcpy(where, &symbol, sizeof symbol);
  return true;
}

bool failed(const char* what) {
  if (!PyErr_Occurred()) PyErr_Format(PyExc_ImportError, "%s of this torch are not where they were looked for", what);
  return false;
}

uint64_t number(PyObject* value) { return value ? PyLong_AsUnsignedLongLongMask(value) : 0; }

// A tuple of (tensor, what `_dispatch_keys` says of it): the one offset at which all have these.
bool find_keys(PyObject* samples) {
  size_t matches = 0;
  for (size_t offset = 8; offset + 8 <= MOST_BYTES_OF_IMPL; offset += 8) {
    bool same = true;
    for (Py_ssize_t index = 0; same && index < PyTuple_Size(samples); index++) {
      PyObject* sample = PyTuple_GetItem(samples, index);
      uint64_t word;
      std::memcpy(&word, static_cast<const char*>(impl_of(PyTuple_GetItem(sample, 0))) + offset, sizeof word);
      same = word == number(PyTuple_GetItem(sample, 1));
    }
    if (same) keys_in_impl = offset, matches++;
  }
  return matches == 1 || failed("the dispatch keys");
}

}  // namespace

bool open(PyObject* samples) {
  if (call.torch && keys_in_impl) return true;
  call.torch = dlopen("libtorch_python.so", RTLD_NOLOAD | RTLD_LAZY);
  if (!call.torch) return failed("the libraries");
  if (!(found("aoti_torch_get_data_ptr", &call.get_data_ptr) && found("aoti_torch_get_dtype", &call.get_dtype) &&
        found("aoti_torch_get_dim", &call.get_dim) && found("aoti_torch_get_sizes", &call.get_sizes) &&
        found("aoti_torch_get_strides", &call.get_strides) &&
        found("aoti_torch_get_device_index", &call.get_device_index) &&
        found("aoti_torch_new_tensor_handle", &call.new_tensor_handle) &&
        found("aoti_torch_delete_tensor_object", &call.delete_tensor_object) &&
        found("_ZNK3c1010TensorImpl13requires_gradEv", &call.requires_grad) &&
        found("_ZNK2at10TensorBase8_versionEv", &call.version) &&
        found("_ZN3c108GradMode10is_enabledEv", &call.gradients) &&
        found("_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv", &call.function_modes) &&
        found("_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv", &call.dispatch_modes) &&
        found("_Z16THPVariable_WrapON2at10TensorBaseE", &call.wrap)))
    return false;
  if (!local_keys()) return failed("the modes of a thread");
  if (!PyTuple_Check(samples)) return failed("the samples");
  for (Py_ssize_t index = 0; index < PyTuple_Size(samples); index++) {
    PyObject* sample = PyTuple_GetItem(samples, index);
    if (reinterpret_cast<uint64_t>(impl_of(PyTuple_GetItem(sample, 0))) != number(PyTuple_GetItem(sample, 2)))
      return failed("the tensors");
  }
  return find_keys(samples);
}

void know_modes(uint64_t included, uint64_t excluded) {
  included_by_modes = included, excluded_by_modes = excluded;
}

void* handle_of(PyObject* tensor) { return reinterpret_cast<char*>(tensor) + TENSOR_IN_OBJECT; }

Layout layout_of(PyObject* tensor) {
  void* handle = handle_of(tensor);
  Layout layout{-1, 0, nullptr, nullptr};
  int64_t *sizes = nullptr, *strides = nullptr;
  call.get_dtype(handle, &layout.dtype), call.get_dim(handle, &layout.rank);
  call.get_sizes(handle, &sizes), call.get_strides(handle, &strides);
  layout.sizes = sizes, layout.strides = strides;
  return layout;
}

const void* address_of(PyObject* tensor) {
  void* address = nullptr;
  call.get_data_ptr(handle_of(tensor), &address);
  return address;
}

uint64_t keys_of(PyObject* tensor) {
  uint64_t keys;
  std::memcpy(&keys, static_cast<const char*>(impl_of(tensor)) + keys_in_impl, sizeof keys);
  return keys;
}

int32_t device_index_of(PyObject* tensor) {
  int32_t index = -1;
  call.get_device_index(handle_of(tensor), &index);
  return index;
}

bool requires_grad(PyObject* tensor) { return call.requires_grad(impl_of(tensor)); }

int64_t version_of(PyObject* tensor) { return call.version(handle_of(tensor)); }

void* new_handle(void* tensor) {
  void* handle = nullptr;
  call.new_tensor_handle(tensor, &handle);
  return handle;
}

PyObject* wrapped(void* handle) {
  PyObject* tensor = call.wrap(handle);
  call.delete_tensor_object(handle);
  return tensor;
}

void dropped(void* handle) { call.delete_tensor_object(handle); }

Modes modes() {
  const LocalKeys* keys = local_keys();
  return {keys->included & ~included_by_modes, keys->excluded & ~excluded_by_modes,
          call.gradients(),                    (keys->included & included_by_modes) != 0,
          call.function_modes(),               call.dispatch_modes()};
}

}  // namespace aotc::torch_door
