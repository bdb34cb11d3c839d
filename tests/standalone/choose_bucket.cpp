// Which bucket the call table of an exported folder chooses: `choose_bucket TABLE`, and on each line of standard input the
// shapes of a call's inputs, each as its number of axes and its sizes. Prints the bucket's place
// and the sizes at which it runs, or the reasons of a miss.
#include <fstream>
#include <iostream>
#include <sstream>

#include "../../aotc/core/cpu/call_table.h"

using namespace aotc::cpu;

int main(int, char** argv) {
  std::ostringstream text;
  text << std::ifstream(argv[1]).rdbuf();
  CallTable table(text.str());
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream numbers(line);
    std::vector<const Tensor*> inputs;
    for (const Input& input : table.inputs) {
      int64_t rank;
      numbers >> rank;
      Sizes sizes(static_cast<size_t>(rank));
      for (int64_t& size : sizes) numbers >> size;
      inputs.push_back(new_tensor(new Storage{nullptr, 0, [](Storage*) {}}, rank, sizes.data(), nullptr, 0, input.dtype));
    }
    std::vector<std::string> reasons;
    std::optional<Choice> found = table.choose(inputs, reasons);
    if (found) {
      std::cout << found->bucket - table.buckets.data();
      for (const Input& input : table.inputs)
        for (const Expression& size : input.sizes) std::cout << " " << size.at(found->run).value_or(-1);
    }
    for (const std::string& reason : reasons) std::cout << reason << ";";
    std::cout << "\n";
  }
}
