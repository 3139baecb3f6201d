// Candidates that are hardly neighbours by their errors: Candidates.likely of memhier.ann.zoom.preview.scan_arguments.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "scan/scanner.hpp"

namespace memhier {

constexpr float kLogistic = 1.702F;  // of a normal distribution, the scale of the logistic one like it

// How many of a query's candidates, by ascending lower bound, to read, to miss at most `loss` of its `k` neighbours on
// average. The errors of estimates are taken as normal, with `eps` of them between estimate and bound; the k-th
// distance as the k-th of the estimates with an error added, as the least of many estimates are too small. `room` is
// memory to work in.
inline std::size_t likely(std::span<const Found> items, std::size_t k, float eps, float loss,
                          std::vector<float>& room) {
  if (items.size() <= k) return items.size();
  room.clear();
  for (const Found& item : items) room.push_back(item.estimate + (item.estimate - item.key) / eps);
  std::nth_element(room.begin(), room.begin() + static_cast<std::ptrdiff_t>(k - 1), room.end());
  const float kth = room[k - 1], scale = kLogistic * eps;
  std::size_t count = items.size();
  float missed = 0;
  for (; count > k; --count) {
    const Found& last = items[count - 1];
    const float errors = scale * (last.estimate - kth) / (last.estimate - last.key);
    missed += 1 / (1 + std::exp(errors));  // the odds of a nearer one
    if (!(missed <= loss)) break;          // unknown odds count as likely
  }
  return count;
}

}  // namespace memhier
