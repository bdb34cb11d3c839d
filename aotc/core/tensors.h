// How a tensor lies in memory, and the door to the library that made it.
#pragma once

#include <Python.h>

#include <cstdint>
#include <vector>

namespace aotc {

using Sizes = std::vector<int64_t>;

struct Layout {  // of a tensor: `sizes` and `strides` are the tensor's own arrays, in elements
  int32_t dtype;
  int64_t rank;
  const int64_t *sizes, *strides;
};

namespace torch_door {

// Finds torch's functions, which `import torch` has loaded, and where the dispatch keys of a tensor lie: at the one place
// that fits all `samples`, tuples of a tensor, its keys and its address in C++. False with a Python exception (ImportError)
// where this torch is not one that the door knows.
bool open(PyObject* samples);

// Which dispatch keys of the thread inference mode changes: nothing else changes those that are included.
void know_modes(uint64_t included, uint64_t excluded);

void* handle_of(PyObject* tensor);  // at::Tensor*, borrowed: AtenTensorHandle of torch's C shim
Layout layout_of(PyObject* tensor);
const void* address_of(PyObject* tensor);
uint64_t keys_of(PyObject* tensor);     // dispatch keys: conj, neg, nested, subclasses of Python's, backends
int32_t device_index_of(PyObject* tensor);
bool requires_grad(PyObject* tensor);
int64_t version_of(PyObject* tensor);   // how often it was written to

void* new_handle(void* tensor);         // the library that gets it takes it over
PyObject* wrapped(void* handle);        // takes the handle over
void dropped(void* handle);

struct Modes {  // of this thread
  uint64_t included, excluded;  // dispatch keys, without those that inference mode changes
  bool gradients, inference;
  int64_t function_modes, dispatch_modes;
};
Modes modes();

}  // namespace torch_door
}  // namespace aotc
