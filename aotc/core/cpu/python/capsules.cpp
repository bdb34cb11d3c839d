// DLPack's capsules: tensors over the memory of objects that give one, and the capsule of a tensor.
#include <cstring>

#include "../../gpu/device.h"
#include "../dlpack.h"
#include "tensor_object.h"

namespace aotc::cpu {
namespace {

constexpr uint32_t DL_VERSION = 1;
constexpr uint64_t DL_READ_ONLY = 1;
constexpr const char *CAPSULE = "dltensor", *CAPSULE_VERSIONED = "dltensor_versioned";

template <typename Managed>
void release_managed(Managed* managed) {
  if (managed->deleter) managed->deleter(managed);
}

// `stream` waits for what the producer has yet to write; null for memory of the CPU.
PyObject* capsule_of(PyObject* object, void* stream) {
  PyObject* method = checked(PyObject_GetAttrString(object, "__dlpack__"));
  PyObject *none = PyTuple_New(0), *options = Py_BuildValue("{s(ii)}", "max_version", 1, 0);
  PyObject* number = stream ? PyLong_FromVoidPtr(stream) : nullptr;
  if (number && options) PyDict_SetItemString(options, "stream", number);
  Py_XDECREF(number);
  PyObject* capsule = none && options ? PyObject_Call(method, none, options) : nullptr;
  if (!capsule && PyErr_ExceptionMatches(PyExc_TypeError) && options) {  // a producer from before DLPack 1.0
    PyErr_Clear();
    PyDict_DelItemString(options, "max_version");
    capsule = PyObject_Call(method, none, options);
  }
  Py_XDECREF(none);
  Py_XDECREF(options);
  Py_DECREF(method);
  return capsule;
}

bool takes(const DLManagedTensor&) { return true; }
bool takes(const DLManagedTensorVersioned& managed) { return managed.version.major == DL_VERSION; }
bool is_read_only(const DLManagedTensor&) { return false; }  // those could not be exported
bool is_read_only(const DLManagedTensorVersioned& managed) { return managed.flags & DL_READ_ONLY; }

// Takes a capsule's tensor over, whose deleter runs once, with the last tensor over its memory. Null for another capsule;
// throws, and takes nothing, where no tensor can be made.
template <typename Managed>
PyObject* consumed(PyObject* capsule, const char* name, const char* used, int32_t device) {
  if (!PyCapsule_IsValid(capsule, name)) return nullptr;
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
  if (!takes(*managed)) return nullptr;
  const DLTensor& given = managed->dl_tensor;
  int32_t dtype = dtype_of(given.dtype);
  require(dtype >= 0, "its dtype is one of DLPack's that no tensor holds here");
  require(given.ndim >= 0 && given.ndim <= MOST_AXES && (!given.ndim || given.shape), "it has not 0 to 16 axes");
  bool read_only = is_read_only(*managed);
  Owned tensor = tensor_over(static_cast<char*>(given.data) + given.byte_offset, given.ndim, given.shape, given.strides,
                             dtype, release_owner<Managed, release_managed<Managed>>, managed, device);
  PyCapsule_SetName(capsule, used);  // which does not fail for a valid one
  return wrapped(std::move(tensor), read_only);
}

// A capsule that a consumer renames; an unconsumed one deletes its tensor itself.
template <typename Managed>
PyObject* capsule_with(Managed* managed, const char* name) {
  PyObject* capsule = PyCapsule_New(managed, name, [](PyObject* own) {
    const char* now = PyCapsule_GetName(own);
    if (std::strcmp(now, CAPSULE) && std::strcmp(now, CAPSULE_VERSIONED)) return;
    auto* kept = static_cast<Managed*>(PyCapsule_GetPointer(own, now));
    kept->deleter(kept);
  });
  if (!capsule) managed->deleter(managed);
  return capsule;
}

}  // namespace

PyObject* from_dlpack(PyObject* object, int32_t device) {
  PyObject* there = checked(PyObject_CallMethod(object, "__dlpack_device__", nullptr));
  int kind = 0, number = 0;
  bool known = PyArg_ParseTuple(there, "ii", &kind, &number);
  Py_DECREF(there);
  if (!known) return nullptr;
  bool on_gpu = kind == kDLCUDA && number == device;
  if (kind != kDLCPU && kind != kDLCUDAHost && !on_gpu) {
    std::string ours = device == HOST ? "in the CPU's memory" : "on GPU " + std::to_string(device) + " or in the CPU's memory";
    return PyErr_Format(PyExc_BufferError, "it lies on the device %d:%d of DLPack, and not %s", kind, number, ours.c_str());
  }
  PyObject* capsule = capsule_of(object, on_gpu ? gpu::device_at(device).stream() : nullptr);
  if (!capsule) return nullptr;
  PyObject* made = nullptr;
  try {
    made = consumed<DLManagedTensorVersioned>(capsule, CAPSULE_VERSIONED, "used_dltensor_versioned", on_gpu ? device : HOST);
    if (!made) made = consumed<DLManagedTensor>(capsule, CAPSULE, "used_dltensor", on_gpu ? device : HOST);
    require(made, "`__dlpack__` gave no capsule of DLPack 0 or 1, or one that was taken before");
  } catch (const std::exception& error) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_BufferError, error.what());
  }
  KeptError kept;
  Py_DECREF(capsule);  // an unconsumed capsule deletes its tensor
  return made;
}

