// The sums of exp that a scan left, closed with exact logits.
#include "decode/sums.hpp"

#include <algorithm>
#include <cmath>

namespace memhier {
namespace {

// log(exp(a) + exp(b))
double log_of_sum(double a, double b) {
  const double larger = std::max(a, b);
  return std::isinf(larger) ? larger : larger + std::log1p(std::exp(std::min(a, b) - larger));
}

}  // namespace

void close_sums(const SummedRows& rows, const CodedQuery& query, const ExpSums& sums,
                const std::vector<Logit>& scored_rows, const ScanOptions& options, double* partition) {
  // A hundred times the loss in a term or in adding up a chunk.
  constexpr double kSlack = 1e-5;
  const Spread spread = query.spread(rows.blocks.width);
  const RowNumbers& numbers = rows.blocks.numbers;
  const double inverse = options.inverse, beyond = inverse * spread.outside;
  const double half = 0.5 * options.variance * beyond * beyond;
  double reference = -1e300;  // of the exact logits
  for (const Logit& scored : scored_rows) reference = std::max(reference, inverse * scored.key);
  double exact[3] = {0, 0, 0}, replaced[3] = {0, 0, 0};
  for (const Logit& scored : scored_rows) {
    const double error = error_of(rows.exact, rows.rounding, scored);
    const double logit = scored.key, estimate = scored.estimate;
    const double margin = margin_of(numbers, scored.row, spread, query.shift());
    const double outside = numbers.outside[scored.row];
    const double before[3] = {std::min(inverse * estimate + half * outside * outside, sums.reference + 80),
                              inverse * (estimate - margin), inverse * (estimate + margin)};
    const double after[3] = {inverse * logit, inverse * (logit - error), inverse * (logit + error)};
    for (std::size_t i = 0; i < 3; ++i) {
      replaced[i] += std::exp(before[i] - sums.reference);
      exact[i] += std::exp(after[i] - reference);
    }
  }
  const double tiny = static_cast<double>(rows.count) * 2e-35;  // terms that were taken for zero
  double tail[3] = {sums.sums[0] - replaced[0], sums.sums[1] * (1 - kSlack) - replaced[1] * (1 + kSlack),
                    sums.sums[2] * (1 + kSlack) - replaced[2] * (1 - kSlack) + tiny};
  if (!std::isfinite(tail[2])) tail[2] = kInfinity;  // nothing is known where bounds are too far for exp
  for (std::size_t i = 0; i < 3; ++i) {
    const double head = reference + std::log(exact[i]);
    const bool more = scored_rows.size() < rows.count && tail[i] > 0;
    partition[i] = more ? log_of_sum(head, sums.reference + std::log(tail[i])) : head;
  }
  if (options.interval) {
    partition[0] = std::clamp(partition[0], partition[1], partition[2]);
  } else {
    partition[1] = -kInfinity;
    partition[2] = kInfinity;
  }
}

}  // namespace memhier
