/* Runs an exported model of one float32 input, without Python and torch:
 *
 *   run FOLDER INPUT SIZE... > OUTPUT
 *
 * INPUT holds the raw values of a contiguous tensor of these sizes. OUTPUT gets those of the model's first result; its
 * name and shape go to standard error. The exit code is the AotcStatus of what failed.
 */
#include <stdio.h>
#include <stdlib.h>

#include "aotc.h"

enum { MOST_AXES = 16 };

static int failed(AotcStatus status) {
  fprintf(stderr, "%s\n", aotc_error());
  return status;
}

static int run(AotcModel* model, const char* path, int32_t ndim, int64_t* shape) {
  size_t count = 1;
  for (int32_t axis = 0; axis < ndim; axis++) count *= (size_t)shape[axis];
  float* values = malloc(count * sizeof *values);
  FILE* file = fopen(path, "rb");
  int whole = values && file && fread(values, sizeof *values, count, file) == count;
  if (file) fclose(file);
  if (!whole) {
    fprintf(stderr, "%s does not hold %zu values of float32\n", path, count);
    free(values);
    return AOTC_ERROR_INPUT;
  }
  DLTensor input = {.data = values, .device = {kDLCPU, 0}, .ndim = ndim, .dtype = {kDLFloat, 32, 1}, .shape = shape};
  int32_t output_count = aotc_output_count(model);
  DLManagedTensor** outputs = calloc((size_t)output_count, sizeof *outputs);
  AotcStatus status = aotc_run(model, &input, 1, outputs, output_count);
  if (status == AOTC_OK) {
    DLTensor result = outputs[0]->dl_tensor;
    size_t bytes = result.dtype.bits / 8;
    fprintf(stderr, "%s: %d bits, shape", aotc_output_name(model, 0), result.dtype.bits);
    for (int32_t axis = 0; axis < result.ndim; axis++) {
      bytes *= (size_t)result.shape[axis];
      fprintf(stderr, " %lld", (long long)result.shape[axis]);
    }
    fprintf(stderr, "\n");
    fwrite(result.data, 1, bytes, stdout);
    for (int32_t at = 0; at < output_count; at++) outputs[at]->deleter(outputs[at]);
  }
  free(outputs);
  free(values);
  return status == AOTC_OK ? 0 : failed(status);
}

int main(int argc, char** argv) {
  if (argc < 3 || argc - 3 > MOST_AXES) {
    fprintf(stderr, "usage: %s FOLDER INPUT SIZE...\n", argv[0]);
    return 2;
  }
  AotcModel* model;
  AotcStatus status = aotc_load(argv[1], 1, &model);
  if (status != AOTC_OK) return failed(status);
  for (int32_t at = 0; at < aotc_input_count(model); at++)
    fprintf(stderr, "%s: %s\n", aotc_input_name(model, at), aotc_input_form(model, at));
  int64_t shape[MOST_AXES];
  for (int at = 3; at < argc; at++) shape[at - 3] = atoll(argv[at]);
  int code = run(model, argv[2], argc - 3, shape);
  aotc_destroy(model);
  return code;
}
