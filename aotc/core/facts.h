// What the module and the process have to be for a call to run: rows that Python wrote, compared by identity.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>

#include "tensors.h"

namespace aotc {

struct Owned {  // a reference that is dropped with the GIL held
  PyObject* object;
  explicit Owned(PyObject* given) : object(given) { Py_XINCREF(object); }
  Owned(const Owned&) = delete;
  ~Owned() { Py_XDECREF(object); }
};

std::vector<PyObject*> items_of(PyObject* tuple);            // borrowed
PyObject* field(PyObject* spec, const char* name);           // of a dict; throws std::runtime_error where it is missing
std::vector<PyObject*> rows(PyObject* spec, const char* name);  // of a tuple in a dict
long whole(PyObject* number);                                // throws unless it is an int

// One immutable object: a call looks at one and the same from its first row to its last. Objects are borrowed from `spec`.
class Facts {
 public:
  explicit Facts(PyObject* spec);  // `aotc.runtime.native.facts_of` says what is in it
  bool hold() const;
  PyObject* spec() const { return spec_.object; }
  PyObject* tensors() const { return tensors_; }  // the module's, as a library takes them: a list
  void* container(size_t variant) const { return containers_[variant]; }

 private:
  struct Entry { PyObject *owner, *key, *value; };
  struct Pair { PyObject *first, *second; };
  struct Sized { PyObject* object; Py_ssize_t length; };
  struct Written { PyObject* tensor; int64_t version; const void* address; };
  struct Placed {
    PyObject* tensor;
    const void* address;
    int32_t dtype;
    uint64_t keys;
    Sizes sizes, strides;
  };

  Owned spec_;
  std::vector<Entry> slots_, attributes_, gradients_;
  std::vector<Pair> tables_, lists_, classes_, readers_;
  std::vector<PyObject*> empty_;
  std::vector<Sized> lengths_;
  std::vector<Written> written_;
  std::vector<Placed> placed_;
  PyObject* tensors_;
  std::vector<void*> containers_;
};

}  // namespace aotc
