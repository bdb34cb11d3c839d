#pragma once

#include "errors.h"

namespace aotc::cpu {

PyObject* new_table_type();

}  // namespace aotc::cpu
