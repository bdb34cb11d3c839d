/* aotc.h: run a compiled model that `aotc export REF --standalone FOLDER` wrote, from C.
 *
 * Link with FOLDER/libaotc.so, or open it with dlopen. Tensors are DLPack's, in the CPU's memory. Every function may be
 * called by any thread, and a model by several at a time; only `aotc_destroy` needs that no other call is under way.
 * After a fork, the child loads anew.
 * A function that gives a status gives AOTC_OK, or says why not in `aotc_error`. The text is UTF-8.
 */
#ifndef AOTC_H_
#define AOTC_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* -- DLPack's structures (https://dmlc.github.io/dlpack/latest/c_api.html), where dlpack.h was not included before ---- */

#ifndef DLPACK_DLPACK_H_
#define DLPACK_DLPACK_H_

typedef enum { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3 } DLDeviceType;
typedef struct {
  int32_t device_type; /* a DLDeviceType */
  int32_t device_id;
} DLDevice;

typedef enum { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLComplex = 5, kDLBool = 6 } DLDataTypeCode;
typedef struct {
  uint8_t code; /* a DLDataTypeCode */
  uint8_t bits;
  uint16_t lanes; /* 1 */
} DLDataType;

typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides; /* in elements; NULL: contiguous, the last axis fastest */
  uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(struct DLManagedTensor* self);
} DLManagedTensor;

#endif /* DLPACK_DLPACK_H_ */

/* -- the model -------------------------------------------------------------------------------------------------------- */

typedef struct AotcModel AotcModel;

typedef enum {
  AOTC_OK = 0,
  AOTC_ERROR_FOLDER = 1,  /* the folder cannot be read, is damaged, or is of another version of libaotc.so */
  AOTC_ERROR_MACHINE = 2, /* this CPU, or this process, cannot run the code */
  AOTC_ERROR_INPUT = 3,   /* a call with another number of tensors, or that no bucket takes */
  AOTC_ERROR_FAILED = 4   /* the compiled code failed, as where memory is short */
} AotcStatus;

/* Loads the model of a folder. Up to `concurrency` calls run in one bucket's code at a time, others wait: 1 or more.
 * Weights are mapped: the folder's files must stay as they are until the model is destroyed. */
AotcStatus aotc_load(const char* folder, int32_t concurrency, AotcModel** model);

/* Frees a model; NULL does nothing. Results of its calls stay. */
void aotc_destroy(AotcModel* model);

/* What a call takes and gives: numbers of tensors, names, and the form of an input, as `float32 [batch, 128, 256]`.
 * Names belong to the model. NULL for an index that is not there. */
int32_t aotc_input_count(const AotcModel* model);
int32_t aotc_output_count(const AotcModel* model);
const char* aotc_input_name(const AotcModel* model, int32_t index);
const char* aotc_input_form(const AotcModel* model, int32_t index);
const char* aotc_output_name(const AotcModel* model, int32_t index);

/* Runs the model. `inputs` are read where they lie, in the order of their names, and are not written to; `outputs` has
 * room for as many pointers as the model has outputs. Each result is contiguous, has memory of its own, and is the
 * caller's: `output->deleter(output)` frees it. Where the status is not AOTC_OK, the outputs are NULL. */
AotcStatus aotc_run(AotcModel* model, const DLTensor* inputs, int32_t input_count, DLManagedTensor** outputs,
                    int32_t output_count);

/* What the last function of this thread that failed has said, with both values of each difference; "" at first. */
const char* aotc_error(void);

/* How many threads a call that this thread makes uses: 1 or more; 0 leaves it as it is. Gives the number. */
int32_t aotc_set_num_threads(int32_t count);

#ifdef __cplusplus
}
#endif

#endif /* AOTC_H_ */
