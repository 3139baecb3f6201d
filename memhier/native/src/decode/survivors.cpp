// The second estimate of a coarse scan's survivors.
#include "decode/survivors.hpp"

#include <algorithm>

namespace memhier {
namespace {

constexpr std::size_t kSome = 64;  // codes on their way from memory while as many are multiplied

}  // namespace

void Survivors::refine(const RowCodes& codes, const CodedQuery& query, std::vector<Logit>& found, std::size_t limit) {
  const std::int32_t excess = query.excess(codes.width);
  const std::size_t count = found.size();
  rows_.resize(count);
  dots_.resize(count);
  std::transform(found.begin(), found.end(), rows_.begin(), [](const Logit& one) { return one.row; });
  const auto prefetch = [&](std::size_t first) {
    for (std::size_t i = first; i < std::min(first + kSome, count); ++i) {
      for (std::size_t at = 0; at < codes.width; at += 64)
        __builtin_prefetch(codes.codes + std::size_t{rows_[i]} * codes.width + at);
      __builtin_prefetch(codes.offsets + rows_[i]);
      __builtin_prefetch(codes.scales + rows_[i]);
    }
  };
  prefetch(0);
  for (std::size_t first = 0; first < count; first += kSome) {
    prefetch(first + kSome);
    dot_codes(codes.codes, codes.width, rows_.data() + first, std::min(kSome, count - first), query.bytes(),
              dots_.data() + first);
  }
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t row = rows_[i];
    const float estimate = (codes.offsets[row] + query.shift()) +
                           codes.scales[row] * (query.step() * static_cast<float>(dots_[i] - excess));
    found[i] = {estimate, estimate, row};
  }
  if (count > limit) keep_first(found, limit, Larger{});
}

}  // namespace memhier
