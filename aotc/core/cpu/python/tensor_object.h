// `aotc.core._cpu.Tensor`: what Python has in its hands, over the memory of any object that has a buffer or DLPack, or its
// own.
#pragma once

#include <vector>

#include "errors.h"

#include "../tensor.h"

namespace aotc::cpu {

struct TensorObject {
  PyObject_HEAD Tensor* tensor;
  bool read_only;
  Py_ssize_t strides[MOST_AXES];  // in bytes, for buffers
};

extern PyTypeObject* tensor_type;  // made once, with the module
PyObject* new_tensor_type();

inline TensorObject* of(PyObject* object) { return reinterpret_cast<TensorObject*>(object); }
inline bool is_tensor(PyObject* object) { return PyObject_TypeCheck(object, tensor_type); }
PyObject* wrapped(Owned tensor, bool read_only);  // null with a Python exception
PyObject* list_of(std::vector<Owned>& tensors);   // throws Failed
std::vector<Tensor*> tensors_of(PyObject* list);  // which must not change meanwhile; throws std::runtime_error

// The object itself where it is a Tensor, else one over its memory, which is of the CPU or of that GPU; None where it has no
// such memory.
PyObject* viewed(PyObject* object, int32_t device = HOST);
extern PyMethodDef tensor_functions[];  // of the module

// -- memory of other objects ------------------------------------------------------------------------------------------

// Releases an owner of memory, which may need the GIL, from any thread.
template <typename Owner, void (*RELEASE)(Owner*)>
void release_owner(Storage* storage) {
  if (!Py_IsInitialized()) return;
  PyGILState_STATE state = PyGILState_Ensure();
  {
    KeptError kept;
    RELEASE(static_cast<Owner*>(storage->owner));
  }
  PyGILState_Release(state);
}

// A tensor whose first element lies at `data`, in memory of an owner. It takes the owner over, unless it throws.
Owned tensor_over(void* data, int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                  void (*release)(Storage*), void* owner, int32_t device = HOST);

// Python's buffers (buffers.cpp).
void release_buffer(Py_buffer* buffer);
PyObject* from_buffer(PyObject* object);
int get_buffer(PyObject* object, Py_buffer* buffer, int flags);

// DLPack's capsules (capsules.cpp).
PyObject* from_dlpack(PyObject* object, int32_t device);
PyObject* to_dlpack(PyObject* self, PyObject* args, PyObject* options);
PyObject* dlpack_device(PyObject* self, PyObject*);

}  // namespace aotc::cpu
