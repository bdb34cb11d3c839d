// `libaotc.so`: the standalone runtime for programs in C, without Python. It runs the folders that
// `aotc.standalone.exporting` writes; `aotc.h` is its whole interface.
#include <dlfcn.h>
#include <fcntl.h>
#include <omp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <utility>

#include "../openmp.h"
#include "cpu_features.h"
#include "dlpack.h"
#include "table_call.h"

AOTC_EXPORTED int32_t aoti_torch_get_data_ptr(aotc::cpu::Tensor*, void**);

namespace aotc::cpu {
namespace {

struct Refused : std::runtime_error {
  AotcStatus status;
  Refused(AotcStatus why, const std::string& words) : std::runtime_error(words), status(why) {}
};

// A miss, in the words of `aotc.standalone`.
std::string told(const TableCall& call, const CallTable& table, const std::vector<Issue>& issues) {
  std::string text;
  auto put = [&](const std::string& where, const Issue& issue) {
    text += (text.empty() ? "" : "\n") + (where.empty() ? "" : where + ": ") + issue.words;
    if (!issue.hint.empty()) text += "\n    hint: " + issue.hint;
  };
  for (const Issue& issue : issues) put(issue.where, issue);
  if (!call.asked || call.choice) return text;
  for (const Rejected& each : table.rejected(*call.asked, nullptr))
    for (const Issue& issue : each.issues) put("bucket " + each.bucket->name, issue);
  return text.empty() ? "no bucket takes its sizes" : text;
}

// -- this machine -----------------------------------------------------------------------------------------------------

void check_features(const CallTable& table) {
  std::vector<std::string> here = features_of_this_cpu(), missing;
  for (const std::string& needed : table.features)
    if (std::find(here.begin(), here.end(), needed) == here.end()) missing.push_back(needed);
  if (!missing.empty()) {
    std::string names;
    for (const std::string& name : missing) names += (names.empty() ? "" : ", ") + name;
    const char* why = here.empty() ? "; /proc/cpuinfo, which names its features, cannot be read" : "";
    throw Refused(AOTC_ERROR_MACHINE, "built for " + table.target + ", this CPU has no " + names + why);
  }
#if defined(__x86_64__)
  bool tiles = std::find(table.features.begin(), table.features.end(), "amx_tile") != table.features.end();
  constexpr long REQUEST = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, man 2 arch_prctl
  if (tiles && syscall(SYS_arch_prctl, REQUEST, TILES))
    throw Refused(AOTC_ERROR_MACHINE, "built for " + table.target + ", and the kernel refuses AMX to this process");
#endif
}

// -- files ------------------------------------------------------------------------------------------------------------

Refused unreadable(const std::string& path, const std::string& why) {
  return {AOTC_ERROR_FOLDER, path + " cannot be read: " + why};
}

std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf())) throw unreadable(path, std::strerror(errno));
  return text.str();
}

int64_t size_of(const std::string& path) {
  struct stat known;
  if (stat(path.c_str(), &known)) throw unreadable(path, std::strerror(errno));
  return known.st_size;
}

void check_size(const std::string& path, int64_t expected) {
  if (int64_t size = size_of(path); size != expected)
    throw unreadable(path, std::to_string(expected) + " bytes are expected, it has " + std::to_string(size));
}

Storage* mapped(const std::string& path, int64_t bytes) {
  check_size(path, bytes);
  int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  void* memory = file < 0 ? MAP_FAILED : mmap(nullptr, static_cast<size_t>(bytes), PROT_READ, MAP_PRIVATE, file, 0);
  int why = errno;
  if (file >= 0) close(file);
  if (memory == MAP_FAILED) throw unreadable(path, std::strerror(why));
  return new Storage{static_cast<char*>(memory), bytes, [](Storage* own) { munmap(own->data, static_cast<size_t>(own->bytes)); }};
}

Owned tensor_of(const Form& form, Storage* weights) {
  auto rank = static_cast<int64_t>(form.sizes.size());
  int64_t bytes = storage_bytes(rank, form.sizes.data(), form.strides.data(), form.dtype);
  if (!bytes) return Owned(new_empty(rank, form.sizes.data(), form.strides.data(), form.dtype));
  int64_t itemsize = itemsize_of(form.dtype);
  require(weights && form.offset % itemsize == 0 && bytes <= weights->bytes && form.offset <= weights->bytes - bytes,
          "a weight lies beyond the end of the file of weights");
  weights->keep();
  return Owned(new_tensor(weights, rank, form.sizes.data(), form.strides.data(), form.offset / itemsize, form.dtype));
}

// -- a bucket's library -----------------------------------------------------------------------------------------------

