// Pieces of many tensors in one parallel region: a region per tensor would cost more than the work
// on a small one.
#pragma once

#include <ATen/Parallel.h>
#include <algorithm>
#include <cstdint>
#include <vector>

namespace isobit {

// Cuts tensors with `counts` elements into pieces of at most `piece`. Each task calls run(visit)
// once, and visit(work) calls work(tensor, begin, end) for the task's pieces, one after another.
template <class Run>
void parallel_pieces(const std::vector<int64_t>& counts, int64_t piece, const Run& run) {
  std::vector<int64_t> ends;  // per tensor: pieces of it and of those before
  for (int64_t count : counts)
    ends.push_back((ends.empty() ? 0 : ends.back()) + (count + piece - 1) / piece);
  const int64_t total = ends.empty() ? 0 : ends.back();
  at::parallel_for(0, total, 1, [&](int64_t begin, int64_t end) {
    run([&](const auto& work) {
      size_t tensor = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
      for (int64_t at = begin; at < end; at++) {
        while (at >= ends[tensor]) tensor++;
        const int64_t first = (at - (tensor ? ends[tensor - 1] : 0)) * piece;
        work(tensor, first, std::min(first + piece, counts[tensor]));
      }
    });
  });
}

}  // namespace isobit
