// The functions of torch's C shim (torch/csrc/inductor/aoti_torch/c/shim.h, of torch 2.11 to 2.15) that code of
// AOTInductor calls beside operators, without torch; those for a GPU alone are in `../gpu/cuda_functions.cpp`. A function that is not here fails the open of a library,
// which names it.
#include <cstdio>
#include <cstring>

#include "tensor.h"

using namespace aotc::cpu;

namespace {

int64_t axis_of(const Tensor* tensor, int64_t axis) {
  int64_t found = axis < 0 ? axis + tensor->rank : axis;
  require(found >= 0 && found < tensor->rank, "an axis that the tensor does not have");
  return found;
}

Tensor* view(const Tensor* of, int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t offset, int32_t dtype) {
  Tensor* made = new_tensor(of->storage, rank, sizes, strides, offset, dtype);
  of->storage->keep();
  return made;
}

Tensor* over(void* data, int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t offset, int32_t dtype, int32_t device) {
  int64_t bytes = offset * itemsize_of(dtype) + storage_bytes(rank, sizes, strides, dtype);
  return new_tensor(new Storage{static_cast<char*>(data), bytes, [](Storage*) {}, nullptr, device}, rank, sizes, strides, offset, dtype);
}

constexpr int32_t CPU = 0, CUDA = 1, STRIDED = 0;

int32_t device_of(int32_t type, int32_t index) {  // of code for a GPU, which names its number
  require(type == CPU || (type == CUDA && index >= 0), "a device that the standalone runtime does not have");
  return type == CPU ? HOST : index;
}

template <typename T>
T item_of(const Tensor& tensor) {
  if (tensor.device() == HOST) return *tensor.as<T>();
  T item;
  Storage place{reinterpret_cast<char*>(&item), sizeof item, [](Storage*) {}};  // never dropped: this reference stays
  copy(Tensor{&place, 0, 0, tensor.dtype, {}, {}}, Tensor{tensor.storage, tensor.offset, 0, tensor.dtype, {}, {}});
  return item;
}

thread_local bool gradients = false;

}  // namespace

// -- constants --------------------------------------------------------------------------------------------------------

#define CONSTANT(name, value) \
  AOTC_EXPORTED int32_t aoti_torch_##name() { return value; }
CONSTANT(device_type_cpu, CPU)
CONSTANT(device_type_cuda, CUDA)
CONSTANT(device_type_meta, 14)
CONSTANT(device_type_xpu, 12)
CONSTANT(device_type_mps, 13)
CONSTANT(device_type_privateuse1, 20)
CONSTANT(dtype_uint8, UINT8)
CONSTANT(dtype_int8, INT8)
CONSTANT(dtype_int16, INT16)
CONSTANT(dtype_int32, INT32)
CONSTANT(dtype_int64, INT64)
CONSTANT(dtype_uint16, UINT16)
CONSTANT(dtype_uint32, UINT32)
CONSTANT(dtype_uint64, UINT64)
CONSTANT(dtype_float16, FLOAT16)
CONSTANT(dtype_float32, FLOAT32)
CONSTANT(dtype_float64, FLOAT64)
CONSTANT(dtype_bfloat16, BFLOAT16)
CONSTANT(dtype_complex32, COMPLEX32)
CONSTANT(dtype_complex64, COMPLEX64)
CONSTANT(dtype_complex128, COMPLEX128)
CONSTANT(dtype_bool, BOOL)
CONSTANT(dtype_float8_e5m2, FLOAT8_E5M2)
CONSTANT(dtype_float8_e4m3fn, FLOAT8_E4M3FN)
CONSTANT(dtype_float8_e5m2fnuz, FLOAT8_E5M2FNUZ)
CONSTANT(dtype_float8_e4m3fnuz, FLOAT8_E4M3FNUZ)
CONSTANT(layout_strided, STRIDED)
CONSTANT(layout__mkldnn, 5)
CONSTANT(memory_format_contiguous_format, 0)
CONSTANT(memory_format_preserve_format, 1)
CONSTANT(memory_format_channels_last, 2)
CONSTANT(memory_format_channels_last_3d, 3)
#undef CONSTANT

AOTC_EXPORTED size_t aoti_torch_dtype_element_size(int32_t dtype) {
  return name_of_dtype(dtype) ? static_cast<size_t>(itemsize_of(dtype)) : 0;
}
AOTC_EXPORTED bool aoti_torch_grad_mode_is_enabled() { return gradients; }
AOTC_EXPORTED void aoti_torch_grad_mode_set_enabled(bool enabled) { gradients = enabled; }

// -- a tensor's form --------------------------------------------------------------------------------------------------

#define ASKED(name, type, value)                                    \
  AOTC_EXPORTED Status aoti_torch_##name(Tensor* tensor, type* into) { \
    *into = value;                                                  \
    return 0;                                                       \
  }
ASKED(get_data_ptr, void*, tensor->bytes())
ASKED(get_storage_size, int64_t, tensor->storage->bytes)
ASKED(get_storage_numel, int64_t, tensor->storage->bytes / itemsize_of(tensor->dtype))
ASKED(get_dim, int64_t, tensor->rank)
ASKED(get_numel, int64_t, tensor->elements())
ASKED(get_sizes, int64_t*, tensor->sizes)
ASKED(get_strides, int64_t*, tensor->strides)
ASKED(get_dtype, int32_t, tensor->dtype)
ASKED(get_device_type, int32_t, tensor->device() == HOST ? CPU : CUDA)
ASKED(get_device_index, int32_t, tensor->device())
ASKED(get_layout, int32_t, STRIDED)
ASKED(get_storage_offset, int64_t, tensor->offset)
ASKED(is_defined, bool, tensor != nullptr)
#undef ASKED

