// Which bucket the call table chooses: `choose_bucket TABLE`, and on each line of standard input the shapes of a call's
// inputs, each as its number of axes and its sizes. Prints the bucket's place and the sizes at which it runs, or what a miss
// says, in one line.
#include <fstream>
#include <iostream>
#include <sstream>

#include "../../aotc/core/cpu/table_call.h"

using namespace aotc::cpu;

int main(int, char** argv) {
  std::ostringstream text;
  text << std::ifstream(argv[1]).rdbuf();
  CallTable table(text.str());
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream numbers(line);
    TableCall call(table);
    for (const Input& input : table.inputs) {
      int64_t rank;
      numbers >> rank;
      Sizes sizes(static_cast<size_t>(rank));
      for (int64_t& size : sizes) numbers >> size;
      call.given.push_back({Owned(new_empty(rank, sizes.data(), nullptr, input.dtype))});
    }
    std::vector<Issue> issues;
    if (call.decide({}, issues)) {
      std::cout << call.choice->bucket - table.buckets.data();
      for (const Input& input : table.inputs)
        for (const Expression& size : input.sizes) std::cout << " " << size.at(call.choice->run).value_or(-1);
    }
    for (const Issue& issue : issues) std::cout << issue.where << ": " << issue.words << " (" << issue.hint << ");";
    if (call.asked && !call.choice)
      for (const Rejected& each : table.rejected(*call.asked, nullptr))
        for (const Issue& issue : each.issues) std::cout << each.bucket->name << ": " << issue.words << " (" << issue.hint << ");";
    std::cout << "\n";
  }
}