std::unique_ptr<Library> library_of(const std::string& folder, const Bucket& bucket, int32_t concurrency, Storage* weights) {
  std::string path = folder + "/" + bucket.library;
  check_size(path, bucket.bytes);
  void* opened = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // for good: it stays mapped
  if (!opened) throw Refused(AOTC_ERROR_MACHINE, path + " cannot be opened: " + dlerror());
  if (dlsym(opened, "aoti_torch_get_data_ptr") != reinterpret_cast<void*>(aoti_torch_get_data_ptr))
    throw Refused(AOTC_ERROR_MACHINE, path + " was opened over another libaotc.so, which this process has loaded before");
  Library::Constants constants;
  for (const Form& form : bucket.constants) constants.emplace_back(form.name, tensor_of(form, weights));
  return std::make_unique<Library>(opened, bucket, concurrency, std::move(constants));
}

// Names that are global in the process come before a library's own: torch's functions would take ours' place.
void refuse_global_torch() {
  void* global = dlsym(RTLD_DEFAULT, "aoti_torch_get_data_ptr");
  if (global && global != reinterpret_cast<void*>(aoti_torch_get_data_ptr))
    throw Refused(AOTC_ERROR_MACHINE, "functions of torch, or of another libaotc.so, are global in this process (RTLD_GLOBAL, LD_PRELOAD), and would be called in place of this one's");
}

// -- from a call's tensors and to its results -------------------------------------------------------------------------

std::string name_of(const DLDataType& dtype) {
  if (const char* name = name_of_dtype(dtype_of(dtype))) return name;
  return "DLPack's code " + std::to_string(dtype.code) + " of " + std::to_string(dtype.bits) + " bits and " + std::to_string(dtype.lanes) + " lanes";
}

// The tensor as it came; null where it has no sizes that could be compared, of which `issues` says why.
Owned input_of(const DLTensor& given, const Input& input, std::vector<Issue>& issues) {
  if (given.device.device_type != kDLCPU && given.device.device_type != kDLCUDAHost)
    issues.push_back({"the CPU's memory is expected, it lies on device " + std::to_string(given.device.device_type) + ":" + std::to_string(given.device.device_id) + " of DLPack", input.name, "", "", ""});
  int32_t dtype = dtype_of(given.dtype);
  if (dtype < 0) issues.push_back(expected_issue("dtype", name_of_dtype(input.dtype), name_of(given.dtype), input.name));
  bool sized = given.ndim == 0 || (given.ndim > 0 && given.shape && std::all_of(given.shape, given.shape + given.ndim, [](int64_t size) { return size >= 0; }));
  if (!sized || given.ndim != static_cast<int32_t>(input.sizes.size())) {
    issues.push_back(expected_issue("shape", input.shape(), sized ? shown(given.shape, given.ndim) : "no shape", input.name));
    return nullptr;
  }
  char* data = given.data ? static_cast<char*>(given.data) + given.byte_offset : nullptr;
  return Owned(new_tensor(new Storage{data, 0, [](Storage*) {}}, given.ndim, given.shape, given.strides, 0, dtype < 0 ? input.dtype : dtype));
}

struct Result {
  DLManagedTensor managed;
  Owned tensor;
};

// A contiguous tensor with memory that nothing else holds, as the caller's own.
DLManagedTensor* given_away(Owned tensor) {
  bool alone = tensor->storage->references.load(std::memory_order_acquire) == 1;
  Sizes strides = strides_in("contiguous", Sizes(tensor->sizes, tensor->sizes + tensor->rank));
  if (!alone || !lies_as(*tensor, strides)) {
    Owned made(new_empty(tensor->rank, tensor->sizes, nullptr, tensor->dtype));
    copy(*made, *tensor);
    tensor = std::move(made);
  }
  std::copy(strides.begin(), strides.end(), tensor->strides);
  auto result = std::make_unique<Result>();
  result->tensor = std::move(tensor);
  Tensor& own = *result->tensor;
  require(dlpack_dtype(own.dtype).bits, "a result is of a dtype that DLPack does not have");
  result->managed = {{own.bytes(), {kDLCPU, 0}, own.rank, dlpack_dtype(own.dtype), own.sizes, own.strides, 0},
                     result.get(),
                     [](DLManagedTensor* managed) { delete static_cast<Result*>(managed->manager_ctx); }};
  return &result.release()->managed;
}

}  // namespace
}  // namespace aotc::cpu

using namespace aotc::cpu;

struct AotcModel {
  CallTable table;
  std::vector<std::string> names, forms;  // of the inputs
  std::vector<Owned> state;
  std::vector<std::unique_ptr<Library>> libraries;