PyObject* dlpack_device(PyObject* self, PyObject*) {
  int32_t device = of(self)->tensor->device();
  return device == HOST ? Py_BuildValue("(ii)", kDLCPU, 0) : Py_BuildValue("(ii)", kDLCUDA, device);
}

PyObject* to_dlpack(PyObject* self, PyObject* args, PyObject* options) {
  static const char* names[] = {"stream", "max_version", "dl_device", "copy", nullptr};
  PyObject *stream = Py_None, *version = Py_None, *device = Py_None, *copied = Py_None;
  if (!PyArg_ParseTupleAndKeywords(args, options, "|$OOOO", const_cast<char**>(names), &stream, &version, &device, &copied))
    return nullptr;
  const Tensor& own = *of(self)->tensor;
  bool on_gpu = own.device() != HOST;
  int kind = on_gpu ? kDLCUDA : kDLCPU, number = on_gpu ? own.device() : 0;
  if (device != Py_None && !PyArg_ParseTuple(device, "ii", &kind, &number)) return nullptr;
  bool to_host = on_gpu && kind == kDLCPU;  // a copy
  if (!to_host && kind != (on_gpu ? kDLCUDA : kDLCPU)) return PyErr_Format(PyExc_BufferError, "the tensor does not lie on the device %d:%d of DLPack", kind, number);
  if (!on_gpu && stream != Py_None) return PyErr_Format(PyExc_BufferError, "memory of the CPU has no streams");
  if (to_host && copied == Py_False) return PyErr_Format(PyExc_BufferError, "the tensor lies on a GPU, and the CPU cannot read it there");
  long major = 0;
  if (version != Py_None && PyTuple_Check(version) && PyTuple_Size(version)) major = PyLong_AsLong(PyTuple_GetItem(version, 0));
  if (PyErr_Occurred()) return nullptr;
  bool read_only = of(self)->read_only, versioned = major >= static_cast<long>(DL_VERSION);
  DLDataType dtype = dlpack_dtype(own.dtype);
  if (!dtype.bits) return PyErr_Format(PyExc_BufferError, "DLPack has no dtype %s", name_of_dtype(own.dtype));
  if (read_only && !versioned) return PyErr_Format(PyExc_BufferError, "the tensor is read-only, which DLPack before 1.0 cannot say");
  return translated([&] {
    bool copies = copied == Py_True || to_host;
    Owned made(copies ? nullptr : shared(own));
    if (copies || on_gpu) {
      WithoutLock unlocked;
      if (copies) made.reset(new_dense_like(own, to_host ? HOST : own.device())), copy(*made, own), read_only = false;
      // All that was to write it is done: no stream of the consumer's has to wait.
      if (made->device() != HOST) gpus->wait(made->device());
    }
    if (made->device() != HOST) gpu::mark_lent(*made);
    Tensor* kept = made.release();
    DLDevice place = kept->device() == HOST ? DLDevice{kDLCPU, 0} : DLDevice{kDLCUDA, kept->device()};
    DLTensor given{kept->bytes(), place, kept->rank, dtype, kept->sizes, kept->strides, 0};
    if (!versioned) {
      auto deleter = [](DLManagedTensor* managed) { drop(static_cast<Tensor*>(managed->manager_ctx)), delete managed; };
      return capsule_with(new DLManagedTensor{given, kept, deleter}, CAPSULE);
    }
    auto deleter = [](DLManagedTensorVersioned* managed) { drop(static_cast<Tensor*>(managed->manager_ctx)), delete managed; };
    return capsule_with(
        new DLManagedTensorVersioned{{DL_VERSION, 0}, kept, deleter, read_only ? DL_READ_ONLY : 0, given}, CAPSULE_VERSIONED);
  });
}

}  // namespace aotc::cpu