#define ITEM(name, type) \
  AOTC_EXPORTED Status aoti_torch_item_##name(Tensor* tensor, type* into) { return guarded([&] { *into = item_of<type>(*tensor); }); }
ITEM(uint8, uint8_t)
ITEM(uint16, uint16_t)
ITEM(uint32, uint32_t)
ITEM(uint64, uint64_t)
ITEM(int8, int8_t)
ITEM(int16, int16_t)
ITEM(int32, int32_t)
ITEM(int64, int64_t)
ITEM(float32, float)
ITEM(float64, double)
ITEM(bool, bool)
#undef ITEM

AOTC_EXPORTED Status aoti_torch_get_size(Tensor* tensor, int64_t axis, int64_t* into) {
  return guarded([&] { *into = tensor->sizes[axis_of(tensor, axis)]; });
}
AOTC_EXPORTED Status aoti_torch_get_stride(Tensor* tensor, int64_t axis, int64_t* into) {
  return guarded([&] { *into = tensor->strides[axis_of(tensor, axis)]; });
}

// -- handles ----------------------------------------------------------------------------------------------------------

AOTC_EXPORTED Status aoti_torch_delete_tensor_object(Tensor* tensor) {
  drop(tensor);
  return 0;
}
AOTC_EXPORTED Status aoti_torch_new_tensor_handle(Tensor* tensor, Tensor** made) {
  return guarded([&] { *made = shared(*tensor); });
}
AOTC_EXPORTED Status aoti_torch_assign_tensors_out(Tensor* tensor, Tensor** made) {
  return guarded([&] { *made = shared(*tensor); });
}
AOTC_EXPORTED Status aoti_torch__reinterpret_tensor(Tensor* tensor, int64_t rank, const int64_t* sizes,
                                                    const int64_t* strides, int64_t further, Tensor** made) {
  return guarded([&] { *made = view(tensor, rank, sizes, strides, tensor->offset + further, tensor->dtype); });
}
AOTC_EXPORTED Status aoti_torch__alloc_from_pool(Tensor* pool, int64_t offset_bytes, int32_t dtype, int64_t rank,
                                                 const int64_t* sizes, const int64_t* strides, Tensor** made) {
  return guarded([&] {
    int64_t itemsize = itemsize_of(dtype);
    require(offset_bytes % itemsize == 0, "an offset in a pool that is not aligned to the size of an element");
    *made = view(pool, rank, sizes, strides, offset_bytes / itemsize, dtype);
  });
}
AOTC_EXPORTED Status aoti_torch_as_strided(Tensor* tensor, const int64_t* sizes, const int64_t* strides, Tensor** made) {
  return guarded([&] { *made = view(tensor, tensor->rank, sizes, strides, tensor->offset, tensor->dtype); });
}
AOTC_EXPORTED Status aoti_torch_empty_strided(int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                              int32_t device, int32_t index, Tensor** made) {
  return guarded([&] { *made = new_empty(rank, sizes, strides, dtype, device_of(device, index)); });
}
AOTC_EXPORTED Status aoti_torch_create_tensor_from_blob(void* data, int64_t rank, const int64_t* sizes,
                                                        const int64_t* strides, int64_t offset, int32_t dtype,
                                                        int32_t device, int32_t index, Tensor** made) {
  return guarded([&] { *made = over(data, rank, sizes, strides, offset, dtype, device_of(device, index)); });
}
AOTC_EXPORTED Status aoti_torch_create_tensor_from_blob_v2(void* data, int64_t rank, const int64_t* sizes,
                                                           const int64_t* strides, int64_t offset, int32_t dtype,
                                                           int32_t device, int32_t index, Tensor** made, int32_t layout,
                                                           const uint8_t*, int64_t) {
  return guarded([&] {
    require(layout == STRIDED, "a constant that oneDNN packed, which the standalone runtime cannot read");
    *made = over(data, rank, sizes, strides, offset, dtype, device_of(device, index));
  });
}

// -- contents ---------------------------------------------------------------------------------------------------------

AOTC_EXPORTED Status aoti_torch_clone(Tensor* tensor, Tensor** made) {
  return guarded([&] {
    *made = new_dense_like(*tensor);
    copy(**made, *tensor);
  });
}
AOTC_EXPORTED Status aoti_torch_clone_preserve_strides(Tensor* tensor, Tensor** made) {
  return guarded([&] {
    *made = new_empty(tensor->rank, tensor->sizes, tensor->strides, tensor->dtype, tensor->device());
    copy(**made, *tensor);
  });
}
AOTC_EXPORTED Status aoti_torch_copy_(Tensor* into, Tensor* from, int32_t) {
  return guarded([&] { copy(*into, *from); });
}
AOTC_EXPORTED Status aoti_torch_tensor_copy_(Tensor* from, Tensor* into) {
  return guarded([&] { copy(*into, *from); });
}
AOTC_EXPORTED Status aoti_torch_zero_(Tensor* tensor) {
  return guarded([&] {
    static char zeros[16] = {};
    static Storage storage{zeros, sizeof zeros, [](Storage*) {}};  // never dropped: this reference stays
    copy(*tensor, Tensor{&storage, 0, 0, tensor->dtype, {}, {}});
  });
}

// -- words ------------------------------------------------------------------------------------------------------------

AOTC_EXPORTED void aoti_torch_check(bool holds, const char*, const char*, uint32_t, const char* words) {
  if (!holds) throw std::runtime_error(words);
}
AOTC_EXPORTED void aoti_torch_warn(const char*, const char*, uint32_t, const char* words) {
  std::fprintf(stderr, "aotc.standalone: %s\n", words);
}
AOTC_EXPORTED Status aoti_record_function_end(void*) { return 0; }
