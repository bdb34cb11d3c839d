// Runs one model of a package that `aotc export` wrote, without Python:
//
//   run PACKAGE MODEL TENSORS RESULTS
//
// TENSORS is a file of torch.save: a dict of the inputs, by their paths, and of the module's state_dict. RESULTS is
// written in the same form: a tuple of the library's outputs.
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

int main(int argc, char** argv) {
  if (argc != 5) {
    std::cerr << "usage: " << argv[0] << " PACKAGE MODEL TENSORS RESULTS\n";
    return 2;
  }
  c10::InferenceMode guard;
  torch::inductor::AOTIModelPackageLoader loader(argv[1], argv[2]);

  std::ifstream file(argv[3], std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  auto tensors = torch::jit::pickle_load(bytes).toGenericDict();

  // Each line of aotc.arguments is `input PATH` or `state NAME`, in the order that the library takes them.
  std::vector<at::Tensor> arguments;
  std::istringstream lines(loader.get_metadata().at("aotc.arguments"));
  for (std::string line; std::getline(lines, line);) {
    arguments.push_back(tensors.at(line.substr(line.find(' ') + 1)).toTensor());
  }

  std::vector<c10::IValue> outputs;
  for (const at::Tensor& output : loader.run(arguments)) {
    outputs.emplace_back(output);
  }
  auto results = torch::jit::pickle_save(c10::ivalue::Tuple::create(std::move(outputs)));
  std::ofstream(argv[4], std::ios::binary).write(results.data(), static_cast<std::streamsize>(results.size()));
}