  AotcModel(const std::string& folder, int32_t concurrency) : table(text_of(folder + "/table.txt")) {
    check_features(table);
    refuse_global_torch();
    for (const Input& input : table.inputs) names.push_back(input.name), forms.push_back(std::string(name_of_dtype(input.dtype)) + " " + input.shape());
    struct Release { void operator()(Storage* storage) const { storage->drop(); } };
    std::unique_ptr<Storage, Release> weights(table.weights ? mapped(folder + "/weights.bin", table.weights) : nullptr);
    for (const Form& form : table.state) state.push_back(tensor_of(form, weights.get()));
    for (const Bucket& bucket : table.buckets)
      libraries.push_back(library_of(folder, bucket, concurrency, weights.get()));
    aotc::spin_briefly(omp_get_max_threads());
  }

  void run(const DLTensor* given, int32_t input_count, DLManagedTensor** outputs, int32_t output_count) const {
    auto expect = [](const char* what, size_t expected, int32_t came) {
      if (static_cast<int64_t>(expected) != came)
        throw Refused(AOTC_ERROR_INPUT, std::to_string(expected) + " " + what + " are expected, " + std::to_string(came) + " came");
    };
    expect("inputs", table.inputs.size(), input_count), expect("outputs", table.outputs.size(), output_count);
    std::vector<Issue> issues;
    std::vector<Tensor*> tensors;
    for (const Owned& each : state) tensors.push_back(each.get());
    TableCall call(table);
    for (size_t at = 0; at < table.inputs.size(); at++) call.given.push_back({input_of(given[at], table.inputs[at], issues)});
    if (!call.decide(tensors, issues)) throw Refused(AOTC_ERROR_INPUT, told(call, table, issues));
    const Bucket& bucket = *call.choice->bucket;
    call.run(*libraries[static_cast<size_t>(&bucket - table.buckets.data())], tensors);
    std::vector<Owned> results;
    for (const Place& place : bucket.results)
      results.emplace_back(shared(place.kind == Place::INDEX ? *call.outputs[place.index] : place.kind == Place::INPUT ? *call.given[place.index].tensor : *state[place.index]));
    call.outputs.clear();  // a result whose memory nothing else holds is given away as it is
    for (size_t at = 0; at < results.size(); at++) outputs[at] = given_away(std::move(results[at]));
  }
};

namespace {

template <typename Work>
AotcStatus guarded(AotcStatus otherwise, Work work) {
  try {
    work();
    return AOTC_OK;
  } catch (const Refused& refused) {
    set_failure(std::string(refused.what()).c_str());
    return refused.status;
  } catch (const std::bad_alloc&) {
    set_failure("memory is short");
    return AOTC_ERROR_FAILED;
  } catch (const std::exception& error) {
    set_failure(std::string(error.what()).c_str());
    return otherwise;
  }
}

const char* at(const std::vector<std::string>& texts, int32_t index) {
  return index >= 0 && static_cast<size_t>(index) < texts.size() ? texts[static_cast<size_t>(index)].c_str() : nullptr;
}

}  // namespace

extern "C" {

#define API __attribute__((visibility("default")))

API AotcStatus aotc_load(const char* folder, int32_t concurrency, AotcModel** model) {
  *model = nullptr;
  return guarded(AOTC_ERROR_FOLDER, [&] {
    if (concurrency < 1) throw Refused(AOTC_ERROR_INPUT, "concurrency is " + std::to_string(concurrency) + ", and may be 1 or more");
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("bmi2"))
      throw Refused(AOTC_ERROR_MACHINE, "libaotc.so needs a CPU with avx2, bmi2 and fma");
#endif
    *model = new AotcModel(folder, concurrency);
  });
}

API const char* aotc_error(void) { return failure().c_str(); }

API void aotc_destroy(AotcModel* model) { delete model; }

API int32_t aotc_input_count(const AotcModel* model) { return static_cast<int32_t>(model->table.inputs.size()); }
API int32_t aotc_output_count(const AotcModel* model) { return static_cast<int32_t>(model->table.outputs.size()); }
API const char* aotc_input_name(const AotcModel* model, int32_t index) { return at(model->names, index); }
API const char* aotc_input_form(const AotcModel* model, int32_t index) { return at(model->forms, index); }
API const char* aotc_output_name(const AotcModel* model, int32_t index) { return at(model->table.outputs, index); }

API AotcStatus aotc_run(AotcModel* model, const DLTensor* inputs, int32_t input_count, DLManagedTensor** outputs,
                        int32_t output_count) {
  std::fill(outputs, outputs + std::max(output_count, 0), nullptr);
  AotcStatus status = guarded(AOTC_ERROR_FAILED, [&] { model->run(inputs, input_count, outputs, output_count); });
  for (int32_t at = 0; status && at < output_count; at++)
    if (DLManagedTensor* made = std::exchange(outputs[at], nullptr)) made->deleter(made);
  return status;
}

API int32_t aotc_set_num_threads(int32_t count) {
  if (count > 0) omp_set_num_threads(count);
  return omp_get_max_threads();
}

}  // extern "C"
