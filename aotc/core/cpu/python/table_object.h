#pragma once

#include "errors.h"

namespace aotc::cpu {

PyObject* new_table_type();
extern PyMethodDef gpu_functions[];  // of the module

}  // namespace aotc::cpu
